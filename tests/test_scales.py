"""Scales: the rule exactly, always usable, and flags that tell the truth about scale 1.0."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvcal import calibrate, folding, formats, objectives, scales
from kvcal.errors import ModelError, UsageError
from kvcal.formats import KVFormat
from kvcal.plan import Plan
from kvcal.recipe import SIDES, ScaleRule, Side
from kvcal.statistics import Statistics
from kvcal.transforms.record import Transforms
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set

MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
POSITIVE = st.floats(2.0**-140, 2.0**120, width=32, allow_subnormal=True)
DYNAMIC = [f for f in formats.FORMATS if f.dynamic]
every_dynamic_format = pytest.mark.parametrize("fmt", DYNAMIC, ids=lambda f: f.name)
DEAD = "has a head that is always zero"


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


def planted(k_factor: float, **fields: Any) -> tuple[Statistics, Plan]:
    """Statistics of a model one of whose heads of K is wider or narrower by a factor."""
    model = tiny.build_model(head_dim=32)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[:32] *= k_factor
    return run(model, token_set([64, 64]), **fields), plan_for(model, **fields)


def summaries(k_factor: float, **fields: Any) -> dict[int, dict[Side, scales.SideSummary]]:
    statistics, plan = planted(k_factor, **fields)
    return scales.summarize(statistics, scales.compute(statistics, plan), plan)


def test_a_head_beyond_448_is_flagged_with_the_fraction_clipped() -> None:
    statistics, plan = planted(3000.0)
    summary = scales.summarize(statistics, scales.compute(statistics, plan), plan)
    k = summary[1]["k"]
    assert "saturates at scale 1.0" in k.flags
    assert 0 < k.saturated < 0.5  # one of two heads
    assert k.saturated * 2 * 32 * 128 == int(statistics.layers[1]["k"].saturated.sum())
    assert k.amax > 448
    assert not any("saturates" in flag for flag in summary[0]["k"].flags)


def test_a_tiny_head_is_flagged_as_underflow() -> None:
    k = summaries(1e-4)[1]["k"]
    assert any(flag.startswith("underflows at scale 1.0") for flag in k.flags)
    assert k.zeroed > 0.2


def test_a_dead_head_gets_the_identity_and_a_flag() -> None:
    assert DEAD in summaries(0.0)[1]["k"].flags
    statistics, plan = planted(0.0, granularity="per_head")
    assert scales.compute(statistics, plan).layers[1]["k"].flatten()[0] == 1.0


@every_dynamic_format
@pytest.mark.parametrize(("k_factor", "flags"), [(3000.0, []), (1e-4, []), (0.0, [DEAD])])
def test_scale_1_is_of_no_concern_to_a_dynamic_format_but_a_dead_head_is(
    fmt: KVFormat, k_factor: float, flags: list[str]
) -> None:
    statistics, plan = planted(k_factor, format=fmt.name)
    k = scales.summarize(statistics, None, plan)[1]["k"]
    assert k.flags == flags
    assert k.scale == []
    static, plan = planted(k_factor)
    known = scales.summarize(static, None, plan)[1]["k"]
    assert (k.amax, k.saturated, k.zeroed) == (known.amax, known.saturated, known.zeroed)


def test_folded_fp8_is_judged_at_scale_1() -> None:
    statistics, plan = planted(3000.0, deliver="fold")
    found = scales.unit(plan)
    assert all(t.dtype == torch.float32 and t.tolist() == [1.0] for t in tensors(found))
    assert {(i, s) for i, sides in found.layers.items() for s in sides} == set(product(range(3), SIDES))
    k = scales.summarize(statistics, found, plan)[1]["k"]
    assert k.scale == [1.0]
    assert "saturates at scale 1.0" in k.flags


def tensors(found: scales.Scales) -> list[torch.Tensor]:
    return [tensor for sides in found.layers.values() for tensor in sides.values()]


@pytest.mark.parametrize(
    "fields", [{"deliver": "fold"}, *({"format": f.name} for f in DYNAMIC)], ids=lambda f: str(*f.values())
)
def test_static_scales_are_not_computed_where_none_are_written(fields: dict[str, str]) -> None:
    statistics, plan = planted(1.0, **fields)
    with pytest.raises(UsageError, match=f"{plan.format.name} with --deliver fold has no static scales"):
        scales.compute(statistics, plan)


def test_folded_weights_can_have_scales_too() -> None:
    statistics, plan = planted(2.0, deliver="both", granularity="per_head")
    _, plain = planted(2.0, granularity="per_head")
    both, metadata = (tensors(scales.compute(statistics, p)) for p in (plan, plain))
    assert all(torch.equal(a, b) for a, b in zip(both, metadata, strict=True))


def test_saved_scales_come_back_equal(tmp_path: Path) -> None:
    found = scales.compute(*planted(2.0))
    found.save(tmp_path / "scales.safetensors")
    again = scales.Scales.load(tmp_path / "scales.safetensors")
    assert list(again.layers) == list(found.layers)
    assert all(torch.equal(again.layers[i][s], found.layers[i][s]) for i in found.layers for s in SIDES)


HEADS = st.lists(POSITIVE, min_size=1, max_size=8).map(lambda heads: torch.tensor(heads).reshape(-1, 1, 1))
PER_HEAD = st.fixed_dictionaries({"k": HEADS, "v": HEADS, "q": HEADS}).map(lambda sides: {3: sides})


def same(a: scales.Scales, b: scales.Scales) -> bool:
    places = {(i, side) for i, sides in a.layers.items() for side in sides}
    return places == {(i, side) for i, sides in b.layers.items() for side in sides} and all(
        torch.equal(a.layers[i][side], b.layers[i][side]) for i, side in places
    )


@given(layers=PER_HEAD)
def test_the_scale_of_a_tensor_is_that_of_its_widest_head(
    layers: dict[int, dict[Side, torch.Tensor]],
) -> None:
    found = scales.reduced(scales.Scales(layers), "per_tensor")
    for side, heads in layers[3].items():
        one = found.layers[3][side]
        assert (one.shape, one.dtype) == ((1,), torch.float32)
        assert bool((one >= heads).all())
        assert bool((one == heads).any())
    assert same(scales.reduced(found, "per_tensor"), found)


@given(layers=PER_HEAD)
def test_k_and_v_share_the_larger_scale_and_q_keeps_its_own(
    layers: dict[int, dict[Side, torch.Tensor]],
) -> None:
    per_head = scales.Scales(layers)
    per_tensor, found = scales.reduced(per_head, "per_tensor"), scales.reduced(per_head, "shared")
    own, shared = per_tensor.layers[3], found.layers[3]
    assert torch.equal(shared["q"], own["q"])
    for side in ("k", "v"):
        assert (shared[side].shape, shared[side].dtype) == ((1,), torch.float32)
        assert float(shared[side]) == max(float(own["k"]), float(own["v"]))  # type: ignore[index]
    assert same(scales.reduced(found, "shared"), found)
    assert same(scales.reduced(found, "per_tensor"), found)
    assert same(scales.reduced(per_tensor, "shared"), found)


def test_the_scale_per_tensor_is_what_a_calibration_per_tensor_finds() -> None:
    model, tokens = tiny.build_model(), token_set([33, 20])
    per_head, per_tensor = (
        scales.compute(run(model, tokens, granularity=gran), plan_for(model, granularity=gran))
        for gran in ("per_head", "per_tensor")
    )
    assert same(scales.reduced(per_head, "per_tensor"), per_tensor)


def test_shared_scales_can_be_written(tmp_path: Path) -> None:
    found = scales.reduced(scales.compute(*planted(2.0, granularity="per_head")), "shared")
    found.save(tmp_path / "scales.safetensors")
    assert same(scales.Scales.load(tmp_path / "scales.safetensors"), found)


def heavy(granularity: str = "per_head", **rule: Any) -> tuple[Statistics, Plan, Any]:
    """One channel of K and one of V, both of head 0, far wider than the others and read by nothing."""
    model = tiny.build_model(head_dim=32)
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.k_proj.weight[5] *= 300.0
        attention.q_proj.weight.view(6, 32, -1)[:3, [5, 21]] = 0.0  # a pair that RoPE turns
        attention.v_proj.weight[7] *= 300.0
        attention.o_proj.weight.view(-1, 6, 32)[:, :3, 7] = 0.0
    resolved = plan_for(model, granularity=granularity, scale={"rule": "amax", "headroom": 1.0} | rule)
    tokens = token_set([64, 64])
    statistics = calibrate.calibrate(model, resolved, tokens, collect=scales.collect(resolved))
    return statistics, resolved, model


@pytest.mark.parametrize("granularity", ["per_tensor", "per_head"])
@pytest.mark.parametrize("objective", ["percentile", "mse", "attention"])
def test_objectives_set_scales_within_those_of_amax(granularity: str, objective: str) -> None:
    statistics, plan, model = heavy(granularity, objective=objective)
    weights = objectives.value_weights(model, plan.model)
    found = scales.compute(statistics, plan, value_weights=weights)
    widest = scales.compute(statistics, plan, ScaleRule(rule="amax", headroom=1.0))
    for index, sides in found.layers.items():
        for side in SIDES:
            assert sides[side].dtype == torch.float32
            assert sides[side].shape == widest.layers[index][side].shape
            assert bool((sides[side] > 0).all())
            assert bool((sides[side] <= widest.layers[index][side]).all())
    assert any(not torch.equal(a, b) for a, b in zip(tensors(found), tensors(widest), strict=True))


def test_headroom_and_powers_of_two_apply_to_every_objective() -> None:
    statistics, plan, _ = heavy(objective="percentile", percentile=99.0)
    plain, roomy, power = (
        scales.compute(statistics, plan, plan.recipe.scale.model_copy(update=changes)).layers[1]["k"]
        for changes in ({}, {"headroom": 2.0}, {"rule": "power_of_two"})
    )
    assert torch.equal(roomy, plain * 2)
    assert torch.equal(power, torch.exp2(torch.ceil(torch.log2(plain))))
    wider = scales.compute(
        statistics, plan, plan.recipe.scale.model_copy(update={"percentile": 99.9})
    ).layers[1]["k"]
    assert bool((wider > plain).all())


def test_attention_weighs_keys_by_queries_values_by_the_output_and_queries_not_at_all() -> None:
    statistics, plan, model = heavy(objective="attention")
    int4 = dataclasses.replace(plan, format=formats.get("int4"))
    given = objectives.value_weights(model, plan.model)
    found = scales.compute(statistics, int4, value_weights=given).layers[1]
    sides = statistics.layers[1]
    for side, weight in (("k", objectives.key_weight(sides)), ("v", given[1])):
        _, high = objectives.ranges(
            sides[side], int4.granularity, int4.format, "attention", symmetric=True, weight=weight  # type: ignore[index, arg-type]
        )  # fmt: skip
        assert torch.equal(found[side], high / 7)  # type: ignore[index]
    by_mse = scales.compute(statistics, int4, ScaleRule(rule="amax", headroom=1.0, objective="mse")).layers[1]
    assert torch.equal(found["q"], by_mse["q"])
    for side in ("k", "v"):
        assert found[side][0] < by_mse[side][0] / 20
    with pytest.raises(UsageError, match="needs the weight of each channel"):
        scales.compute(statistics, int4)


@pytest.mark.parametrize(
    ("objective", "fields", "wanted"),
    [
        ("amax", {}, "summary"),
        ("percentile", {}, "distribution"),
        ("mse", {"granularity": "per_head"}, "distribution"),
        ("attention", {"deliver": "both"}, "distribution"),
        ("mse", {"deliver": "fold"}, "summary"),
        ("mse", {"format": "int8_per_token_head"}, "summary"),
    ],
)
def test_distributions_are_collected_where_scales_need_them(
    objective: str, fields: dict[str, str], wanted: str
) -> None:
    resolved = plan_for(tiny.build_model(head_dim=32), scale={"objective": objective}, **fields)
    assert scales.collect(resolved) == wanted


def test_folds_are_chosen_by_extremes_whatever_the_objective() -> None:
    statistics, plan, _ = heavy(objective="mse")
    found = folding._scales(plan, statistics, Transforms({}))
    assert found is not None
    widest = scales.compute(statistics, plan, ScaleRule(rule="amax", headroom=1.0))
    assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(widest), strict=True))


@pytest.mark.parametrize("content", [b"", b"no safetensors", None], ids=["empty", "garbage", "other names"])
def test_a_broken_file_of_scales_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    if content is None:
        save_file({"model.embed_tokens.weight": torch.zeros(2)}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(ModelError, match="holds no scales that can be read"):
        scales.Scales.load(path)
