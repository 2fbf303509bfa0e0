"""The form of NVIDIA ModelOpt: ``k_proj.k_scale`` and ``v_proj.v_scale``, numbers without a dimension.

vLLM reads it through ``ModelOptKVCacheMethod`` (quantization/modelopt.py), ``q_scale`` too. ``quant_algo`` is
mandatory there; "FP8" that ignores every module leaves the weights as they are.

Checkpoints of ModelOpt's have the same facts in ``hf_quant_config.json``, older ones there alone. vLLM and
TensorRT-LLM read one or the other first, so both are made to say the same.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcal.errors import ModelError, PlanRefused
from kvcal.export import naming
from kvcal.export.bundle import Bundle, write_json
from kvcal.plan import Plan
from kvcal.scales import Scales

OWN_CONFIG = "hf_quant_config.json"


def section_of(path: Path) -> dict[str, Any]:
    """The ``quantization_config`` that says what a ``hf_quant_config.json`` says of the weights.

    Raises:
        ModelError: the file names no ``quant_algo``.
        PlanRefused: its layers are quantized in different ways.
    """
    inner = _own(path).get("quantization")
    if not isinstance(inner, dict) or not isinstance(inner.get("quant_algo"), str):
        raise ModelError(f"{path}: names no quantization.quant_algo")
    if "quantized_layers" in inner:
        raise PlanRefused(
            [f"{path}: {inner['quant_algo']} by layer is not handled; use a base of one algorithm"]
        )
    section = {"quant_method": "modelopt", "quant_algo": inner["quant_algo"]}
    if inner.get("group_size") is not None:
        section["group_size"] = inner["group_size"]
    return section | {"ignore": inner.get("exclude_modules") or []}


def announce(path: Path, plan: Plan) -> None:
    """Make a ``hf_quant_config.json`` say that the cache has scales, or that it has none."""
    document = _own(path)
    algorithm = "FP8" if plan.granularity is not None else None
    document["quantization"] = document.get("quantization", {}) | {"kv_cache_quant_algo": algorithm}
    write_json(path, document)


def disagreements(path: Path) -> Iterator[str]:
    """What a ``hf_quant_config.json`` beside the section says against it; nothing where there is none."""
    if not path.is_file():
        return
    inner = _own(path).get("quantization")
    algorithm = inner.get("kv_cache_quant_algo") if isinstance(inner, dict) else None
    if algorithm != "FP8":
        yield f'{path.name}: kv_cache_quant_algo is {json.dumps(algorithm)}, must be "FP8" as in config.json'


def _own(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ModelError(f"{path}: is no JSON document of ModelOpt")
    return document


def to_bundle(scales: Scales | None, plan: Plan, base_quantization: dict[str, Any] | None) -> Bundle:
    """Rename the scales; merge the KV scheme into the base's quantization config if it has one."""
    if plan.granularity is None or scales is None:
        return Bundle(tensors={}, quantization=None)
    quantization = copy.deepcopy(base_quantization) or {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["*"],
    }
    quantization["kv_cache_scheme"] = {"dynamic": False, "num_bits": plan.format.bits, "type": "float"}
    named = naming.tensors(scales, plan)
    return Bundle({name: scale.reshape(()) for name, scale in named.items()}, quantization)
