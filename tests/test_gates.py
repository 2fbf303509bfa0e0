from __future__ import annotations

import math

import pytest

from kvcal import gates
from kvcal.evaluate import Fidelity
from kvcal.recipe import Gates

FIDELITY = Fidelity(
    kl_mean=0.02, kl_p99=0.3, top1_agreement=0.95, perplexity=10.5, perplexity_reference=10.0, tokens=100
)
ATTENTION_ERROR = 0.4


def test_every_gate_of_the_recipe_is_measured() -> None:
    assert gates.MEASURES.keys() == Gates.model_fields.keys()


@pytest.mark.parametrize(
    ("name", "value", "passing", "failing"),
    [
        ("kl_mean", 0.02, 0.02, 0.0199),
        ("kl_p99", 0.3, 0.3, 0.299),
        ("top1_agreement", 0.95, 0.95, 0.951),
        ("perplexity_increase", 0.05, 0.0501, 0.0499),
        ("attention_error", 0.4, 0.4, 0.399),
    ],
)
def test_a_gate_passes_up_to_its_limit(name: str, value: float, passing: float, failing: float) -> None:
    for limit, expected in ((passing, True), (failing, False)):
        (result,) = gates.apply(Gates(**{name: limit}), FIDELITY, ATTENTION_ERROR)
        assert result.name == name
        assert result.value == pytest.approx(value)
        assert result.passed is expected


def test_nan_never_passes() -> None:
    for at_least in (False, True):
        assert not gates.GateResult("x", 0.5, math.nan, at_least=at_least).passed


def test_gates_that_are_not_set_are_not_applied() -> None:
    assert gates.apply(Gates(), FIDELITY, ATTENTION_ERROR) == []


def test_the_text_names_value_and_limit() -> None:
    assert str(gates.GateResult("kl_mean", 0.01, 0.02)) == "kl_mean is 0.02, must be at most 0.01"
    assert (
        str(gates.GateResult("top1_agreement", 0.9, 0.8, True))
        == "top1_agreement is 0.8, must be at least 0.9"
    )
