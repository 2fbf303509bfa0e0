"""A layer's quantized K and V in pages, and attention over them by the kernels that serve such caches."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvcal import formats, online
from kvcal.cache import QuantizedCache
from kvcal.capture import AttentionCall
from kvcal.formats import KVFormat
from kvcal.kernels import codes, paged
from kvcal.kernels.dispatch import Backend
from kvcal.kernels.paged import Pages, Segment

PAGE_SIZE = 64

# What a dynamic format's codes are, once the engine has scaled them.
_STORED = {
    "int8_per_token_head": formats.INT8,
    "fp8_per_token_head": formats.FP8_E4M3,
    "int4_per_token_head": formats.INT4,
}


def reads(call: AttentionCall, cache: QuantizedCache) -> bool:
    """Whether the paged kernels compute this layer's attention as the engine would.

    They know some head sizes and GQA groups only, no latents, and causal attention by Q and K alone. A
    transform that is emulated happens around the cache, not in it.
    """
    if call.expansion is not None or not call.plain:
        return False
    if call.layer in cache.skipped or (cache.transforms and call.layer in cache.transforms.layers):
        return False
    heads, head_dim = call.query.shape[1], call.query.shape[3]
    known = head_dim in paged.HEAD_DIMS and heads // call.key.shape[1] <= paged.LARGEST_GROUP
    return known and cache.format.name in (_STORED if cache.scales is None else paged.FORMATS)


def attend(call: AttentionCall, cache: QuantizedCache, backend: Backend) -> torch.Tensor:
    """Causal attention with K and V written to pages and read by ``backend``.

    Args:
        call: Q, K and V of one layer, and its geometry.
        cache: one that :func:`reads` accepts for this layer.
        backend: whose ``write`` and ``paged_attention`` run.

    Returns:
        ``(batch, heads, tokens, head_dim)`` float32: the kernel is given Q in float32, so that its result is
        not rounded to 16 bits.
    """
    batch, _, tokens, _ = call.key.shape
    q = call.query.float()
    if cache.scales is None:
        k, v = (_dynamic_pages(x, cache.format) for x in (call.key, call.value))
        if cache.format.rotated:
            q = online.rotate_query(q)
    else:
        of = cache.scales.layers[call.layer]
        k = _static_pages(call.key, of["k"], cache.format, backend)
        v = _static_pages(call.value, of["v"], cache.format, backend)
    each = k.codes.shape[0] // batch
    table = torch.arange(batch * each, dtype=torch.int32, device=q.device).reshape(batch, each)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=q.device)
    out = backend.paged_attention(
        q,
        [Segment(k, v, table)],
        lengths,
        **call.geometry,
    )
    return online.rotate_back(out) if cache.format.rotated else out


def _static_pages(x: torch.Tensor, scale: torch.Tensor, fmt: KVFormat, backend: Backend) -> Pages:
    """Pages with fixed scales, written by the backend's own kernel."""
    batch, heads, tokens, head_dim = x.shape
    each = -(-tokens // PAGE_SIZE)
    pages = paged.allocate(
        fmt,
        pages=batch * each,
        kv_heads=heads,
        page_size=PAGE_SIZE,
        head_dim=head_dim,
        sharing="group" if fmt.block else "head",
        scale=None if fmt.block else scale.float(),
        tensor_scale=scale.float() if fmt.block else None,
        device=x.device,
    )
    first = torch.arange(batch, device=x.device) * each * PAGE_SIZE
    slots = (first[:, None] + torch.arange(tokens, device=x.device)).flatten()
    backend.write(x.transpose(1, 2).reshape(batch * tokens, heads, head_dim), slots, pages)
    return pages


def _dynamic_pages(x: torch.Tensor, fmt: KVFormat) -> Pages:
    """Pages of the codes and scales that the engine would write, bit for bit."""
    stored = online.quantize(x, fmt)
    kept, low = stored.codes, None
    if stored.zero_point is not None:
        kept = codes.pack(stored.codes, fmt.bits)
        low = _in_pages(-stored.zero_point.float() * stored.scale)
    return Pages(_in_pages(kept), x.shape[-1], _STORED[fmt.name], _in_pages(stored.scale), low)


def _in_pages(x: torch.Tensor) -> torch.Tensor:
    """``(batch, heads, tokens, row)`` to ``(pages, heads, PAGE_SIZE, row)``, zeros behind the last token."""
    batch, heads, tokens, row = x.shape
    dtype = x.dtype
    x = x.view(torch.uint8) if dtype.itemsize == 1 else x
    x = F.pad(x, (0, 0, 0, -tokens % PAGE_SIZE))
    x = x.reshape(batch, heads, -1, PAGE_SIZE, row).transpose(1, 2).reshape(-1, heads, PAGE_SIZE, row)
    return x.view(dtype)
