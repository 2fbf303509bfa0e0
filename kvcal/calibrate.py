"""Runs calibration text through the model and gathers statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcal import capture, models
from kvcal.arch import LayerSpec
from kvcal.data import TokenSet
from kvcal.errors import ModelError, StatisticsError
from kvcal.formats import KVFormat
from kvcal.plan import Plan
from kvcal.recipe import SIDES, Side
from kvcal.statistics import SideStatistics, Statistics


@torch.inference_mode()
def calibrate(
    model: Any,
    plan: Plan,
    tokens: TokenSet,
    *,
    on_tokens: Callable[[int], None] = lambda _: None,
    extremes_only: bool = False,
) -> Statistics:
    """One forward pass over every sample, without the output head.

    ``on_tokens`` hears of each finished batch. ``extremes_only`` leaves out sums and counts.

    Raises:
        StatisticsError: a layer was not observed, or holds NaN or infinity.
        ModelError: a layer's tensors have other shapes than ``config.json`` announced.
    """
    layers = {layer.index: layer for layer in plan.layers}
    fmt: KVFormat | None = None if extremes_only else plan.format
    statistics = Statistics({index: _empty(layer, model.device) for index, layer in layers.items()})
    keep: torch.Tensor | None = None

    def observe(call: capture.AttentionCall) -> None:
        tensors: dict[Side, torch.Tensor] = {"k": call.key, "v": call.value, "q": call.query}
        for side in SIDES:
            _require_shape(layers, call.layer, side, tensors[side])
            statistics.layers[call.layer][side].update(tensors[side], keep, fmt)

    first = True
    with capture.intercept(model, observe):
        for batch in tokens.batches(plan.recipe.calibration.batch_size):
            keep = None if batch.keep is None else batch.keep.to(model.device)
            model.base_model(**batch.inputs(model.device), use_cache=False)
            if first:  # a broken model should not cost a whole run
                _require_sound(statistics, model)
                first = False
            on_tokens(batch.tokens)
    _require_sound(statistics, model)
    return statistics


def _empty(layer: LayerSpec, device: torch.device) -> dict[Side, SideStatistics]:
    heads = {"k": layer.kv_heads, "v": layer.kv_heads, "q": layer.heads}
    return {side: SideStatistics.empty(heads[side], layer.head_dim, device) for side in SIDES}


def _require_shape(layers: dict[int, LayerSpec], index: int, side: Side, x: torch.Tensor) -> None:
    layer = layers.get(index)
    if layer is None:
        raise ModelError(f"the model runs an attention layer {index} that config.json does not announce")
    heads = layer.heads if side == "q" else layer.kv_heads
    if (x.shape[1], x.shape[3]) != (heads, layer.head_dim):
        raise ModelError(
            f"layer {index}: {side.upper()} has {x.shape[1]} heads of size {x.shape[3]},"
            f" config.json announces {heads} of {layer.head_dim}"
        )


def _require_sound(statistics: Statistics, model: Any) -> None:
    try:
        statistics.require_sound()
    except StatisticsError as error:
        weight = models.non_finite_weight(model)
        if weight is None:
            raise
        raise StatisticsError(f"{error}; found: {weight} is not finite") from None
