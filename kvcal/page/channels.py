"""Magnitudes of K and V channel by channel, as the cache holds them and as they were before any fold.

Statistics of a folded checkpoint are those of its folded weights. Folds that scale, shift, turn or swap
channels can be taken back from extremes and sums alone; one that mixes channels of V cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcal.statistics import SideStatistics
from kvcal.transforms.record import LayerTransform


@dataclass(frozen=True)
class Profile:
    """``amax`` and ``rms`` of each channel, ``(heads, head_dim)`` float64."""

    amax: torch.Tensor
    rms: torch.Tensor

    @property
    def spread(self) -> torch.Tensor:
        """Largest ``amax`` of a head's channels over their median, ``(heads,)``; 1 for a head of zeros."""
        median = self.amax.median(-1).values
        return torch.where(median > 0, self.amax.amax(-1) / median, torch.ones_like(median))


def profile(seen: SideStatistics) -> Profile:
    """Of the side that was seen."""
    return Profile(seen.amax.double(), (seen.squares / int(seen.tokens)).clamp(min=0).sqrt())


def unfolded_key(seen: SideStatistics, transform: LayerTransform) -> Profile:
    """Of K before the fold: ``k = s (k' T) + o`` in the words of :mod:`kvcal.transforms.record`."""
    found = _exact(seen)
    if transform.key_turn is not None:
        found = _turned_back(found, transform.key_turn)
    if transform.key_scale is not None:
        found = _scaled(found, transform.key_scale)
    if transform.key_offset is not None:
        found = _shifted(found, transform.key_offset)
    return profile(found)


def unfolded_value(seen: SideStatistics, transform: LayerTransform) -> Profile | None:
    """Of V before the fold; None where the map mixes channels, of which extremes tell nothing."""
    if transform.value_map is None:
        return profile(seen)
    scale = transform.value_map.diagonal(dim1=-2, dim2=-1)
    if not torch.equal(torch.diag_embed(scale), transform.value_map):
        return None
    return profile(_scaled(_exact(seen), 1 / scale))


def _exact(seen: SideStatistics) -> SideStatistics:
    return replace(seen, minimum=seen.minimum.double(), maximum=seen.maximum.double())


def _turned_back(seen: SideStatistics, turn: torch.Tensor) -> SideStatistics:
    """``k' T``: channel j comes from the row of T that has its ±1 in column j."""
    source = turn.abs().argmax(-2)  # (heads, head_dim)
    positive = turn.sum(-2) > 0
    low, high = seen.minimum.gather(-1, source), seen.maximum.gather(-1, source)
    total = seen.total.gather(-1, source)
    return replace(
        seen,
        minimum=torch.where(positive, low, -high),
        maximum=torch.where(positive, high, -low),
        total=torch.where(positive, total, -total),
        squares=seen.squares.gather(-1, source),
    )


def _scaled(seen: SideStatistics, factor: torch.Tensor) -> SideStatistics:
    ends = seen.minimum * factor, seen.maximum * factor
    return replace(
        seen,
        minimum=torch.minimum(*ends),
        maximum=torch.maximum(*ends),
        total=seen.total * factor,
        squares=seen.squares * factor.square(),
    )


def _shifted(seen: SideStatistics, offset: torch.Tensor) -> SideStatistics:
    squares = seen.squares + 2 * offset * seen.total + int(seen.tokens) * offset.square()
    return replace(
        seen,
        minimum=seen.minimum + offset,
        maximum=seen.maximum + offset,
        total=seen.total + int(seen.tokens) * offset,
        squares=squares,
    )
