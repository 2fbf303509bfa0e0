"""Checkpoints whose config says nothing of the cache.

LMDeploy and llama.cpp take no scale of any kind: the calibration is in the weights, and nothing shows it; on
a ``k_scale`` LMDeploy fails with KeyError. TensorRT-LLM refuses a config that quantizes the cache alone, and
finds the scales of an NVFP4 cache by their names (_torch/modules/linear.py).
"""

from __future__ import annotations

from typing import Any

from kvcal.export import naming
from kvcal.export.bundle import Bundle
from kvcal.plan import Plan
from kvcal.scales import Scales


def to_bundle(scales: Scales | None, plan: Plan, base_quantization: dict[str, Any] | None) -> Bundle:
    """The scales where the engine has names for some, and nothing else beside the weights."""
    if plan.granularity is None or scales is None:
        return Bundle(tensors={}, quantization=None)
    return Bundle(tensors=naming.tensors(scales, plan), quantization=None)
