"""Statistics against plain float64 reductions, whatever the split into batches and the padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import histogram
from kvcal.errors import StatisticsError
from kvcal.formats import FP8_E4M3
from kvcal.recipe import SIDES
from kvcal.statistics import Collect, Collector, SideStatistics, Statistics

CPU = torch.device("cpu")


def gather(batches: list[tuple[torch.Tensor, torch.Tensor | None]]) -> SideStatistics:
    heads, head_dim = batches[0][0].shape[1], batches[0][0].shape[3]
    collector = Collector({(0, "k"): (heads, head_dim), (1, "k"): (2, 3)}, "summary", FP8_E4M3, CPU)
    for x, keep in batches:
        collector.see(0, "k", x, keep)
        collector.end_batch()
    return collector.statistics().layers[0]["k"]


def assert_describes(seen: SideStatistics, rows: torch.Tensor) -> None:
    """``rows`` is ``(tokens, heads, head_dim)``: everything that was to be counted."""
    wide = rows.double()
    assert int(seen.tokens) == rows.shape[0]
    assert torch.equal(seen.minimum.double(), wide.amin(0))
    assert torch.equal(seen.maximum.double(), wide.amax(0))
    assert torch.equal(seen.amax.double(), wide.abs().amax(0))
    # float32 within a sample; relative to magnitudes, as sums may cancel
    assert bool(((seen.total - wide.sum(0)).abs() <= 2e-7 * wide.abs().sum(0)).all())
    torch.testing.assert_close(seen.squares, wide.square().sum(0), rtol=1e-6, atol=0)
    assert torch.equal(seen.saturated, (rows.abs() > 448).sum((0, 2)))
    assert torch.equal(seen.zeroed, ((rows != 0) & (rows.abs() <= 2**-10)).sum((0, 2)))


@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 9),
    head_dim=st.integers(1, 17),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
)
@settings(max_examples=60, deadline=None)
def test_padding_never_counts(
    seed: int, batch: int, heads: int, tokens: int, head_dim: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, tokens, head_dim, generator=generator) * scale
    keep = torch.rand(batch, tokens, generator=generator) < 0.7
    keep[0, 0] = True
    poisoned = torch.where(keep[:, None, :, None], x, torch.nan)
    assert_describes(gather([(poisoned, keep)]), x.transpose(1, 2)[keep])


@given(seed=st.integers(0, 2**31), parts=st.lists(st.integers(1, 6), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_split_and_order_of_batches_gives_the_same(seed: int, parts: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(n, 3, 7, 10, generator=generator) for n in parts]
    rows = torch.cat([b.transpose(1, 2).flatten(0, 1) for b in batches])
    assert_describes(gather([(b, None) for b in batches]), rows)
    assert_describes(gather([(b, None) for b in reversed(batches)]), rows)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_merging_equals_gathering_together(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(2, 3, 5, 8, generator=generator) for _ in range(3))
    parts = [gather([(x, None)]) for x in (a, b, c)]
    rows = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in (a, b, c)])
    assert_describes(parts[0].merge(parts[1]).merge(parts[2]), rows)
    assert_describes(parts[2].merge(parts[0].merge(parts[1])), rows)
    nothing = gather([(torch.empty(1, 3, 0, 8), None)])
    assert_describes(parts[1].merge(nothing).merge(parts[0]).merge(parts[2]), rows)


def test_memory_does_not_grow_with_tokens() -> None:
    few, many = gather([(torch.randn(1, 2, 3, 4), None)]), gather([(torch.randn(9, 2, 99, 4), None)])
    assert {n: t.shape for n, t in few.tensors().items()} == {n: t.shape for n, t in many.tensors().items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_keep_exact_extremes(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 3, 11, 6) * 5).to(dtype)
    assert_describes(gather([(x, None)]), x.transpose(1, 2).flatten(0, 1))


SHAPES = {(0, side): (6 if side == "q" else 2, 5) for side in SIDES}


def distributions(batches: list[torch.Tensor], keep: list[torch.Tensor] | None = None) -> Statistics:
    """Of one layer; a batch is ``(batch, 6, tokens, 5)``, of which K and V are the first two heads."""
    collector = Collector(SHAPES, "distribution", FP8_E4M3, CPU)
    for index, x in enumerate(batches):
        for side in SIDES:
            heads = SHAPES[0, side][0]
            collector.see(0, side, x[:, :heads], None if keep is None else keep[index])
        collector.see_weighted(0, x[0, :2], x[0, 2:4, :, 0].abs())
        collector.end_batch()
    return collector.statistics()


def drawn(seed: int, batch: int = 2, tokens: int = 7) -> torch.Tensor:
    return torch.randn(batch, 6, tokens, 5, generator=torch.Generator().manual_seed(seed)) * 3


def test_second_moments_are_those_of_float64() -> None:
    x = drawn(0)
    found = distributions([x]).layers[0]
    wide = x.double()
    kv = torch.einsum("bhtc,bhtd->hcd", wide[:, :2], wide[:, :2])
    q = torch.einsum("bhtc,bhtd->hcd", wide, wide).view(2, 3, 5, 5).sum(1)
    weighted = torch.einsum("ht,htc,htd->hcd", wide[0, 2:4, :, 0].abs(), wide[0, :2], wide[0, :2])
    for moments, exact in (
        (found["k"].moments, kv),
        (found["v"].moments, kv),
        (found["q"].moments, q),
        (found["v"].weighted_moments, weighted),
        (found["v"].weight, wide[0, 2:4, :, 0].abs().sum(-1)),
    ):
        assert moments is not None
        assert moments.dtype == torch.float64
        torch.testing.assert_close(moments, exact, rtol=1e-5, atol=1e-4)
    diagonal = found["k"].moments.diagonal(dim1=-2, dim2=-1)  # type: ignore[union-attr]
    torch.testing.assert_close(diagonal, found["k"].squares, rtol=1e-5, atol=0)


def test_histograms_hold_every_value_once() -> None:
    x = drawn(1)
    found = distributions([x]).layers[0]
    for side, channels in (("k", 5), ("v", 5), ("q", 1)):
        heads = SHAPES[0, side][0]
        wanted = torch.zeros(heads, channels, histogram.BINS, dtype=torch.int64)
        histogram.count(x[:, :heads], None, wanted)
        assert torch.equal(found[side].histogram.long(), wanted)


def assert_same(one: Statistics, two: Statistics) -> None:
    for side in SIDES:
        before, after = one.layers[0][side].tensors(), two.layers[0][side].tensors()
        assert before.keys() == after.keys()
        for name in before:
            exactly = {} if before[name].dtype == torch.float64 else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(after[name], before[name], **(exactly or {"rtol": 1e-5, "atol": 1e-4}))


@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_distributions_merge_in_any_order(seed: int) -> None:
    a, b, c = (drawn(seed + part, batch=1 + part) for part in range(3))
    parts = [distributions([x]) for x in (a, b, c)]
    together = distributions([a, b, c])
    assert_same(together, parts[0].merge(parts[1]).merge(parts[2]))
    assert_same(together, parts[2].merge(parts[1].merge(parts[0])))


def test_padding_is_in_no_distribution() -> None:
    x = drawn(2, batch=1, tokens=9)
    keep = torch.tensor([[True] * 6 + [False] * 3])
    poisoned = torch.where(keep[:, None, :, None], x, torch.nan)
    with_padding = Collector(SHAPES, "distribution", FP8_E4M3, CPU)
    without = Collector(SHAPES, "distribution", FP8_E4M3, CPU)
    for side in SIDES:
        heads = SHAPES[0, side][0]
        with_padding.see(0, side, poisoned[:, :heads], keep)
        without.see(0, side, x[:, :heads, :6], None)
    for collector in (with_padding, without):
        collector.end_batch()
    assert_same(without.statistics(), with_padding.statistics())


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_gpu_gathers_what_a_cpu_does(dtype: torch.dtype, padded: bool) -> None:
    x = (drawn(3, batch=2, tokens=700) * 30).to(dtype)
    keep = torch.arange(700) < torch.tensor([[700], [431]]) if padded else None
    found = []
    for device in (CPU, torch.device("cuda")):
        collector = Collector(SHAPES, "distribution", FP8_E4M3, device)
        for side in SIDES:
            rows = x[:, : SHAPES[0, side][0]].to(device).transpose(1, 2).contiguous().transpose(1, 2)
            collector.see(0, side, rows, keep)
        collector.end_batch()
        found.append(collector.statistics())
    for side in SIDES:
        cpu, gpu = (each.layers[0][side].tensors() for each in found)
        for name in ("tokens", "minimum", "maximum", "saturated", "zeroed", "histogram"):
            assert torch.equal(cpu[name], gpu[name]), name
        rough = 1e-4 * cpu["squares"].max()
        torch.testing.assert_close(gpu["squares"], cpu["squares"], rtol=1e-5, atol=0)
        torch.testing.assert_close(gpu["total"], cpu["total"], rtol=0, atol=float(1e-3 * rough.sqrt() * 700))
        torch.testing.assert_close(gpu["moments"], cpu["moments"], rtol=0, atol=float(rough))


@pytest.mark.parametrize("collect", ["extremes", "summary"])
def test_less_is_collected_where_less_is_asked(collect: Collect) -> None:
    collector = Collector(SHAPES, collect, FP8_E4M3, CPU)
    collector.see(0, "k", drawn(0)[:, :2], None)
    collector.end_batch()
    k = collector.statistics().layers[0]["k"]
    assert k.histogram is k.moments is k.weighted_moments is k.weight is None
    assert bool((k.squares > 0).all()) == (collect == "summary")
    assert bool((k.amax > 0).all())


def test_distributions_do_not_merge_with_none() -> None:
    full = distributions([drawn(0)])
    lean = Statistics({0: {side: gather([(drawn(0), None)]) for side in SIDES}})
    with pytest.raises(StatisticsError, match="with and without distributions"):
        full.merge(lean)


def test_saved_distributions_come_back_equal(tmp_path: Path) -> None:
    written = distributions([drawn(0)])
    written.save(tmp_path / "s.safetensors")
    read = Statistics.load(tmp_path / "s.safetensors")
    for side in SIDES:
        before, after = written.layers[0][side].tensors(), read.layers[0][side].tensors()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    assert read.layers[0]["q"].weighted_moments is None


def two_layers(**planted: torch.Tensor) -> Statistics:
    layers = {
        index: {side: gather([(torch.randn(1, 2, 5, 4), None)]) for side in SIDES} for index in range(2)
    }
    for where, x in planted.items():
        layers[1][where] = gather([(x, None)])  # type: ignore[index]
    return Statistics(layers)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.full((1, 2, 5, 4), torch.nan), "layer 1: V holds NaN in head 0, 1"),
        (torch.tensor([1.0, torch.inf]).reshape(1, 2, 1, 1).expand(1, 2, 5, 4), "V holds infinity in head 1"),
        (
            torch.tensor([-torch.inf, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 5, 4),
            "V holds infinity in head 0",
        ),
        (torch.zeros(1, 2, 5, 4), "layer 1: V is zero for every token"),
        (torch.zeros(1, 2, 0, 4), "layer 1: V was never observed"),
    ],
    ids=["nan", "inf", "minus-inf", "zero", "unseen"],
)
def test_unsound_statistics_name_the_layer(x: torch.Tensor, message: str) -> None:
    with pytest.raises(StatisticsError, match=message):
        two_layers(v=x).require_sound()


def test_one_nan_among_many_values_is_found() -> None:
    x = torch.randn(3, 2, 50, 4)
    x[1, 0, 17, 2] = torch.nan
    with pytest.raises(StatisticsError, match="K holds NaN in head 0;"):
        two_layers(k=x).require_sound()


def test_saved_statistics_come_back_equal(tmp_path: Path) -> None:
    written = two_layers()
    written.save(tmp_path / "s.safetensors")
    read = Statistics.load(tmp_path / "s.safetensors")
    for index in written.layers:
        for side in SIDES:
            before, after = written.layers[index][side].tensors(), read.layers[index][side].tensors()
            assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)


def test_statistics_of_other_layers_do_not_merge() -> None:
    one, two = two_layers(), two_layers()
    del two.layers[0]
    with pytest.raises(StatisticsError, match="different layers"):
        one.merge(two)
