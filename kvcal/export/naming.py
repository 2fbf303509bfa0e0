"""Scales under the names that an engine's row gives them."""

from __future__ import annotations

import torch

from kvcal.plan import Plan
from kvcal.recipe import SIDES, Side
from kvcal.scales import Scales


def tensors(scales: Scales, plan: Plan) -> dict[str, torch.Tensor]:
    """Name in the file -> float32 scale."""
    return {
        name: scales.layers[index][side].float().contiguous()
        for name, (index, side) in tensor_names(plan).items()
    }


def tensor_names(plan: Plan) -> dict[str, tuple[int, Side]]:
    """Name of each scale in the file -> layer and side; empty where none are written."""
    if plan.granularity is None:
        return {}
    sides = [side for side in SIDES if side in plan.engine.scale_suffixes]
    return {
        plan.engine.scale_name(layer, side): (layer.index, side) for layer in plan.layers for side in sides
    }
