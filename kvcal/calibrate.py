"""Runs calibration text through the model and gathers statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcal import capture, formats, models
from kvcal.data import TokenSet
from kvcal.errors import ModelError, StatisticsError
from kvcal.plan import Plan
from kvcal.recipe import SIDES, Side
from kvcal.statistics import Collector, Statistics


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
    shapes = _shapes(plan)
    # Counts are those of FP8 at scale 1.0, whatever the format: that is where range matters.
    collector = Collector(shapes, None if extremes_only else formats.FP8_E4M3, model.device)
    keep: torch.Tensor | None = None

    def observe(call: capture.AttentionCall) -> None:
        tensors: dict[Side, torch.Tensor] = {"k": call.key, "v": call.value, "q": call.query}
        for side in SIDES:
            _require_shape(shapes, call.layer, side, tensors[side])
            collector.see(call.layer, side, tensors[side], keep)

    first = True
    with capture.intercept(model, observe):
        for batch in tokens.batches(plan.recipe.calibration.batch_size):
            keep = None if batch.keep is None else batch.keep.to(model.device)
            model.base_model(**batch.inputs(model.device), use_cache=False)
            collector.end_batch()
            if first:  # a broken model should not cost a whole run
                _require_sound(collector.statistics(), model)
                first = False
            on_tokens(batch.tokens)
    statistics = collector.statistics()
    _require_sound(statistics, model)
    return statistics


def _shapes(plan: Plan) -> dict[tuple[int, Side], tuple[int, int]]:
    """``(heads, head_dim)`` of every layer and side."""
    return {
        (layer.index, side): (layer.heads_of(side), layer.head_dim) for layer in plan.layers for side in SIDES
    }


def _require_shape(
    shapes: dict[tuple[int, Side], tuple[int, int]], index: int, side: Side, x: torch.Tensor
) -> None:
    announced = shapes.get((index, side))
    if announced is None:
        raise ModelError(f"the model runs an attention layer {index} that config.json does not announce")
    if (x.shape[1], x.shape[3]) != announced:
        raise ModelError(
            f"layer {index}: {side.upper()} has {x.shape[1]} heads of size {x.shape[3]},"
            f" config.json announces {announced[0]} of {announced[1]}"
        )


def _require_sound(statistics: Statistics, model: Any) -> None:
    try:
        statistics.require_sound()
    except StatisticsError as error:
        weight = models.non_finite_weight(model)
        if weight is None:
            raise
        raise StatisticsError(f"{error}; found: {weight} is not finite") from None
