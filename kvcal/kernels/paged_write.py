"""Triton twin of ``paged_reference.write``: quantize, pack and scatter tokens to pages in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcal.kernels.paged import Pages
from kvcal.kernels.quantize import encode_e4m3, encode_e5m2, scale_per_head
from kvcal.kernels.words import spread

_TOKENS = 16

# Adding it leaves no bits for a fraction: the sum of a float32 below 2**22 with it is rounded half to even.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)


def write(x: torch.Tensor, slots: torch.Tensor, pages: Pages) -> None:
    """Quantize, pack and scatter tokens into pages, as :func:`kvcal.kernels.paged_reference.write` says."""
    tokens, kv_heads, head_dim = x.shape
    if kv_heads != pages.kv_heads or head_dim != pages.head_dim:
        raise ValueError(f"x is {tuple(x.shape)} for pages of {pages.kv_heads} heads of {pages.head_dim}")
    if not tokens:
        return
    fmt = pages.fmt
    codes, scale, low = pages.codes, pages.scale, pages.low
    static = static_low = x
    dynamic = dynamic_low = x
    strides: tuple[int, ...] = (0, 0, 0)
    groups = 1
    if scale is not None and pages.sharing in ("head", "channel"):
        static = _per_channel(scale, pages)
        static_low = static if low is None else _per_channel(low, pages)
    elif scale is not None:
        dynamic = scale.view(torch.uint8) if fmt is not None and fmt.block else scale
        dynamic_low = dynamic if low is None else low
        strides = dynamic.stride()[:3]
        groups = scale.shape[-1]
        if pages.tensor_scale is not None:
            static = scale_per_head(pages.tensor_scale, kv_heads, "tensor_scale")
    if fmt is not None and codes.dtype != torch.uint8:
        codes = codes.view(torch.uint8)
    row = head_dim // pages.per_byte
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _write[(triton.cdiv(tokens, _TOKENS), kv_heads)](
            x,
            slots,
            static,
            static_low,
            codes,
            dynamic,
            dynamic_low,
            tokens,
            *x.stride(),
            *codes.stride()[:3],
            *strides,
            PAGE=pages.page_size,
            HEAD_DIM=head_dim,
            ROW=row,
            PER_BYTE=pages.per_byte,
            KIND="float" if fmt is None else fmt.name,
            BITS=16 if fmt is None else fmt.bits,
            LARGEST=0.0 if fmt is None else fmt.max,
            SHARING=pages.sharing,
            LOW=low is not None,
            GROUPS=groups,
            TOKENS=_TOKENS,
            BYTES=triton.next_power_of_2(row),
        )


def _per_channel(scale: torch.Tensor, pages: Pages) -> torch.Tensor:
    """A static scale as float32 ``(kv_heads, head_dim)``."""
    wide = scale.float().reshape(1 if scale.numel() == 1 else pages.kv_heads, -1)
    return wide.expand(pages.kv_heads, pages.head_dim).contiguous()


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _write(
    x_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    static_ptr: tl.tensor,
    static_low_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    low_ptr: tl.tensor,
    tokens: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    x_dim: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_page: tl.tensor,
    scale_head: tl.tensor,
    scale_token: tl.tensor,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    PER_BYTE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    SHARING: tl.constexpr,
    LOW: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    slot = tl.where(kept, slot, 0)
    byte = tl.arange(0, BYTES)
    within = tl.arange(0, PER_BYTE)
    channel = byte[:, None] * PER_BYTE + within[None, :]  # (BYTES, PER_BYTE)
    in_row = kept[:, None, None] & (channel < HEAD_DIM)[None, :, :]
    place = token.to(tl.int64)[:, None, None] * x_token + head * x_head + channel[None, :, :] * x_dim
    x = tl.load(x_ptr + place, mask=in_row, other=0.0).to(tl.float32)
    codes_ptr += head * head_stride
    out = (slot // PAGE * page_stride + slot % PAGE * token_stride)[:, None] + byte[None, :]
    if KIND == "float":
        out = tl.reshape(out, (TOKENS, BYTES, PER_BYTE))
        tl.store(codes_ptr + out, x.to(codes_ptr.dtype.element_ty), mask=in_row)
    else:
        low = 0.0
        if SHARING == "head" or SHARING == "channel":
            step = tl.load(static_ptr + head * HEAD_DIM + channel, mask=channel < HEAD_DIM, other=1.0)
            step = tl.broadcast_to(step[None, :, :], (TOKENS, BYTES, PER_BYTE))
            if LOW:
                low = tl.load(static_low_ptr + head * HEAD_DIM + channel, mask=channel < HEAD_DIM, other=0.0)
                low = low[None, :, :]
        else:
            EACH: tl.constexpr = ROW // GROUPS if GROUPS > 1 else BYTES
            PADDED: tl.constexpr = BYTES // EACH
            group = tl.arange(0, PADDED)
            beside = (slot // PAGE * scale_page + head * scale_head + slot % PAGE * scale_token)[:, None]
            beside += group[None, :]
            in_groups = kept[:, None] & (group < GROUPS)[None, :]
            if LOW:
                least = -_of_groups(tl.where(in_row, -x, float("-inf")), TOKENS, PADDED, EACH)
                most = _of_groups(tl.where(in_row, x, float("-inf")), TOKENS, PADDED, EACH)
                # Padding has neither, and infinities would make NaN.
                least = tl.where(in_groups, least, 0.0)
                most = tl.where(in_groups, most, 0.0)
                step = tl.div_rn(most - least, tl.full((TOKENS, PADDED), _largest_unsigned(BITS), tl.float32))
                least = least.to(low_ptr.dtype.element_ty)
                tl.store(low_ptr + beside, least, mask=in_groups)
                low = spread(least.to(tl.float32), TOKENS, PADDED, EACH)[:, :, None]
            else:
                amax = _of_groups(tl.abs(x), TOKENS, PADDED, EACH)
                step = tl.div_rn(amax, tl.full((TOKENS, PADDED), LARGEST, tl.float32))
            if KIND == "nvfp4":
                tensor_scale = tl.load(static_ptr + head)
                # As the definition has it: 6 * tensor_scale is rounded before it divides.
                limit = tl.zeros((TOKENS, PADDED), tl.float32) + LARGEST * tensor_scale
                wanted = tl.minimum(tl.div_rn(amax, tl.where(limit == 0, 1.0, limit)), 448.0)
                code = encode_e4m3(tl.where(limit == 0, 0.0, wanted))
                code = tl.maximum(code.to(tl.int32), 1).to(tl.uint8)  # 2 ** -9; 0 would erase the block
                tl.store(scale_ptr + beside, code, mask=in_groups)
                half = (code.to(tl.uint16) << 7).to(tl.float16, bitcast=True)
                step = half.to(tl.float32) * 256.0 * tensor_scale
            else:
                stored = step.to(scale_ptr.dtype.element_ty)
                tl.store(scale_ptr + beside, stored, mask=in_groups)
                step = stored.to(tl.float32)
            step = spread(step, TOKENS, PADDED, EACH)[:, :, None]
            step = tl.broadcast_to(step, (TOKENS, BYTES, PER_BYTE))
        # A scale of 0 is that of a group without extent.
        empty = step == 0
        x = tl.where(empty, 0.0, tl.div_rn(x - low, tl.where(empty, 1.0, step)))
        if KIND == "fp8_e4m3":
            code = encode_e4m3(x).to(tl.int32)
        elif KIND == "fp8_e5m2":
            code = encode_e5m2(x).to(tl.int32)
        elif KIND == "nvfp4":
            code = _encode_e2m1(x)
        elif LOW:
            code = _round(tl.minimum(tl.maximum(x, 0.0), _largest_unsigned(BITS)))
        else:
            code = _round(tl.minimum(tl.maximum(x, -LARGEST - 1), LARGEST))
            # Codes of less than a byte count from the lowest, so that packing needs no sign.
            code = code & 0xFF if BITS == 8 else code + (1 << (BITS - 1))
        packed = tl.sum(code << (within * BITS)[None, None, :], 2)
        tl.store(codes_ptr + out, packed.to(tl.uint8), mask=kept[:, None] & (byte < ROW)[None, :])


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _largest_unsigned(bits: int) -> float:
    return float((1 << bits) - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _of_groups(x: tl.tensor, TOKENS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr) -> tl.tensor:
    """The largest value in ``EACH`` bytes of ``(TOKENS, BYTES, PER_BYTE)``, ``(TOKENS, GROUPS)``."""
    return tl.max(tl.reshape(tl.max(x, 2), (TOKENS, GROUPS, EACH)), 2)


@triton.jit  # type: ignore[untyped-decorator]
def _round(x: tl.tensor) -> tl.tensor:
    """The nearest integer, ties to even, int32; below 2**22."""
    return ((x + _ROUNDER) - _ROUNDER).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _encode_e2m1(x: tl.tensor) -> tl.tensor:
    """float32 to 4-bit codes: sign, then the index of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties to the even index."""
    size = tl.minimum(tl.abs(x), 6.0)
    # Steps of 0.5 below 2, of 1 below 4, then of 2: an index each.
    code = tl.where(size < 2, _round(size * 2), tl.where(size < 4, _round(size) + 2, _round(size / 2) + 4))
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
