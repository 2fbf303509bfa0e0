"""Pure-torch definitions of the paged kernels: what a cache in pages holds, and attention over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcal.formats import FP8_E4M3, KVFormat
from kvcal.kernels import codes, paged, reference
from kvcal.kernels.codes import BlockCodes
from kvcal.kernels.paged import Pages, Segment


def paged_attention(
    q: torch.Tensor,
    segments: Sequence[Segment],
    lengths: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Causal attention of the last queries of each sequence over its segments.

    Args:
        q: ``(sequences, heads, queries, head_dim)``, float16, bfloat16 or float32. Query ``i`` stands at
            position ``length - queries + i``; one before position 0 sees nothing and gets zeros.
        segments: where the tokens lie. Each position lies in at most one; one in none is not attended to.
        lengths: ``(sequences,)`` int32 tokens of each sequence, the queries' own included.
        scaling: softmax scale, usually ``head_dim ** -0.5``.
        window: visible keys per query, its own included.
        softcap: bound of the logits.
        sinks: ``(heads,)`` learned logits that take part in the softmax and have no value (GPT-OSS).
        q_scale: ``(1,)`` or ``(heads, 1, 1)``: round Q to E4M3 first, as engines do that multiply in FP8.
        hadamard: turn Q by :func:`kvcal.kernels.reference.hadamard` first, for K that is stored turned.
        dtype: what is computed in; the result has the dtype of ``q`` but for float64.

    Returns:
        In the shape of ``q``.

    Raises:
        ValueError: shapes or formats that no kernel reads.
    """
    paged.require(q, segments, lengths)
    out = torch.zeros_like(q, dtype=torch.float64 if dtype == torch.float64 else q.dtype)
    for sequence, length in enumerate(lengths.tolist()):
        queries = q[sequence].to(dtype)
        if hadamard:
            queries = reference.hadamard(queries)
        if q_scale is not None:
            queries = reference.quantize(queries, q_scale, FP8_E4M3).to(dtype) * q_scale.reshape(-1, 1, 1)
        position, k, v = _gather(segments, sequence, length, dtype)
        group = queries.shape[0] // k.shape[0]
        at = torch.arange(length - q.shape[2], length, device=q.device).unsqueeze(1)
        seen = position <= at
        if window is not None:
            seen &= position > at - window
        logits = queries @ k.repeat_interleave(group, 0).transpose(1, 2) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(dtype).reshape(-1, 1, 1).expand(-1, q.shape[2], 1)], -1)
        weights = logits.softmax(-1).nan_to_num(0.0)[..., : k.shape[1]]
        out[sequence] = (weights @ v.repeat_interleave(group, 0)).to(out.dtype)
    return out


def write(x: torch.Tensor, slots: torch.Tensor, pages: Pages) -> None:
    """Quantize, pack and scatter tokens into pages.

    Scales that come with the tokens: ``amax / max`` of a head or group; with ``low``, the least value and
    ``(high - low) / (2 ** bits - 1)``; each is stored first, and codes belong to what is stored.

    Args:
        x: ``(tokens, kv_heads, head_dim)``, 16-bit or float32.
        slots: ``(tokens,)`` int64, ``page * page_size + slot``; a negative one is skipped.
        pages: written in place.
    """
    kept = slots >= 0
    x, slots = x[kept].float(), slots[kept]
    if not len(slots):
        return
    place = (slots // pages.page_size, slice(None), slots % pages.page_size)
    if pages.fmt is None:
        pages.codes[place] = x.to(pages.codes.dtype)
        return
    fmt, scale, low = pages.fmt, pages.scale, pages.low
    assert scale is not None
    if fmt.block:
        stored = codes.quantize_blocks(x, fmt, _over_heads(pages.tensor_scale, x))
        scale.view(torch.uint8)[place] = stored.block_scale.view(torch.uint8)
        pages.codes[place] = codes.pack(stored.codes, fmt.bits)
        return
    if pages.sharing in ("head", "channel"):
        step, base = _over_heads(scale, x), None if low is None else _over_heads(low, x)
    else:
        step, base = _extent(x, fmt, scale, low)
        scale[place] = step.to(scale.dtype)
        if low is not None and base is not None:
            low[place] = base.to(low.dtype)
        each = pages.head_dim // scale.shape[-1]
        step = scale[place].float().repeat_interleave(each, -1)
        base = None if low is None else low[place].float().repeat_interleave(each, -1)
    pages.codes[place] = _codes(x, fmt, step, base).view(pages.codes.dtype)


def read(pages: Pages, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the slots give back, ``(tokens, kv_heads, head_dim)``."""
    place = (slots // pages.page_size, slice(None), slots % pages.page_size)
    held = pages.codes[place]
    if pages.fmt is None:
        return held.to(dtype)
    fmt, scale, low = pages.fmt, pages.scale, pages.low
    assert scale is not None
    if fmt.block:
        unpacked = codes.unpack(held, fmt.bits, pages.head_dim)
        block_scale = scale.view(torch.uint8)[place].view(scale.dtype)
        over = _over_heads(pages.tensor_scale, held)
        return codes.dequantize_blocks(BlockCodes(unpacked, block_scale, over)).to(dtype)
    if fmt.integer and held.dtype == torch.uint8:
        held = codes.unpack(held, fmt.bits, pages.head_dim)
        if low is None:
            held = codes.to_signed(held, fmt.bits)
    if pages.sharing in ("head", "channel"):
        step, base = _over_heads(scale, held), None if low is None else _over_heads(low, held)
    else:
        each = pages.head_dim // scale.shape[-1]
        step = scale[place].repeat_interleave(each, -1)
        base = None if low is None else low[place].repeat_interleave(each, -1)
    value = held.to(dtype) * step.to(dtype)
    return value if base is None else value + base.to(dtype)


def _gather(
    segments: Sequence[Segment], sequence: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions ``(tokens,)`` of a sequence, and its K and V ``(kv_heads, tokens, head_dim)``."""
    positions, keys, values = [], [], []
    for segment in segments:
        first = 0 if segment.first is None else int(segment.first[sequence])
        stop = length if segment.stop is None else int(segment.stop[sequence])
        position = torch.arange(max(first, 0), max(stop, first, 0), device=segment.table.device)
        size = segment.k.page_size
        number = position // size
        if segment.ring:
            number = number % segment.table.shape[1]
        slots = segment.table[sequence].long()[number] * size + position % size
        positions.append(position)
        keys.append(read(segment.k, slots, dtype).transpose(0, 1))
        values.append(read(segment.v, slots, dtype).transpose(0, 1))
    return torch.cat(positions), torch.cat(keys, 1), torch.cat(values, 1)


def _extent(
    x: torch.Tensor, fmt: KVFormat, scale: torch.Tensor, low: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and low of each group of channels, ``(tokens, kv_heads, groups)``, before they are stored."""
    groups = x.reshape(*x.shape[:-1], scale.shape[-1], -1)
    if low is None:
        amax = groups.abs().amax(-1)
        return amax / torch.full_like(amax, fmt.max), None
    least, most = groups.amin(-1), groups.amax(-1)
    return (most - least) / torch.full_like(least, 2**fmt.bits - 1), least


def _codes(x: torch.Tensor, fmt: KVFormat, step: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    if base is not None:
        return codes.pack(codes.quantize_asymmetric(x, base, step, fmt), fmt.bits)
    if not fmt.integer:
        safe = torch.where(step == 0, 1.0, step)
        scaled = torch.where(step == 0, 0.0, x / safe).clamp(-fmt.max, fmt.max)
        return scaled.to(getattr(torch, fmt.storage_dtype))
    signed = codes.quantize_symmetric(x, step, fmt)
    return signed if fmt.bits == 8 else codes.pack(codes.to_unsigned(signed, fmt.bits), fmt.bits)


def _over_heads(scale: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """A static scale against ``(tokens, kv_heads, channels)``."""
    assert scale is not None
    return scale.float() if scale.dim() == 1 else scale.float().reshape(1, x.shape[1], -1)
