"""`kvcal compare` on the real model: the order of schemes that the README tells of."""

from __future__ import annotations

import pytest

from tests.test_demo import kvcal_json

pytestmark = pytest.mark.slow

SCHEMES = (
    "fp8",
    "int8-per-channel",
    "vllm-int8-per-token-head",
    "vllm-int4-per-token-head",
    "kvquant-nuq-4",
    "quarot-4",
    "balanced-4",
    "balanced-4-before-rope",
    "balanced-3",
    "balanced-2",
)


def test_schemes_stand_in_the_order_that_was_measured() -> None:
    document = kvcal_json(
        *("compare", "--model", "demo", "--schemes", ",".join(SCHEMES)),
        *("--samples", "8", "--evaluation-samples", "2"),
    )
    rows = {row["scheme"]: row for row in document["rows"]}
    kl = {name: row["fidelity"]["kl_mean"] for name, row in rows.items()}
    bits = {name: row["bits_per_element"] for name, row in rows.items()}
    # 1,024 tokens tell factors apart, not percents.
    assert kl["int8-per-channel"] < 0.003
    assert kl["vllm-int8-per-token-head"] < 0.002
    assert 0.003 < kl["fp8"] < 0.02
    assert 0.02 < kl["vllm-int4-per-token-head"] < 0.1
    assert bits["balanced-4"] <= 4.25
    assert kl["balanced-4"] < 0.6 * kl["vllm-int4-per-token-head"]
    assert kl["balanced-4"] < 0.6 * kl["quarot-4"]
    assert kl["balanced-4-before-rope"] < kl["balanced-4"]
    assert bits["balanced-3"] <= 3.25
    assert kl["balanced-3"] < 0.15
    assert bits["balanced-2"] <= 2.5
    assert kl["balanced-2"] < 0.8
    assert kl["balanced-4"] < kl["balanced-3"] < kl["balanced-2"]
