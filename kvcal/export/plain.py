"""Engines that take no scale of any kind: the calibration is in the weights, and nothing shows it.

A tensor or a config section about the cache would be ignored at best: LMDeploy fails with KeyError on a
``k_scale``, and TensorRT-LLM refuses a checkpoint that quantizes its cache alone.
"""

from __future__ import annotations

from typing import Any

from kvcal.export.bundle import Bundle
from kvcal.plan import Plan
from kvcal.scales import Scales


def to_bundle(scales: Scales | None, plan: Plan, base_quantization: dict[str, Any] | None) -> Bundle:
    """Nothing beside the weights."""
    return Bundle(tensors={}, quantization=None)
