"""Dynamic quantizers: a group of numbers to what a cache would give back for them, in plain torch.

Sources of each formula: KIVI (asymmetric, min and max of the group), QuaRot (the same with a clipped range),
TurboQuant (Lloyd-Max levels for a vector turned so that its channels are nearly Gaussian).
"""

from __future__ import annotations

from typing import Literal

import torch

from kvcal.formats import FP8_E4M3, KVFormat
from kvcal.granularity import Granularity
from kvcal.kernels import codes

ZeroPoint = Literal["none", "integer", "float"]

# What ``clip: search`` tries; of a Gaussian group of 64 the best is 0.96 at 4 bits and 0.64 at 2.
SEARCHED_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)

# A scale of 8 bits is never 0, for that would erase a group that is only small.
_LEAST_SCALE = FP8_E4M3.min_subnormal


def quantize_dequantize(
    x: torch.Tensor,
    fmt: KVFormat,
    grouping: Granularity,
    *,
    zero_point: ZeroPoint = "none",
    clip: float | Literal["search"] = 1.0,
    scale_bits: int = 16,
    unit: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a cache with scales of its own gives back.

    Args:
        x: ``(batch, heads, tokens, head_dim)``.
        fmt: a static format; integers only where there is a zero point.
        grouping: a dynamic granularity.
        zero_point: ``none``: ``x̂ = s q`` with ``s = c amax / max``. ``float``: ``x̂ = s q + low``,
            ``s = (high - low) / (2^b - 1)``, both ends moved towards their middle by ``c``. ``integer``:
            ``x̂ = s (q - z)`` with ``z = round(-low / s)`` a code itself.
        clip: the factor ``c``, or ``search``: the one of :data:`SEARCHED_CLIPS` with the least squared error
            in each group.
        scale_bits: 32 (float32), 16 (float16), 8 (E4M3 times ``unit``) for scales and float zero points.
        unit: ``(heads, 1, 1)`` positive; what an 8-bit scale counts in.

    Returns:
        float32 in the shape of ``x``.
    """
    groups = grouping.to_canonical(x.float())
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best = error = None
    for factor in SEARCHED_CLIPS if clip == "search" else (float(clip),):
        found = _through(groups, low, high, factor, fmt, zero_point, scale_bits, unit)
        if clip != "search":
            best = found
            break
        off = (found - groups).square().sum(-1, keepdim=True)
        if best is None or error is None:
            best, error = found, off
        else:
            best = torch.where(off < error, found, best)
            error = torch.minimum(off, error)
    back: torch.Tensor = grouping.from_canonical(best, x.shape)
    return back


def nearest_level(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Each value's nearest of ``levels`` (ascending, ``(n,)``)."""
    middles = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize(x.contiguous(), middles)]


def with_gaussian_levels(
    x: torch.Tensor, levels: torch.Tensor, grouping: Granularity, scale_bits: int
) -> torch.Tensor:
    """Levels for N(0, 1) times the root mean square of each group, float32 in the shape of ``x``."""
    groups = grouping.to_canonical(x.float())
    scale = _stored(groups.square().mean(-1, keepdim=True).sqrt(), scale_bits, None, _LEAST_SCALE)
    safe = torch.where(scale == 0, 1.0, scale)
    back: torch.Tensor = grouping.from_canonical(nearest_level(groups / safe, levels) * scale, x.shape)
    return back


def with_levels_over_range(
    x: torch.Tensor, levels: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """Levels in [-1, 1] stretched over ``[low, high]``, which broadcast against ``x``."""
    half, middle = (high - low) / 2, (high + low) / 2
    safe = torch.where(half == 0, 1.0, half)
    return nearest_level((x.float() - middle) / safe, levels) * half + middle


def _through(
    x: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    clip: float,
    fmt: KVFormat,
    zero_point: ZeroPoint,
    scale_bits: int,
    unit: torch.Tensor | None,
) -> torch.Tensor:
    if zero_point == "none":
        scale = _stored(torch.maximum(high, -low) * clip / fmt.max, scale_bits, unit, _LEAST_SCALE)
        safe = torch.where(scale == 0, 1.0, scale)
        return codes.round_to_format(x / safe, fmt) * scale
    middle, reach = (high + low) / 2, (high - low) / 2 * clip
    steps = 2**fmt.bits - 1
    scale = _stored(2 * reach / steps, scale_bits, unit, _LEAST_SCALE)
    if zero_point == "float":
        base = _stored(middle - reach, scale_bits, unit, -FP8_E4M3.max)
        return codes.dequantize_asymmetric(codes.quantize_asymmetric(x, base, scale, fmt), base, scale)
    safe = torch.where(scale == 0, 1.0, scale)
    zero = (-(middle - reach) / safe).round().clamp(0, steps)
    return ((x / safe).round() + zero).clamp(0, steps).sub(zero) * scale


def _stored(value: torch.Tensor, bits: int, unit: torch.Tensor | None, least: float) -> torch.Tensor:
    """A scale or offset as it is read back; ``least`` is the smallest that 8 bits count down to."""
    if bits == 8:
        counted = (value / _unit(unit)).clamp(least, FP8_E4M3.max)
        return counted.to(torch.float8_e4m3fn).float() * _unit(unit)
    return value.half().float() if bits == 16 else value


def _unit(unit: torch.Tensor | None) -> torch.Tensor:
    if unit is None:
        raise ValueError("scales of 8 bits need the unit that they count in")
    return unit
