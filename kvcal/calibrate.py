"""Runs calibration text through the model and gathers statistics.

For the distribution of V each token is weighted by the attention that it gets, squared. That takes
probabilities, which no fast attention gives out, so they are computed again for at most 128 queries of a
sample: the middles of as many equal parts of it, each standing for all queries of its part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcal import capture, formats, models
from kvcal.data import Batch, TokenSet
from kvcal.errors import ModelError, StatisticsError
from kvcal.plan import Plan
from kvcal.recipe import SIDES, Side
from kvcal.statistics import Collect, Collector, Statistics

_QUERIES = 128  # per sample, of those whose attention is computed again


@torch.inference_mode()
def calibrate(
    model: Any,
    plan: Plan,
    tokens: TokenSet,
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
    collect: Collect = "summary",
) -> Statistics:
    """One forward pass over every sample, without the output head.

    ``on_tokens`` hears of each finished batch.

    Raises:
        StatisticsError: a layer was not observed, or holds NaN or infinity.
        ModelError: a layer's tensors have other shapes than ``config.json`` announced.
    """
    shapes = _shapes(plan)
    # Counts are those of FP8 at scale 1.0, whatever the format: that is where range matters.
    collector = Collector(shapes, collect, formats.FP8_E4M3, model.device)
    keep: torch.Tensor | None = None
    spans: list[slice] = []

    def observe(call: capture.AttentionCall) -> None:
        tensors: dict[Side, torch.Tensor] = {"k": call.key, "v": call.value, "q": call.query}
        for side in SIDES:
            _require_shape(shapes, call.layer, side, tensors[side])
            collector.see(call.layer, side, tensors[side], keep)
        if collect == "distribution":
            for sample, span in enumerate(spans):
                weight = attention_weights(call, sample, span)
                collector.see_weighted(call.layer, call.value[sample, :, span], weight)

    first = True
    with capture.intercept(model, observe):
        for batch in tokens.batches(plan.recipe.calibration.batch_size):
            keep = None if batch.keep is None else batch.keep.to(model.device)
            spans = _spans(batch)
            model.base_model(**batch.inputs(model.device), use_cache=False)
            collector.end_batch()
            if first:  # a broken model should not cost a whole run
                _require_sound(collector.statistics(), model)
                first = False
            on_tokens(batch.tokens)
    statistics = collector.statistics()
    _require_sound(statistics, model)
    return statistics


def attention_weights(call: capture.AttentionCall, sample: int, span: slice) -> torch.Tensor:
    """Σ p² of each token over the queries that see it and the query heads of its KV head.

    ``p`` is the softmax of what the layer attends with. Of more than 128 queries the sum is estimated from
    128, so that its expectation is that over all.

    Args:
        call: what the layer attends with.
        sample: row of the batch.
        span: where the sample's tokens are, padding left out.

    Returns:
        ``(kv_heads, tokens)`` float32.
    """
    k = call.key[sample, :, span].float()
    kv_heads, tokens, head_dim = k.shape
    queries = min(tokens, _QUERIES)
    position = torch.arange(tokens, device=k.device)
    chosen = ((2 * position[:queries] + 1) * tokens) // (2 * queries)
    q = call.query[sample, :, span][:, chosen].float() * call.scaling
    logits = q.reshape(kv_heads, -1, head_dim) @ k.mT
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    hidden = position > chosen.unsqueeze(1)
    if call.window is not None:
        hidden |= position <= chosen.unsqueeze(1) - call.window
    # Added, not filled in: a mask that broadcasts is many times slower to fill on a CPU.
    bias = logits.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    each = logits.view(kv_heads, -1, queries, tokens) + bias
    return each.softmax(-1).square_().sum((1, 2)) * (tokens / queries)


def _spans(batch: Batch) -> list[slice]:
    """Where each sample's tokens are. Found on the CPU, where the batch is: a GPU need not wait."""
    starts, lengths = batch.attention_mask.argmax(-1).tolist(), batch.attention_mask.sum(-1).tolist()
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]


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
