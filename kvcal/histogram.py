"""Mergeable histograms of signed values in bins that are the same for all data, so that adding merges them.

Bins come from the bit pattern of float32: the exponent and the first 5 bits of the mantissa, with the sign.
They are ordered by value: overflow below ``-512``, 544 negative bins, one bin around zero for
``|x| < 2^-8``, 544 positive bins, overflow from 512. A bin ``[a, b)`` of a magnitude in between has
``b - a <= a / 32``, so whatever lies in it is known to 1/32 of itself; around zero it is known to 2^-8, and
beyond 512 up to the exact extremes, which are kept elsewhere.

1091 bins of int32 per channel of K and V are 286 MB for 32 layers of 8 KV heads of 128 channels.
"""

from __future__ import annotations

import torch

_MANTISSA_BITS = 5
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -8, 9

SMALLEST = 2.0**_SMALLEST_EXPONENT
LARGEST = 2.0**_LARGEST_EXPONENT

_PER_OCTAVE = 2**_MANTISSA_BITS
ZERO = (_LARGEST_EXPONENT - _SMALLEST_EXPONENT) * _PER_OCTAVE + 1  # index of the bin around zero
BINS = 2 * ZERO + 1

SHIFT = 23 - _MANTISSA_BITS
FIRST = (127 + _SMALLEST_EXPONENT) << _MANTISSA_BITS  # the leading bits of SMALLEST


def edges(device: torch.device) -> torch.Tensor:
    """``(BINS + 1,)`` float64, ascending; bin ``i`` lies between edges ``i`` and ``i + 1``, ends infinite."""
    positive = _magnitude_edges(device)[1:]
    return torch.cat([-positive.flip(0), positive])


def bin_of(x: torch.Tensor) -> torch.Tensor:
    """Index of the bin of each value, int32 in the shape of ``x``; NaN counts as overflow."""
    bits = x.float().view(torch.int32)
    # The magnitude's leading bits grow with it; from 0 around zero to ZERO in overflow.
    index = bits & 0x7FFFFFFF
    index >>= SHIFT
    index -= FIRST - 1
    index.clamp_(0, ZERO)
    sign = bits >> 31  # -1 or 0: i ^ -1 is -i - 1
    index ^= sign
    index -= sign
    index += ZERO
    return index


def count(x: torch.Tensor, keep: torch.Tensor | None, counts: torch.Tensor) -> None:
    """Add values to a histogram in place.

    Args:
        x: ``(batch, heads, tokens, head_dim)``, any float dtype and strides.
        keep: ``(batch, tokens)`` bool, False on padding; None where nothing is padded.
        counts: ``(heads, head_dim, BINS)``, or ``(heads, 1, BINS)`` to pool the channels of a head;
            contiguous, int32 or int64.
    """
    heads, channels, _ = counts.shape
    starts = torch.arange(heads * channels, dtype=torch.int32, device=x.device) * BINS
    rows = x.transpose(1, 2)
    index = bin_of(rows if keep is None else rows[keep])
    index += starts.view(heads, channels)
    one = torch.ones((), dtype=counts.dtype, device=x.device)
    # In the order of memory, so that a transposed view needs no copy: addition has no order.
    ordered = index.permute(sorted(range(index.dim()), key=index.stride, reverse=True))
    counts.view(-1).index_add_(0, ordered.flatten(), one.expand(index.numel()))


def quantile(counts: torch.Tensor, fraction: float, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The value of rank ``ceil(fraction * n)`` of ``n``, up to the width of its bin.

    Args:
        counts: ``(..., BINS)``, none empty.
        fraction: within [0, 1].
        low: exact minimum, ``(...)``; the result is never below it.
        high: exact maximum, ``(...)``; nor above this.

    Returns:
        ``(...)`` float64, interpolated inside the bin by rank.
    """
    return _interpolated(counts, edges(counts.device), fraction, low, high)


def magnitude_quantile(counts: torch.Tensor, fraction: float, amax: torch.Tensor) -> torch.Tensor:
    """:func:`quantile` of magnitudes; ``amax`` is the exact largest, ``(...)``."""
    below, above = counts[..., :ZERO].flip(-1), counts[..., ZERO + 1 :]
    magnitudes = torch.cat([counts[..., ZERO : ZERO + 1], below + above], -1)
    return _interpolated(magnitudes, _magnitude_edges(counts.device), fraction, torch.zeros_like(amax), amax)


def _magnitude_edges(device: torch.device) -> torch.Tensor:
    step = torch.arange(ZERO, dtype=torch.float64, device=device)
    octave = torch.floor(step / _PER_OCTAVE)
    magnitudes = torch.exp2(octave + _SMALLEST_EXPONENT) * (1 + step / _PER_OCTAVE - octave)
    return torch.cat([magnitudes.new_zeros(1), magnitudes, magnitudes.new_full((1,), float("inf"))])


def _interpolated(
    counts: torch.Tensor, edges: torch.Tensor, fraction: float, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    running = counts.cumsum(-1, dtype=torch.int64)
    total = running[..., -1:]
    rank = torch.ceil(total.double() * fraction).long().clamp(min=1).minimum(total)
    index = torch.searchsorted(running, rank)
    inside = counts.gather(-1, index).double()
    position = ((rank - running.gather(-1, index)).double() + inside - 0.5) / inside
    low, high = low.double().unsqueeze(-1), high.double().unsqueeze(-1)
    left, right = (edges[at].clamp(low, high) for at in (index, index + 1))
    return (left + (right - left) * position).squeeze(-1)
