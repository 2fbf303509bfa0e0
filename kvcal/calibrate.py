"""Runs calibration text through the model and gathers statistics.

For the distribution of V each token is weighted by the attention that it gets, squared. That takes
probabilities, which no fast attention gives out, so they are computed again for at most 32 queries of a
sample: the middles of as many equal parts of it, each standing for all queries of its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcal import capture, distributed, formats, forward, models, rotary
from kvcal.arch import LayerSpec
from kvcal.data import Batch, TokenSet
from kvcal.errors import ModelError, StatisticsError
from kvcal.kernels import reference
from kvcal.layerwise import Step
from kvcal.plan import Plan
from kvcal.recipe import SIDES, Side
from kvcal.resume import Checkpoint
from kvcal.statistics import Collect, Collector, Statistics

_COMPARED = 64  # tokens of the first sample that attention is computed for a second time
_EMULATED = 0.05  # relative error that 16-bit arithmetic stays far below
_QUERIES = 32  # per sample, of those whose attention is computed again


@dataclass(frozen=True)
class View:
    """How statistics look at a model.

    ``before_rope``: K before RoPE, and Q as such keys meet it (:func:`kvcal.rotary.as_seen_by_keys`).
    ``skip``: tokens at the start of each sample that are left out, as they are not going to be quantized.
    """

    before_rope: bool = False
    skip: int = 0


def calibrate(
    model: Any,
    plan: Plan,
    tokens: TokenSet,
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
    collect: Collect = "summary",
    state: Checkpoint | None = None,
) -> Statistics:
    """One forward pass over every sample, without the output head, shared with the other ranks of the run.

    ``on_tokens`` hears of each finished batch. ``state`` is gone on from, and written now and then.

    Raises:
        StatisticsError: a layer was not observed, or holds NaN or infinity.
        ModelError: a layer's tensors have other shapes than ``config.json`` announced.
    """
    batch_size = plan.recipe.calibration.batch_size
    found = views(
        model, plan.layers, batch_size, tokens, (View(),), on_tokens=on_tokens, collect=collect, state=state
    )
    return found[View()]


@torch.inference_mode()
def views(
    model: Any,
    layers: Sequence[LayerSpec],
    batch_size: int,
    tokens: TokenSet,
    wanted: Collection[View],
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
    collect: Collect = "summary",
    state: Checkpoint | None = None,
) -> dict[View, Statistics]:
    """Statistics in several views from one pass; otherwise as :func:`calibrate`.

    ``state`` goes with a single view.
    """
    specs = {layer.index: layer for layer in layers}
    shapes = _shapes(layers)
    device = models.device_of(model)
    # Counts are those of FP8 at scale 1.0, whatever the format: that is where range matters.
    collectors = {view: Collector(shapes, collect, formats.FP8_E4M3, device) for view in wanted}
    if any(view.before_rope for view in wanted):  # queries meet angles of all positions before theirs
        tokens = dataclasses.replace(tokens, chunk=None)
    spans: list[slice] = []
    start = 0
    kept: dict[int, torch.Tensor | None] = {}
    kept_by_encoder: torch.Tensor | None = None

    def observe(call: capture.AttentionCall) -> None:
        newest = _newest(call)
        for side, x in _seen(newest, specs.get(call.layer), View()).items():
            _require_shape(shapes, call.layer, side, x)
        weights = []
        if collect == "distribution":
            weights = [attention_weights(call, sample, span, start) for sample, span in enumerate(spans)]
        for view, collector in collectors.items():
            for side, x in _seen(newest, specs[call.layer], view).items():
                keep = kept_by_encoder if call.cross and side != "q" else kept[view.skip]
                collector.see(call.layer, side, x, keep)
            for sample, (span, weight) in enumerate(zip(spans, weights, strict=False)):
                columns, first = _cached(call, span, start)
                counted = slice(max(0, view.skip - first), None)
                value = call.value[sample, :, columns]
                collector.see_weighted(call.layer, value[:, counted], weight[:, counted])

    first, done, ended = True, 0, 0  # parts
    if state is not None:
        (kept_view,) = collectors.values()
        done = state.restore(kept_view)

    compared: set[bool] = set()  # batches without images, and with
    running: Batch | None = None

    def compare(call: capture.AttentionCall, output: torch.Tensor) -> None:
        assert running is not None
        if start == 0 and (running.images is not None) not in compared:
            require_emulated(call, output, running)

    rotary_too = any(view.before_rope for view in wanted)
    with capture.intercept(model, observe, rotary=rotary_too, after=compare):
        batches, share = distributed.dealt(tokens, batch_size)
        for part in forward.parts(model, batches):
            ended += 1
            if ended <= done:
                on_tokens(share * sum(batch.tokens for batch in part))
                continue
            for step in forward.steps(model, part):
                spans, start = _spans(step.batch), step.queries.start
                running, kept_by_encoder = step.batch, _kept_by_encoder(step.batch, device)
                kept = {view.skip: _kept(step, spans, view.skip, device) for view in wanted}
                step.run()
                for collector in collectors.values():
                    collector.end_batch()
                on_tokens(share * step.tokens)
            if first and part:  # a broken model should not cost a whole run
                for collector in collectors.values():
                    _require_sound(collector.statistics(), model)
            first = False
            compared |= {batch.images is not None for batch in part}
            if state is not None:
                state.offer(ended, kept_view)
    if state is not None:
        state.offer(ended, kept_view, finished=True)
    found = {view: distributed.merged(collector.statistics()) for view, collector in collectors.items()}
    for statistics in found.values():
        _require_sound(statistics, model)
    return found


def attention_weights(call: capture.AttentionCall, sample: int, span: slice, start: int = 0) -> torch.Tensor:
    """Σ p² of each token over the queries that see it and the query heads of its KV head.

    ``p`` is the softmax of what the layer attends with. Of more than 32 queries the sum is estimated from 32,
    so that its expectation is that over all. Of a sample that is run in chunks, what the queries of all
    chunks give to a token adds up to the same.

    Args:
        call: what the layer attends with.
        sample: row of the batch.
        span: columns of the batch that are the sample's tokens, padding left out.
        start: column of the first query.

    Returns:
        ``(kv_heads, tokens)`` float32, of those tokens of the sample that are in the cache or among the
        queries.
    """
    columns, first = _cached(call, span, start)
    k = call.key[sample, :, columns].float()
    kv_heads, keys, head_dim = k.shape
    tokens = span.stop - span.start
    queries = min(tokens, _QUERIES)
    # Positions in the sample ascend, so those of this chunk follow one another.
    middles = [((2 * i + 1) * tokens) // (2 * queries) for i in range(queries)]
    here = [i for i, x in enumerate(middles) if 0 <= x + span.start - start < call.query.shape[2]]
    if not here or not keys:
        return k.new_zeros(kv_heads, keys)
    index = torch.arange(here[0], here[-1] + 1, device=k.device)
    chosen = ((2 * index + 1) * tokens) // (2 * queries)
    q = call.query[sample, :, chosen + (span.start - start)].float() * call.scaling
    logits = q.reshape(kv_heads, -1, head_dim) @ k.mT
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    position = torch.arange(first, first + keys, device=k.device)
    hidden = position > chosen.unsqueeze(1)
    if call.window is not None:
        hidden |= position <= chosen.unsqueeze(1) - call.window
    # Added, not filled in: a mask that broadcasts is many times slower to fill on a CPU.
    bias = logits.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    each = logits.view(kv_heads, -1, len(here), keys) + bias
    if call.sinks is not None:
        sink = call.sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, len(here), 1)
        each = torch.cat([each, sink], -1)
    found: torch.Tensor = each.softmax(-1)[..., :keys].square_().sum((1, 2)) * (tokens / queries)
    return found


def _cached(call: capture.AttentionCall, span: slice, start: int) -> tuple[slice, int]:
    """Where a sample's tokens are among the keys, and the position of the first of them.

    A sliding window's cache has forgotten the oldest.
    """
    end = start + call.query.shape[2]
    oldest = end - call.key.shape[2]
    first = max(span.start, oldest)
    return slice(first - oldest, max(first, min(span.stop, end)) - oldest), first - span.start


def _newest(call: capture.AttentionCall) -> capture.AttentionCall:
    """The call without keys and values that earlier chunks have left."""
    old = call.key.shape[2] - call.query.shape[2]
    if call.cross or not old:
        return call
    return dataclasses.replace(call, key=call.key[:, :, old:], value=call.value[:, :, old:])


def require_emulated(call: capture.AttentionCall, output: torch.Tensor, batch: Batch) -> None:
    """Refuse a layer that does more at attention than kvcal does when it judges it.

    Biases of position that it does not hand over, chunks, a prefix that is seen as a whole, attention that is
    no softmax: whatever shows in the first tokens of a sample, or from its first image on. K and V of
    cross-attention belong together.

    Raises:
        ModelError: naming the layer.
    """
    span, start = _spans(batch)[0], 0
    if batch.images is not None:
        start = int(batch.images.placeholders.int().argmax())
    few = slice(span.start, min(span.stop, span.start + start + _COMPARED))
    keys = _spans(batch.encoder)[0] if batch.encoder is not None and call.cross else few
    q, k, v = call.attended()
    q, given = (x[:1, :, few].float()[:, :, start:] for x in (q, output))
    k, v = (x[:1, :, keys].float() for x in (k, v))
    bias = None if call.bias is None else call.bias[:1, :, few, keys][:, :, start:]
    expected = reference.attention(q, k, v, **dataclasses.replace(call, bias=bias).geometry)
    error = float((given - expected).norm() / expected.norm())
    kind = "full" if call.cross else "causal"
    if error > _EMULATED:  # NaN and infinity are for those who know where they came from
        raise ModelError(
            f"layer {call.layer}: its attention differs by {error:.2g} from {kind} softmax attention over its"
            " Q, K and V; what else it does is not emulated, so nothing that kvcal says of it would hold"
        )


def _spans(batch: Batch) -> list[slice]:
    """Where each sample's tokens are. Found on the CPU, where the batch is: a GPU need not wait."""
    starts, lengths = batch.attention_mask.argmax(-1).tolist(), batch.attention_mask.sum(-1).tolist()
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _seen(call: capture.AttentionCall, layer: LayerSpec | None, view: View) -> dict[Side, torch.Tensor]:
    if layer is None or not view.before_rope:
        return {"k": call.key, "v": call.value, "q": call.query}
    return {
        "k": rotary.apply(call.key, layer, call.rotary, inverse=True),
        "v": call.value,
        "q": rotary.as_seen_by_keys(call.query, layer, call.rotary, call.window),
    }


def _kept(step: Step, spans: list[slice], skip: int, device: torch.device) -> torch.Tensor | None:
    """``(batch, queries)`` bool of what is counted; None where that is everything."""
    batch = step.batch
    if not skip:
        return None if batch.keep is None else batch.keep[:, step.queries].to(device)
    keep = batch.attention_mask.bool().clone()
    for row, span in enumerate(spans):
        keep[row, span.start : span.start + skip] = False
    return keep[:, step.queries].to(device)


def _kept_by_encoder(batch: Batch, device: torch.device) -> torch.Tensor | None:
    """``(batch, encoder tokens)`` bool of what cross-attention counts; None where that is everything."""
    if batch.encoder is None or batch.encoder.keep is None:
        return None
    return batch.encoder.keep.to(device)


def _shapes(layers: Sequence[LayerSpec]) -> dict[tuple[int, Side], tuple[int, int]]:
    """``(heads, head_dim)`` of every layer and side."""
    return {
        (layer.index, side): (layer.heads_of(side), layer.size_of(side)) for layer in layers for side in SIDES
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
