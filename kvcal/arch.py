"""What a model caches, and its ``config.json`` alone as one way to know it.

:mod:`kvcal.families` says what a family's configs mean; :mod:`kvcal.probe` finds the same out from
transformers' own code, also of models that have no row there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvcal import latent as latents
from kvcal.errors import ModelError, PlanRefused
from kvcal.families import FAMILIES, Family, Projections, QkNorm, model_type_of, unhandled
from kvcal.latent import LatentSpec
from kvcal.model_config import (
    architecture_of,
    bounded_layers,
    dtype_of,
    optional_float,
    positive_int,
    quant_method_of,
    sliding_window_of,
)

LayerKind = Literal["full", "sliding"]
Rope = Literal["half", "interleaved", "none", "unknown"]

_MAX_HEAD_DIM = 65_536
_LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer and the cache it owns.

    Of each head's channels the first ``rotary_dim`` rotate, in pairs: channel ``i`` with
    ``i + rotary_dim / 2`` (``half``) or ``2i`` with ``2i + 1`` (``interleaved``). A layer without positions
    has ``rope`` ``none`` and ``rotary_dim`` 0; ``unknown`` says that nobody has found out.

    ``window`` keys are seen by a query of a ``sliding`` layer, its own included, and engines keep no others.
    ``shares`` is the index of the layer whose cache a layer without one of its own reads. ``stored`` is the
    path under which checkpoints keep the layer's weights, where it is not ``module``. ``own_tensors`` are
    the names of those that lie in the attention module itself, not in a module inside it.

    A layer with a ``latent`` has one KV head of ``head_dim`` channels, the latent and then the rotary key,
    whose channels rotate. Its K is the latent, its V the rotary key, as transformers' cache has them; its Q
    has the up-projection absorbed and meets both.

    Behind an encoder, a decoder layer has two of these: self-attention of layer ``i`` has ``index`` ``2 i``,
    and ``2 i + 1`` is the one of ``cross`` attention, whose K and V are of the encoder's tokens and are
    written once.
    """

    index: int
    kind: LayerKind
    module: str
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    rotary_dim: int
    latent: LatentSpec | None = None
    window: int | None = None
    shares: int | None = None
    stored: str | None = None
    own_tensors: tuple[str, ...] = ()
    cross: bool = False

    @property
    def in_checkpoint(self) -> str:
        """Path of the attention module in the names of a checkpoint's tensors."""
        return self.stored or self.module

    def elements_held(self, context: int) -> int:
        """Elements that the layer's own cache holds of a sequence of ``context`` tokens."""
        return self.cached_elements * (context if self.window is None else min(context, self.window))

    @property
    def channel_ties(self) -> tuple[int, ...]:
        """``head_dim`` numbers, dense from 0; channels that RoPE turns into each other share one.

        K and Q may be multiplied by a factor per channel before RoPE as well as after it, with the same
        result, only where tied channels have the same factor.
        """
        pairs = self.rotary_dim // 2
        if self.rope == "interleaved":
            rotating = [channel // 2 for channel in range(self.rotary_dim)]
        else:
            rotating = [*range(pairs), *range(pairs)]
        others = range(pairs, pairs + self.head_dim - self.rotary_dim)
        return (*others, *rotating) if self.latent else (*rotating, *others)

    def heads_of(self, side: str) -> int:
        """Heads of k, v or q: Q counts query heads, K and V count KV heads."""
        return self.heads if side == "q" else self.kv_heads

    def size_of(self, side: str) -> int:
        """Channels of a head of k, v or q."""
        return self.head_dim if self.latent is None else self.latent.size_of(side)

    @property
    def cached_elements(self) -> int:
        """Elements that one token adds to the layer's own cache."""
        if self.shares is not None:
            return 0
        return sum(self.kv_heads * self.size_of(side) for side in ("k", "v"))


@dataclass(frozen=True)
class ModelSpec:
    """Geometry of a decoder as its config announces it, and what its code does to Q and K on the way.

    ``qk_norm`` is the RMS norm that Q and K go through before RoPE: none, over each head with one gain vector
    of ``head_dim`` that all heads share (``head``), or over all heads at once with a gain for each head's
    channels (``full``). Its gains are the weights of the modules ``q_norm`` and ``k_norm``, paths relative to
    :attr:`LayerSpec.module`. ``norm_adds_one``: all norms multiply by ``1 + weight``. ``key_bias``: the
    projection to K has a bias. ``sinks``: each query head has a learned logit in its softmax that leads to
    no value. ``output_gate``: what attention gives is multiplied by a gate per channel before the output
    projection reads it.

    ``layers`` are those that attend; the model has ``layers_without_attention`` more. ``projections`` None
    says that nobody has found out which weights make Q, K and V, nor any of the above but ``sinks`` and
    ``key_bias``.

    ``decoder_start`` is the token that a decoder behind an encoder begins with; None where there is no
    encoder. ``position_bias``: logits have a term added that depends on the distance in tokens.
    """

    model_type: str
    architecture: str
    dtype: str
    hidden_size: int
    vocab_size: int
    max_context: int
    softcap: float | None
    sliding_window: int | None
    quant_method: str | None
    projections: Projections | None
    qk_norm: QkNorm
    norm_adds_one: bool
    q_norm: str
    k_norm: str
    key_bias: bool
    layers: tuple[LayerSpec, ...]
    sinks: bool = False
    output_gate: bool = False
    layers_without_attention: int = 0
    decoder_start: int | None = None
    position_bias: bool = False

    @property
    def encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompt, and the decoder attends to it by cross-attention."""
        return self.decoder_start is not None

    def layers_grown_by(self, *, encoder: bool) -> tuple[LayerSpec, ...]:
        """Layers to whose caches a token that the decoder, or the encoder, reads adds K and V."""
        return tuple(layer for layer in self.layers if layer.cross == encoder)

    @property
    def cached_elements_per_token(self) -> int:
        """Elements of K and V that one token adds to the cache of all layers, while no window is full.

        Behind an encoder: one token of the decoder.
        """
        return sum(layer.cached_elements for layer in self.layers_grown_by(encoder=False))

    @property
    def cached_elements_per_encoder_token(self) -> int:
        """Elements that one token of the encoder adds to the caches of cross-attention."""
        return sum(layer.cached_elements for layer in self.layers_grown_by(encoder=True))

    @property
    def latent(self) -> LatentSpec | None:
        """Of the layers of a model that caches latents, which are all alike."""
        return self.layers[0].latent

    def elements_held(self, context: int) -> int:
        """Elements that the cache of all layers holds of a sequence of ``context`` tokens.

        Behind an encoder: of as many tokens each that encoder and decoder have read.
        """
        return sum(layer.elements_held(context) for layer in self.layers)

    @property
    def shares_caches(self) -> bool:
        """Whether some layer reads another one's cache."""
        return any(layer.shares is not None for layer in self.layers)


def read(config: Mapping[str, Any]) -> ModelSpec:
    """Build the spec from the parsed ``config.json``.

    Raises:
        ModelError: a field is missing or cannot be meant.
        PlanRefused: the family, or what the config makes of it, is not one that kvcal handles.
    """
    model_type = model_type_of(config)
    family = FAMILIES.get(model_type)
    if family is None:
        raise unhandled(model_type, f"is not a family kvcal knows; it knows {', '.join(sorted(FAMILIES))}")

    refused = [f"{key}: {why}" for key, why in family.refused.items() if config.get(key)]
    if refused:
        raise PlanRefused([f"model_type {model_type!r} with {reason}" for reason in refused])

    own_words = {key: config[own] for key, own in family.names.items() if config.get(own) is not None}
    config = {**family.defaults, **config, **own_words}
    if family.settle is not None:
        config = dict(family.settle(config))
    hidden_size = positive_int(config, "hidden_size")
    layer_count = positive_int(config, "num_hidden_layers")
    bounded_layers(config)
    heads = positive_int(config, "num_attention_heads")
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = positive_int(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads do not divide into {kv_heads} KV heads")
    if config.get("head_dim") is not None:
        head_dim = positive_int(config, "head_dim")
    elif hidden_size % heads:
        raise ModelError(f"config.json: hidden_size {hidden_size} does not divide into {heads} heads")
    else:
        head_dim = hidden_size // heads
    if head_dim > _MAX_HEAD_DIM:
        raise ModelError(f"config.json: head_dim is {head_dim}, more than any model has")

    latent = latents.read(config) if family.latent else None
    if latent is not None:
        kv_heads, head_dim, rotary_dim = 1, latent.width, latent.rotary
    else:
        rotary_dim = 0 if family.rope_layers == "no" else _rotary_dim(config, family, head_dim)
    kinds = _layer_kinds(config, layer_count, family.without_cache)
    if not any(kinds):
        raise PlanRefused([f"none of the {layer_count} layers attends, so there is no KV cache to quantize"])
    window = sliding_window_of(config)
    everywhere = family.rope_layers == "all" or (family.rope_layers == "hybrid" and window is None)
    some = family.rope_layers != "no"
    rotates = [everywhere or (some and kind == "sliding") for kind in kinds]
    return ModelSpec(
        model_type=model_type,
        architecture=architecture_of(config),
        dtype=dtype_of(config),
        hidden_size=hidden_size,
        vocab_size=positive_int(config, "vocab_size"),
        max_context=positive_int(config, "max_position_embeddings"),
        softcap=optional_float(config, "attn_logit_softcapping"),
        sliding_window=window,
        quant_method=quant_method_of(config),
        projections=family.projections,
        qk_norm=family.qk_norm,
        norm_adds_one=family.norm_adds_one,
        q_norm=family.q_norm,
        k_norm=family.k_norm,
        key_bias=bool(config.get(family.key_bias) if isinstance(family.key_bias, str) else family.key_bias),
        layers=tuple(
            LayerSpec(
                index=index,
                kind=kind,
                module=family.attention_module.format(index=index),
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rope=family.rope if rotates[index] else "none",
                rotary_dim=rotary_dim if rotates[index] else 0,
                latent=latent,
                window=window if kind == "sliding" else None,
                own_tensors=("sinks",) if family.sinks else (),
            )
            for index, kind in enumerate(kinds)
            if kind is not None
        ),
        sinks=family.sinks,
        output_gate=family.output_gate,
        layers_without_attention=kinds.count(None),
    )


def _layer_kinds(
    config: Mapping[str, Any], layer_count: int, without_cache: tuple[str, ...]
) -> list[LayerKind | None]:
    """None for a layer that does not attend."""
    names = config.get("layer_types")
    if names is None:
        return [_kind_of_unlisted(config, index) for index in range(layer_count)]
    if not isinstance(names, list) or len(names) != layer_count:
        raise ModelError(f"config.json: layer_types must list {layer_count} layers, found {names!r}")
    unknown = sorted({str(n) for n in names} - {*_LAYER_KINDS, *without_cache})
    if unknown:
        raise PlanRefused([f"layers of kind {', '.join(unknown)} keep no plain KV cache; not handled yet"])
    return [_LAYER_KINDS.get(n) for n in names]


def _kind_of_unlisted(config: Mapping[str, Any], index: int) -> LayerKind:
    """Kind of a layer where the config, of an earlier transformers, does not list them."""
    if sliding_window_of(config) is None:
        return "full"
    if config.get("sliding_window_pattern") is not None:
        return "sliding" if (index + 1) % positive_int(config, "sliding_window_pattern") else "full"
    if config.get("max_window_layers"):
        return "sliding" if index >= positive_int(config, "max_window_layers") else "full"
    return "sliding"


def _rotary_dim(config: Mapping[str, Any], family: Family, head_dim: int) -> int:
    """Channels of a head that rotate, rounded as transformers rounds them."""
    factor = _rotary_factor(config, family)
    if family.rotary_factor is None and factor != 1.0:
        # transformers rotates all channels of these whatever the config says, vLLM does not.
        raise PlanRefused(
            [f"model_type {family.model_type!r} with {family.rotary_field} {factor}: it rotates all channels"]
        )
    rotary_dim = int(head_dim * factor)
    if rotary_dim == 0 or rotary_dim % 2:
        raise ModelError(
            f"config.json: {rotary_dim} of a head's {head_dim} channels rotate, which do not pair up"
        )
    return rotary_dim


def _rotary_factor(config: Mapping[str, Any], family: Family) -> float:
    # Configs of an earlier transformers have the section as rope_scaling, and that one goes first.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise ModelError(f"config.json: {key} must be a section, found {section!r}")
    # gemma3 has a section per kind of layer.
    sections = [section, *(inner for inner in section.values() if isinstance(inner, Mapping))]
    found: list[Any] = [inner.get("partial_rotary_factor") for inner in sections]
    if all(value is None for value in found):
        found = [config.get(family.rotary_field)]
    given = [value for value in found if value is not None]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ModelError(f"config.json: {family.rotary_field} must lie in (0, 1], found {value!r}")
    return min(map(float, given), default=family.rotary_factor or 1.0)
