"""Levels against the published tables and against exhaustive search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvcal import codebooks


@pytest.mark.parametrize(
    ("bits", "positive"),  # Max, Quantizing for minimum distortion, 1960, table I
    [
        (1, [0.7980]),
        (2, [0.4528, 1.510]),
        (3, [0.2451, 0.7560, 1.344, 2.152]),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
    ],
)
def test_gaussian_levels_are_those_of_max(bits: int, positive: list[float]) -> None:
    found = codebooks.gaussian(bits)
    assert found[2 ** (bits - 1) :].tolist() == pytest.approx(positive, rel=1e-3)
    assert torch.equal(found, -found.flip(0))


def cost(levels: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> float:
    return float((weights * (values[:, None] - levels).square().amin(1)).sum())


@given(
    st.lists(
        st.tuples(st.integers(0, codebooks.BINS - 1), st.floats(0.1, 10)),
        min_size=4,
        max_size=9,
        unique_by=lambda p: p[0],
    )
)
@example([(0, 2.0), (1, 2.0), (2, 2.0), (5, 3.0), (19, 0.5)])  # settles at half of one level's cost
def test_levels_are_the_means_of_what_is_nearest_to_them(points: list[tuple[int, float]]) -> None:
    counts = torch.zeros(codebooks.BINS, dtype=torch.float64)
    for place, weight in points:
        counts[place] += weight
    found = codebooks.nuq(counts, 2)
    assert found.shape == (4,)
    assert bool((found.diff() > 0).all())
    values = (torch.arange(codebooks.BINS) + 0.5) / (codebooks.BINS / 2) - 1
    kept = counts.nonzero().flatten()
    x, w = values[kept].double(), counts[kept]
    nearest = (x[:, None] - found.double()).abs().argmin(1)
    for level in range(4):  # the fixed point of Lloyd's algorithm, which need not be the best there is
        mine = nearest == level
        if bool(mine.any()):
            assert float(found[level]) == pytest.approx(
                float((w[mine] * x[mine]).sum() / w[mine].sum()), abs=1e-6
            )
    one = float((w * (x - (w * x).sum() / w.sum()).square()).sum())
    # Below one level's cost, by no certain share: a fixed point is not the best one.
    assert cost(found.double(), x, w) < one


def test_weights_move_levels_to_where_errors_cost() -> None:
    x = torch.linspace(-1, 1, 4001)
    heavy = torch.where(x > 0.5, 100.0, 1.0)
    even = codebooks.nuq(codebooks.count(x, torch.ones_like(x)), 4)
    drawn = codebooks.nuq(codebooks.count(x, heavy), 4)
    assert int((even > 0.5).sum()) == 4
    assert int((drawn > 0.5).sum()) > 8
    assert even.tolist() == pytest.approx([(2 * i + 1) / 16 - 1 for i in range(16)], abs=2e-3)


def test_a_histogram_of_one_value_still_gives_all_levels() -> None:
    counts = torch.zeros(codebooks.BINS)
    counts[7] = 3.0
    found = codebooks.nuq(counts, 4)
    assert len(found.unique()) == 16


@given(st.integers(0, 2**32 - 1))
def test_counting_loses_no_weight(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 50, generator=generator) * 2.4 - 1.2
    weight = torch.rand(3, 50, generator=generator)
    counts = codebooks.count(x, weight)
    assert float(counts.sum()) == pytest.approx(float(weight.double().sum()))
    assert float(counts[0]) >= float(weight[x < -1].sum()) - 1e-5
