"""Ranges against brute force on the values themselves, with the format's own rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvcal import formats, granularity, objectives
from kvcal.errors import StatisticsError, UsageError
from kvcal.formats import KVFormat
from kvcal.kernels import codes
from kvcal.recipe import SIDES, Objective
from kvcal.statistics import Collector, SideStatistics
from tests import tiny
from tests.test_calibrate import distribution, run, token_set

CPU = torch.device("cpu")
INTEGERS = [formats.get(f"int{bits}") for bits in (2, 3, 4, 8)]
FLOATS = [formats.get("fp8_e4m3"), formats.get("fp8_e5m2")]
every_granularity = pytest.mark.parametrize("name", ["per_tensor", "per_head", "per_channel"])


def collected(x: torch.Tensor, shapes: dict[Any, tuple[int, int]] | None = None) -> SideStatistics:
    """Statistics of K with distributions; ``x`` is ``(tokens, heads, head_dim)``."""
    shape = (x.shape[1], x.shape[2])
    collector = Collector(shapes or {(0, "k"): shape}, "distribution", formats.FP8_E4M3, CPU)
    collector.see(0, "k", x.transpose(0, 1).unsqueeze(0), None)
    collector.end_batch()
    return collector.statistics().layers[0]["k"]


def values(name: str, n: int = 100_000) -> torch.Tensor:
    """``(n,)`` float32 of about unit size."""
    chooser = np.random.default_rng(0)
    found = {
        "gaussian": lambda: chooser.normal(size=n),
        "laplace": lambda: chooser.laplace(size=n),
        "student": lambda: chooser.standard_t(4, size=n),
        "shifted": lambda: chooser.normal(size=n) + 6.0,
        "wide": lambda: chooser.normal(size=n) * 40,
        "small": lambda: chooser.normal(size=n) * 0.02,
    }[name]()
    return torch.from_numpy(found).float()


def rounded(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, fmt: KVFormat, symmetric: bool) -> Any:
    if symmetric:
        scale = high / fmt.max
        return codes.round_to_format(x / scale, fmt) * scale
    scale = (high - low) / (2**fmt.bits - 1)
    return codes.dequantize_asymmetric(codes.quantize_asymmetric(x, low, scale, fmt), low, scale)


def mse(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, fmt: KVFormat, symmetric: bool) -> float:
    return float((rounded(x, low, high, fmt, symmetric) - x).double().square().mean())


CASES = [
    *((fmt, symmetric, name) for fmt in INTEGERS for symmetric in (True, False)
      for name in ("gaussian", "laplace", "student", "shifted", "wide", "small")),
    *((fmt, True, name) for fmt in FLOATS for name in ("gaussian", "student", "shifted", "small")),
]  # fmt: skip
every_case = pytest.mark.parametrize(
    ("fmt", "symmetric", "name"), CASES, ids=lambda v: v.name if isinstance(v, KVFormat) else str(v)
)


@every_case
def test_predicted_error_is_that_of_the_values(fmt: KVFormat, symmetric: bool, name: str) -> None:
    x = values(name)
    seen = collected(x.view(-1, 1, 1))
    assert seen.histogram is not None
    spread = objectives.Spread.of(seen.histogram[0], seen.minimum[0], seen.maximum[0])
    low, high = (-seen.amax[0], seen.amax[0]) if symmetric else (seen.minimum[0], seen.maximum[0])
    middle, widest = (low + high) / 2, (high - low) / 2
    for factor in (1.0, 0.7, 0.4):
        reach = widest * factor
        levels = middle + reach * objectives._unit_levels(fmt, symmetric).unsqueeze(0)
        predicted = float(spread.error(levels.double())) / len(x)
        measured = mse(x, middle - reach, middle + reach, fmt, symmetric)
        assert predicted == pytest.approx(measured, rel=0.03), factor


@pytest.mark.parametrize("value", [512.0, 3.0, -512.0, 1e4])
def test_the_error_of_a_single_value_is_exact(value: float) -> None:
    """Its bin has no width; levels beyond it on both sides."""
    seen, fmt = collected(torch.full((7, 1, 1), value)), formats.get("int4")
    assert seen.histogram is not None
    spread = objectives.Spread.of(seen.histogram[0], seen.minimum[0], seen.maximum[0])
    reach = torch.tensor(1.3 * abs(value))
    found = spread.error(reach.double() * objectives._unit_levels(fmt, symmetric=True).unsqueeze(0))
    measured = mse(torch.tensor(value), -reach, reach, fmt, True)
    assert float(found) == pytest.approx(7 * measured, rel=1e-4)


@every_case
def test_the_range_is_as_good_as_the_best_by_brute_force(fmt: KVFormat, symmetric: bool, name: str) -> None:
    x = values(name)
    seen = collected(x.view(-1, 1, 1))
    per_tensor = granularity.get("per_tensor")
    low, high = objectives.ranges(seen, per_tensor, fmt, "mse", symmetric=symmetric)
    low_all, high_all = objectives.ranges(seen, per_tensor, fmt, "amax", symmetric=symmetric)
    middle, widest = (low_all + high_all) / 2, (high_all - low_all) / 2
    tried = [widest * float(f) for f in np.geomspace(0.02, 1.0, 100)]
    best = min(mse(x, middle - reach, middle + reach, fmt, symmetric) for reach in tried)
    assert mse(x, low, high, fmt, symmetric) <= best * 1.03


@pytest.mark.parametrize(
    ("name", "clip", "decibel"), [("int4", 2.35, 19.25), ("int3", 1.80, 13.90), ("int2", 1.05, 8.25)]
)
def test_gaussian_optima_are_the_known_ones(name: str, clip: float, decibel: float) -> None:
    x = torch.from_numpy(np.random.default_rng(1).normal(size=1_000_000)).float()
    seen, fmt = collected(x.view(-1, 1, 1)), formats.get(name)
    low, high = objectives.ranges(seen, granularity.get("per_tensor"), fmt, "mse", symmetric=True)
    assert float(high) == pytest.approx(clip, rel=0.04)
    assert -10 * math.log10(mse(x, low, high, fmt, True)) == pytest.approx(decibel, abs=0.05)


@pytest.mark.parametrize("fmt", [f for f in formats.FORMATS if not f.dynamic], ids=lambda f: f.name)
def test_levels_are_all_that_the_format_rounds_to(fmt: KVFormat) -> None:
    levels = (objectives._unit_levels(fmt, symmetric=True) * fmt.max).float()
    assert bool((levels.diff() > 0).all())
    assert torch.equal(codes.round_to_format(levels, fmt), levels)
    dense = torch.cat([torch.linspace(-1.2, 1.2, 4001) * fmt.max, torch.randn(4001) * 4 * fmt.min_normal])
    nearest = levels[(dense.unsqueeze(1) - levels).abs().argmin(1)]
    error = (nearest - dense).abs() - (codes.round_to_format(dense, fmt) - dense).abs()
    assert float(error.abs().max()) == 0.0


def channels(tokens: int = 4000) -> torch.Tensor:
    """``(tokens, 2, 3)`` whose channels differ in size and offset."""
    generator = torch.Generator().manual_seed(3)
    size = torch.tensor([[1.0, 0.1, 30.0], [3.0, 0.5, 2.0]])
    return torch.randn(tokens, 2, 3, generator=generator) * size + torch.tensor([0.0, 1.0, -4.0])


def groups(x: torch.Tensor, name: str) -> list[torch.Tensor]:
    """The values that share a scale, in the order of the scales."""
    if name == "per_tensor":
        return [x.flatten()]
    if name == "per_head":
        return [x[:, head].flatten() for head in range(2)]
    return [x[:, head, channel] for head in range(2) for channel in range(3)]


@every_granularity
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("objective", ["amax", "percentile", "mse", "attention"])
def test_each_scale_is_that_of_its_own_values(name: str, symmetric: bool, objective: Objective) -> None:
    x, fmt, gran = channels(), formats.get("int4"), granularity.get(name)
    weight = torch.ones(2, 3) if objective == "attention" else None
    low, high = objectives.ranges(collected(x), gran, fmt, objective, symmetric=symmetric, weight=weight)
    assert low.shape == high.shape == gran.scale_shape(2, 3)
    assert low.dtype == high.dtype == torch.float32
    alone = objective if objective != "attention" else "mse"
    for index, group in enumerate(groups(x, name)):
        seen = collected(group.view(-1, 1, 1))
        expected = objectives.ranges(seen, granularity.get("per_tensor"), fmt, alone, symmetric=symmetric)
        assert low.flatten()[index] == pytest.approx(float(expected[0]), rel=1e-6)
        assert high.flatten()[index] == pytest.approx(float(expected[1]), rel=1e-6)
        if not symmetric:
            assert group.min() <= low.flatten()[index] < high.flatten()[index] <= group.max()


@every_granularity
def test_amax_is_exact_without_distributions(name: str) -> None:
    x = channels()
    collector = Collector({(0, "k"): (2, 3)}, "extremes", formats.FP8_E4M3, CPU)
    collector.see(0, "k", x.transpose(0, 1).unsqueeze(0), None)
    collector.end_batch()
    seen, gran = collector.statistics().layers[0]["k"], granularity.get(name)
    low, high = objectives.ranges(seen, gran, formats.FP8_E4M3, "amax", symmetric=False)
    assert low.flatten().tolist() == [float(group.min()) for group in groups(x, name)]
    assert high.flatten().tolist() == [float(group.max()) for group in groups(x, name)]
    low, high = objectives.ranges(seen, gran, formats.FP8_E4M3, "amax", symmetric=True)
    assert torch.equal(low, -high)
    assert high.flatten().tolist() == [float(group.abs().max()) for group in groups(x, name)]
    for objective in ("percentile", "mse"):
        with pytest.raises(StatisticsError, match="needs distributions"):
            objectives.ranges(seen, gran, formats.FP8_E4M3, objective, symmetric=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.99, 100.0])
def test_percentiles_are_those_of_sorting(percentile: float) -> None:
    x = values("student")
    seen, gran = collected(x.view(-1, 1, 1)), granularity.get("per_tensor")
    asked = {"objective": "percentile", "percentile": percentile}
    low, high = objectives.ranges(seen, gran, formats.FP8_E4M3, symmetric=True, **asked)  # type: ignore[arg-type]
    assert float(high) == pytest.approx(float(np.percentile(x.abs().numpy(), percentile)), rel=1 / 32)
    assert torch.equal(low, -high)
    low, high = objectives.ranges(seen, gran, formats.get("int4"), symmetric=False, **asked)  # type: ignore[arg-type]
    ends = np.percentile(x.numpy(), [100 - percentile, percentile])
    assert float(low) == pytest.approx(ends[0], rel=1 / 32)
    assert float(high) == pytest.approx(ends[1], rel=1 / 32)


def test_attention_serves_the_channels_that_matter() -> None:
    """One scale for a wide channel that nobody reads and a narrow one that all read."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 1, 2, generator=generator) * torch.tensor([10.0, 1.0])
    seen, gran, fmt = collected(x), granularity.get("per_head"), formats.get("int4")
    found = {}
    for name, weight in (("wide", [1.0, 0.0]), ("narrow", [0.0, 1.0]), ("both", [1.0, 1.0])):
        ends = objectives.ranges(seen, gran, fmt, "attention", symmetric=True, weight=torch.tensor([weight]))
        found[name] = float(ends[1])
    plain = float(objectives.ranges(seen, gran, fmt, "mse", symmetric=True)[1])
    assert found["narrow"] == pytest.approx(2.35, rel=0.05)
    assert found["wide"] == pytest.approx(23.5, rel=0.05)
    assert found["both"] == plain


def test_channels_without_weight_keep_all_that_was_seen() -> None:
    seen, gran = collected(channels()), granularity.get("per_channel")
    ends = {"fmt": formats.get("int4"), "symmetric": False}
    found = objectives.ranges(seen, gran, objective="attention", weight=torch.zeros(2, 3), **ends)  # type: ignore[arg-type]
    assert all(map(torch.equal, found, objectives.ranges(seen, gran, objective="amax", **ends)))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, 3.0, -0.001, 1e4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_constant_channel_keeps_its_value(value: float, symmetric: bool) -> None:
    seen = collected(torch.full((50, 1, 1), value))
    # The magnitude's percentile is interpolated from 0 in the bin around it.
    for objective in ("mse",) if symmetric else ("percentile", "mse"):
        low, high = objectives.ranges(
            seen, granularity.get("per_channel"), formats.get("int4"), objective, symmetric=symmetric  # type: ignore[arg-type]
        )  # fmt: skip
        found = torch.full((1, 1, 1), value)
        assert torch.equal(high, found.abs() if symmetric else found)
        assert torch.equal(low, -found.abs() if symmetric else found)


def test_what_cannot_be_done_is_refused() -> None:
    seen, int4 = collected(channels()), formats.get("int4")
    with pytest.raises(UsageError, match="needs the weight of each channel"):
        objectives.ranges(seen, granularity.get("per_head"), int4, "attention", symmetric=True)
    with pytest.raises(UsageError, match="fp8_e4m3 has no zero point"):
        objectives.ranges(seen, granularity.get("per_head"), formats.FP8_E4M3, "mse", symmetric=False)
    queries = distribution(tiny.build_model(), token_set([30])).layers[0]["q"]
    with pytest.raises(StatisticsError, match="Q is not counted per channel"):
        objectives.ranges(queries, granularity.get("per_channel"), int4, "mse", symmetric=True)


@pytest.mark.parametrize("name", ["per_tensor", "per_head"])
def test_queries_have_ranges_too(name: str) -> None:
    model: Any = tiny.build_model()
    queries, gran = distribution(model, token_set([60])).layers[0]["q"], granularity.get(name)
    found: dict[Objective, torch.Tensor] = {}
    chosen: tuple[Objective, ...] = ("amax", "percentile", "mse")
    for objective in chosen:
        _, found[objective] = objectives.ranges(
            queries, gran, formats.get("int4"), objective, symmetric=True, percentile=99.0
        )
    assert found["mse"].shape == gran.scale_shape(6, 16)
    assert bool((found["mse"] < found["amax"]).all())
    assert bool((found["percentile"] < found["amax"]).all())


def test_key_weight_is_the_energy_of_the_queries_that_read_a_channel() -> None:
    sides = distribution(tiny.build_model(), token_set([30, 20])).layers[1]
    exact = sides["q"].squares.view(2, 3, 16).sum(1) / 50
    torch.testing.assert_close(objectives.key_weight(sides), exact, rtol=1e-5, atol=0)
    lean = run(tiny.build_model(), token_set([30])).layers[1]
    assert set(lean) == set(SIDES)
    with pytest.raises(StatisticsError, match="needs distributions"):
        objectives.key_weight(lean)


def test_value_weight_is_what_a_unit_error_does_to_the_output() -> None:
    model = tiny.build_model()
    output = model.model.layers[1].self_attn.o_proj.weight.detach()
    weight = objectives.value_weight(output, 2, 16)
    for head, channel in ((0, 3), (1, 15)):
        cost = 0.0
        for query_head in range(3 * head, 3 * head + 3):
            error = torch.zeros(96)
            error[16 * query_head + channel] = 1.0
            cost += float((output @ error).double().square().sum())
        assert float(weight[head, channel]) == pytest.approx(cost, rel=1e-5)


def test_extremes_of_a_histogram_are_never_passed() -> None:
    x = torch.tensor([1.0001, 1.0002, 1.02]).view(-1, 1, 1)  # all in one bin
    seen = collected(x)
    assert seen.histogram is not None
    assert int((seen.histogram > 0).sum()) == 1
    low, high = objectives.ranges(
        seen, granularity.get("per_channel"), formats.get("int2"), "mse", symmetric=False
    )
    assert x.min() <= low < high <= x.max()
