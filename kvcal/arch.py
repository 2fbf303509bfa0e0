"""What a model caches, and its ``config.json`` alone as one way to know it.

A family is a row of :data:`FAMILIES`, which says what of a model its weights' fold depends on.
:mod:`kvcal.probe` finds out the rest from transformers' own code, also of models that have no row, and
holds rows against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvcal import latent as latents
from kvcal.errors import ModelError, PlanRefused
from kvcal.latent import LatentSpec

LayerKind = Literal["full", "sliding"]
Rope = Literal["half", "interleaved", "none", "unknown"]
QkNorm = Literal["none", "head", "full"]

_MAX_LAYERS = 10_000
_MAX_HEAD_DIM = 65_536
_LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}


@dataclass(frozen=True)
class Projections:
    """Where an attention block keeps its weights: module paths relative to :attr:`LayerSpec.module`.

    Weights are ``(out, in)``. Rows of ``q``, ``k`` and ``v`` and columns of ``o`` run over heads, then over
    the channels of a head. ``fused`` says that ``q``, ``k`` and ``v`` name one module: with ``blocks`` its
    rows are all of Q, then all of K, then all of V; with ``groups`` they are ``[KV head][its query heads, k,
    v][channel]``. ``transposed``: weights are ``(in, out)``. Which of the modules carry a bias is for the
    checkpoint to say.
    """

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    fused: Literal["no", "blocks", "groups"] = "no"
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """What holds for every model of one ``model_type``; the facts are those of transformers' modeling file.

    ``attention_module`` is the module path of a layer's attention block; ``defaults`` are what
    transformers takes for fields that a config may leave out. ``names``: field -> the family's own name of
    it. ``settle`` says in the common fields what the family says in others. ``without_cache`` are the
    ``layer_types`` whose layers do not attend.

    ``rope`` is the pairing of the layers that have positions: every layer (``all``), only those with a
    sliding window (``sliding``), the same unless the model has no window at all (``hybrid``), or ``no``
    layer.
    ``rotary_factor`` is the share of a head's channels that rotates where the config, under
    ``rotary_field`` or in its RoPE section, does not say; None for families whose code rotates them all.
    RoPE hands out a cosine per rotating ``channel``, or per ``pair`` of them.

    ``qk_norm``, ``norm_adds_one``, ``q_norm``, ``k_norm``, ``sinks`` and ``output_gate`` are those of
    :class:`ModelSpec`. ``key_bias`` says whether K has a bias, or names the config field that does.
    ``refused`` has the config fields that must not be set, as no :class:`ModelSpec` can describe the outcome,
    with why.

    ``latent``: the layers cache a latent and a rotary key (:mod:`kvcal.latent`); ``rope`` is then the pairing
    of that key as it is cached.
    """

    model_type: str
    attention_module: str = "model.layers.{index}.self_attn"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    settle: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    without_cache: tuple[str, ...] = ()
    projections: Projections = Projections()
    rope: Literal["half", "interleaved"] = "half"
    rope_layers: Literal["all", "sliding", "hybrid", "no"] = "all"
    rotary_factor: float | None = None
    rotary_field: str = "partial_rotary_factor"
    qk_norm: QkNorm = "none"
    norm_adds_one: bool = False
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    key_bias: bool | str = "attention_bias"
    cosines: Literal["channel", "pair"] = "channel"
    sinks: bool = False
    output_gate: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    latent: bool = False


# Qwen: a window that is only used on request, and then from one layer on.
_OPTIONAL_WINDOW = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_EVERY_FOURTH_FULL = {"sliding_window": 4096, "sliding_window_pattern": 4}
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
# vLLM does not implement them either.
_QK_LAYERNORM = {"qk_layernorm": "LayerNorms of Q and K, with a mean and a bias, are not handled"}


def _one_kv_head_per_head(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, "num_key_value_heads": None}


def _even_heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """One KV head per query head, and together they are as wide as the model."""
    return {**config, "num_key_value_heads": None, "head_dim": None}


def _falcon_kv_heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    config = {**config, "head_dim": None}
    if not config["new_decoder_architecture"]:
        config["num_key_value_heads"] = 1 if config["multi_query"] else None
    return config


def _full_every_nth(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Linear layers but for every ``full_attention_interval``-th, where a config does not list them."""
    if config.get("layer_types") is not None:
        return config
    bounded_layers(config)
    interval, layers = (positive_int(config, key) for key in ("full_attention_interval", "num_hidden_layers"))
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return {**config, "layer_types": kinds}


_QUERY_KEY_VALUE = Projections(
    q="query_key_value", k="query_key_value", v="query_key_value", o="dense", fused="groups"
)
_ALIBI = {"alibi": "attention with linear biases (ALiBi) is not emulated"}

FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family("llama"),
        Family("mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}, key_bias=False),
        Family("mixtral", defaults={"num_key_value_heads": 8}, key_bias=False),
        Family("qwen2", defaults={"num_key_value_heads": 32} | _OPTIONAL_WINDOW, key_bias=True),
        Family(
            "qwen2_moe",
            defaults={"num_key_value_heads": 16, "use_sliding_window": False, "qkv_bias": True},
            key_bias="qkv_bias",
        ),
        Family(
            "qwen3",
            defaults={"num_key_value_heads": 32, "head_dim": 128} | _OPTIONAL_WINDOW,
            qk_norm="head",
        ),
        Family(
            "qwen3_moe",
            defaults={"num_key_value_heads": 4, "use_sliding_window": False},
            qk_norm="head",
        ),
        Family(
            "gemma2",
            defaults=_GEMMA | {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0},
            norm_adds_one=True,
        ),
        Family(
            "gemma3_text",
            defaults=_GEMMA | {"sliding_window_pattern": 6},
            qk_norm="head",
            norm_adds_one=True,
        ),
        Family(
            "phi3",
            projections=Projections(q="qkv_proj", k="qkv_proj", v="qkv_proj", fused="blocks"),
            rotary_factor=1.0,
            key_bias=False,
        ),
        Family("olmo2", qk_norm="full"),
        Family("granite"),
        Family("starcoder2", defaults={"num_key_value_heads": 2, "use_bias": True}, key_bias="use_bias"),
        Family("cohere2", defaults=_EVERY_FOURTH_FULL, rope="interleaved", rope_layers="sliding"),
        Family(
            "stablelm",
            defaults={"num_key_value_heads": 32},
            rotary_factor=0.25,
            key_bias="use_qkv_bias",
            refused=_QK_LAYERNORM,
        ),
        Family(
            "gpt_neox",
            attention_module="gpt_neox.layers.{index}.attention",
            defaults={"attention_bias": True},
            settle=_one_kv_head_per_head,
            projections=_QUERY_KEY_VALUE,
            rotary_factor=0.25,
            rotary_field="rotary_pct",
        ),
        Family(
            "phi",
            projections=Projections(o="dense"),
            rotary_factor=0.5,
            key_bias=True,
            refused=_QK_LAYERNORM,
        ),
        Family(
            "exaone4",
            defaults={"num_key_value_heads": 32} | _EVERY_FOURTH_FULL,
            rope_layers="hybrid",
            qk_norm="head",
            key_bias=False,
        ),
        Family("deepseek_v2", defaults=_LATENT, rope="interleaved", latent=True),
        # Pairs lie side by side in the weights, and half a key apart once they are rotated.
        Family("deepseek_v3", defaults=_LATENT, latent=True),
        Family(
            "gpt2",
            attention_module="transformer.h.{index}.attn",
            defaults={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
            | {"max_position_embeddings": 1024, "vocab_size": 50257},
            names={
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "max_position_embeddings": "n_positions",
            },
            settle=_even_heads,
            projections=Projections(
                q="c_attn", k="c_attn", v="c_attn", o="c_proj", fused="blocks", transposed=True
            ),
            rope_layers="no",
            key_bias=True,
            refused={"add_cross_attention": "a cache of cross-attention is not handled"},
        ),
        Family(
            "opt",
            attention_module="model.decoder.layers.{index}.self_attn",
            defaults={"enable_bias": True},
            settle=_even_heads,
            projections=Projections(o="out_proj"),
            rope_layers="no",
            key_bias="enable_bias",
        ),
        Family(
            "falcon",
            attention_module="transformer.h.{index}.self_attention",
            defaults={"multi_query": True, "new_decoder_architecture": False, "bias": False}
            | {"max_position_embeddings": 2048},
            names={"num_key_value_heads": "num_kv_heads"},
            settle=_falcon_kv_heads,
            projections=_QUERY_KEY_VALUE,
            key_bias="bias",
            refused=_ALIBI,
        ),
        Family(
            "gpt_oss",
            defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
            | {"sliding_window_pattern": 2, "attention_bias": True},
            cosines="pair",
            sinks=True,
        ),
        Family(
            "qwen3_next",
            defaults={"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
            settle=_full_every_nth,
            without_cache=("linear_attention",),
            rotary_factor=0.25,
            qk_norm="head",
            norm_adds_one=True,
            output_gate=True,
        ),
    )
}

ENCODER_DECODER = (
    "is an encoder-decoder: it has a cache of cross-attention too, and no engine that kvcal knows loads"
    " scales for either"
)

# Families people will try, with the reason they are refused instead of being called merely unknown.
_REFUSED_FAMILIES: dict[str, str] = {
    "mamba": "has no attention layer, hence no KV cache",
    "mamba2": "has no attention layer, hence no KV cache",
    "bert": "is an encoder and has no KV cache",
    "t5": ENCODER_DECODER,
    "mllama": "keeps K and V of images in layers of cross-attention, which text alone does not reach",
}


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

    @property
    def cached_elements_per_token(self) -> int:
        """Elements of K and V that one token adds to the cache of all layers, while no window is full."""
        return sum(layer.cached_elements for layer in self.layers)

    @property
    def latent(self) -> LatentSpec | None:
        """Of the layers of a model that caches latents, which are all alike."""
        return self.layers[0].latent

    def elements_held(self, context: int) -> int:
        """Elements that the cache of all layers holds of a sequence of ``context`` tokens."""
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
    window = _sliding_window(config)
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
        softcap=_optional_float(config, "attn_logit_softcapping"),
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


def model_type_of(config: Mapping[str, Any]) -> str:
    """``model_type``, as long as nothing is known against it.

    Raises:
        ModelError: there is none.
        PlanRefused: a family that cannot be handled.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("config.json has no model_type; is this a transformers model folder?")
    if model_type in _REFUSED_FAMILIES:
        raise unhandled(model_type, _REFUSED_FAMILIES[model_type])
    return model_type


def unhandled(model_type: str, why: str) -> PlanRefused:
    """The refusal of a family."""
    return PlanRefused([f"model_type {model_type!r} {why}"])


def bounded_layers(config: Mapping[str, Any]) -> None:
    """Refuse a number of layers that no memory would hold."""
    count = config.get("num_hidden_layers")
    if isinstance(count, int) and count > _MAX_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers is {count}, more than any model has")


def positive_int(config: Mapping[str, Any], key: str) -> int:
    """The field, which must be there and above 0."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _optional_float(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} must be a positive number, found {value!r}")
    return float(value)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The model class."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise ModelError("config.json: architectures must name the model class, for example LlamaForCausalLM")


def dtype_of(config: Mapping[str, Any]) -> str:
    """That of the weights."""
    value = config.get("dtype", config.get("torch_dtype"))
    return value if value in ("float16", "bfloat16", "float32") else "float32"


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
    if _sliding_window(config) is None:
        return "full"
    if config.get("sliding_window_pattern") is not None:
        return "sliding" if (index + 1) % positive_int(config, "sliding_window_pattern") else "full"
    if config.get("max_window_layers"):
        return "sliding" if index >= positive_int(config, "max_window_layers") else "full"
    return "sliding"


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    value = config.get("sliding_window")
    if value is None or config.get("use_sliding_window") is False:
        return None
    return positive_int(config, "sliding_window")


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


def quant_method_of(config: Mapping[str, Any]) -> str | None:
    """How the weights are quantized; None if they are not."""
    section = config.get("quantization_config")
    if section is None:
        return None
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if not isinstance(method, str):
        raise ModelError("config.json: quantization_config names no quant_method")
    return method
