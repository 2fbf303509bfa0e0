"""Codes of every static format and their packing, in plain torch: integers, small floats, FP4 in blocks.

Scales are the caller's: any shape that broadcasts against ``x``. A scale of 0 belongs to a group without
extent; it gives back 0, or the offset, and never NaN. Dynamic formats are rounded by ``online`` as their
engine does it; they are refused here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcal.formats import KVFormat

# Magnitudes of E2M1 by their 3-bit index.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Smallest positive E4M3: the block scale where the wanted one rounds to 0, which would erase the block.
_SMALLEST_E4M3 = 2.0**-9
_LARGEST_E4M3 = 448.0

# E8M0 stores the exponent of a power of two plus 127; 255 is NaN.
_E8M0_BIAS = 127


def round_to_format(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """The nearest value that one element can hold, saturated, ties to the even code.

    Between two powers of two, a float with ``m`` mantissa bits has steps of ``2 ** (e - m)``, and below its
    smallest normal those of that one; an integer has steps of 1 and reaches from ``-max - 1`` to ``max``.

    Args:
        x: divided by its scale already, any float dtype and shape; NaN stays NaN.
        fmt: a static format; of one with blocks, its elements.

    Returns:
        float32 in the shape of ``x``.

    Raises:
        ValueError: ``fmt`` is dynamic.
    """
    _require_static(fmt)
    x = x.float()
    if fmt.integer:
        return x.round().clamp(-fmt.max - 1, fmt.max)
    x = x.clamp(-fmt.max, fmt.max)
    # frexp: |x| = m * 2 ** exponent with m in [0.5, 1). Division by a power of two is exact.
    _, smallest = math.frexp(fmt.min_normal)
    exponent = torch.frexp(x).exponent.clamp(min=smallest)
    step = torch.ldexp(torch.ones_like(x), exponent - 1 - fmt.mantissa_bits)
    return (x / step).round() * step


def quantize_symmetric(x: torch.Tensor, scale: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Signed codes ``clamp(round(x / scale), -max - 1, max)``, half to even.

    Args:
        x: finite values, any float dtype.
        scale: broadcasts against ``x``, not negative; a code of 1 stands for it.
        fmt: a static integer format.

    Returns:
        int8 in the shape of ``x``.

    Raises:
        ValueError: ``fmt`` is no static integer.
    """
    _require_integer(fmt)
    return round_to_format(_over(x.float(), scale), fmt).to(torch.int8)


def dequantize_symmetric(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``codes * scale`` in float32."""
    return codes.float() * scale.float()


def quantize_asymmetric(
    x: torch.Tensor, low: torch.Tensor, scale: torch.Tensor, fmt: KVFormat
) -> torch.Tensor:
    """Codes ``clamp(round((x - low) / scale), 0, 2 ** bits - 1)``, half to even.

    With ``scale = (high - low) / (2 ** bits - 1)`` the codes reach from ``low`` to ``high``. The offset is a
    float, not a code, so 0 itself is given back exactly only where it is ``low`` or by chance.

    Args:
        x: finite values, any float dtype.
        low: what code 0 stands for; broadcasts against ``x``.
        scale: the step between codes; broadcasts against ``x``, not negative.
        fmt: a static integer format, of which only ``bits`` counts.

    Returns:
        uint8 in the shape of ``x``.

    Raises:
        ValueError: ``fmt`` is no static integer.
    """
    _require_integer(fmt)
    steps = _over(x.float() - low.float(), scale)
    return steps.round().clamp(0, 2**fmt.bits - 1).to(torch.uint8)


def dequantize_asymmetric(codes: torch.Tensor, low: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``codes * scale + low`` in float32."""
    return codes.float() * scale.float() + low.float()


@dataclass(frozen=True)
class BlockCodes:
    """Elements E2M1 that share a scale with the others of their block, along the last dimension.

    Attributes:
        codes: ``(..., size)`` uint8 of 0 to 15, the sign as 8 and the index of the magnitude, not packed.
        block_scale: ``(..., size / block)`` float8_e4m3fn (NVFP4) or float8_e8m0fnu (MXFP4).
        tensor_scale: float32, broadcasts against ``block_scale``; None for MXFP4.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    tensor_scale: torch.Tensor | None = None


def nvfp4_tensor_scale(amax: torch.Tensor) -> torch.Tensor:
    """Float32 scale that brings the scale of the block with the largest magnitude to E4M3's maximum.

    ``amax / (448 * 6)``; 1 where nothing but zeros was seen.
    """
    # A tensor, because torch on CUDA divides by a Python number through its reciprocal, which is not exact.
    scale = amax.float() / torch.full_like(amax, _LARGEST_E4M3 * _E2M1[-1], dtype=torch.float32)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_blocks(x: torch.Tensor, fmt: KVFormat, tensor_scale: torch.Tensor | None = None) -> BlockCodes:
    """Codes and block scales of NVFP4 or MXFP4.

    NVFP4 (NVIDIA): the block scale is ``E4M3(amax / (6 * tensor_scale))``, at least ``2 ** -9``. MXFP4 (OCP
    Microscaling 1.0, section 6.3): ``2 ** (floor(log2(amax)) - 2)``, within E8M0's ``2 ** ±127``; magnitudes
    above 6 scales, of which a block can hold up to 8, saturate. A block of zeros takes the smallest scale.

    Args:
        x: ``(..., size)``, finite, any float dtype.
        fmt: ``nvfp4`` or ``mxfp4``.
        tensor_scale: of NVFP4 only, broadcasts against ``(..., size / block)``; without it, that of ``x``
            (:func:`nvfp4_tensor_scale`).

    Raises:
        ValueError: ``fmt`` has no blocks, ``size`` is no multiple of them, or MXFP4 got a tensor scale.
    """
    if not fmt.block:
        raise ValueError(f"{fmt.name} has no blocks; quantize_blocks takes nvfp4 and mxfp4")
    size = x.shape[-1]
    if size % fmt.block:
        raise ValueError(f"{fmt.name} stores blocks of {fmt.block} elements; {size} is no multiple of that")
    blocks = x.float().reshape(*x.shape[:-1], size // fmt.block, fmt.block)
    amax = blocks.abs().amax(-1)
    if fmt.block_scale_dtype == "float8_e8m0fnu":
        if tensor_scale is not None:
            raise ValueError(f"{fmt.name} has no scale of the tensor; leave tensor_scale out")
        block_scale = _power_of_two(torch.where(amax == 0, -_E8M0_BIAS, torch.frexp(amax).exponent - 3))
    else:
        tensor_scale = nvfp4_tensor_scale(x.abs().max()) if tensor_scale is None else tensor_scale.float()
        wanted = _over(amax, _E2M1[-1] * tensor_scale).clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
        block_scale = wanted.float().clamp(min=_SMALLEST_E4M3).to(torch.float8_e4m3fn)
    scale = _block_step(block_scale, tensor_scale).unsqueeze(-1)
    elements = round_to_format(_over(blocks, scale), fmt).flatten(-2)
    levels = torch.tensor(_E2M1, device=x.device)
    index = torch.bucketize(elements.abs(), levels)
    return BlockCodes((index + 8 * elements.signbit()).to(torch.uint8), block_scale, tensor_scale)


def dequantize_blocks(stored: BlockCodes) -> torch.Tensor:
    """``element * (block_scale * tensor_scale)``, ``(..., size)`` float32."""
    levels = torch.tensor((*_E2M1, *(-level for level in _E2M1)), device=stored.codes.device)
    blocks = stored.block_scale.shape
    elements = levels[stored.codes.long()].reshape(*blocks, stored.codes.shape[-1] // blocks[-1])
    scale = _block_step(stored.block_scale, stored.tensor_scale).unsqueeze(-1)
    return (elements * scale).flatten(-2)


def to_unsigned(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed int8 codes as uint8, moved by ``2 ** (bits - 1)`` so that the lowest becomes 0: for packing."""
    return (codes.short() + (1 << bits - 1)).to(torch.uint8)


def to_signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """What :func:`to_unsigned` was given, int8."""
    return (codes.short() - (1 << bits - 1)).to(torch.int8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes without gaps in a little-endian stream of bits.

    Code ``i`` takes bits ``i * bits`` and following, its lowest first; bit ``j`` of the stream is bit
    ``j % 8`` of byte ``j // 8``. Rows are packed each for itself; bits left over in the last byte are 0.

    Args:
        codes: ``(..., n)`` uint8 below ``2 ** bits``; signed ones through :func:`to_unsigned`.
        bits: 1 to 8.

    Returns:
        ``(..., ceil(n * bits / 8))`` uint8.

    Raises:
        ValueError: other codes or bits.
    """
    _require_bits(bits)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype}; pack takes uint8, signed codes through to_unsigned")
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"code {int(codes.max())} does not fit into {bits} bits")
    length = -(-codes.shape[-1] * bits // 8)
    shifts = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = ((codes.unsqueeze(-1) >> shifts) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, 8 * length - stream.shape[-1]))
    return _bits_to_bytes(stream.reshape(*codes.shape[:-1], length, 8))


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """What :func:`pack` was given, ``(..., n)`` uint8.

    Raises:
        ValueError: ``packed`` is not as long as ``n`` codes make it.
    """
    _require_bits(bits)
    length = -(-n * bits // 8)
    if packed.shape[-1] != length:
        raise ValueError(f"{n} codes of {bits} bits take {length} bytes, not {packed.shape[-1]}")
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    stream = ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., : n * bits]
    return _bits_to_bytes(stream.reshape(*packed.shape[:-1], n, bits))


def _bits_to_bytes(stream: torch.Tensor) -> torch.Tensor:
    """``(..., bits)`` of 0 and 1, lowest first, to ``(...)``."""
    weights = 1 << torch.arange(stream.shape[-1], dtype=torch.uint8, device=stream.device)
    return (stream * weights).sum(-1, dtype=torch.uint8)


def _over(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale``, and 0 where the scale is 0."""
    scale = scale.float()
    empty = scale == 0
    return torch.where(empty, 0.0, x / torch.where(empty, 1.0, scale))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """E8M0; made from bits, for its smallest value is no normal float32."""
    return (exponent.clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _block_step(block_scale: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
    step = block_scale.float()
    return step if tensor_scale is None else step * tensor_scale


def _require_static(fmt: KVFormat) -> None:
    if fmt.dynamic:
        raise ValueError(f"{fmt.name} is rounded by the engine; kvcal.online does what it does")


def _require_integer(fmt: KVFormat) -> None:
    _require_static(fmt)
    if not fmt.integer:
        raise ValueError(f"{fmt.name} is no integer format; these codes are for int2 to int8")


def _require_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"codes of {bits} bits cannot be packed; 1 to 8 can")
