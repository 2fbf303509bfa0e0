"""Triton twins of ``observe_reference.observe`` and ``histogram.count``: each reads its tensor once.

In torch, sums and counts take ten passes over Q, K and V, and bins another eight; on a GPU that is a third of
the forward pass itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcal import histogram
from kvcal.formats import KVFormat
from kvcal.kernels.observe_reference import Seen

_TOKENS_OF_ROW = 256  # enough programs for every processor, few rows to merge
_TOKENS_AT_ONCE = 16
_MOST_ROWS = 32  # per sample: long samples get longer rows


def observe(x: torch.Tensor, keep: torch.Tensor | None, fmt: KVFormat | None) -> Seen:
    """As :func:`kvcal.kernels.observe_reference.observe`; rows are runs of tokens of a sample."""
    batch, heads, tokens, head_dim = x.shape
    span = max(_TOKENS_OF_ROW, triton.cdiv(tokens, _MOST_ROWS * _TOKENS_AT_ONCE) * _TOKENS_AT_ONCE)
    parts = triton.cdiv(tokens, span)
    rows = batch * parts
    floats = torch.empty(2 if fmt is None else 4, rows, heads, head_dim, device=x.device)
    counts = torch.empty(0 if fmt is None else 2, rows, heads, dtype=torch.int64, device=x.device)
    if rows:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _observe[(rows, heads)](
                x,
                keep if keep is not None else x,
                floats,
                counts,
                *x.stride(),
                *(keep.stride() if keep is not None else (0, 0)),
                tokens,
                head_dim,
                span,
                parts,
                floats.stride(0),
                counts.stride(0) if fmt is not None else 0,
                0.0 if fmt is None else fmt.max,
                0.0 if fmt is None else fmt.rounds_to_zero,
                MASKED=keep is not None,
                SUMS=fmt is not None,
                TOKENS=_TOKENS_AT_ONCE,
                CHANNELS=triton.next_power_of_2(head_dim),
            )
    return Seen(*floats, *counts)


def count(x: torch.Tensor, keep: torch.Tensor | None, counts: torch.Tensor) -> None:
    """Add values to a histogram in place, as :func:`kvcal.histogram.count` does.

    Args:
        x: ``(batch, heads, tokens, head_dim)``, 16-bit floats or wider, any strides.
        keep: ``(batch, tokens)`` bool, False on padding; None where nothing is padded.
        counts: ``(heads, head_dim, BINS)``, or ``(heads, 1, BINS)`` to pool the channels of a head;
            contiguous, int32 or int64.
    """
    batch, heads, tokens, head_dim = x.shape
    parts = triton.cdiv(tokens, _TOKENS_OF_ROW)
    if batch * parts:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _count[(batch * parts, heads)](
                x,
                keep if keep is not None else x,
                counts,
                *x.stride(),
                *(keep.stride() if keep is not None else (0, 0)),
                tokens,
                head_dim,
                _TOKENS_OF_ROW,
                parts,
                counts.stride(0),
                counts.stride(1) if counts.shape[1] > 1 else 0,
                MASKED=keep is not None,
                TOKENS=_TOKENS_AT_ONCE,
                CHANNELS=triton.next_power_of_2(head_dim),
                SHIFT=histogram.SHIFT,
                FIRST=histogram.FIRST,
                ZERO=histogram.ZERO,
            )


@triton.jit  # type: ignore[untyped-decorator]
def _lower(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def _higher(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def _observe(
    x_ptr: tl.tensor,
    keep_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    x_batch: int,
    x_head: int,
    x_token: int,
    x_channel: int,
    keep_batch: int,
    keep_token: int,
    tokens: int,
    head_dim: int,
    span: int,
    parts: int,
    floats_kind: int,
    counts_kind: int,
    largest: float,
    rounds_to_zero: float,
    MASKED: tl.constexpr,
    SUMS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    sample, part = row // parts, row % parts
    channel = tl.arange(0, CHANNELS)
    offset = tl.arange(0, TOKENS)
    x_ptr += sample.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    keep_ptr += sample.to(tl.int64) * keep_batch
    low = tl.full((TOKENS, CHANNELS), float("inf"), tl.float32)
    high = tl.full((TOKENS, CHANNELS), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    squares = tl.zeros((TOKENS, CHANNELS), tl.float32)
    saturated = tl.zeros((TOKENS, CHANNELS), tl.int32)
    zeroed = tl.zeros((TOKENS, CHANNELS), tl.int32)
    end = tl.minimum((part + 1) * span, tokens)
    for start in range(part * span, end, TOKENS):
        token = start + offset
        here = token < end
        if MASKED:
            here = here & (tl.load(keep_ptr + token * keep_token, mask=here, other=0) != 0)
        inside = here[:, None] & (channel < head_dim)[None, :]
        where = token.to(tl.int64)[:, None] * x_token + channel[None, :] * x_channel
        x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
        low = _lower(low, tl.where(inside, x, float("inf")))
        high = _higher(high, tl.where(inside, x, float("-inf")))
        if SUMS:
            magnitude = tl.abs(x)  # 0 outside, which counts nowhere
            total += x
            squares += x * x
            saturated += (magnitude > largest).to(tl.int32)
            zeroed += ((magnitude > 0) & (magnitude <= rounds_to_zero)).to(tl.int32)
    heads = tl.num_programs(1)
    floats_ptr += (row.to(tl.int64) * heads + head) * head_dim + channel
    stored = channel < head_dim
    tl.store(floats_ptr, tl.reduce(low, 0, _lower), mask=stored)
    tl.store(floats_ptr + floats_kind, tl.reduce(high, 0, _higher), mask=stored)
    if SUMS:
        tl.store(floats_ptr + 2 * floats_kind, tl.sum(total, 0), mask=stored)
        tl.store(floats_ptr + 3 * floats_kind, tl.sum(squares, 0), mask=stored)
        counts_ptr += row.to(tl.int64) * heads + head
        tl.store(counts_ptr, tl.sum(tl.sum(saturated, 0), 0).to(tl.int64))
        tl.store(counts_ptr + counts_kind, tl.sum(tl.sum(zeroed, 0), 0).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _count(
    x_ptr: tl.tensor,
    keep_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    x_batch: int,
    x_head: int,
    x_token: int,
    x_channel: int,
    keep_batch: int,
    keep_token: int,
    tokens: int,
    head_dim: int,
    span: int,
    parts: int,
    counts_head: int,
    counts_channel: int,
    MASKED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
    ZERO: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    sample, part = row // parts, row % parts
    channel = tl.arange(0, CHANNELS)
    offset = tl.arange(0, TOKENS)
    x_ptr += sample.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    keep_ptr += sample.to(tl.int64) * keep_batch
    counts_ptr += head.to(tl.int64) * counts_head + channel.to(tl.int64)[None, :] * counts_channel
    end = tl.minimum((part + 1) * span, tokens)
    for start in range(part * span, end, TOKENS):
        token = start + offset
        here = token < end
        if MASKED:
            here = here & (tl.load(keep_ptr + token * keep_token, mask=here, other=0) != 0)
        inside = here[:, None] & (channel < head_dim)[None, :]
        where = token.to(tl.int64)[:, None] * x_token + channel[None, :] * x_channel
        bits = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        # The magnitude's leading bits grow with it: from 0 around zero to ZERO in overflow.
        index = ((bits & 0x7FFFFFFF) >> SHIFT) - (FIRST - 1)
        index = tl.minimum(tl.maximum(index, 0), ZERO)
        index = tl.where(bits < 0, -index, index) + ZERO
        tl.atomic_add(counts_ptr + index, 1, mask=inside, sem="relaxed")
