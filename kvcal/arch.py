"""What a model caches, read from its ``config.json`` alone.

A family is a row of :data:`FAMILIES`; a ``model_type`` that is not there is refused by name. Capture
checks later that the tensors it sees have the shapes announced here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvcal.errors import ModelError, PlanRefused

LayerKind = Literal["full", "sliding"]

_MAX_LAYERS = 10_000
_LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}


@dataclass(frozen=True)
class Family:
    """What holds for every model of one ``model_type``.

    ``attention_module`` is the module path of a layer's attention block; ``defaults`` are what
    transformers takes for fields that a config may leave out.
    """

    model_type: str
    attention_module: str = "model.layers.{index}.self_attn"
    defaults: Mapping[str, Any] = field(default_factory=dict)


# Qwen: a window that is only used on request, and then from one layer on.
_OPTIONAL_WINDOW = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}


FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family("llama"),
        Family("mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
        Family("mixtral", defaults={"num_key_value_heads": 8}),
        Family("qwen2", defaults={"num_key_value_heads": 32} | _OPTIONAL_WINDOW),
        Family("qwen2_moe", defaults={"num_key_value_heads": 16, "use_sliding_window": False}),
        Family("qwen3", defaults={"num_key_value_heads": 32, "head_dim": 128} | _OPTIONAL_WINDOW),
        Family("qwen3_moe", defaults={"num_key_value_heads": 4, "use_sliding_window": False}),
        Family("gemma2", defaults=_GEMMA | {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0}),
        Family("gemma3_text", defaults=_GEMMA | {"sliding_window_pattern": 6}),
        Family("phi3"),
        Family("olmo2"),
        Family("granite"),
        Family("starcoder2", defaults={"num_key_value_heads": 2}),
    )
}

# Families people will try, with the reason they are refused instead of being called merely unknown.
_REFUSED_FAMILIES: dict[str, str] = {
    "deepseek_v2": "caches a latent (MLA) instead of K and V",
    "deepseek_v3": "caches a latent (MLA) instead of K and V",
    "gpt2": "vLLM drops scales of an attention module that is itself named attn",
    "gpt_oss": "learned attention sinks are not emulated yet",
    "qwen3_next": "hybrid of linear and full attention",
    "mamba": "has no attention layer, hence no KV cache",
    "mamba2": "has no attention layer, hence no KV cache",
    "bert": "is an encoder and has no KV cache",
    "t5": "encoder-decoder models are not handled yet",
}


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer and the cache it owns."""

    index: int
    kind: LayerKind
    module: str
    heads: int
    kv_heads: int
    head_dim: int

    def heads_of(self, side: str) -> int:
        """Heads of k, v or q: Q counts query heads, K and V count KV heads."""
        return self.heads if side == "q" else self.kv_heads


@dataclass(frozen=True)
class ModelSpec:
    """Geometry of a decoder as its config announces it."""

    model_type: str
    architecture: str
    dtype: str
    hidden_size: int
    vocab_size: int
    max_context: int
    softcap: float | None
    sliding_window: int | None
    quant_method: str | None
    layers: tuple[LayerSpec, ...]

    @property
    def cached_elements_per_token(self) -> int:
        """Elements of K and V that one token adds to the cache of all layers."""
        return sum(2 * layer.kv_heads * layer.head_dim for layer in self.layers)


def read(config: Mapping[str, Any]) -> ModelSpec:
    """Build the spec from the parsed ``config.json``.

    Raises:
        ModelError: a field is missing or cannot be meant.
        PlanRefused: the family is not one that kvcal handles.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("config.json has no model_type; is this a transformers model folder?")
    family = FAMILIES.get(model_type)
    if family is None:
        why = _REFUSED_FAMILIES.get(model_type, "is not a family kvcal knows")
        raise PlanRefused([f"model_type {model_type!r} {why}; handled: {', '.join(sorted(FAMILIES))}"])

    config = {**family.defaults, **config}
    hidden_size = _positive_int(config, "hidden_size")
    layer_count = _positive_int(config, "num_hidden_layers")
    if layer_count > _MAX_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers is {layer_count}, more than any model has")
    heads = _positive_int(config, "num_attention_heads")
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _positive_int(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads do not divide into {kv_heads} KV heads")
    if config.get("head_dim") is not None:
        head_dim = _positive_int(config, "head_dim")
    elif hidden_size % heads:
        raise ModelError(f"config.json: hidden_size {hidden_size} does not divide into {heads} heads")
    else:
        head_dim = hidden_size // heads

    kinds = _layer_kinds(config, layer_count)
    return ModelSpec(
        model_type=model_type,
        architecture=_architecture(config),
        dtype=_dtype(config),
        hidden_size=hidden_size,
        vocab_size=_positive_int(config, "vocab_size"),
        max_context=_positive_int(config, "max_position_embeddings"),
        softcap=_optional_float(config, "attn_logit_softcapping"),
        sliding_window=_sliding_window(config),
        quant_method=_quant_method(config),
        layers=tuple(
            LayerSpec(
                index=index,
                kind=kinds[index],
                module=family.attention_module.format(index=index),
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
            )
            for index in range(layer_count)
        ),
    )


def _positive_int(config: Mapping[str, Any], key: str) -> int:
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


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise ModelError("config.json: architectures must name the model class, for example LlamaForCausalLM")


def _dtype(config: Mapping[str, Any]) -> str:
    value = config.get("dtype", config.get("torch_dtype"))
    return value if value in ("float16", "bfloat16", "float32") else "float32"


def _layer_kinds(config: Mapping[str, Any], layer_count: int) -> list[LayerKind]:
    names = config.get("layer_types")
    if names is None:
        return [_kind_of_unlisted(config, index) for index in range(layer_count)]
    if not isinstance(names, list) or len(names) != layer_count:
        raise ModelError(f"config.json: layer_types must list {layer_count} layers, found {names!r}")
    unknown = sorted({str(n) for n in names} - set(_LAYER_KINDS))
    if unknown:
        raise PlanRefused([f"layers of kind {', '.join(unknown)} keep no plain KV cache; not handled yet"])
    return [_LAYER_KINDS[n] for n in names]


def _kind_of_unlisted(config: Mapping[str, Any], index: int) -> LayerKind:
    """Kind of a layer where the config, of an earlier transformers, does not list them."""
    if _sliding_window(config) is None:
        return "full"
    if config.get("sliding_window_pattern") is not None:
        return "sliding" if (index + 1) % _positive_int(config, "sliding_window_pattern") else "full"
    if config.get("max_window_layers"):
        return "sliding" if index >= _positive_int(config, "max_window_layers") else "full"
    return "sliding"


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    value = config.get("sliding_window")
    if value is None or config.get("use_sliding_window") is False:
        return None
    return _positive_int(config, "sliding_window")


def _quant_method(config: Mapping[str, Any]) -> str | None:
    section = config.get("quantization_config")
    if section is None:
        return None
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if not isinstance(method, str):
        raise ModelError("config.json: quantization_config names no quant_method")
    return method
