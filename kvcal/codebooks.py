"""Levels that are not evenly spaced.

``gaussian``: the Lloyd-Max levels of N(0, 1): each level is the mean of what is nearest to it (TurboQuant,
arXiv 2504.19874, section 3.1).

``nuq``: k-means in one dimension, weighted by what an error costs (KVQuant, arXiv 2401.18079, section 3.3),
on a histogram of values that each vector's range has brought into [-1, 1].
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

# Bins of a histogram over [-1, 1]: their width is far below the distance of 16 levels.
BINS = 4096

_MAX_ROUNDS = 500


@functools.cache
def _gaussian(bits: int) -> tuple[float, ...]:
    levels = [math.sqrt(2) * 2 * (i + 0.5) / 2**bits for i in range(2 ** (bits - 1))]
    for _ in range(20_000):
        edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
        found = [_mean_between(a, b) for a, b in itertools.pairwise(edges)]
        moved = max(abs(a - b) for a, b in zip(found, levels, strict=True))
        levels = found
        if moved < 1e-9:
            break
    return tuple(levels)


def gaussian(bits: int) -> torch.Tensor:
    """Lloyd-Max levels of N(0, 1), ascending, ``(2 ** bits,)`` float32.

    >>> [round(x, 3) for x in gaussian(2).tolist()]
    [-1.51, -0.453, 0.453, 1.51]
    """
    positive = torch.tensor(_gaussian(bits))
    return torch.cat([-positive.flip(0), positive])


def count(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted histogram of values in [-1, 1], those beyond at the ends: ``(BINS,)`` float64."""
    index = ((x.float() + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
    return torch.bincount(index.flatten(), weight.double().flatten(), minlength=BINS)


def nuq(counts: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels of weighted k-means, ascending, ``(2 ** bits,)`` float32.

    Starts from equal shares of the weight, which ends in the same levels every time; where shares fall
    together, a level is added where the error is largest.

    Args:
        counts: weights by value, as :func:`count` gives them.
        bits: the number of levels is ``2 ** bits``.
    """
    centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) / (BINS / 2) - 1
    counts = counts.double().cpu()
    number = 2**bits
    share = counts.cumsum(0) / counts.sum()
    starts = torch.searchsorted(share, (torch.arange(number, dtype=torch.float64) + 0.5) / number)
    levels = torch.unique(centres[starts.clamp(max=BINS - 1)])
    while len(levels) < number:
        levels = _split_worst(levels, centres, counts)
    for _ in range(_MAX_ROUNDS):
        nearest = torch.bucketize(centres, (levels[1:] + levels[:-1]) / 2)
        weight = torch.zeros(number, dtype=torch.float64).index_add_(0, nearest, counts)
        total = torch.zeros(number, dtype=torch.float64).index_add_(0, nearest, counts * centres)
        found = torch.where(weight > 0, total / weight.clamp(min=1e-300), levels)
        settled = bool((found - levels).abs().max() < 1e-7)
        levels = found
        if settled:
            break
    narrow: torch.Tensor = levels.float()
    return narrow


def _split_worst(levels: torch.Tensor, centres: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    nearest = torch.bucketize(centres, (levels[1:] + levels[:-1]) / 2)
    error = counts * (centres - levels[nearest]).square()
    error[torch.isin(centres, levels)] = -1  # or a histogram of few values would be split without end
    found: torch.Tensor = torch.unique(torch.cat([levels, centres[error.argmax()].reshape(1)]))
    return found


def _mean_between(a: float, b: float) -> float:
    """Mean of N(0, 1) between two bounds."""
    mass = (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2
    density = [0.0 if math.isinf(x) else math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (a, b)]
    return (density[0] - density[1]) / mass
