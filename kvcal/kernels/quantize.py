"""Triton twin of ``reference.quantize``, and the E4M3 arithmetic that the attention kernel shares.

Rounding and decoding work on bits, not on casts: hardware casts to FP8 exist on some GPUs only, and
Triton's CPU interpreter halves values just below ``2**-6``. Bits give the same codes everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcal.formats import KVFormat

_BLOCK = 4096


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Codes of ``x / scale``, saturated to ``±fmt.max`` and rounded half to even.

    Args:
        x: ``(..., heads, tokens, head_dim)``, 16-bit floats or wider, any strides.
        scale: ``(1,)`` or ``(heads, 1, 1)``.
        fmt: the storage format.

    Returns:
        Codes in the shape of ``x``, contiguous.
    """
    require_e4m3(fmt)
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        raise ValueError(f"x is {x.dtype}; quantize takes 16-bit floats and wider")
    if x.dim() < 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; quantize takes (..., heads, tokens, head_dim)")
    heads, tokens, head_dim = x.shape[-3:]
    divisor = scale_per_head(scale, heads, "scale")
    x = x.contiguous()
    codes = torch.empty_like(x, dtype=torch.uint8)
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    if x.numel():
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _quantize[grid](x, divisor, codes, x.numel(), tokens * head_dim, heads, BLOCK=_BLOCK)
    return codes.view(getattr(torch, fmt.storage_dtype))


def scale_per_head(scale: torch.Tensor, heads: int, name: str) -> torch.Tensor:
    """A ``(1,)`` or ``(heads, 1, 1)`` scale as contiguous float32 ``(heads,)``."""
    if scale.numel() not in (1, heads):
        raise ValueError(f"{name} has {scale.numel()} values for {heads} heads; give 1 or {heads}")
    return scale.float().reshape(-1).expand(heads).contiguous()


def require_e4m3(fmt: KVFormat) -> None:
    """Refuse formats whose rounding these kernels do not have."""
    if fmt.storage_dtype != "float8_e4m3fn":
        raise ValueError(f"no Triton kernel for {fmt.name}; set KVCAL_EAGER=1 to use the torch definition")


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    elements: tl.tensor,
    elements_per_head: tl.tensor,
    heads: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < elements
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + offset // elements_per_head % heads, mask=inside, other=1.0)
    # div_rn: the plain division may be off by 2 ulp on a GPU, enough to cross a rounding tie.
    tl.store(codes_ptr + offset, encode_e4m3(tl.div_rn(x, scale)), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def encode_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 to E4M3 codes (uint8): round half to even, saturate at 448, keep NaN."""
    return _encode(x, 3, 7, 0x43E00000)


@triton.jit  # type: ignore[untyped-decorator]
def encode_e5m2(x: tl.tensor) -> tl.tensor:
    """float32 to E5M2 codes (uint8): round half to even, saturate at 57344, keep NaN."""
    return _encode(x, 2, 15, 0x47600000)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(
    x: tl.tensor, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, LARGEST_BITS: tl.constexpr
) -> tl.tensor:
    DROPPED: tl.constexpr = 23 - MANTISSA_BITS
    # At this power of two one float32 ulp is the subnormal step.
    STEP_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA_BITS) << 23
    SMALLEST_NORMAL_BITS: tl.constexpr = (128 - BIAS) << 23
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, LARGEST_BITS)  # non-negative floats order like their bits
    # Adding just under half of the last kept bit, plus that bit itself, carries exactly where half-to-even
    # rounds up. The exponent bias falls from 127 to BIAS.
    half = (1 << (DROPPED - 1)) - 1
    normal = ((magnitude + half + ((magnitude >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA_BITS)
    # The addition rounds to the subnormal step, half to even.
    step = tl.full(x.shape, STEP_BITS, tl.int32).to(tl.float32, bitcast=True)
    shifted = (magnitude.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True)
    code = tl.where(magnitude < SMALLEST_NORMAL_BITS, shifted - STEP_BITS, normal)
    code = tl.where(is_nan, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def decode_e4m3(code: tl.tensor) -> tl.tensor:
    """E4M3 codes (uint8) to float32, exactly."""
    bits = code.to(tl.int32)
    # The same fields one place lower in float16, whose bias is 15, not 7: 2**8 too small, subnormals too.
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
