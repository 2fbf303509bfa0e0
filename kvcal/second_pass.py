"""Second passes over calibration text, for the schemes of others that need more than streaming statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kvcal import capture, codebooks, rotary
from kvcal.arch import LayerSpec
from kvcal.data import TokenSet
from kvcal.scheme import CacheSide

# llm-compressor's averaging_constant (observers/min_max.py).
_AVERAGING = 0.01

Range = tuple[torch.Tensor, torch.Tensor]


@torch.inference_mode()
def moving_extremes(
    model: Any,
    layers: Mapping[int, LayerSpec],
    tokens: TokenSet,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> dict[int, dict[CacheSide, torch.Tensor]]:
    """The ``(1,)`` amax per layer and side that llm-compressor's default observer arrives at.

    A moving average of each sample's minimum and maximum, in the order of the samples, whose first sample
    counts in full: ``low <- low + 0.01 (min - low)``.
    """
    ends: dict[tuple[int, CacheSide], torch.Tensor] = {}

    def see(call: capture.AttentionCall) -> None:
        sides: tuple[tuple[CacheSide, torch.Tensor], ...] = (("k", call.key), ("v", call.value))
        for side, x in sides:
            found = torch.stack(x.float().aminmax())
            key = (call.layer, side)
            ends[key] = torch.lerp(ends[key], found, _AVERAGING) if key in ends else found

    with capture.intercept(model, see):
        for batch in tokens.singly():
            model.base_model(**batch.inputs(model.device, dtype=model.dtype), use_cache=False)
            on_tokens(batch.tokens)
    return {
        index: {side: ends[index, side].abs().amax().reshape(1).cpu() for side in ("k", "v")}
        for index in layers
    }


def fisher_levels(
    model: Any,
    layers: Mapping[int, LayerSpec],
    ranges: Mapping[int, Range],
    tokens: TokenSet,
    *,
    bits: Mapping[CacheSide, int],
    skip: int,
    before_rope: bool,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> dict[int, dict[CacheSide, torch.Tensor]]:
    """KVQuant's non-uniform levels in [-1, 1], one codebook per layer for K and one for V.

    Values are brought into [-1, 1] by the range of their vector: of K the channel's, of V the token's over
    all heads. Each counts with its Fisher information, the square of the loss's gradient, times the square
    of half its range, as an error scales with that.

    Args:
        model: its weights stay as they are; gradients flow through activations alone.
        layers: geometry by index.
        ranges: ends of K's channels per layer, each ``(kv_heads, 1, head_dim)``.
        tokens: a few samples; each takes one forward and one backward pass, and memory for its activations.
        bits: levels of a side are ``2 ** bits[side]``.
        skip: first tokens of a sample that are not counted.
        before_rope: K is taken before RoPE.
        on_tokens: hears of each finished sample.
    """
    counts = {
        (index, side): torch.zeros(codebooks.BINS, dtype=torch.float64) for index in layers for side in "kv"
    }

    def see(call: capture.AttentionCall) -> None:
        layer = layers[call.layer]
        key = call.key.detach()
        if before_rope:
            key = rotary.apply(key, layer, call.rotary, inverse=True)
        low, high = (end.to(key.device) for end in ranges[call.layer])

        def tally_key(gradient: torch.Tensor) -> None:
            if before_rope:  # a rotation, so gradients turn back as keys do
                gradient = rotary.apply(gradient, layer, call.rotary, inverse=True)
            _tally(counts[call.layer, "k"], key, gradient, low, high, skip)

        value = call.value.detach()
        ends = value.amin((1, 3), keepdim=True), value.amax((1, 3), keepdim=True)
        call.key.register_hook(tally_key)  # type: ignore[no-untyped-call]

        def tally_value(gradient: torch.Tensor) -> None:
            _tally(counts[call.layer, "v"], value, gradient, *ends, skip)

        call.value.register_hook(tally_value)  # type: ignore[no-untyped-call]

    with _differentiable(model), capture.intercept(model, see, rotary=before_rope):
        for batch in tokens.singly():
            inputs = batch.inputs(model.device, dtype=model.dtype)
            logits = model(**inputs, use_cache=False).logits[0, :-1].float()
            scored, ids = (x[0].to(logits.device) for x in (batch.scored, batch.input_ids))
            loss = torch.nn.functional.cross_entropy(logits[scored[:-1]], ids[1:][scored[:-1]])
            loss.backward()  # type: ignore[no-untyped-call]
            on_tokens(batch.tokens)
    return {
        index: {side: codebooks.nuq(counts[index, side], bits[side]) for side in ("k", "v")}
        for index in layers
    }


def _tally(
    counts: torch.Tensor,
    x: torch.Tensor,
    gradient: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    skip: int,
) -> None:
    half = (high - low) / 2
    scaled = (x - (high + low) / 2) / torch.where(half == 0, 1.0, half)
    weight = gradient.float().square() * half.square()
    counts += codebooks.count(scaled[:, :, skip:].clamp(-1, 1), weight[:, :, skip:]).cpu()


@contextmanager
def _differentiable(model: Any) -> Iterator[None]:
    """Gradients from the embeddings on, and none for weights."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    hook = model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: out.requires_grad_())
    try:
        with torch.enable_grad():
            yield
    finally:
        hook.remove()
        for parameter in wanted:
            parameter.requires_grad_(True)
