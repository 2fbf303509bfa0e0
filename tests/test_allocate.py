"""The knapsack, against every assignment there is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcal import allocate
from kvcal.allocate import Assignment, Option, measured_within_kl, within_bits, within_kl
from kvcal.errors import UsageError

Problem = tuple[dict[int, list[Option]], dict[int, float]]

# Layers with their KL at 2, 4 and 8 bits.
WORKED = [(0.20, 0.03, 0.001), (0.05, 0.004, 0.0002), (0.30, 0.02, 0.001)]


def worked() -> Problem:
    options = {
        layer: [Option(f"int{bits}", bits, kl) for bits, kl in zip((2, 4, 8), each, strict=True)]
        for layer, each in enumerate(WORKED)
    }
    return options, dict.fromkeys(options, 1 / 3)


def everything(options: dict[int, list[Option]], shares: dict[int, float]) -> Iterator[tuple[float, float]]:
    """Bits and KL of every assignment."""
    for choice in itertools.product(*options.values()):
        pairs = list(zip(shares.values(), choice, strict=True))
        yield sum(share * option.bits for share, option in pairs), sum(max(o.kl, 0.0) for _, o in pairs)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    weights = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    bits = draw(st.lists(st.floats(1, 16), min_size=1, max_size=4, unique=True))
    # Of both signs and in no order, as measured ones are.
    kls = st.floats(-0.01, 1.0)
    options = {key: [Option(f"b{b}", b, draw(kls)) for b in bits] for key in range(len(weights))}
    return options, {key: weight / sum(weights) for key, weight in enumerate(weights)}


def test_the_worked_example() -> None:
    options, shares = worked()
    found = within_bits(options, shares, 12 / 3)
    assert [option.bits for option in found.options.values()] == [4, 4, 4]
    assert found.kl == pytest.approx(0.054)
    assert found.bits == pytest.approx(4)
    assert within_kl(options, shares, 0.054) == found


def test_what_a_greedy_choice_leaves_over_is_used() -> None:
    """By gain per bit item 0 is raised first (0.4 against 0.3), and then nothing else fits."""
    options = {
        0: [Option("low", 2, 0.9), Option("high", 4, 0.1)],
        1: [Option("low", 2, 1.0), Option("high", 5, 0.1)],
    }
    found = within_bits(options, {0: 0.5, 1: 0.5}, 3.5)
    assert [option.name for option in found.options.values()] == ["low", "high"]
    assert found.kl == pytest.approx(1.0)


@given(problems(), st.floats(1, 17))
def test_no_assignment_within_the_budget_has_a_smaller_sum(problem: Problem, budget: float) -> None:
    every = list(everything(*problem))
    affordable = [kl for bits, kl in every if bits <= budget * (1 + 1e-9)]
    if not affordable:
        with pytest.raises(UsageError, match="the fewest are"):
            within_bits(*problem, budget)
        return
    found = within_bits(*problem, budget)
    assert found.bits <= budget * (1 + 1e-9)
    assert found.kl == pytest.approx(min(affordable), abs=1e-9)


@given(problems(), st.floats(0, 2))
def test_no_assignment_within_the_kl_has_fewer_bits(problem: Problem, max_kl: float) -> None:
    every = list(everything(*problem))
    good = [bits for bits, kl in every if kl <= max_kl * (1 + 1e-9)]
    if not good:
        with pytest.raises(UsageError, match="the smallest is"):
            within_kl(*problem, max_kl)
        return
    found = within_kl(*problem, max_kl)
    assert found.kl <= max_kl * (1 + 1e-9)
    assert found.bits == pytest.approx(min(good), abs=1e-6)


@given(problems(), st.floats(1, 17))
def test_bits_and_kl_are_those_of_the_options(problem: Problem, budget: float) -> None:
    options, shares = problem
    if all(bits > budget for bits, _ in everything(*problem)):
        return
    found = within_bits(options, shares, budget)
    assert found.options.keys() == options.keys()
    assert all(found.options[key] in options[key] for key in options)
    assert found.bits == pytest.approx(sum(shares[key] * o.bits for key, o in found.options.items()))
    assert found.kl == pytest.approx(sum(max(o.kl, 0) for o in found.options.values()))


@pytest.mark.parametrize("budget", [3.0, 5.0, 7.0, 9.0, 11.0])
def test_a_full_frontier_costs_no_more_than_is_said(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = random.Random(0)
    options, shares = {}, dict.fromkeys(range(6), 1 / 6)
    for key in shares:
        bits = [2, *(chooser.uniform(2, 14) for _ in range(3)), 14]  # no two sums are the same
        options[key] = [Option(f"b{b}", b, (key + 1) * 2.0**-b) for b in bits]
    every = list(everything(options, shares))
    monkeypatch.setattr(allocate, "FRONTIER", 40)
    slack = 6 * 12 / 39
    found = within_bits(options, shares, budget)
    assert found.bits <= budget * (1 + 1e-9)
    best = min(kl for cost, kl in every if cost <= budget)
    assert best <= found.kl <= min((kl for cost, kl in every if cost <= budget - slack), default=math.inf)
    cheap = within_kl(options, shares, best)
    fewest = min(cost for cost, kl in every if kl <= best)
    assert fewest - 1e-9 <= cheap.bits <= fewest + slack
    # Far better than promised, where each step of bits keeps its best.
    assert found.kl <= 1.1 * best


def test_more_bits_that_were_measured_worse_are_left_out() -> None:
    options = {0: [Option("int4", 4, 0.01), Option("fp8", 8, 0.02), Option("bf16", 16, 0.0)]}
    assert within_bits(options, {0: 1.0}, 8).options[0].name == "int4"


def test_a_kl_below_zero_pays_for_nothing() -> None:
    options = {0: [Option("int8", 8, -0.5)], 1: [Option("int4", 4, 0.2), Option("int8", 8, 0.1)]}
    found = within_kl(options, {0: 0.5, 1: 0.5}, 0.1)
    assert found.options[1].name == "int8"
    assert found.kl == pytest.approx(0.1)


def test_many_layers_are_exact_and_quick() -> None:
    """Sums of equal shares differ little: 128 items and 8 options have few distinct costs."""
    bits = [2, 3, 4, 5, 6, 8, 8.25, 16]
    kls = {i: [(i % 7 + 1) / 2**b for b in bits] for i in range(128)}
    options = {i: [Option(f"b{b}", b, kl) for b, kl in zip(bits, kls[i], strict=True)] for i in kls}
    found = within_bits(options, dict.fromkeys(options, 1 / 128), 4.25)
    assert 4.2 < found.bits <= 4.25 * (1 + 1e-9)
    # The hull's bound: no assignment beats the Lagrangian of any price per bit.
    bound = max(
        sum(min(o.kl + price * o.bits / 128 for o in each) for each in options.values()) - price * 4.25
        for price in (0.1 * 1.2**step for step in range(60))
    )
    assert bound <= found.kl <= bound * 1.02


def test_what_only_nearly_adds_up_is_chosen_again() -> None:
    """The whole is measured three times as costly as its parts."""
    options = {i: [Option("int8", 8, 0.001 * (i + 1)), Option("bf16", 16, 0.0)] for i in range(6)}
    asked: list[int] = []

    def measure(assignment: Assignment[int]) -> float:
        asked.append(sum(option.name == "bf16" for option in assignment.options.values()))
        return 3 * assignment.kl

    found, kl = measured_within_kl(options, dict.fromkeys(options, 1 / 6), 0.01, measure)
    assert asked == [2, 4]
    assert (found.kl, kl) == (pytest.approx(0.003), pytest.approx(0.009))


def test_a_whole_that_never_keeps_the_limit_is_refused() -> None:
    options = {i: [Option("int8", 8, 0.001), Option("bf16", 16, 0.0)] for i in range(3)}
    with pytest.raises(UsageError, match="the choice with the smallest sum costs 0.5"):
        measured_within_kl(options, dict.fromkeys(options, 1 / 3), 0.01, lambda _: 0.5)
