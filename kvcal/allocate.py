"""Which format each part of a cache gets: the multiple-choice knapsack over measured KLs.

KL of a model with several parts quantized is close to the sum of the KLs with each alone, so the choice is
one option per item that makes the sum small and the bits few. Dynamic programming over the frontier of
(bits, KL): of two partial choices with the same bits only the better can be part of the best whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from kvcal.errors import UsageError

# Partial choices that are kept at once. Enough for every set of costs that repeat, as those of layers do.
FRONTIER = 2048
# Of the limit: sums of shares are rounded, and a budget that is met exactly must not fail by that.
_ROUNDING = 1e-9

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Option:
    """One way to store an item: bits per element, and KL in nats per token with that item alone stored so."""

    name: str
    bits: float
    kl: float


@dataclass(frozen=True)
class Assignment(Generic[Key]):
    """One option per item.

    Attributes:
        options: item -> the option as it was given.
        bits: per cached element, over all items.
        kl: sum of the items' KLs, none counted below 0; nats per token.
    """

    options: dict[Key, Option]
    bits: float
    kl: float


class _Partial(NamedTuple):
    """Options of the first items: their summed cost and KL, the last of them and those before it."""

    bits: float
    kl: float
    option: Option | None = None
    before: _Partial | None = None


def within_bits(
    options: Mapping[Key, Sequence[Option]], shares: Mapping[Key, float], budget: float
) -> Assignment[Key]:
    """The smallest sum of KLs for at most ``budget`` bits per element.

    ``shares`` are those of all cached elements, 1 together. KLs are measured, so noise is in them: one below
    0 counts as 0, and an option with more bits never counts as worse than one with fewer, since it is left
    out where it would be.

    The budget is never exceeded. The sum is the smallest for this budget as long as no more than
    :data:`FRONTIER` partial choices differ, which holds where shares and bits repeat; beyond that it is at
    most the smallest for a budget lower by ``items * (most - fewest bits) / (FRONTIER - 1)``.

    Raises:
        UsageError: all items at their fewest bits exceed the budget.
    """
    frontier = _frontier(options, shares, max_bits=budget * (1 + _ROUNDING))
    if not frontier:
        fewest = sum(shares[key] * min(o.bits for o in choices) for key, choices in options.items())
        raise UsageError(
            f"{budget:g} bits per element cannot be reached: with these formats the fewest are {fewest:.4g}"
        )
    return _assignment(options, frontier[-1])


def within_kl(
    options: Mapping[Key, Sequence[Option]], shares: Mapping[Key, float], max_kl: float
) -> Assignment[Key]:
    """The fewest bits per element for a sum of KLs of at most ``max_kl`` nats; else as :func:`within_bits`.

    Beyond :data:`FRONTIER` partial choices the bits are at most
    ``items * (most - fewest bits) / (FRONTIER - 1)`` above the fewest.

    Raises:
        UsageError: all items at their smallest KLs exceed it.
    """
    frontier = _frontier(options, shares, max_kl=max_kl * (1 + _ROUNDING))
    if not frontier:
        smallest = sum(min(_kl(o) for o in choices) for choices in options.values())
        raise UsageError(
            f"a KL of {max_kl:g} nats cannot be reached: with these formats the smallest is {smallest:.3g}"
        )
    return _assignment(options, frontier[0])


def measured_within_kl(
    options: Mapping[Key, Sequence[Option]],
    shares: Mapping[Key, float],
    max_kl: float,
    measure: Callable[[Assignment[Key]], float],
) -> tuple[Assignment[Key], float]:
    """The fewest bits whose KL as a whole is at most ``max_kl``, and that KL.

    KLs of items only nearly add up: while the whole exceeds the limit, it is chosen again for a smaller sum.

    Raises:
        UsageError: no choice stays within the limit.
    """
    limit = max_kl
    while True:
        found = within_kl(options, shares, limit)
        kl = measure(found)
        if kl <= max_kl:
            return found, kl
        if found.kl == 0:  # no sum is smaller
            raise UsageError(
                f"a KL of {max_kl:g} nats cannot be reached: the choice with the smallest sum costs {kl:.3g}"
            )
        # As much lower as the sum was too low, and low enough that something else is chosen.
        limit = min(limit * max_kl / kl, found.kl * (1 - 1e-6))


def _frontier(
    options: Mapping[Key, Sequence[Option]],
    shares: Mapping[Key, float],
    *,
    max_bits: float = math.inf,
    max_kl: float = math.inf,
) -> list[_Partial]:
    """Whole choices within the limits that no other beats in bits and KL both, by rising bits and so by
    falling KL.
    """
    # What the items still to come take at least: partial choices that leave them less lead nowhere.
    bits_to_come = sum(shares[key] * min(o.bits for o in choices) for key, choices in options.items())
    kl_to_come = sum(min(_kl(o) for o in choices) for choices in options.values())
    frontier = [_Partial(0.0, 0.0)]
    for key, choices in options.items():
        share = shares[key]
        bits_to_come -= share * min(o.bits for o in choices)
        kl_to_come -= min(_kl(o) for o in choices)
        # Differences of rounded sums: what is over is over by more than that.
        bits_left, kl_left = (
            limit - to_come + _ROUNDING * abs(to_come)
            for limit, to_come in ((max_bits, bits_to_come), (max_kl, kl_to_come))
        )
        extended = []
        for option in choices:
            more, worse = share * option.bits, _kl(option)
            extended += [
                _Partial(before.bits + more, before.kl + worse, option, before)
                for before in frontier
                if before.bits + more <= bits_left and before.kl + worse <= kl_left
            ]
        frontier = _thinned(_unbeaten(extended))
    return frontier


def _kl(option: Option) -> float:
    """Noise alone can bring one below 0, which must not pay for another item."""
    return max(option.kl, 0.0)


def _unbeaten(partials: list[_Partial]) -> list[_Partial]:
    kept: list[_Partial] = []
    # Timsort merges what comes in runs, as here: one for each option.
    for partial in sorted(partials, key=itemgetter(0, 1)):
        if not kept or partial.kl < kept[-1].kl:
            kept.append(partial)
    return kept


def _thinned(frontier: list[_Partial]) -> list[_Partial]:
    """At most one for each of so many steps of bits: the one with the smallest KL, which costs a step more
    at most than what it stands for, and so never raises the KL of what is built on it.
    """
    if len(frontier) <= FRONTIER:
        return frontier
    fewest = frontier[0].bits
    step = (frontier[-1].bits - fewest) / (FRONTIER - 1)
    by_step = {int((partial.bits - fewest) / step): partial for partial in frontier}
    return [frontier[0], *(p for p in by_step.values() if p is not frontier[0])]


def _assignment(options: Mapping[Key, Sequence[Option]], whole: _Partial) -> Assignment[Key]:
    chosen: list[Option] = []
    last: _Partial | None = whole
    while last is not None and last.option is not None:
        chosen.append(last.option)
        last = last.before
    return Assignment(dict(zip(options, reversed(chosen), strict=True)), whole.bits, whole.kl)
