"""Recipes: strict, readable alone, every fault of a file reported at once.

A recipe says *how* to calibrate; the model it is applied to is named on the command line. Command-line
flags override single fields through :meth:`Recipe.override`.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvcal import engines, formats, granularity
from kvcal.engine_spec import Deliver
from kvcal.errors import RecipeError, UsageError

Side = Literal["k", "v", "q"]
SIDES: tuple[Side, ...] = ("k", "v", "q")

Objective = Literal["amax", "percentile", "mse", "attention"]

SUFFIXES = (".yaml", ".yml")  # of files; names of what kvcal ships may have dots too

MIN_TOKENS = 8  # of a sample that is worth a forward pass

_Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
_NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """A mapping of a YAML file: frozen, and strict about names and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


_PERCENTILE = 99.99


class ScaleRule(Section):
    """How what was seen becomes a scale.

    ``objective``: the largest magnitude that the scale has to cover. ``amax``: of all that was seen;
    ``percentile``: but the largest 0.01 %, or what ``percentile`` says; ``mse``: where the format's squared
    error is smallest; ``attention``: the same, channels weighted by what reads them (Q by ``mse``, as nothing
    weighs its channels). All but the first need distributions to be collected.

    ``rule`` makes a scale of that magnitude. ``amax``: ``headroom * amax / max``. ``power_of_two``: the same
    rounded up to a power of two, so that scaling changes exponents only. On the demo model all rules cost the
    same KL within noise (`kvcal bench rules`), as E4M3's flat precision says they should. The default is the
    one with other merits: it adds no rounding of its own, survives engines that keep scales in BF16, and
    leaves room for unseen values.
    """

    rule: Literal["amax", "power_of_two"] = "power_of_two"
    headroom: Annotated[float, Field(ge=1.0, le=16.0)] = 1.25
    objective: Objective = "amax"
    percentile: Annotated[float, Field(gt=50.0, le=100.0)] = _PERCENTILE

    @model_validator(mode="after")
    def _percentile_has_an_effect(self) -> ScaleRule:
        if self.percentile != _PERCENTILE and self.objective != "percentile":
            raise ValueError(
                f"percentile {self.percentile:g} has no effect with objective {self.objective}; leave it out"
            )
        return self


class Text(Section):
    """Where text comes from and how much of it is used.

    ``dataset`` is ``builtin``, a local .jsonl, .parquet or .txt file, or a hub id or dataset folder
    (with ``split``). ``column`` names the text or chat column; by default ``text``, ``messages``,
    ``conversations`` or ``prompt``, whichever is there. Images are in parts of chats or in a column ``image``
    or ``images``. Samples longer than ``chunk`` are run so many tokens at a time, over a cache.
    """

    dataset: Annotated[str, Field(min_length=1)] = "builtin"
    split: str = "train"
    column: str | None = None
    samples: Annotated[int, Field(ge=1)] = 64
    seq_len: Annotated[int, Field(ge=MIN_TOKENS)] = 512
    chunk: Annotated[int, Field(ge=MIN_TOKENS)] = 4096


class Calibration(Text):
    """Text that sets the scales."""

    batch_size: Annotated[int, Field(ge=1)] = 4
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class Evaluation(Text):
    """Held-out text that judges them. Documents are assigned by content, so none is in both."""

    samples: Annotated[int, Field(ge=1)] = 8
    batch_size: Annotated[int, Field(ge=1)] = 1


Transform = Literal[
    "key_scale",
    "key_turn",
    "key_offset",
    "key_hadamard",
    "value_scale",
    "value_hadamard",
    "value_random_hadamard",
    "value_balanced",
    "latent_scale",
]


class Folds(Section):
    """What is tried where a calibration is delivered through the weights.

    ``transforms`` are tried in this order, one on top of the other; each is kept if it lowers the KL of the
    engine's own quantizer on calibration text that did not shape it, ``samples`` of it. By default those that
    are worth trying on what the model caches, K and V of its heads or latents. ``scales``: powers of
    two move exponents only, so that a fold is exact in any dtype and can be taken back bit for bit; free
    scales are rounded with the weights. ``seed`` draws the signs of randomized Hadamard transforms.
    """

    transforms: list[Transform] = ["key_scale", "key_turn", "value_scale", "latent_scale"]
    scales: Literal["power_of_two", "free"] = "power_of_two"
    samples: Annotated[int, Field(ge=1)] = 8
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class Weights(Section):
    """Quantization of the weights by llm-compressor, after the folds and before the KV statistics.

    ``FP8_DYNAMIC``: weights per channel, activations per token as they come; needs no data. ``W4A16``:
    4-bit weights in groups of 128, 16-bit activations; needs the calibration text.
    """

    scheme: Literal["FP8_DYNAMIC", "W4A16"]


class Mixed(Section):
    """Formats by layer, by what each costs there in KL; one of the two limits is given.

    ``bits_budget``: bits per element that the whole cache may take; KL is made as small as it gets.
    ``max_kl``: what the KLs of all layers may sum up to; bits are made as few as that allows. At most
    ``passes`` forward passes over ``samples`` of the calibration text, which then set no scales, measure what
    each layer costs; the reference and the choice as a whole come on top.
    """

    bits_budget: Annotated[float, Field(gt=0.0, le=16.0)] | None = None
    max_kl: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    passes: Annotated[int, Field(ge=2)] = 128
    samples: Annotated[int, Field(ge=1)] = 2

    @model_validator(mode="after")
    def _one_limit(self) -> Mixed:
        if (self.bits_budget is None) == (self.max_kl is None):
            raise ValueError("needs one of bits_budget and max_kl")
        return self


class Gates(Section):
    """Limits on what was measured; a value beyond one of them fails the run."""

    kl_mean: _NonNegative | None = None
    kl_p99: _NonNegative | None = None
    top1_agreement: _Fraction | None = None
    perplexity_increase: _NonNegative | None = None
    attention_error: _NonNegative | None = None


class Recipe(Section):
    """One calibration, whole.

    ``deliver``: ``metadata`` writes static scales beside the weights, ``fold`` puts the calibration into the
    weights and leaves the engine's own scaling alone, ``both`` adds scales for the folded weights. By default
    what the engine loads for this format. ``granularity`` is that of static scales, ``per_tensor`` by
    default. ``mixed`` leaves layers in 16 bits. ``schemes`` are for ``kvcal compare``: names or files, each
    held against the gates.
    """

    description: str = ""
    schemes: list[Annotated[str, Field(min_length=1)]] = []
    format: str = formats.FP8_E4M3.name
    granularity: str | None = None
    engine: str = "vllm"
    deliver: Deliver | None = None
    scale: ScaleRule = ScaleRule()
    folds: Folds = Folds()
    weights: Weights | None = None
    mixed: Mixed | None = None
    calibration: Calibration = Calibration()
    evaluation: Evaluation = Evaluation()
    gates: Gates = Gates(kl_mean=0.1)

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        return known(lambda: formats.get(value).name)

    @field_validator("granularity")
    @classmethod
    def _known_granularity(cls, value: str | None) -> str | None:
        return None if value is None else known(lambda: granularity.get(value).name)

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        return known(lambda: engines.get(value).name)

    def override(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy with dotted fields replaced, validated again: ``{"calibration.samples": 16}``."""
        tree = self.model_dump()
        for path, value in changes.items():
            *parents, leaf = path.split(".")
            node = tree
            for parent in parents:
                if node[parent] is None:  # a section that was left out
                    node[parent] = {}
                node = node[parent]
            node[leaf] = value
        return parse(tree, source="command line")

    def to_yaml(self) -> str:
        """The recipe with every default filled in, as YAML."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def known(look_up: Any) -> str:
    """The canonical name that a lookup gives, or its refusal as a fault of the field."""
    try:
        return str(look_up())
    except UsageError as error:
        raise ValueError(str(error)) from None


def parse(tree: Any, source: str) -> Recipe:
    """Validate parsed YAML.

    Raises:
        RecipeError: with one line per fault: path, found value, and what would be right.
    """
    if not isinstance(tree, Mapping):
        raise RecipeError(source, [f"a recipe is a mapping of fields, found {type(tree).__name__}"])
    try:
        return Recipe.model_validate(dict(tree))
    except ValidationError as error:
        raise RecipeError(source, [describe(f, Recipe) for f in error.errors()]) from None
    except RecursionError:
        raise RecipeError(source, ["nested too deeply to be a recipe"]) from None


def load(name: str) -> Recipe:
    """Read a recipe from a file, or by the name of one that kvcal ships (``fp8-per-head``)."""
    path = Path(name)
    if path.suffix not in SUFFIXES and not os.path.exists(path):
        path = shipped_folder() / f"{name}.yaml"
        if not os.path.exists(path):
            raise UsageError(
                f"no recipe named {name!r}; kvcal ships {', '.join(shipped())}; or give the path of a file"
            )
    return parse(read_yaml(path), source=str(path))


def parse_text(text: str, source: str) -> Recipe:
    """Validate a recipe given as YAML text."""
    return parse(_yaml(text, source), source)


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; a field that is given twice is refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise RecipeError(str(path), [f"cannot be read: {error}"]) from None
    return _yaml(text, str(path))


def _yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except Exception as error:  # PyYAML raises whatever its constructors raise
        message = " ".join(str(error).split()) or type(error).__name__
        raise RecipeError(source, [f"not YAML: {message}"]) from None


class _Loader(yaml.SafeLoader):
    """Refuses a field that is given twice; PyYAML would take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"field {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def shipped_folder() -> Path:
    """``recipes/`` of the checkout, or its copy inside an installed package."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped() -> list[str]:
    """Names of the recipes that kvcal ships."""
    return sorted(p.stem for p in shipped_folder().glob("*.yaml"))


def describe(fault: Any, root: type[Section]) -> str:
    """One line for a fault that pydantic found in a file of this kind."""
    path = ".".join(str(part) for part in fault["loc"]) or root.__name__.lower()
    if fault["type"] == "extra_forbidden":
        known_here = _fields_beside(root, fault["loc"])
        close = difflib.get_close_matches(str(fault["loc"][-1]), known_here, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known_here)}"
        return f"{path}: unknown field; {hint}"
    found = fault["input"]
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if fault["type"] == "model_type":
        message = "should be a mapping of fields"
    if fault["type"] == "float_type" and isinstance(found, str):
        message += "; no quotes, and YAML wants a dot before an exponent (1.0e-3)"
    shown = reprlib.repr(found)  # an alias in YAML can stand for gigabytes
    return f"{path}: found {shown if len(shown) <= 60 else shown[:57] + '...'}; {message}"


def _fields_beside(root: type[Section], location: tuple[Any, ...]) -> list[str]:
    model: Any = root
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        # A section that may be left out is a union with None.
        model = next((t for t in get_args(annotation) if t is not type(None)), annotation)
    return sorted(model.model_fields)
