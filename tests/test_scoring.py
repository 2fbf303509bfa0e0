"""Scores, intervals and tests against scipy's own and against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvcal import scoring

shares = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12)
rights = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=24
)


def test_recall_wants_whole_words_in_any_case() -> None:
    assert scoring.recall("ABC, 12345 and abd.", ["abc", "ABD", "1234", "345"]) == 0.5
    assert scoring.recall("", ["1"]) == 0
    assert scoring.recall("a+b", ["a+b"]) == 1


def test_ratio_is_matching_characters() -> None:
    assert scoring.ratio("", "x") == 0
    assert scoring.ratio("the cat", "the cat") == 1
    # difflib would call a letter of a long text junk where it is frequent
    assert scoring.ratio("a" * 300, "a" * 300) == 1


@given(st.integers(1, 40), st.data())
def test_bounds_are_clopper_and_pearsons(n: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, n))
    expected = stats.binomtest(right, n).proportion_ci(0.95, method="exact")
    low, high = scoring.bounds([1.0] * right + [0.0] * (n - right))
    assert low == pytest.approx(expected.low)
    assert high == pytest.approx(expected.high)


@given(shares)
def test_bounds_hold_the_mean(scores: list[float]) -> None:
    low, high = scoring.bounds(scores)
    assert 0 <= low <= scoring.mean(scores) <= high <= 1


@given(rights)
def test_right_and_wrong_is_mcnemars_exact_test(pairs: list[tuple[float, float]]) -> None:
    lost, won = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    tail = sum(math.comb(lost + won, i) for i in range(min(lost, won) + 1)) / 2 ** (lost + won)
    found = scoring.p_value([a for a, _ in pairs], [b for _, b in pairs], seed=0)
    assert found == pytest.approx(min(1.0, 2 * tail))


def test_other_scores_are_permuted_in_pairs() -> None:
    reference, quantized = [0.5, 0.75, 1.0, 0.25, 0.5], [0.25, 0.5, 0.5, 0.25, 0.75]
    changes = [b - a for a, b in zip(reference, quantized, strict=True) if a != b]
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(changes))).reshape(len(changes), -1)
    all_means = np.abs(np.asarray(changes) @ signs) / len(changes)
    expected = (all_means >= abs(np.mean(changes)) - 1e-12).mean()
    assert scoring.p_value(reference, quantized, seed=3) == pytest.approx(expected)
    assert scoring.p_value(reference, reference, seed=3) == 1


def test_difference_bounds_are_those_of_resampled_pairs() -> None:
    generator = np.random.default_rng(1)
    reference = generator.random(60)
    quantized = np.clip(reference - 0.2 + 0.1 * generator.standard_normal(60), 0, 1)
    low, high = scoring.difference_bounds(list(reference), list(quantized), seed=0)
    change = quantized - reference
    half = 1.96 * change.std(ddof=1) / math.sqrt(60)  # the means of 60 are nearly normal
    assert low == pytest.approx(change.mean() - half, abs=0.005)
    assert high == pytest.approx(change.mean() + half, abs=0.005)
    assert (low, high) == scoring.difference_bounds(list(reference), list(quantized), seed=0)


def test_no_change_in_a_few_prompts_is_no_certainty() -> None:
    unseen = 1 - 0.025 ** (1 / 5)  # a share of which five prompts show nothing once in forty times
    some, every = [1.0, 0.0, 1.0, 1.0, 0.0], [1.0] * 5
    assert scoring.difference_bounds(some, some, seed=0) == pytest.approx((-unseen, 0.4))
    assert scoring.difference_bounds(every, every, seed=0) == pytest.approx((-unseen, 0.0))
    assert scoring.difference_bounds([1.0] * 500, [1.0] * 500, 0)[0] > -0.01
    assert scoring.difference_bounds([1.0, 1.0], [0.0, 0.0], 0) == pytest.approx((-1.0, -1 + 1 - 0.025**0.5))


def test_a_ratio_of_sums_is_bounded_over_its_parts() -> None:
    assert scoring.ratio_bounds([1.0], [3], 0) == (None, None)
    low, high = scoring.ratio_bounds([1.0, 2.0, 8.0], [10, 20, 80], 0)
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)
    low, high = scoring.ratio_bounds([1.0, 0.0], [10, 10], 0)
    assert (low, high) == pytest.approx((0.0, 0.1))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_the_area_is_a_mean_over_lengths(means: list[float]) -> None:
    lengths = [512 << i for i in range(len(means))]
    found = scoring.area(lengths, means)
    assert min(means) - 1e-9 <= found <= max(means) + 1e-9
    fine = np.linspace(lengths[0], lengths[-1], 100001)
    assert found == pytest.approx(float(np.interp(fine, lengths, means).mean()), abs=1e-3)
    assert scoring.area([512], [0.25]) == 0.25
