"""What can be said of a serving engine, and what becomes of a calibration there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvcal import formats
from kvcal import granularity as granularities
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.formats import KVFormat
from kvcal.granularity import Granularity

# Of an engine that reads scales beside unquantized weights alone, with no section about them.
UNQUANTIZED = "none"

Deliver = Literal["metadata", "fold", "both"]
Outcome = Literal["consumed", "folded", "ignored", "refused"]


@dataclass(frozen=True)
class Verdict:
    """What an engine makes of a calibration.

    Attributes:
        outcome: ``consumed``: it loads the scales and computes with them. ``folded``: it gets weights that
            suit the scales it has. ``ignored``: it would load the checkpoint and serve other scales.
            ``refused``: it would not serve this at all.
        reasons: why, one line each.
        alternative: what would reach it; None if this does, or nothing would.
    """

    outcome: Outcome
    reasons: tuple[str, ...]
    alternative: str | None = None


@dataclass(frozen=True)
class EngineSpec:
    """Capabilities of one engine version.

    Attributes:
        title: the engine's name as its makers write it.
        cache_dtype: kvcal format name -> value of the engine's cache dtype flag.
        loads_scales: formats whose static scales it takes from a checkpoint.
        granularities: static granularities the loader accepts.
        head_dim_multiple: format -> the attention kernels' alignment of one cached vector, in elements.
        own_attention: name of the attention inside a module that is called so itself. Names of scales are
            mapped into it from the module around it, but not where that has the same name already.
        renamed: model type -> a part of module paths and what the engine calls it, where the two differ.
        smallest_head_dim: format -> smallest head size of a backend that has it.
        per_head_max_head_dim: largest head size of a backend that takes one scale per head.
        base_quant_methods: ``quant_method`` of base weights whose config the KV scheme is merged into; the
            first is that of a checkpoint whose weights are not quantized.
        scalar_quant_methods: ``quant_method`` of base weights beside which scales per tensor are read, with
            nothing about them in the config.
        scale_suffixes: side -> suffix of the tensor, appended to the attention module's path.
        backends: granularity -> attention backends that consume it, for the user to read; ``latent``: those
            that read cached latents.
        decode_time: format -> time of decode attention relative to the 16-bit cache, each on its fastest
            backend; measured on one GPU at one long context, so an order of magnitude.
        executes_online: whether it runs rotations of K and Q, or adds an offset to K, that a checkpoint asks
            for; every engine so far ignores them.
        skips_layers: whether it can keep single layers in 16 bits, and their Q with them.
        source: where the facts of the row were read.
        families: model types whose loader hands scales to attention; None for all but ``unloaded``.
        unloaded: model type -> what happens to scales of one whose loader does not.
        separate_projections: the names of scales need modules ``k_proj`` and ``v_proj``.
        unread: format -> why static scales for it reach no kernel.
        needs_hardware: format -> the unit, ``fp8`` or ``fp4``, without which a GPU does not get this cache.
        nvidia_only: it runs on no other maker's GPUs.
        approximations: format -> how the engine's own quantizer differs from the one that is measured.
        nvfp4_scale: what the engine takes the scale of an NVFP4 cache to be of its absolute maximum. With
            ``amax/2688`` block scales use all of E4M3, with ``amax/448`` a sixth of it.
        latent_formats: those in which it can store a cached latent and its rotary key, as one vector.
        loads_latent_scale: the one scale of that vector reaches its kernels; otherwise it is 1.0.
        about_encoders: why it consumes nothing for an encoder-decoder; None if it does.
        about_latents: what it does with models that cache latents, where it has no format or no scale for
            them.
        notes: what else the engine ignores, or takes another way.
        answers_live: ``kvcal check --live`` can start it and ask what it holds.
        forgets_over_16_bits: it sets scales to 1.0 when it loads them for a 16-bit cache.
        standalone: its files hold scales alone, without a checkpoint around them.
        pages_hold_states: a page is made as long as the state of a layer without attention needs, which is
            padded to it.
    """

    name: str
    title: str
    version: str
    source: str
    cache_dtype: Mapping[str, str]
    loads_scales: tuple[str, ...]
    granularities: tuple[str, ...]
    backends: Mapping[str, str]
    scale_suffixes: Mapping[str, str] = field(default_factory=dict)
    base_quant_methods: tuple[str, ...] = ()
    scalar_quant_methods: tuple[str, ...] = ()
    head_dim_multiple: Mapping[str, int] = field(default_factory=dict)
    own_attention: str | None = None
    renamed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    smallest_head_dim: Mapping[str, int] = field(default_factory=dict)
    per_head_max_head_dim: int = 2**16
    decode_time: Mapping[str, float] = field(default_factory=dict)
    executes_online: bool = False
    skips_layers: bool = False
    families: tuple[str, ...] | None = None
    unloaded: Mapping[str, str] = field(default_factory=dict)
    separate_projections: bool = False
    unread: Mapping[str, str] = field(default_factory=dict)
    needs_hardware: Mapping[str, Literal["fp8", "fp4"]] = field(default_factory=dict)
    nvidia_only: bool = False
    approximations: Mapping[str, str] = field(default_factory=dict)
    nvfp4_scale: Literal["amax/2688", "amax/448"] = "amax/2688"
    latent_formats: tuple[str, ...] = ()
    loads_latent_scale: bool = False
    about_latents: str = "is not known to quantize a cached latent"
    about_encoders: str | None = "is not known to load scales for the two caches of an encoder-decoder"
    notes: tuple[str, ...] = ()
    answers_live: bool = False
    forgets_over_16_bits: bool = False
    standalone: bool = False
    pages_hold_states: bool = False

    def scale_name(self, layer: LayerSpec, side: str) -> str:
        """Name of the tensor that holds the scale of k, v or q."""
        module = layer.in_checkpoint
        if self.own_attention is not None and module.rpartition(".")[2] == self.own_attention:
            module = f"{module}.{self.own_attention}"
        return f"{module}.{self.scale_suffixes[side]}"

    def module_held(self, model: ModelSpec, layer: LayerSpec) -> str:
        """Path of the module around attention in the running engine."""
        old, new = self.renamed.get(model.model_type, ("", ""))
        return layer.module.replace(old, new) if old else layer.module

    def reach(self, fmt: KVFormat) -> float:
        """The largest magnitude at a static scale of 1, by this engine's convention."""
        return 448.0 if fmt.block and self.nvfp4_scale == "amax/448" else fmt.reach

    def deliveries(self, fmt: KVFormat, model: ModelSpec) -> tuple[Deliver, ...]:
        """Ways by which a calibration for this format reaches the engine, the usual one first.

        Of a static format that the engine lacks, those that it would have; :meth:`refusals` refuses it.
        """
        lacking = fmt.name not in self.cache_dtype and not fmt.dynamic
        loaded = lacking or (fmt.name in self.loads_scales and self._reaches(model) is None)
        if loaded and fmt.block:
            return ("metadata",)
        return ("metadata", "fold", "both") if loaded else ("fold",)

    def verdict(
        self, model: ModelSpec, fmt: KVFormat, granularity: Granularity | None, deliver: Deliver
    ) -> Verdict:
        """What becomes of a calibration; ``granularity`` is None where no static scales are written."""
        behind_encoder = self._about_encoder(model)
        if behind_encoder is not None:
            return Verdict("refused", (behind_encoder,), "--engine kernel --format fp8")
        ignored = self.ignores(model, fmt, deliver)
        refused = [r for r in self.refusals(model, fmt, granularity, deliver) if r not in ignored]
        if not refused and not ignored:
            served = self.backends[self.backends_of(model, fmt, granularity)]
            return Verdict("folded" if deliver == "fold" else "consumed", (f"served by {served}",))
        alternative = self._alternative(model, fmt, granularity, deliver)
        return Verdict("ignored" if ignored else "refused", (*refused, *ignored), alternative)

    @staticmethod
    def backends_of(model: ModelSpec, fmt: KVFormat, granularity: Granularity | None) -> str:
        """The key of ``backends`` for what is served."""
        if model.latent is not None:
            return "latent"
        if granularity is not None:
            return granularity.name
        return "per_token_head" if fmt.dynamic else "per_tensor"

    def _alternative(
        self, model: ModelSpec, fmt: KVFormat, granularity: Granularity | None, deliver: Deliver
    ) -> str | None:
        """Options with which it would be consumed or folded, the least change first."""
        if granularity is not None:
            for name in self.granularities:
                if not self.refusals(model, fmt, granularities.get(name), deliver):
                    return f"--granularity {name}"
        if deliver != "fold" and not self.refusals(model, fmt, None, "fold"):
            return "--deliver fold"
        nearest = formats.get(self._nearest(fmt))
        if nearest.block:
            return f"--format {nearest.name}" if nearest != fmt else None
        if nearest != fmt and not self.refusals(model, nearest, None, "fold"):
            return f"--format {nearest.name} --deliver fold"
        return None

    def ignores(self, model: ModelSpec, fmt: KVFormat, deliver: Deliver) -> list[str]:
        """Why static scales beside the weights would be loaded by nobody; empty if they would be."""
        if deliver == "fold" or not self._has(fmt, model) or fmt.dynamic:
            return []
        if self._about_encoder(model) is not None:
            return []
        why = self._reaches(model)
        if fmt.name in self.unread:
            why = f"{self.name} {self.version} {self.unread[fmt.name]}"
        if why is None:
            return []
        return [why if fmt.block else f"{why}; --deliver fold reaches it"]

    def _about_encoder(self, model: ModelSpec) -> str | None:
        """Why it consumes nothing for this model because of its encoder; None if it has none, or it does."""
        if not model.encoder_decoder or self.about_encoders is None:
            return None
        return f"{self.name} {self.version}, {model.model_type}: {self.about_encoders}"

    def _reaches(self, model: ModelSpec) -> str | None:
        """Why its loader drops the scales of this model; None if it does not."""
        if model.latent is not None and not self.loads_latent_scale:
            return f"{self.name} {self.version}, {model.model_type}: {self.about_latents}"
        known = self.families is None or model.model_type in self.families or model.latent is not None
        if not known or model.model_type in self.unloaded:
            what = self.unloaded.get(model.model_type, "is not known to load scales for it")
            return f"{self.name} {self.version}, {model.model_type}: {what}"
        names = model.projections
        if self.separate_projections and (names is None or (names.k, names.v) != ("k_proj", "v_proj")):
            what = "are not known to be there" if names is None else "here are fused"
            return f"{self.name} {self.version} looks for scales beside k_proj and v_proj, which {what}"
        return None

    def refusals(
        self, model: ModelSpec, fmt: KVFormat, granularity: Granularity | None, deliver: Deliver
    ) -> list[str]:
        """Why this engine would not serve the outcome; empty if it would.

        ``granularity`` is None where no static scales are written.
        """
        behind_encoder = self._about_encoder(model)
        if behind_encoder is not None:
            return [f"{behind_encoder}; use --engine kernel, which takes fp8"]
        reasons = self.ignores(model, fmt, deliver)
        known = fmt.name in self.cache_dtype
        if not known:
            reasons.append(self._about_missing_format(fmt))
        elif fmt.latent_only and model.latent is None:
            reasons.append(f"{fmt.name} is for models that cache a latent (MLA); use fp8")
        elif not self._has(fmt, model):
            reasons.append(self._about_latents(fmt, model))
        elif fmt.block and deliver != "metadata":
            reasons.append(f"folds are not measured for {fmt.name}; use --deliver metadata")
        elif fmt.dynamic and deliver not in self.deliveries(fmt, model):
            reasons.append(
                f"{self.name} {self.version} loads no static scales for {fmt.name}, which it scales itself;"
                " only --deliver fold reaches it, through the weights"
            )
        if granularity is not None and granularity.name not in self.granularities and self.granularities:
            why = "" if granularity.static else " from a checkpoint, since they come with the tokens"
            reasons.append(
                f"{self.name} {self.version} takes no {granularity.name} scales{why};"
                f" use {' or '.join(self.granularities)}"
            )
        if model.latent is not None and granularity is not None and granularity.name == "per_head":
            reasons.append("all heads read one cached latent, so there is no scale per head; use per_tensor")
        if deliver != "metadata" and model.projections is None:
            reasons.append(
                f"which weights of {model.model_type} make Q, K and V is not known, so nothing can be folded;"
                " use fp8 with --deliver metadata where the engine loads scales"
            )
        reasons += self._about_weights(model, granularity, deliver)
        sizes = {layer.head_dim for layer in model.layers if layer.latent is None}
        for head_dim in sorted(sizes) if known else []:
            reasons += self._about_head_dim(head_dim, fmt, granularity)
        return reasons

    def _has(self, fmt: KVFormat, model: ModelSpec) -> bool:
        """Whether it can store what this model caches in a format."""
        return fmt.name in (self.cache_dtype if model.latent is None else self.latent_formats)

    def _about_latents(self, fmt: KVFormat, model: ModelSpec) -> str:
        if not self.latent_formats:
            return f"{self.name} {self.version}, {model.model_type}: {self.about_latents}"
        others = " or ".join(self.latent_formats)
        return f"{self.name} {self.version} stores no cached latent in {fmt.name}; use {others}"

    def _nearest(self, fmt: KVFormat) -> str:
        """The format of this engine that is most like ``fmt``."""

        def distance(name: str) -> tuple[float, bool, float]:
            other = formats.get(name)
            return abs(other.bits - fmt.bits), other.integer != fmt.integer, -other.bits

        return min(self.cache_dtype, key=distance)

    def _about_missing_format(self, fmt: KVFormat) -> str:
        nearest = self._nearest(fmt)
        others = ", ".join(name for name in self.cache_dtype if name != nearest)
        also = f"; others are {others}" if others else ""
        return f"{self.name} {self.version} has no {fmt.name} cache; the nearest it has is {nearest}{also}"

    def _about_weights(
        self, model: ModelSpec, granularity: Granularity | None, deliver: Deliver
    ) -> list[str]:
        method = model.quant_method
        if method is None:
            return []
        if deliver != "metadata":
            return [
                f"base weights are quantized already ({method}), and folding would round"
                " them a second time;"
                " fold into the unquantized model first and quantize its weights after that"
                " (a recipe with weights: does both)"
            ]
        known = (*self.base_quant_methods, *self.scalar_quant_methods)
        if method not in known:
            others = "".join(f" or {name}" for name in known if name != UNQUANTIZED)
            return [
                f"base weights with quant_method {method!r} cannot carry a KV scheme for"
                f" {self.name} yet; use the unquantized model{others}"
            ]
        if method in self.scalar_quant_methods and granularity and granularity.name != "per_tensor":
            return [
                f"beside weights with quant_method {method!r} {self.name} {self.version} reads scales"
                " per_tensor alone; use per_tensor"
            ]
        return []

    def _about_head_dim(self, head_dim: int, fmt: KVFormat, granularity: Granularity | None) -> list[str]:
        multiple, smallest = self.head_dim_multiple.get(fmt.name, 1), self.smallest_head_dim.get(fmt.name, 1)
        if head_dim % multiple:
            return [
                f"head size {head_dim} is not a multiple of {multiple}, which {self.name}'s"
                f" {fmt.name} attention kernels need; keep the 16-bit cache for this model"
            ]
        if head_dim < smallest:
            return [
                f"head size {head_dim} is below {smallest}, the smallest of {self.name}'s {fmt.name} kernels;"
                " use fp8"
            ]
        per_head = granularity is not None and granularity.name == "per_head"
        if per_head and head_dim > self.per_head_max_head_dim:
            return [
                f"head size {head_dim} exceeds {self.per_head_max_head_dim}, the largest for which"
                f" {self.name} has a kernel with per_head scales; use per_tensor"
            ]
        return []
