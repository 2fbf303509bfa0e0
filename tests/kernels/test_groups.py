"""Dynamic quantizers against numpy in float64, and what their definitions promise."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcal import codebooks, formats
from kvcal.granularity import PerGroup, PerToken, PerTokenHead
from kvcal.kernels import groups

Array = np.ndarray[Any, Any]
ZeroPoint = Literal["none", "integer", "float"]


@st.composite
def cached(draw: Any, head_dim: int = 12) -> torch.Tensor:
    """``(batch, heads, tokens, head_dim)`` of very different sizes and offsets, some groups constant."""
    batch, heads, tokens = (draw(st.integers(1, n)) for n in (2, 3, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(batch, heads, tokens, head_dim, generator=generator)
    size = torch.exp2(torch.randint(-9, 9, (batch, heads, tokens, 1), generator=generator))
    x = x * size + draw(st.floats(-3, 3)) * size
    if draw(st.booleans()):
        x[0, 0, 0] = draw(st.floats(-2, 2))
    return x


def expected(x: Array, axis: tuple[int, ...], fmt: formats.KVFormat, zero_point: str, clip: float) -> Array:
    """The formulas of the module once more, over whole axes and with scales that nothing rounds."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    if zero_point == "none":
        step = clip * np.maximum(high, -low) / fmt.max
        safe = np.where(step == 0, 1, step)
        return np.clip(np.round(x / safe), -fmt.max - 1, fmt.max) * step
    top = 2**fmt.bits - 1
    middle, reach = (low + high) / 2, clip * (high - low) / 2
    step = 2 * reach / top
    safe = np.where(step == 0, 1, step)
    if zero_point == "float":
        return np.clip(np.round((x - (middle - reach)) / safe), 0, top) * step + middle - reach
    zero = np.clip(np.round(-(middle - reach) / safe), 0, top)
    return (np.clip(np.round(x / safe) + zero, 0, top) - zero) * step


@pytest.mark.parametrize("zero_point", ["none", "integer", "float"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@given(cached(), st.sampled_from([1.0, 0.9, 0.6]))
def test_each_zero_point_follows_its_formula(
    zero_point: ZeroPoint, bits: int, x: torch.Tensor, clip: float
) -> None:
    fmt = formats.get(f"int{bits}")
    for grouping, axis in ((PerTokenHead(), (3,)), (PerToken(), (1, 3))):
        found = groups.quantize_dequantize(
            x, fmt, grouping, zero_point=zero_point, clip=clip, scale_bits=32
        ).double()
        wanted = torch.from_numpy(expected(x.double().numpy(), axis, fmt, zero_point, clip))
        # A value next to a tie may take the other code in float32; all others must be the same.
        step = (x.amax(axis, keepdim=True) - x.amin(axis, keepdim=True)).double() + x.abs().amax(
            axis, keepdim=True
        )
        off = (found - wanted).abs() / (step + 1e-30)
        assert float((off > 1e-4).double().mean()) < 0.05
        assert bool(found.isfinite().all())


@given(cached())
def test_an_error_is_half_a_step_within_the_range(x: torch.Tensor) -> None:
    found = groups.quantize_dequantize(x, formats.INT4, PerTokenHead(), zero_point="float", scale_bits=32)
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 15
    assert bool(((found - x).abs() <= step / 2 + 1e-5 * x.abs().amax(-1, keepdim=True)).all())


@given(cached())
def test_searching_a_clip_is_never_worse_than_none(x: torch.Tensor) -> None:
    for bits, zero_point in ((2, "float"), (3, "integer"), (4, "none")):
        fmt = formats.get(f"int{bits}")
        options: dict[str, Any] = {"zero_point": zero_point, "scale_bits": 32}
        plain = groups.quantize_dequantize(x, fmt, PerTokenHead(), **options)
        best = groups.quantize_dequantize(x, fmt, PerTokenHead(), clip="search", **options)
        error = [(y - x).double().square().sum(-1) for y in (best, plain)]
        assert bool((error[0] <= error[1] * (1 + 1e-6)).all())


def test_searching_gains_what_clipping_gains_on_gaussians() -> None:
    x = torch.randn(1, 1, 20_000, 64, generator=torch.Generator().manual_seed(0))
    for bits, gain_db in ((2, 2.4), (3, 0.7)):
        fmt, options = formats.get(f"int{bits}"), {"zero_point": "float", "scale_bits": 32}
        plain, best = (
            (groups.quantize_dequantize(x, fmt, PerTokenHead(), clip=clip, **options) - x).square().mean()
            for clip in (1.0, "search")
        )
        assert 10 * float((plain / best).log10()) > gain_db


@given(cached())
def test_a_group_of_tokens_shares_each_channels_range(x: torch.Tensor) -> None:
    size = x.shape[2]
    found = groups.quantize_dequantize(
        x, formats.INT2, PerGroup(size, "tokens"), zero_point="float", scale_bits=32
    )
    turned = groups.quantize_dequantize(
        x.transpose(2, 3), formats.INT2, PerTokenHead(), zero_point="float", scale_bits=32
    ).transpose(2, 3)
    assert torch.equal(found, turned)


@given(cached())
def test_scales_of_8_bits_are_e4m3_of_the_unit_and_never_0(x: torch.Tensor) -> None:
    unit = torch.linspace(0.1, 3, x.shape[1])[:, None, None]
    found = groups.quantize_dequantize(
        x, formats.INT8, PerTokenHead(), zero_point="none", scale_bits=8, unit=unit
    )
    wanted = (x.abs().amax(-1, keepdim=True) / 127 / unit).numpy()
    scale = np.clip(wanted, 2**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * unit.numpy()
    codes = np.clip(np.round(x.numpy() / scale), -128, 127)
    assert np.allclose(found.numpy(), codes * scale, rtol=1e-5)


def test_scales_of_8_bits_need_their_unit() -> None:
    with pytest.raises(ValueError, match="need the unit"):
        groups.quantize_dequantize(torch.ones(1, 1, 1, 4), formats.INT4, PerTokenHead(), scale_bits=8)


@given(cached(head_dim=64))
def test_gaussian_levels_err_as_lloyd_and_max_say(x: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    gaussian = torch.randn(1, 2, 3000, 64, generator=generator) * 7.0
    for bits, decibel in ((2, 9.30), (3, 14.62), (4, 20.22)):  # Max, 1960, table I
        levels = codebooks.gaussian(bits)
        found = groups.with_gaussian_levels(gaussian, levels, PerTokenHead(), 32)
        ratio = gaussian.square().mean() / (found - gaussian).square().mean()
        assert 10 * float(ratio.log10()) == pytest.approx(decibel, abs=0.2)
        scaled = groups.with_gaussian_levels(x, levels, PerTokenHead(), 32)
        rms = x.square().mean(-1, keepdim=True).sqrt()
        assert bool((scaled.abs() <= rms * float(levels[-1]) * (1 + 1e-5)).all())
        assert bool(scaled.isfinite().all())


@given(cached())
def test_levels_over_a_range_are_the_nearest_ones(x: torch.Tensor) -> None:
    levels = torch.tensor([-1.0, -0.2, 0.1, 0.7])
    low, high = x.amin((0, 2), keepdim=True), x.amax((0, 2), keepdim=True)
    found = groups.with_levels_over_range(x, levels, low, high)
    stretched = levels * ((high - low) / 2).unsqueeze(-1) + ((high + low) / 2).unsqueeze(-1)
    best = (stretched - x.unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose((found - x).abs(), best, atol=1e-5 * float(x.abs().max()))
