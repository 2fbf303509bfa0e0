"""Scales beside an engine's attention modules, and a compressed-tensors section that announces them.

Read by vLLM (``get_cache_scale_mapper`` in vllm/model_executor/layers/quantization/base_config.py;
``kv_cache_scheme`` of ``CompressedTensorsConfig``), by SGLang (``maybe_remap_kv_scale_name``) and by
text-generation-inference (``get_kv_scales``). Which of K, V and Q have scales, and under which suffix, is in
the engine's row. Where kernels compute attention in FP8, Q travels too: they round it with ``q_scale``, and a
missing one is 1.0 without a word. Skipped layers have scales as well: a 16-bit cache leaves them unused, and
whoever serves without the list of skipped layers gets calibrated ones.
"""

from __future__ import annotations

import copy
from typing import Any

from kvcal.export import naming
from kvcal.export.bundle import Bundle
from kvcal.plan import Plan
from kvcal.scales import Scales


def to_bundle(scales: Scales | None, plan: Plan, base_quantization: dict[str, Any] | None) -> Bundle:
    """Rename the scales; merge the KV scheme into the base's quantization config if it has one.

    Without scales to write the checkpoint stays as plain as the base: the engine then scales by 1.0 or
    online, whichever cache dtype it is started with.
    """
    if plan.granularity is None or scales is None:
        return Bundle(tensors={}, quantization=None)
    named = naming.tensors(scales, plan)
    if base_quantization and base_quantization.get("quant_method") in plan.engine.scalar_quant_methods:
        return Bundle(tensors=named, quantization=None)  # its config has no word for them
    quantization = copy.deepcopy(base_quantization) or {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "global_compression_ratio": None,
        "ignore": [],
    }
    # vLLM counts heads only if it is there (model_loader/weight_utils.py, get_quant_config).
    quantization.setdefault("config_groups", {})
    quantization["kv_cache_scheme"] = {
        "num_bits": plan.format.bits,
        "type": "float",
        "strategy": plan.granularity.compressed_tensors_strategy,
        "symmetric": True,
        "dynamic": False,
    }
    return Bundle(tensors=named, quantization=quantization)
