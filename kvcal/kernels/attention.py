"""Triton twin of ``reference.quantized_attention``: causal attention over contiguous FP8 codes.

It validates scales, so it is right first. Two passes over the keys of a block of queries: the first
finds each row's maximum, the second accumulates. One online pass would round probabilities relative
to a running maximum and give other codes than the definition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcal.formats import KVFormat
from kvcal.kernels.quantize import decode_e4m3, encode_e4m3, quantize, require_e4m3, scale_per_head

# FlashAttention-3 (hopper/softmax.h, Max_offset = 8). A power of two, so lifting is exact.
PROBABILITY_LIFT = tl.constexpr(256.0)

# Three TF32 dots: E4M3 codes are exact in TF32, so only the 16-bit or float32 side is split. On an H200
# against float64 it errs by half of what plain float32 ("ieee") does, and runs 4 to 33 times faster.
PRECISION = tl.constexpr("tf32x3")

_BLOCK_Q = 64
_BLOCK_K = 32


def quantized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    fmt: KVFormat,
    scaling: float,
    q_scale: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    quantize_probabilities: bool = False,
) -> torch.Tensor:
    """Causal attention over a quantized cache, accumulated in float32. Any strides.

    Args:
        q: ``(batch, heads, queries, head_dim)``, 16-bit or float32; rounded to ``fmt`` first when
            ``q_scale`` is given. Query ``i`` stands at position ``keys - queries + i``.
        k: codes of K, ``(batch, kv_heads, keys, head_dim)``.
        v: codes of V, likewise.
        k_scale: scale of K, ``(1,)`` or ``(kv_heads, 1, 1)``.
        v_scale: scale of V, likewise.
        q_scale: scale of Q, ``(1,)`` or ``(heads, 1, 1)``.
        fmt: the storage format.
        scaling: softmax scale, usually ``head_dim ** -0.5``.
        window: visible keys per query, its own included.
        softcap: bound of the logits.
        sinks: logits of no key, ``(heads,)``.
        quantize_probabilities: round ``256 * exp(s - max)`` to ``fmt`` before it meets V, as
            FlashAttention-3 does; the denominator keeps full precision.

    Returns:
        ``(batch, heads, queries, head_dim)`` in float32.
    """
    _require_shapes(q, k, v, fmt)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a query sees at least its own key")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; give a positive bound or None")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks have shape {tuple(sinks.shape)}; each of {q.shape[1]} query heads has one")
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    group = heads // kv_heads

    # Scales leave the dots and meet in one factor per head: codes multiply exactly, and each
    # logit is rounded once less.
    logit_scale = scale_per_head(k_scale, kv_heads, "k_scale").double().repeat_interleave(group) * scaling
    if q_scale is not None:
        logit_scale *= scale_per_head(q_scale, heads, "q_scale")
        q = quantize(q, q_scale, fmt).view(torch.uint8)
    logit_scale = logit_scale.float()
    value_scale = scale_per_head(v_scale, kv_heads, "v_scale")
    weights = logit_scale if sinks is None else sinks.float().contiguous()  # not read where there are none
    k, v = k.view(torch.uint8), v.view(torch.uint8)

    out = torch.empty((batch, heads, queries, head_dim), dtype=torch.float32, device=q.device)
    grid = (batch * heads, triton.cdiv(queries, _BLOCK_Q))
    if out.numel():
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            _attention[grid](
                q,
                k,
                v,
                out,
                logit_scale,
                value_scale,
                weights,
                *q.stride(),
                *k.stride(),
                *v.stride(),
                heads,
                group,
                queries,
                keys,
                keys if window is None else min(window, keys),
                0.0 if softcap is None else softcap,
                HEAD_DIM=head_dim,
                BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
                BLOCK_Q=_BLOCK_Q,
                BLOCK_K=_BLOCK_K,
                QUANTIZED_Q=q_scale is not None,
                SOFTCAPPED=softcap is not None,
                SINKS=sinks is not None,
                QUANTIZED_P=quantize_probabilities,
            )
    return out


def _require_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fmt: KVFormat) -> None:
    require_e4m3(fmt)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"not (batch, heads, tokens, head_dim): {shapes}")
    if k.shape != v.shape:
        raise ValueError(f"K and V differ in shape: {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"Q and K differ in batch or head_dim: {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"heads are no multiple of KV heads: {shapes}")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"more queries than keys: {shapes}")
    if not q.is_floating_point() or q.dtype.itemsize == 1:
        raise ValueError(f"q is {q.dtype}; attention takes 16-bit floats and wider")
    storage = getattr(torch, fmt.storage_dtype)
    if k.dtype != storage or v.dtype != storage:
        raise ValueError(f"k is {k.dtype} and v is {v.dtype}; both must be codes, {storage}")


# Not specialized on lengths: a kernel per head_dim and option serves every length.
@triton.jit(do_not_specialize=["heads", "group", "queries", "keys", "window"])  # type: ignore[untyped-decorator]
def _attention(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    logit_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_token: tl.tensor,
    q_dim: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    k_dim: tl.tensor,
    v_batch: tl.tensor,
    v_head: tl.tensor,
    v_token: tl.tensor,
    v_dim: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUANTIZED_Q: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTIZED_P: tl.constexpr,
) -> None:
    # int64: a stride times a token index passes 2**31 in long caches.
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    kv_head = head // group
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM

    row = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    # Rows past the end repeat the last query, so that every row sees a key and no row is NaN.
    query = tl.minimum(row, queries - 1)
    position = keys - queries + query
    q_offset = query.to(tl.int64)[:, None] * q_token + dim[None, :] * q_dim
    q = tl.load(q_ptr + batch * q_batch + head * q_head + q_offset, mask=in_head[None, :], other=0)
    q = decode_e4m3(q) if QUANTIZED_Q else q.to(tl.float32)  # (BLOCK_Q, BLOCK_D)

    k_ptr += batch * k_batch + kv_head * k_head
    v_ptr += batch * v_batch + kv_head * v_head
    logit_scale = tl.load(logit_scale_ptr + head)
    first_position = keys - queries + tl.program_id(1) * BLOCK_Q
    start = tl.maximum(first_position - window + 1, 0) // BLOCK_K * BLOCK_K
    stop = tl.minimum(first_position + BLOCK_Q, keys)

    # A sink is a logit like any other until it meets V, where it has no row.
    sink = tl.load(sinks_ptr + head) if SINKS else float("-inf")
    row_max = tl.full((BLOCK_Q,), sink, tl.float32)
    for first_key in range(start, stop, BLOCK_K):
        key = first_key + tl.arange(0, BLOCK_K)
        k = _load(k_ptr, key, dim, k_token, k_dim, keys, in_head)
        logits = _logits(q, k, key, position, window, logit_scale, softcap, SOFTCAPPED)
        row_max = tl.maximum(row_max, tl.max(logits, 1))

    total = tl.exp(sink - row_max) if SINKS else tl.zeros((BLOCK_Q,), tl.float32)
    accumulator = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for first_key in range(start, stop, BLOCK_K):
        key = first_key + tl.arange(0, BLOCK_K)
        k = _load(k_ptr, key, dim, k_token, k_dim, keys, in_head)
        v = _load(v_ptr, key, dim, v_token, v_dim, keys, in_head)
        logits = _logits(q, k, key, position, window, logit_scale, softcap, SOFTCAPPED)
        weights = tl.exp(logits - row_max[:, None])
        total += tl.sum(weights, 1)
        if QUANTIZED_P:
            weights = decode_e4m3(encode_e4m3(weights * PROBABILITY_LIFT)) / PROBABILITY_LIFT
        accumulator += tl.dot(weights, v, input_precision=PRECISION)

    value_scale = tl.load(value_scale_ptr + kv_head)
    out_offset = (sequence * queries + row)[:, None] * HEAD_DIM + dim[None, :]
    inside = (row < queries)[:, None] & in_head[None, :]
    tl.store(out_ptr + out_offset, accumulator * value_scale / total[:, None], mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _load(
    codes_ptr: tl.tensor,
    key: tl.tensor,
    dim: tl.tensor,
    token_stride: tl.tensor,
    dim_stride: tl.tensor,
    keys: tl.tensor,
    in_head: tl.tensor,
) -> tl.tensor:
    """Decoded codes of one head, ``(BLOCK_K, BLOCK_D)``; 0 past the last key and past head_dim."""
    offset = key.to(tl.int64)[:, None] * token_stride + dim[None, :] * dim_stride
    mask = (key < keys)[:, None] & in_head[None, :]
    return decode_e4m3(tl.load(codes_ptr + offset, mask=mask, other=0))


@triton.jit  # type: ignore[untyped-decorator]
def _logits(
    q: tl.tensor,
    k: tl.tensor,
    key: tl.tensor,
    position: tl.tensor,
    window: tl.tensor,
    logit_scale: tl.tensor,
    softcap: tl.tensor,
    SOFTCAPPED: tl.constexpr,
) -> tl.tensor:
    """Scaled and capped logits ``(BLOCK_Q, BLOCK_K)``, ``-inf`` where a query does not see a key."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * logit_scale
    if SOFTCAPPED:
        logits = softcap * _tanh(logits / softcap)
    distance = position[:, None] - key[None, :]
    return tl.where((distance >= 0) & (distance < window), logits, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _tanh(x: tl.tensor) -> tl.tensor:
    # Triton has no tanh that also runs in its interpreter, and in float32 this form cancels near 0.
    decay = tl.exp(-2.0 * tl.abs(x.to(tl.float64)))
    magnitude = ((1.0 - decay) / (1.0 + decay)).to(tl.float32)
    return tl.where(x < 0, -magnitude, magnitude)
