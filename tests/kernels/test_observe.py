"""What is seen of a tensor: the definition and its Triton twin against plain float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import histogram
from kvcal.formats import FP8_E4M3
from kvcal.kernels import observe_reference

pytest.importorskip("triton", reason="Triton is published for Linux only")
from kvcal.kernels import observe
from tests.kernels.test_parity import amid_nan

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Magnitudes from far below what E4M3 stores to beyond its largest, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(8 * torch.randn(shape, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    return x.clamp(-60000, 60000).to(dtype)


def merged(seen: observe_reference.Seen) -> dict[str, torch.Tensor]:
    assert seen.total is not None
    assert seen.squares is not None
    assert seen.saturated is not None
    assert seen.zeroed is not None
    return {
        "low": seen.low.float().amin(0),
        "high": seen.high.float().amax(0),
        "total": seen.total.double().sum(0),
        "squares": seen.squares.double().sum(0),
        "saturated": seen.saturated.sum(0),
        "zeroed": seen.zeroed.sum(0),
    }


def truth(x: torch.Tensor, keep: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """In float64, token by token of what is kept."""
    wide = x.cpu().double()
    kept = torch.ones(wide.shape[0], wide.shape[2], dtype=torch.bool) if keep is None else keep.cpu()
    rows = torch.cat([wide[sample][:, kept[sample]] for sample in range(len(wide))], 1)
    stored = rows.abs().clamp(max=448).float().to(torch.float8_e4m3fn).float()
    return {
        "low": rows.amin(1).float(),
        "high": rows.amax(1).float(),
        "total": rows.sum(1),
        "squares": rows.square().sum(1),
        "saturated": (rows.abs() > 448).sum((1, 2)),
        "zeroed": ((rows != 0) & (stored == 0)).sum((1, 2)),
    }


def assert_as(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name in ("low", "high", "saturated", "zeroed"):
        assert torch.equal(found[name].cpu(), expected[name]), name
    # Float32 sums of at most a thousand values; what they may cancel is bounded by the squares.
    slack = 1e-5 * (expected["squares"] * 1000).sqrt() + 1e-9
    assert ((found["total"].cpu() - expected["total"]).abs() <= slack).all()
    torch.testing.assert_close(found["squares"].cpu(), expected["squares"], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "implementation", [observe_reference.observe, observe.observe], ids=["torch", "triton"]
)
class TestObserve:
    @settings(max_examples=8)
    @given(
        batch=st.integers(1, 3),
        heads=st.integers(1, 3),
        tokens=st.integers(1, 300),
        head_dim=st.sampled_from([1, 16, 23, 64]),
        dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        layout=st.sampled_from(["bhtd", "bthd", "tbdh"]),
        padded=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_against_float64(
        self, implementation, device, batch, heads, tokens, head_dim, dtype, layout, padded, seed
    ):
        x = amid_nan(drawn((batch, heads, tokens, head_dim), dtype, seed).to(device), layout)
        keep = None
        if padded:
            keep = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
            keep[0, 0] = True
        found = implementation(x, None if keep is None else keep.to(device), FP8_E4M3)
        assert_as(merged(found), truth(x, keep))

    def test_extremes_alone(self, implementation, device):
        x = drawn((2, 3, 40, 16), torch.bfloat16, 0).to(device)
        found = implementation(x, None, None)
        assert (found.total, found.squares, found.saturated, found.zeroed) == (None,) * 4
        assert torch.equal(found.low.float().amin(0), x.float().amin((0, 2)))
        assert torch.equal(found.high.float().amax(0), x.float().amax((0, 2)))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("token", [0, 17, 299])
    def test_nothing_hides_what_is_not_finite(self, implementation, device, value, token):
        x = torch.ones(1, 2, 300, 16, device=device)
        x[0, 1, token, 5] = value
        found = implementation(x, None, None)
        ends = torch.stack([found.low.amin(0), found.high.amax(0)])
        broken = ~ends.isfinite().all(0)
        assert broken[1, 5]
        assert broken.sum() == 1

    def test_what_padding_holds_is_never_seen(self, implementation, device):
        x = torch.full((2, 2, 9, 16), float("nan"), device=device)
        keep = torch.zeros(2, 9, dtype=torch.bool, device=device)
        x[1, :, 3], keep[1, 3] = 2.0, True
        found = merged(implementation(x, keep, FP8_E4M3))
        for name, value in (("low", 2.0), ("high", 2.0), ("total", 2.0), ("squares", 4.0)):
            assert (found[name] == value).all()

    def test_nothing_kept(self, implementation, device):
        keep = torch.zeros(2, 9, dtype=torch.bool, device=device)
        found = merged(implementation(torch.ones(2, 2, 9, 16, device=device), keep, FP8_E4M3))
        assert (found["low"] == float("inf")).all()
        assert (found["high"] == float("-inf")).all()
        assert all((found[name] == 0).all() for name in ("total", "squares", "saturated", "zeroed"))


@settings(max_examples=8)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 300),
    head_dim=st.sampled_from([16, 23]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    pooled=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_counts_are_those_of_the_definition(
    device, batch, heads, tokens, head_dim, dtype, pooled, padded, seed
):
    x = amid_nan(drawn((batch, heads, tokens, head_dim), dtype, seed).to(device), "bthd")
    keep = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7 if padded else None
    before = torch.arange(histogram.BINS, dtype=torch.int32, device=device)
    counts = before.expand(heads, 1 if pooled else head_dim, -1).contiguous()
    counts = counts.long() if pooled else counts
    expected = counts.clone()
    keep = keep if keep is None else keep.to(device)
    histogram.count(x, keep, expected)
    observe.count(x, keep, counts)
    assert torch.equal(counts, expected)


def test_every_16_bit_pattern_has_its_bin(device):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).reshape(1, 1, -1, 16).to(device)
    counts = torch.zeros(1, 16, histogram.BINS, dtype=torch.int32, device=device)
    expected = counts.clone()
    observe.count(x, None, counts)
    histogram.count(x, None, expected)
    assert torch.equal(counts, expected)
