"""Pure-torch definitions of correct. The Triton kernels beside this file agree with these functions.

Shapes: Q ``(batch, heads, queries, head_dim)``; K and V ``(batch, kv_heads, keys, head_dim)``; query head
``h`` reads KV head ``h // (heads / kv_heads)``. Query ``i`` stands at position ``keys - queries + i`` and
sees keys up to and including its own. A scale has shape ``(1,)`` or ``(heads, 1, 1)``.
"""

from __future__ import annotations

import torch

from kvcal.formats import KVFormat

# FlashAttention-3 lifts exp(s - max) into [0, 256] before rounding it to E4M3, so that small
# probabilities use the exponents that [0, 1] leaves idle (hopper/softmax.h, Max_offset = 8).
PROBABILITY_LIFT = 256.0


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Codes of ``x / scale``, saturated to ``±fmt.max`` and rounded half to even.

    Division, not multiplication by a reciprocal: it is what vLLM's cache write does
    (csrc/quantization/w8a8/fp8/nvidia/quant_utils.cuh, scaled_vec_conversion).

    Raises:
        ValueError: ``fmt`` is not FP8; ``codes`` has the others.
    """
    if fmt.integer or fmt.bits != 8:
        raise ValueError(f"quantize rounds FP8; of {fmt.name} kernels.codes knows the codes")
    scaled = x.float() / _over_heads(scale)
    return scaled.clamp(-fmt.max, fmt.max).to(getattr(torch, fmt.storage_dtype))


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``codes * scale`` in float32."""
    return codes.float() * _over_heads(scale)


def quantize_dequantize(x: torch.Tensor, scale: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """What the cache gives back for ``x``, in the dtype of ``x``."""
    return dequantize(quantize(x, scale, fmt), scale).to(x.dtype)


def hadamard_order(size: int) -> int:
    """The largest power of two that divides ``size``: the order of the blocks that rotate such a vector."""
    return size & -size


def hadamard(x: torch.Tensor, *, normalized: bool = True) -> torch.Tensor:
    """``y = x B`` over the last dimension, ``B`` block-diagonal with equal Hadamard matrices ``H / √n``.

    ``H`` is Sylvester's: ``H[i, j] = (-1) ** popcount(i & j)``, of order ``n =`` :func:`hadamard_order`: 96
    channels turn in 3 blocks of 32, an odd number not at all. ``B`` is symmetric and orthonormal, hence its
    own inverse.

    Args:
        x: ``(..., size)``. The ``log2(n)`` rounds of sums and differences are rounded in its dtype, the
            nearest channels first; intermediate values grow to ``√n`` times the result.
        normalized: divide by ``√n``; without it rows have length ``√n`` and small integers stay exact.

    Returns:
        The rotated vectors, in the shape and dtype of ``x``.
    """
    size = x.shape[-1]
    order = hadamard_order(size)
    y, stride = x, 1
    while stride < order:
        pairs = y.reshape(*x.shape[:-1], size // (2 * stride), 2, stride)
        near, far = pairs.unbind(-2)
        y = torch.stack((near + far, near - far), dim=-2).reshape(x.shape)
        stride *= 2
    return y * order**-0.5 if normalized else y


def random_signs(size: int, seed: int) -> torch.Tensor:
    """``(size,)`` float32 of ±1, each as likely, drawn on the CPU: a seed means the same on every device."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return 2 * torch.bernoulli(torch.full((size,), 0.5), generator=generator) - 1


def random_hadamard(
    x: torch.Tensor, signs: torch.Tensor, *, inverse: bool = False, normalized: bool = True
) -> torch.Tensor:
    """``y = x D B``: signs, then :func:`hadamard`. The inverse is ``x = y B D``, since both undo themselves.

    A Hadamard transform alone would send a vector that alternates like one of its rows to a single channel;
    random signs make that unlikely for every vector there is.

    Args:
        x: ``(..., size)``.
        signs: the diagonal of ``D``, ``(n,)`` of ±1; ``n`` divides ``size`` and the signs repeat.
        inverse: undo the transform of the same ``signs`` and ``normalized``.
        normalized: without it the transform is ``√order`` times the orthonormal one, and its inverse by as
            much smaller.

    Returns:
        In the shape and dtype of ``x``.
    """
    diagonal = signs.to(x).repeat(x.shape[-1] // len(signs))
    if not inverse:
        return hadamard(x * diagonal, normalized=normalized)
    back = hadamard(x, normalized=normalized) * diagonal
    return back if normalized else back / hadamard_order(x.shape[-1])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in the dtype of ``q``, without any quantization.

    ``window`` keys are visible to a query, its own included; ``softcap`` bounds logits by
    ``softcap * tanh(logits / softcap)``. ``sinks`` ``(heads,)`` are logits beside those of the keys that lead
    to no value, so that what a query gives to keys sums up to less than 1. Without ``causal`` every query
    sees every key, wherever it stands. ``bias`` ``(1 or batch, heads, queries, keys)`` is added to logits.
    """
    seen = _seen(q, k, window, causal)
    weights, total = _weights(q, k, scaling, seen, softcap, sinks, bias)
    return _weighted_values(weights, v) / total


def attention_over_versions(
    q: torch.Tensor,
    keys: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
    seen: tuple[torch.Tensor, ...],
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention where each query finds one of several versions of a token.

    ``keys`` and ``values`` hold ``(batch, kv_heads, tokens, head_dim)`` per version, ``seen`` which query
    meets which key in it, ``(tokens, tokens)`` bool. Other arguments as in :func:`attention`.
    """
    tokens = q.shape[2]
    causal = visible(tokens, tokens, window, q.device)
    mask = torch.cat([causal & each for each in seen], -1)
    weights, total = _weights(q, torch.cat(keys, 2), scaling, mask, softcap, sinks)
    return _weighted_values(weights, torch.cat(values, 2)) / total


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
    causal: bool = True,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over a quantized cache, accumulated in float32.

    Args:
        q: 16-bit or float32 queries; rounded to ``fmt`` first when ``q_scale`` is given.
        k: codes of K, as :func:`quantize` returns them.
        v: codes of V.
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
        causal: as of :func:`attention`.
        bias: likewise.

    Returns:
        ``(batch, heads, queries, head_dim)`` in float32.
    """
    queries = q.float() if q_scale is None else dequantize(quantize(q, q_scale, fmt), q_scale)
    seen = _seen(q, k, window, causal)
    weights, total = _weights(queries, dequantize(k, k_scale), scaling, seen, softcap, sinks, bias)
    if quantize_probabilities:
        lifted = (weights * PROBABILITY_LIFT).to(getattr(torch, fmt.storage_dtype))
        weights = lifted.float() / PROBABILITY_LIFT
    return _weighted_values(weights, dequantize(v, v_scale)) / total


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """``(queries, keys)`` bool: which keys each query sees."""
    position = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device).unsqueeze(0)
    causal = key <= position
    return causal if window is None else causal & (key > position - window)


def _seen(q: torch.Tensor, k: torch.Tensor, window: int | None, causal: bool) -> torch.Tensor:
    if not causal:
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return visible(q.shape[2], k.shape[2], window, q.device)


def _over_heads(scale: torch.Tensor) -> torch.Tensor:
    return scale.float().reshape(-1, 1, 1)


def _weights(
    q: torch.Tensor,
    k: torch.Tensor,
    scaling: float,
    seen: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``exp(s - max)`` as ``(batch, kv_heads, group, queries, keys)`` and its sum over keys and the sink."""
    batch, heads, queries, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, queries, head_dim)
    logits = torch.matmul(grouped, k.unsqueeze(2).transpose(-1, -2)) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(logits).reshape(len(bias), kv_heads, -1, *bias.shape[2:])
    logits = logits.masked_fill(~seen, float("-inf"))
    largest = logits.amax(-1, keepdim=True)
    if sinks is None:
        weights = torch.exp(logits - largest)
        return weights, weights.sum(-1, keepdim=True).flatten(1, 2)
    sink = sinks.to(logits).view(1, kv_heads, -1, 1, 1)
    largest = torch.maximum(largest, sink)
    weights = torch.exp(logits - largest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink - largest)
    return weights, total.flatten(1, 2)


def _weighted_values(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.matmul(weights, v.unsqueeze(2)).flatten(1, 2)
