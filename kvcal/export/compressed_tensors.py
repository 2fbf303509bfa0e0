"""Scales in the names and the config that vLLM's compressed-tensors loader reads.

Names: ``<attention module>.{k,v,q}_scale`` float32, mapped by ``get_cache_scale_mapper`` in
vllm/model_executor/layers/quantization/base_config.py. Config: ``kv_cache_scheme`` of
``CompressedTensorsConfig``; ``config_groups`` must be there, since only then does ``get_quant_config``
(model_loader/weight_utils.py) tell the loader how many heads there are. Q travels too: kernels that
compute attention in FP8 round it with ``q_scale``, and a missing one is 1.0 without a word. Skipped layers
have scales too: a 16-bit cache leaves them unused, and whoever serves without the list of skipped layers gets
calibrated ones.
"""

from __future__ import annotations

import copy
from typing import Any

from kvcal.export.bundle import Bundle
from kvcal.plan import Plan
from kvcal.recipe import SIDES, Side
from kvcal.scales import Scales


def to_bundle(scales: Scales | None, plan: Plan, base_quantization: dict[str, Any] | None) -> Bundle:
    """Rename the scales; merge the KV scheme into the base's quantization config if it has one.

    Without scales to write the checkpoint stays as plain as the base: vLLM then scales by 1.0 or online,
    whichever cache dtype it is started with.
    """
    if plan.granularity is None or scales is None:
        return Bundle(tensors={}, quantization=None)
    tensors = {
        name: scales.layers[index][side].float().contiguous()
        for name, (index, side) in tensor_names(plan).items()
    }
    quantization = copy.deepcopy(base_quantization) or {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "global_compression_ratio": None,
        "ignore": [],
    }
    quantization.setdefault("config_groups", {})
    quantization["kv_cache_scheme"] = {
        "num_bits": plan.format.bits,
        "type": "float",
        "strategy": plan.granularity.compressed_tensors_strategy,
        "symmetric": True,
        "dynamic": False,
    }
    return Bundle(tensors=tensors, quantization=quantization)


def tensor_names(plan: Plan) -> dict[str, tuple[int, Side]]:
    """Name of each scale in the file -> layer and side; empty where none are written."""
    if plan.granularity is None:
        return {}
    return {
        plan.engine.scale_name(layer, side): (layer.index, side) for layer in plan.layers for side in SIDES
    }


def serve_command(folder: str, plan: Plan) -> list[str]:
    """The command that serves the checkpoint over the quantized cache.

    Skipped layers are no matter of the checkpoint: vLLM reads them from its command line alone.
    """
    command = ["vllm", "serve", folder, "--kv-cache-dtype", plan.engine.cache_dtype[plan.format.name]]
    if plan.skipped_layers:
        command += ["--kv-cache-dtype-skip-layers", *map(str, plan.skipped_layers)]
    return command
