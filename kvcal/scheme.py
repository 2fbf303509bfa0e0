"""Schemes: how K and V are stored, whatever any engine does today.

A scheme is one small YAML file with a description and the source it follows. ``recipes/schemes`` holds those
that kvcal ships: formats that engines load, methods from the literature, and kvcal's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from kvcal import formats, granularity, recipe
from kvcal.errors import RecipeError, UsageError
from kvcal.formats import KVFormat
from kvcal.granularity import Granularity
from kvcal.recipe import Mixed, ScaleRule, Section

UNQUANTIZED = "bf16"
UNQUANTIZED_BITS = 16

CacheSide = Literal["k", "v"]
Basis = Literal["none", "hadamard", "random_hadamard", "random_orthogonal", "balanced"]


class SideScheme(Section):
    """How K or V is stored.

    Static granularities (``per_tensor``, ``per_head``, ``per_channel``) take their range from calibration, by
    the rule in ``scale``: by default all that was seen in 8 bits, and the least squared error in fewer, where
    it costs a half to a fifth in KL on the demo model (`kvcal bench objectives`). ``fixed: unit`` is scale
    1.0, ``fixed: moving_average`` what llm-compressor's default observer arrives at. Dynamic ones
    (``per_token``, ``per_token_head``, ``per_group``) take it from the numbers they store: ``clip`` narrows
    that range about its middle, by a factor or, with ``search``, by the one of a few that errs least on this
    very group.

    Attributes:
        zero_point: ``none`` is symmetric about 0. ``float`` keeps the lower end of the range beside the
            scale. ``integer`` keeps the code of 0, of as many bits as an element; the range then includes 0.
        scale_bits: of dynamic scales and float zero points: 32 and 16 are floats, 8 is E4M3 times a
            static unit per head.
        basis: in which vectors are stored, see :mod:`kvcal.basis`.
        center: a constant per head and channel is taken from K before it is stored and added back.
        before_rope: K is stored as it was before RoPE, and rotated when it is read.
        codebook: levels that are not evenly spaced: ``gaussian`` (Lloyd-Max for N(0,1), scaled by the rms of
            the group) or ``nuq`` (k-means on calibration text, over the range of the group).
    """

    format: str
    granularity: str | None = None
    group: Annotated[int, Field(ge=2)] | None = None
    along: Literal["channels", "tokens"] | None = None
    scale: ScaleRule | None = None
    fixed: Literal["unit", "moving_average"] | None = None
    zero_point: Literal["none", "integer", "float"] = "none"
    clip: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["search"] = 1.0
    scale_bits: Literal[8, 16, 32] = 16
    basis: Basis = "none"
    center: bool = False
    before_rope: bool = False
    codebook: Literal["gaussian", "nuq"] | None = None

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        return value if value == UNQUANTIZED else recipe.known(lambda: formats.get(value).name)

    @model_validator(mode="after")
    def _consistent(self) -> SideScheme:
        faults = self._faults()
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def number(self) -> KVFormat | None:
        """The format of an element; None if nothing is quantized."""
        return None if self.format == UNQUANTIZED else formats.get(self.format)

    @property
    def grouping(self) -> Granularity | None:
        """Which elements share a scale; None where the format says so itself."""
        if self.granularity is None:
            return None
        return granularity.get(self.granularity, size=self.group, along=self.along)

    @property
    def rule(self) -> ScaleRule:
        """How a static range becomes a scale."""
        if self.scale is not None:
            return self.scale
        fmt = self.number
        few = fmt is not None and fmt.integer and fmt.bits < 8
        return ScaleRule(rule="amax", headroom=1.0, objective="mse" if few else "amax")

    @property
    def static(self) -> bool:
        """Scales are known before the tokens are."""
        grouping = self.grouping
        return grouping is not None and grouping.static

    @property
    def by_tokens(self) -> bool:
        """Tokens share a scale, so that a token waits in 16 bits until its group is complete."""
        return self.granularity == "per_group" and self.along == "tokens"

    def bits(self, kv_heads: int, head_dim: int) -> float:
        """Bits of one quantized element with its share of what is stored beside it.

        Static scales, maps and codebooks belong to the model, not to its tokens, and are not counted.
        """
        fmt = self.number
        if fmt is None:
            return UNQUANTIZED_BITS
        beside = fmt.scale_bits / head_dim
        if fmt.block:
            beside += 8 / fmt.block
        grouping = self.grouping
        if grouping is not None:
            zero = {"none": 0, "integer": fmt.bits, "float": self.scale_bits}[self._zero_point]
            beside += grouping.scales_per_element(kv_heads, head_dim) * (self.scale_bits + zero)
        return fmt.bits + beside

    @property
    def _zero_point(self) -> str:
        return "float" if self.codebook == "nuq" else self.zero_point

    def _faults(self) -> list[str]:
        fmt = self.number
        given = {name for name in self.model_fields_set if getattr(self, name) is not None} - {"format"}
        if fmt is None or fmt.dynamic:
            what = "is not quantized" if fmt is None else "is scaled by its engine"
            return [f"{self.format} {what}; leave out {', '.join(sorted(given))}"] if given else []
        if fmt.latent_only:
            return [f"format: {fmt.name} stores latents, and a scheme is for K and V"]
        if fmt.block:
            return self._faults_of_blocks(given)
        if self.granularity is None:
            return [f"granularity: {self.format} needs one of {', '.join(granularity.names())}, per_group"]
        try:
            granularity.get(self.granularity, size=self.group, along=self.along)
        except UsageError as error:
            return [str(error)]
        faults = []
        if not fmt.integer and (self.zero_point != "none" or self.codebook):
            faults.append(f"zero_point and codebook are for integers, not for {self.format}")
        faults += self._faults_of_static(given) if self.static else self._faults_of_dynamic(given)
        if self.codebook and self.zero_point != "none":
            faults.append("zero_point: a codebook has its own")
        return faults

    def _faults_of_blocks(self, given: set[str]) -> list[str]:
        allowed = {"before_rope"} if self.format == "nvfp4" else {"before_rope", "basis", "center"}
        excess = given - allowed
        return (
            [f"{self.format} scales its blocks itself; leave out {', '.join(sorted(excess))}"]
            if excess
            else []
        )

    def _faults_of_static(self, given: set[str]) -> list[str]:
        faults = []
        if given & {"clip", "scale_bits"}:
            faults.append(
                "clip and scale_bits are for dynamic scales; scale.objective narrows a static range"
            )
        if given & {"basis", "center"}:
            faults.append(
                "basis and center need dynamic scales: calibration knows the range of K and V as they are"
            )
        if self.zero_point == "integer":
            faults.append("zero_point: a static one is a float, which costs nothing")
        ranged = self.zero_point == "float" or self.codebook is not None
        if ranged and (self.rule.rule, self.rule.headroom) != ("amax", 1.0):
            faults.append("scale: a range with two ends takes rule amax and headroom 1.0")
        if self.fixed and "scale" in given:
            faults.append("scale has no effect where fixed says what it is")
        if self.fixed and (self.granularity != "per_tensor" or self.zero_point != "none"):
            faults.append("fixed is for symmetric scales per_tensor")
        if self.codebook == "gaussian":
            faults.append("codebook gaussian needs a dynamic granularity")
        if self.codebook == "nuq" and self.granularity != "per_channel":
            faults.append("codebook nuq needs per_channel or per_token")
        return faults

    def _faults_of_dynamic(self, given: set[str]) -> list[str]:
        faults = []
        if given & {"scale", "fixed"}:
            faults.append("scale and fixed are for static granularities; clip narrows a dynamic range")
        if self.codebook == "nuq" and self.granularity != "per_token":
            faults.append("codebook nuq needs per_channel or per_token")
        if self.codebook == "gaussian" and self.granularity != "per_token_head":
            faults.append("codebook gaussian needs per_token_head")
        if self.codebook and self.clip != 1.0:
            faults.append("clip: a codebook has its own range")
        if self.scale_bits == 8 and self.granularity not in ("per_token_head", "per_group"):
            faults.append("scale_bits 8 needs per_token_head or per_group along channels")
        if self.scale_bits == 8 and self.by_tokens:
            faults.append("scale_bits 8 needs groups along channels")
        return faults


class Scheme(Section):
    """How a cache is stored: K, V, and which tokens stay in 16 bits.

    Attributes:
        sinks: the first tokens of a sequence that stay; calibration leaves them out too.
        recent: the latest tokens that stay, the query's own included.
        flush: ``token``: a token is quantized as it leaves the window. ``block``: K waits until ``recent``
            tokens are together and is quantized with them, after they were attended to (KIVI).
        mixed: other schemes, of which each layer's K and V gets the one that a budget on bits or KL allows.
    """

    description: str
    source: str
    k: SideScheme | None = None
    v: SideScheme | None = None
    sinks: Annotated[int, Field(ge=0)] = 0
    recent: Annotated[int, Field(ge=0)] = 0
    flush: Literal["token", "block"] = "token"
    mixed: Mixed | None = None
    candidates: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> Scheme:
        faults = []
        if self.mixed is not None:
            if self.k or self.v or self.recent or len(self.candidates) < 2:
                faults.append("a mixed scheme has two candidates or more, and no k, v and recent of its own")
        elif self.k is None or self.v is None or self.candidates:
            faults.append("a scheme has k and v, or mixed and candidates")
        else:
            faults += self._faults(self.k, self.v)
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _faults(self, k: SideScheme, v: SideScheme) -> list[str]:
        faults = []
        if v.before_rope:
            faults.append("v.before_rope: V has no positions")
        if v.center:
            faults.append("v.center: V is not centred; its zero point does that")
        if v.by_tokens:
            faults.append("v: groups along tokens lose V at low bits (KIVI, table 2); use channels")
        if k.by_tokens and (self.flush != "block" or self.recent % int(k.group or 1) or not self.recent):
            faults.append("k: groups along tokens need flush: block and recent a multiple of the group")
        if (k.codebook == "nuq") != (v.codebook == "nuq"):
            faults.append("codebook nuq is for both K and V: one backward pass weighs both")
        if self.flush == "block" and not self.recent:
            faults.append("flush: block needs recent")
        return faults

    def sides(self) -> dict[CacheSide, SideScheme]:
        """K and V of a scheme that is not mixed."""
        assert self.k is not None
        assert self.v is not None
        return {"k": self.k, "v": self.v}

    def bits_per_element(self, kv_heads: int, head_dim: int, context: int) -> float:
        """Bits of a cached element in a sequence of ``context`` tokens: codes, scales, sinks and window.

        ``(1 - f) bits + 16 f`` with ``f`` the share of tokens in 16 bits, as many as the buffers hold.
        """
        return sum(self.side_bits(side, kv_heads, head_dim, context) for side in self.sides()) / 2

    def side_bits(self, side: CacheSide, kv_heads: int, head_dim: int, context: int) -> float:
        """The same of K or V alone."""
        kept = min(self.sinks + self.recent, context) / context
        return (1 - kept) * self.sides()[side].bits(kv_heads, head_dim) + kept * UNQUANTIZED_BITS


def shipped_folder() -> Path:
    return recipe.shipped_folder() / "schemes"


def shipped() -> list[str]:
    """Names of the schemes that kvcal ships."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))


def name_of(name: str) -> str:
    """What a scheme is called that was given by name or as a file."""
    path = Path(name)
    return path.stem if path.suffix in recipe.SUFFIXES else name


def load(name: str) -> Scheme:
    """Read a scheme from a file, or by the name of one that kvcal ships (``kivi-4``).

    Raises:
        UsageError: no such scheme.
        RecipeError: with one line per fault.
    """
    path = Path(name)
    if path.suffix not in recipe.SUFFIXES:
        path = shipped_folder() / f"{name}.yaml"
        if not path.exists():
            raise UsageError(
                f"no scheme named {name!r}; kvcal ships {', '.join(shipped())}; or give the path of a file"
            )
    return parse(recipe.read_yaml(path), str(path))


def parse(tree: Any, source: str) -> Scheme:
    """Validate parsed YAML."""
    try:
        return Scheme.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(source, [recipe.describe(f, Scheme) for f in error.errors()]) from None


def to_yaml(scheme: Scheme) -> str:
    """The scheme as it was written, defaults left out."""
    return yaml.safe_dump(scheme.model_dump(exclude_unset=True), sort_keys=False)
