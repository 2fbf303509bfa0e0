"""The form of NVIDIA ModelOpt: ``k_proj.k_scale`` and ``v_proj.v_scale``, numbers without a dimension.

vLLM reads it through ``ModelOptKVCacheMethod`` (quantization/modelopt.py), ``q_scale`` too. ``quant_algo`` is
mandatory there; "FP8" that ignores every module leaves the weights as they are.
"""

from __future__ import annotations

import copy
from typing import Any

from kvcal.export import naming
from kvcal.export.bundle import Bundle
from kvcal.plan import Plan
from kvcal.scales import Scales


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
