"""Fields of a ``config.json`` that mean the same in every family, each read strictly.

All raise :class:`ModelError` where a field is missing or cannot be meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvcal.errors import ModelError

_MAX_LAYERS = 10_000


def positive_int(config: Mapping[str, Any], key: str) -> int:
    """The field, which must be there and above 0."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def optional_float(config: Mapping[str, Any], key: str) -> float | None:
    """The field, which must be above 0 and finite where it is there."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} must be a positive number, found {value!r}")
    return float(value)


def bounded_layers(config: Mapping[str, Any]) -> None:
    """Refuse a number of layers that no memory would hold."""
    count = config.get("num_hidden_layers")
    if isinstance(count, int) and count > _MAX_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers is {count}, more than any model has")


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


def quant_method_of(config: Mapping[str, Any]) -> str | None:
    """How the weights are quantized; None if they are not."""
    section = config.get("quantization_config")
    if section is None:
        return None
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if not isinstance(method, str):
        raise ModelError("config.json: quantization_config names no quant_method")
    return method


def sliding_window_of(config: Mapping[str, Any]) -> int | None:
    """Keys that a query of a sliding layer sees; None if there is no window or it is not used."""
    value = config.get("sliding_window")
    if value is None or config.get("use_sliding_window") is False:
        return None
    return positive_int(config, "sliding_window")
