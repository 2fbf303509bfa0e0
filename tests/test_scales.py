"""Scales: the rule exactly, always usable, and flags that tell the truth about scale 1.0."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvcal import scales
from kvcal.errors import ModelError
from kvcal.recipe import SIDES, ScaleRule
from kvcal.statistics import Statistics
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set

MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
POSITIVE = st.floats(2.0**-140, 2.0**120, width=32, allow_subnormal=True)


@given(amax=st.lists(POSITIVE, min_size=1, max_size=8), headroom=st.sampled_from([1.0, 1.25, 2.0]))
def test_amax_rule_is_the_float32_nearest_to_the_exact_quotient(amax: list[float], headroom: float) -> None:
    found = scales.from_amax(torch.tensor(amax), MAX, ScaleRule(rule="amax", headroom=headroom))
    exact = np.array(amax, dtype=np.float64) * headroom / 448
    wanted = np.maximum(exact, np.finfo(np.float32).tiny).astype(np.float32)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), wanted)


@given(amax=POSITIVE, headroom=st.sampled_from([1.0, 1.25]))
def test_power_of_two_is_the_smallest_that_does_not_saturate(amax: float, headroom: float) -> None:
    found = float(
        scales.from_amax(torch.tensor([amax]), MAX, ScaleRule(rule="power_of_two", headroom=headroom))
    )
    assert math.frexp(found)[0] == 0.5
    assert found * 448 >= amax * headroom * (1 - 1e-12)
    assert found == 2.0**-126 or found / 2 * 448 < amax * headroom


@given(amax=st.floats(0, 2.0**120, width=32, allow_subnormal=True))
def test_a_scale_is_always_finite_and_positive(amax: float) -> None:
    for rule in ("amax", "power_of_two"):
        found = scales.from_amax(torch.tensor([amax]), MAX, ScaleRule(rule=rule))  # type: ignore[arg-type]
        assert bool(found.isfinite().all())
        assert float(found) > 0


@pytest.mark.parametrize("granularity", ["per_tensor", "per_head"])
def test_each_scale_covers_its_own_elements(granularity: str) -> None:
    model, tokens = tiny.build_model(), token_set([33, 20])
    statistics = run(model, tokens, granularity=granularity)
    found = scales.compute(statistics, plan_for(model, granularity=granularity))
    for index, sides in statistics.layers.items():
        for side in SIDES:
            per_head = sides[side].amax.amax(-1).double() / 448
            heads = 6 if side == "q" else 2
            scale = found.layers[index][side]
            if granularity == "per_head":
                assert scale.shape == (heads, 1, 1)
                torch.testing.assert_close(scale.flatten().double(), per_head, rtol=1e-7, atol=0)
                assert len(set(scale.flatten().tolist())) == heads
            else:
                assert scale.shape == (1,)
                torch.testing.assert_close(scale.double(), per_head.max()[None], rtol=1e-7, atol=0)


def planted(k_factor: float) -> tuple[Statistics, scales.Scales]:
    model = tiny.build_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[:16] *= k_factor
    statistics = run(model, token_set([64, 64]))
    return statistics, scales.compute(statistics, plan_for(model))


def test_a_head_beyond_448_is_flagged_with_the_fraction_clipped() -> None:
    statistics, found = planted(3000.0)
    summary = scales.summarize(statistics, found)
    k = summary[1]["k"]
    assert "saturates at scale 1.0" in k.flags
    assert 0 < k.saturated < 0.5  # one of two heads
    assert k.saturated * 2 * 16 * 128 == int(statistics.layers[1]["k"].saturated.sum())
    assert k.amax > 448
    assert not any("saturates" in flag for flag in summary[0]["k"].flags)


def test_a_tiny_head_is_flagged_as_underflow() -> None:
    statistics, found = planted(1e-4)
    k = scales.summarize(statistics, found)[1]["k"]
    assert any(flag.startswith("underflows at scale 1.0") for flag in k.flags)
    assert k.zeroed > 0.2


def test_a_dead_head_gets_the_identity_and_a_flag() -> None:
    statistics, found = planted(0.0)
    assert "has a head that is always zero" in scales.summarize(statistics, found)[1]["k"].flags
    model = tiny.build_model()
    per_head = scales.compute(statistics, plan_for(model, granularity="per_head"))
    assert per_head.layers[1]["k"].flatten()[0] == 1.0


def test_saved_scales_come_back_equal(tmp_path: Path) -> None:
    _, found = planted(2.0)
    found.save(tmp_path / "scales.safetensors")
    again = scales.Scales.load(tmp_path / "scales.safetensors")
    assert list(again.layers) == list(found.layers)
    assert all(torch.equal(again.layers[i][s], found.layers[i][s]) for i in found.layers for s in SIDES)


@pytest.mark.parametrize("content", [b"", b"no safetensors", None], ids=["empty", "garbage", "other names"])
def test_a_broken_file_of_scales_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    if content is None:
        save_file({"model.embed_tokens.weight": torch.zeros(2)}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(ModelError, match="holds no scales that can be read"):
        scales.Scales.load(path)
