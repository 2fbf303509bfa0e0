"""Histograms against sorting: every bound as stated, whatever the values and the order of merging."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import histogram
from kvcal.histogram import BINS, LARGEST, SMALLEST

CPU = torch.device("cpu")
EDGES = histogram.edges(CPU)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)  # zeros, denormals and 3e38 among them
NEAR = st.floats(-600, 600, width=32)
FRACTIONS = st.sampled_from([0.0, 0.001, 0.25, 0.5, 0.9, 0.999, 0.9999, 1.0])


def counted(x: torch.Tensor, *, pooled: bool = False, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Histogram of ``(n, heads, head_dim)``."""
    _, heads, head_dim = x.shape
    counts = torch.zeros(heads, 1 if pooled else head_dim, BINS, dtype=dtype)
    histogram.count(x.transpose(0, 1).unsqueeze(0), None, counts)
    return counts


def bound(exact: float, amax: float) -> float:
    """How far from the exact value of its rank a quantile may be."""
    magnitude = abs(exact)
    if magnitude < SMALLEST:
        return 2 * SMALLEST
    return magnitude / 32 if magnitude < LARGEST else amax - LARGEST


def test_edges_are_ascending_symmetric_and_a_32nd_apart() -> None:
    inner = EDGES[1:-1]
    assert EDGES.shape == (BINS + 1,)
    assert torch.equal(EDGES, -EDGES.flip(0))
    assert EDGES[0] == -math.inf
    assert inner.max() == LARGEST
    assert inner.abs().min() == SMALLEST
    positive = inner[inner > 0]
    widths = positive.diff()
    assert bool((widths > 0).all())
    assert bool((widths <= positive[:-1] / 32).all())
    assert bool((widths >= positive[:-1] / 64).all())


@given(values=st.lists(FINITE | NEAR, min_size=1, max_size=50))
@settings(max_examples=300, deadline=None)
def test_every_value_lies_between_the_edges_of_its_bin(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    index = histogram.bin_of(x).long()
    left, right = EDGES[index], EDGES[index + 1]
    wide = x.double()
    inside = torch.where(wide < 0, (left < wide) & (wide <= right), (left <= wide) & (wide < right))
    assert bool((inside | ((wide.abs() < SMALLEST) & (left < wide) & (wide < right))).all())


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 2.0**-9])
def test_zeros_and_denormals_are_in_the_middle(value: float) -> None:
    assert int(histogram.bin_of(torch.tensor(value))) == BINS // 2


@pytest.mark.parametrize(("value", "index"), [(512.0, BINS - 1), (3e38, BINS - 1), (-512.0, 0), (-3e38, 0)])
def test_huge_values_are_at_the_ends(value: float, index: int) -> None:
    assert int(histogram.bin_of(torch.tensor(value))) == index


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_counted_by_value(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 2, 3) * 30).to(dtype)
    assert torch.equal(counted(x), counted(x.float()))


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 40),
    scale=st.sampled_from([1e-4, 1.0, 200.0]),
    pooled=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_numpy(seed: int, n: int, scale: float, pooled: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, n, 5, generator=generator).permute(1, 0, 2) * scale  # not contiguous
    found = counted(x, pooled=pooled)
    for head in range(4):
        for channel in range(found.shape[1]):
            values = x[:, head] if pooled else x[:, head, channel]
            # numpy's bins include their left edge, negative bins here their right one
            mirrored, _ = np.histogram(-values[values < 0].double().numpy(), EDGES.numpy())
            plain, _ = np.histogram(values[values >= 0].double().numpy(), EDGES.numpy())
            assert np.array_equal(found[head, channel].numpy(), plain + mirrored[::-1])


@given(values=st.lists(FINITE | NEAR, min_size=1, max_size=80), fraction=FRACTIONS)
@settings(max_examples=400, deadline=None)
def test_quantiles_keep_their_bound(values: list[float], fraction: float) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    counts = counted(x.view(-1, 1, 1))[0, 0]
    rank = min(max(math.ceil(fraction * len(values)), 1), len(values)) - 1
    low, high, amax = x.min(), x.max(), x.abs().max()
    exact = float(x.sort().values[rank])
    found = float(histogram.quantile(counts, fraction, low, high))
    assert float(low) <= found <= float(high)
    assert abs(found - exact) <= bound(exact, float(amax)) * (1 + 1e-12)
    exact = float(x.abs().sort().values[rank])
    found = float(histogram.magnitude_quantile(counts, fraction, amax))
    assert 0 <= found <= float(amax)
    assert abs(found - exact) <= bound(exact, float(amax)) * (1 + 1e-12)


def test_quantiles_of_many_values_are_far_closer_than_the_bound() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    counts = counted(x.view(-1, 1, 1))[0, 0]
    for fraction in (0.001, 0.1, 0.5, 0.9, 0.999):
        found = float(histogram.quantile(counts, fraction, x.min(), x.max()))
        assert found == pytest.approx(float(np.quantile(x.double().numpy(), fraction)), rel=4e-3, abs=4e-3)


@given(seed=st.integers(0, 2**31), parts=st.lists(st.integers(0, 9), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_merging_is_adding_in_any_order(seed: int, parts: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(n, 2, 3, generator=generator) * 10 for n in parts]
    together = counted(torch.cat(batches))
    assert torch.equal(torch.stack([counted(b) for b in batches]).sum(0), together)
    assert torch.equal(torch.stack([counted(b) for b in reversed(batches)]).sum(0), together)
    assert int(together.sum()) == 6 * sum(parts)


def test_quantiles_of_many_channels_are_those_of_each() -> None:
    x = torch.randn(500, 3, 4) * torch.logspace(-3, 3, 12).view(3, 4)
    counts, low, high = counted(x), x.amin(0), x.amax(0)
    together = histogram.quantile(counts, 0.9, low, high)
    for head in range(3):
        for channel in range(4):
            each = counts[head, channel], 0.9, low[head, channel], high[head, channel]
            assert together[head, channel] == histogram.quantile(*each)


def test_a_model_of_8b_fits() -> None:
    channels = 32 * 2 * 8 * 128
    assert channels * BINS * 4 < 300e6
