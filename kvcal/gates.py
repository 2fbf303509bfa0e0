"""Compares what was measured with the limits of the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcal.recipe import Gates

if TYPE_CHECKING:  # `kvcal diff` need not wait for torch
    from kvcal.evaluate import Fidelity


@dataclass(frozen=True)
class GateResult:
    """One gate: ``value`` must not exceed ``limit``, or not fall below it where ``at_least``."""

    name: str
    limit: float
    value: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        relation = "at least" if self.at_least else "at most"
        return f"{self.name} is {self.value:.6g}, must be {relation} {self.limit:g}"


# Gate -> how its value is measured. Every field of Gates must be here; a test compares the two.
MEASURES: dict[str, Callable[[Fidelity, float], float]] = {
    "kl_mean": lambda fidelity, _: fidelity.kl_mean,
    "kl_p99": lambda fidelity, _: fidelity.kl_p99,
    "top1_agreement": lambda fidelity, _: fidelity.top1_agreement,
    "perplexity_increase": lambda fidelity, _: fidelity.perplexity / fidelity.perplexity_reference - 1,
    "attention_error": lambda _, worst: worst,
}
_AT_LEAST = ("top1_agreement",)


def apply(gates: Gates, fidelity: Fidelity, attention_error: float) -> list[GateResult]:
    """Results of the gates that the recipe sets; ``attention_error`` is that of the worst layer."""
    limits = {name: limit for name, limit in gates.model_dump().items() if limit is not None}
    return [
        GateResult(name, limit, MEASURES[name](fidelity, attention_error), at_least=name in _AT_LEAST)
        for name, limit in limits.items()
    ]
