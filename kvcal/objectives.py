"""Which range of values a static scale covers: all that was seen, most of it, or what costs least.

``amax``: the exact extremes. ``percentile``: all but the given share. ``mse``: the range with the smallest
expected squared error of the format's quantizer. ``attention``: the same with each channel's error weighted
by what reads it, so that a scale shared by channels serves those that matter.

The error of a range is computed from the histogram with values spread evenly inside each bin. A quantizer is
its levels: between two midpoints of neighbours all goes to one, so the error is a sum over levels ``c`` of
``M2 - 2 c M1 + c² M0``, the moments of what lies in between, and those are differences of running sums. It is
exact for that distribution whether a step is wider than a bin or finer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcal import histogram, models
from kvcal.arch import ModelSpec
from kvcal.errors import ModelError, StatisticsError, UsageError
from kvcal.formats import KVFormat
from kvcal.granularity import Granularity
from kvcal.recipe import Objective, Side
from kvcal.statistics import SideStatistics

# A range is narrowed in quarter octaves down to 1/256, then finer around the best.
_COARSE = tuple(2 ** (-step / 4) for step in range(1, 33))
_FINE = tuple(2 ** (step / 24) for step in range(5, -6, -1) if step)

# Differences of error below this share of the energy are rounding; the wider range is kept.
_NOISE = 1e-12


def ranges(
    seen: SideStatistics,
    granularity: Granularity,
    fmt: KVFormat,
    objective: Objective,
    *,
    symmetric: bool,
    percentile: float = 99.99,
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper end of what a scale should cover.

    Args:
        seen: one side of one layer, with distributions unless the objective is ``amax``.
        granularity: per tensor, per head or per channel.
        fmt: what is stored; ``mse`` and ``attention`` depend on it.
        objective: see above.
        symmetric: around 0, where code 0 stands for 0 and ``high`` for the format's maximum; otherwise codes
            0 to ``2^bits - 1`` reach from ``low`` to ``high``, and both objectives of error narrow the range
            around its middle.
        percentile: of magnitudes if symmetric; otherwise as much is left out at each end.
        weight: ``(heads, head_dim)``, not negative; for ``attention`` only.

    Returns:
        Two float32 tensors of the granularity's scale shape, within the exact extremes (of magnitudes if
        symmetric, where the first is minus the second).

    Raises:
        StatisticsError: distributions were not collected, or not for each channel.
        UsageError: an asymmetric range of a float format is to be optimized.
    """
    least, most = _grouped(seen.minimum, granularity).amin(-1), _grouped(seen.maximum, granularity).amax(-1)
    amax = torch.maximum(most, -least)
    low, high = (-amax, amax) if symmetric else (least, most)
    if objective == "amax":
        return low, high
    if objective == "attention" and weight is None:
        raise UsageError("the objective attention needs the weight of each channel")
    counts = _pooled(seen, granularity, weight if objective == "attention" else None)
    if counts.shape[:-1] != high.shape:
        raise StatisticsError(f"Q is not counted per channel; scale it {granularity.name} by amax")
    if objective == "percentile":
        share = percentile / 100
        if symmetric:
            high = histogram.magnitude_quantile(counts, share, high).float()
            return -high, high
        ends = (histogram.quantile(counts, part, low, high).float() for part in (1 - share, share))
        return next(ends), next(ends)
    spread = Spread.of(counts.flatten(0, -2), least.flatten(), most.flatten())
    start, stop = low.flatten().double(), high.flatten().double()
    middle, widest = (stop + start) / 2, (stop - start) / 2
    reach = _cheapest(spread, middle, widest, _unit_levels(fmt, symmetric))
    return (middle - reach).float().view(low.shape), (middle + reach).float().view(high.shape)


def key_weight(sides: Mapping[Side, SideStatistics]) -> torch.Tensor:
    """What an error of each channel of K costs in logits: E[q²] of the queries that read it.

    The logit variance ``E[(q·e)²]`` of independent errors is ``Σ_c E[q_c²] E[e_c²]``.

    Args:
        sides: of one layer, with distributions.

    Returns:
        ``(kv_heads, head_dim)`` float64, summed over the query heads of a KV head.
    """
    moments = _collected(sides["q"].moments)
    return moments.diagonal(dim1=-2, dim2=-1) / int(sides["q"].tokens)


def value_weight(output: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """What an error of each channel of V costs in the output: the diagonal of ``Σ_h W_o^(h)ᵀ W_o^(h)``.

    Args:
        output: weight of the output projection, ``(hidden, heads * head_dim)``.
        kv_heads: heads of V; query head ``h`` reads the one at ``h // (heads / kv_heads)``.
        head_dim: channels of a head.

    Returns:
        ``(kv_heads, head_dim)`` float64 on the CPU.
    """
    return output.detach().double().cpu().square().sum(0).view(kv_heads, -1, head_dim).sum(1)


def value_weights(model: Any, spec: ModelSpec) -> dict[int, torch.Tensor]:
    """:func:`value_weight` of every layer of a model as its weights are now."""
    return {
        layer.index: value_weight(output, layer.kv_heads, layer.head_dim)
        for layer, output in zip(spec.layers, output_weights(model, spec), strict=True)
    }


def output_weights(model: Any, spec: ModelSpec) -> list[torch.Tensor]:
    """``(hidden, heads * head_dim)`` of every layer's output projection.

    Raises:
        ModelError: nobody has found out which weights those are.
    """
    names = spec.projections
    if names is None:
        raise ModelError(f"what reads V in {spec.model_type} is not known, so errors of V cannot be weighted")
    found = (models.weight(model, f"{layer.module}.{names.o}.weight") for layer in spec.layers)
    return [weight.T if names.transposed else weight for weight in found]


@dataclass(frozen=True)
class Spread:
    """Values spread evenly inside bins, for ``n`` scales.

    Attributes:
        edges: ``(n, bins + 1)`` float64, none beyond the exact extremes; a bin without width holds its values
            at its edge.
        counts: ``(n, bins)`` float64, or any weight.
        running: sums of 1, x and x² below each edge, ``(3, n, bins + 1)``.
    """

    edges: torch.Tensor
    counts: torch.Tensor
    running: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Spread:
        """``counts`` is ``(n, BINS)`` as of a histogram; ``low`` and ``high`` are the extremes, ``(n,)``."""
        edges = histogram.edges(counts.device)
        edges = edges.clamp(low.double().unsqueeze(-1), high.double().unsqueeze(-1)).contiguous()
        counts = counts.double()
        each = counts * _means(edges[:, :-1], edges[:, 1:])
        return cls(edges, counts, torch.nn.functional.pad(each.cumsum(-1), (1, 0)))

    def error(self, levels: torch.Tensor) -> torch.Tensor:
        """Squared error, summed, of rounding to the nearest level.

        Args:
            levels: ``(n, levels)`` float64, ascending.

        Returns:
            ``(n,)`` float64.
        """
        below = self._below((levels[:, 1:] + levels[:, :-1]) / 2)
        ends = torch.zeros_like(self.running[..., :1]), self.running[..., -1:]
        cells = torch.cat([ends[0], below, ends[1]], -1).diff(dim=-1)
        return (cells[2] - 2 * levels * cells[1] + levels.square() * cells[0]).sum(-1)

    def _below(self, x: torch.Tensor) -> torch.Tensor:
        """Sums of 1, x and x² below ``(n, points)``, ``(3, n, points)``."""
        bins = self.counts.shape[-1]
        index = (torch.searchsorted(self.edges, x, right=True) - 1).clamp(0, bins - 1)
        left, right = self.edges.gather(-1, index), self.edges.gather(-1, index + 1)
        width = right - left
        share = torch.where(width > 0, ((x - left) / width).clamp(0, 1), (x >= left).double())
        inside = self.counts.gather(-1, index) * share * _means(left, left + share * width)
        return self.running.gather(-1, index.expand(3, -1, -1)) + inside


def _means(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Means of 1, x and x² over an interval."""
    second = (left.square() + left * right + right.square()) / 3
    return torch.stack([torch.ones_like(left), (left + right) / 2, second])


def _cheapest(spread: Spread, middle: torch.Tensor, widest: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Half width of the range around ``middle`` with the smallest error, at most ``widest``; all ``(n,)``."""
    energy = spread.running[2, :, -1]

    def error(factor: torch.Tensor) -> torch.Tensor:
        return spread.error(middle.unsqueeze(-1) + (factor * widest).unsqueeze(-1) * unit)

    best = torch.ones_like(widest)
    least = error(best)
    for factors in (_COARSE, _FINE):
        start = best
        for factor in factors:
            tried = (start * factor).clamp(max=1.0)
            found = error(tried)
            better = found < least - _NOISE * energy
            best, least = torch.where(better, tried, best), torch.where(better, found, least)
    return best * widest


def _unit_levels(fmt: KVFormat, symmetric: bool) -> torch.Tensor:
    """What the codes stand for where the range is [-1, 1], ascending float64."""
    if not symmetric:
        if not fmt.integer:
            raise UsageError(f"{fmt.name} has no zero point: its range is symmetric")
        steps = (1 << fmt.bits) - 1
        return torch.arange(steps + 1, dtype=torch.float64) * 2 / steps - 1
    if fmt.integer:
        return torch.arange(-fmt.max - 1, fmt.max + 1, dtype=torch.float64) / fmt.max
    # Subnormals and normals of each exponent up to the largest value.
    mantissas = torch.arange(2**fmt.mantissa_bits, dtype=torch.float64) * fmt.min_subnormal
    octaves = range(math.frexp(fmt.max)[1] - math.frexp(fmt.min_normal)[1] + 1)
    normals = [(fmt.min_normal + mantissas) * 2.0**octave for octave in octaves]
    positive = torch.cat([mantissas, *normals])
    positive = positive[positive <= fmt.max]
    return torch.cat([-positive[1:].flip(0), positive]) / fmt.max


def _grouped(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """``(heads, head_dim)`` -> ``(*scale_shape, group)``."""
    # One cached token: (1, heads, 1, head_dim)
    grouped: torch.Tensor = granularity.to_canonical(x[None, :, None, :])[0]
    return grouped


def _pooled(seen: SideStatistics, granularity: Granularity, weight: torch.Tensor | None) -> torch.Tensor:
    """Counts of what shares a scale, ``(*scale_shape, bins)``: each channel's times its weight."""
    # A bin takes the place of a token's batch row: (bins, heads, 1, channels)
    counts = _collected(seen.histogram).movedim(-1, 0).unsqueeze(2)
    if weight is not None:
        counts = counts * weight[:, None, :].to(counts.device, torch.float64)
    canonical: torch.Tensor = granularity.to_canonical(counts)
    pooled: torch.Tensor = canonical.sum(-1)
    return pooled.movedim(0, -1)


def _collected(part: torch.Tensor | None) -> torch.Tensor:
    if part is None:
        raise StatisticsError("only extremes and sums were collected; this objective needs distributions")
    return part
