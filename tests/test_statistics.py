"""Statistics against plain float64 reductions, whatever the split into batches and the padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal.errors import StatisticsError
from kvcal.formats import FP8_E4M3
from kvcal.recipe import SIDES
from kvcal.statistics import Collector, SideStatistics, Statistics

CPU = torch.device("cpu")


def gather(batches: list[tuple[torch.Tensor, torch.Tensor | None]]) -> SideStatistics:
    heads, head_dim = batches[0][0].shape[1], batches[0][0].shape[3]
    collector = Collector({(0, "k"): (heads, head_dim), (1, "k"): (2, 3)}, FP8_E4M3, CPU)
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
    torch.testing.assert_close(seen.total, wide.sum(0), rtol=1e-12, atol=1e-9)
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
