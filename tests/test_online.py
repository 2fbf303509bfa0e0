"""The engine's own quantizers: error bounds, oracles in float64, and vLLM's Triton kernels themselves."""

from __future__ import annotations

import functools
import math
import struct
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcal import formats, live_engine, online
from kvcal.errors import UsageError
from kvcal.formats import FP8_E4M3, FP8_PER_TOKEN_HEAD, INT4_PER_TOKEN_HEAD, INT8_PER_TOKEN_HEAD, KVFormat
from kvcal.kernels import reference

DYNAMIC = [f for f in formats.FORMATS if f.dynamic]
HEAD_DIMS = [128, 96, 80, 64, 24, 2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
every_format = pytest.mark.parametrize("fmt", DYNAMIC, ids=lambda f: f.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)

PROBE = Path(__file__).with_name("vllm_online_probe.py")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """``(1, 2, 3, head_dim)`` in any dtype: magnitudes from below the floor to large, at times an outlier."""
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    x = normal(1, 2, 3, head_dim, seed=draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        x[..., draw(st.integers(0, head_dim - 1))] *= draw(st.sampled_from([10.0, 1000.0]))
    if draw(st.booleans()):
        x = x + draw(st.sampled_from([-3.0, 1.0]))
    dtype = draw(st.sampled_from(DTYPES))
    largest = 3.0 if dtype == torch.float16 else 1e20  # of FP16, so that rotated vectors stay finite too
    return (x * draw(st.sampled_from([1e-9, 1e-4, 1.0, largest]))).to(dtype)


def hadamard_matrix(order: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    index = np.arange(order)
    parity = np.bitwise_count(index[:, None] & index[None, :]) % 2
    return 1.0 - 2.0 * parity


def rotation(head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What the engine multiplies a row vector by, in float64: signs, then an unnormalized Hadamard matrix."""
    order = head_dim & -head_dim
    signs = reference.random_signs(order, online.SIGN_SEED).double().numpy()
    return np.kron(np.eye(head_dim // order), signs[:, None] * hadamard_matrix(order))


# Hadamard transforms


@every_head_dim
def test_hadamard_is_the_matrix_of_the_textbook(head_dim: int) -> None:
    order = reference.hadamard_order(head_dim)
    matrix = np.kron(np.eye(head_dim // order), hadamard_matrix(order)) / math.sqrt(order)
    torch.testing.assert_close(
        reference.hadamard(torch.eye(head_dim, dtype=torch.float64)), torch.from_numpy(matrix)
    )


@pytest.mark.parametrize(
    ("size", "order"), [(1, 1), (2, 2), (24, 8), (25, 1), (80, 16), (96, 32), (128, 128), (192, 64)]
)
def test_the_order_is_the_largest_power_of_two_that_divides(size: int, order: int) -> None:
    assert reference.hadamard_order(size) == order


@every_dtype
@every_head_dim
def test_hadamard_undoes_itself_and_keeps_lengths(head_dim: int, dtype: torch.dtype) -> None:
    x = normal(3, 2, head_dim).to(dtype)
    y = reference.hadamard(x)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    near = {"rtol": 0.02, "atol": 0.1} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(reference.hadamard(y), x, **near)
    torch.testing.assert_close(y.double().norm(dim=-1), x.double().norm(dim=-1), **near)


def test_without_normalization_integers_stay_exact() -> None:
    x = torch.arange(-48, 48).float()
    y = reference.hadamard(x, normalized=False)
    assert torch.equal(y, y.round())
    assert torch.equal(reference.hadamard(y, normalized=False), 32 * x)


def test_an_odd_number_of_channels_stays_where_it_is() -> None:
    x = normal(2, 25)
    assert torch.equal(reference.hadamard(x), x)


def test_blocks_do_not_mix() -> None:
    x = torch.zeros(96)
    x[40] = 1.0
    y = reference.hadamard(x)
    assert y[32:64].all()
    assert not y[:32].any()
    assert not y[64:].any()


def test_a_vector_without_channels_can_be_rotated() -> None:
    assert reference.hadamard(torch.zeros(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("normalized", [True, False])
@every_head_dim
def test_random_hadamard_is_undone_by_its_inverse(head_dim: int, normalized: bool) -> None:
    x = normal(4, head_dim).double()
    signs = reference.random_signs(head_dim, 7)
    y = reference.random_hadamard(x, signs, normalized=normalized)
    back = reference.random_hadamard(y, signs, inverse=True, normalized=normalized)
    torch.testing.assert_close(back, x)
    assert torch.equal(y, reference.hadamard(x * signs.double(), normalized=normalized))


def test_signs_of_one_block_repeat() -> None:
    x = normal(4, 96)
    signs = reference.random_signs(32, 7)
    assert torch.equal(reference.random_hadamard(x, signs), reference.random_hadamard(x, signs.repeat(3)))


def test_signs_are_fair_and_their_seed_means_the_same_next_year() -> None:
    many = reference.random_signs(10_000, 1)
    assert set(many.tolist()) == {-1.0, 1.0}
    assert abs(float(many.mean())) < 0.05
    assert not torch.equal(many[:64], reference.random_signs(64, 2))
    # vLLM draws its signs anew at each start, so a torch that drew others would change both.
    assert "".join("-+"[int(s > 0)] for s in reference.random_signs(32, online.SIGN_SEED)) == SIGNS


SIGNS = "+-++----+--++-+-++--+++-+-+--++-"


# Error bounds


@given(vectors())
def test_int8_is_off_by_half_a_step(x: torch.Tensor) -> None:
    stored = online.quantize(x, INT8_PER_TOKEN_HEAD)
    error = (online.dequantize(stored, INT8_PER_TOKEN_HEAD).double() - x.double()).abs()
    assert (error <= stored.scale.double() * 0.5001).all()
    assert int(stored.codes.min()) >= -127


@given(vectors())
def test_fp8_is_off_by_a_sixteenth_or_half_a_subnormal(x: torch.Tensor) -> None:
    stored = online.quantize(x, FP8_PER_TOKEN_HEAD)
    error = (online.dequantize(stored, FP8_PER_TOKEN_HEAD).double() - x.double()).abs()
    bound = torch.maximum(x.double().abs() * 2.0**-4, stored.scale.double() * FP8_E4M3.rounds_to_zero)
    assert (error <= bound * 1.0001).all()
    assert stored.codes.float().isfinite().all()


@given(vectors())
def test_int4_is_off_by_half_a_step_of_the_rotated_vector_where_its_range_holds_zero(x: torch.Tensor) -> None:
    stored = online.quantize(x, INT4_PER_TOKEN_HEAD)
    assert stored.zero_point is not None
    exact = x.double() @ torch.from_numpy(rotation(x.shape[-1]))
    read = (stored.codes.double() - stored.zero_point.double()) * stored.scale.double()
    rounding = torch.finfo(torch.float32 if x.dtype == torch.float64 else x.dtype).eps
    tolerance = rounding * exact.abs().amax(-1, keepdim=True) * 8
    holds_zero = (exact.amin(-1) < 0) & (exact.amax(-1) > 0)
    within = (read - exact).abs() <= stored.scale.double() * 0.501 + tolerance
    assert within[holds_zero].all()


@given(vectors())
def test_int4_in_the_original_basis_loses_as_much_as_in_the_rotated_one(x: torch.Tensor) -> None:
    stored = online.quantize(x, INT4_PER_TOKEN_HEAD)
    assert stored.zero_point is not None
    read = (stored.codes.double() - stored.zero_point.double()) * stored.scale.double()
    matrix = torch.from_numpy(rotation(x.shape[-1]))
    original = read @ matrix.T / reference.hadamard_order(x.shape[-1])
    given_back = online.dequantize(stored, INT4_PER_TOKEN_HEAD).double()
    largest = original.abs().amax(-1, keepdim=True)
    assert ((given_back - original).abs() <= 1e-5 * largest).all()
    # What makes the original basis as good: scores with rotated queries are the same.
    q = normal(5, x.shape[-1]).double()
    scores = q @ given_back[0, 0].T
    rotated = (q @ matrix) @ read[0, 0].T / reference.hadamard_order(x.shape[-1])
    torch.testing.assert_close(scores, rotated, rtol=1e-4, atol=float(largest.max()) * 1e-4)


@every_format
@given(x=vectors())
def test_every_vector_is_stored_on_its_own(fmt: KVFormat, x: torch.Tensor) -> None:
    whole = online.quantize_dequantize(x, fmt)
    assert (whole.dtype, whole.shape) == (x.dtype, x.shape)
    assert torch.equal(online.quantize_dequantize(x[:, 1:, 2:], fmt), whole[:, 1:, 2:])
    swapped = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(online.quantize_dequantize(swapped, fmt), whole)


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("power", [-5, 9])
def test_codes_do_not_change_with_powers_of_two(fmt: KVFormat, dtype: torch.dtype, power: int) -> None:
    x = normal(1, 2, 8, 96).to(dtype)
    one, other = online.quantize(x, fmt), online.quantize(x * 2.0**power, fmt)
    assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    assert torch.equal(one.scale * 2.0**power, other.scale)


# Vectors with something about them


@every_format
@every_dtype
@every_head_dim
def test_zero_stays_zero_and_has_the_smallest_scale(fmt: KVFormat, dtype: torch.dtype, head_dim: int) -> None:
    x = torch.zeros(1, 1, 2, head_dim, dtype=dtype)
    stored = online.quantize(x, fmt)
    floor = struct.unpack("<I", struct.pack("<f", 1e-6))[0]
    if fmt.rotated:
        floor &= ~0xF
    assert set(stored.scale.view(torch.int32).flatten().tolist()) == {floor}
    assert torch.equal(online.quantize_dequantize(x, fmt), x)


@pytest.mark.parametrize("fmt", [INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD], ids=lambda f: f.name)
@pytest.mark.parametrize("constant", [5.0, -0.003, 1e30, -1e38])
def test_constant_vectors_come_back(fmt: KVFormat, constant: float) -> None:
    x = torch.full((1, 1, 1, 80), constant)
    torch.testing.assert_close(online.quantize_dequantize(x, fmt), x, rtol=1e-6, atol=0.0)


def test_a_constant_vector_is_one_channel_after_the_rotation_and_survives_int4() -> None:
    # x = D 1, so the rotation collects it all in the first channel: 15 steps, no more and no less.
    x = reference.random_signs(64, online.SIGN_SEED).reshape(1, 1, 1, 64) * 3
    torch.testing.assert_close(online.quantize_dequantize(x, INT4_PER_TOKEN_HEAD), x, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("channel", [1, 31, 50, 95])
def test_int4_keeps_an_outlier_in_any_channel_but_the_first_of_a_block(channel: int) -> None:
    x = normal(1, 1, 4, 96) * 0.1
    x[..., channel] = 100.0
    back = online.quantize_dequantize(x, INT4_PER_TOKEN_HEAD)
    assert (back[..., channel] - 100.0).abs().max() < 0.55 * 200 / 15  # half a step of what is now ±100


@pytest.mark.parametrize("channel", [0, 32, 64])
@pytest.mark.parametrize("outlier", [100.0, -100.0])
def test_int4_loses_an_outlier_in_the_first_channel_of_a_block(channel: int, outlier: float) -> None:
    # Rotated, its block is all but constant and far from zero. Where other blocks stay near zero the range
    # reaches from there and it survives; in a vector of one block the zero point saturates and it is lost.
    x = normal(1, 1, 4, 32) * 0.1
    x[..., channel % 32] = outlier
    assert online.quantize_dequantize(x, INT4_PER_TOKEN_HEAD)[..., channel % 32].abs().max() < 10.0
    wide = normal(1, 1, 4, 96) * 0.1
    wide[..., channel] = outlier
    assert (online.quantize_dequantize(wide, INT4_PER_TOKEN_HEAD)[..., channel] - outlier).abs().max() < 3.0


def test_the_largest_of_a_huge_vector_is_not_wrapped() -> None:
    # Constant once rotated, so scaled by the floor: 1e36 as a 32-bit integer may be anything.
    x = torch.zeros(1, 1, 1, 64)
    x[..., 0] = 1e30
    stored = online.quantize(x, INT4_PER_TOKEN_HEAD)
    sign = float(reference.random_signs(64, online.SIGN_SEED)[0])
    expected = (15, 0) if sign > 0 else (0, 15)
    assert stored.zero_point is not None
    assert (set(stored.codes.flatten().tolist()), int(stored.zero_point)) == ({expected[0]}, expected[1])


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_huge_values_stay_finite(fmt: KVFormat, dtype: torch.dtype) -> None:
    x = (normal(1, 2, 4, 64) * 1e35).to(dtype)
    assert online.quantize_dequantize(x, fmt).isfinite().all()


def test_one_outlier_flattens_the_rest_in_int8_not_in_fp8() -> None:
    x = normal(1, 1, 16, 128)
    x[..., 3] = 1000.0
    rest = torch.ones(128, dtype=torch.bool)
    rest[3] = False
    errors = {
        fmt.name: (online.quantize_dequantize(x, fmt) - x)[..., rest].norm() / x[..., rest].norm()
        for fmt in (INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD)
    }
    assert errors["int8_per_token_head"] > 0.5
    assert errors["fp8_per_token_head"] < 0.05


# What cannot be meant


@pytest.mark.parametrize("of", [online.quantize, online.quantize_dequantize])
def test_static_formats_are_refused_by_name(of: Any) -> None:
    with pytest.raises(UsageError, match="fp8_e4m3 has static scales"):
        of(normal(1, 1, 1, 16), FP8_E4M3)


def test_static_formats_are_refused_on_reading_too() -> None:
    stored = online.quantize(normal(1, 1, 1, 16), FP8_PER_TOKEN_HEAD)
    with pytest.raises(UsageError, match="fp8_e4m3 has static scales"):
        online.dequantize(stored, FP8_E4M3)


def test_two_channels_share_a_byte_so_an_odd_head_size_is_refused() -> None:
    with pytest.raises(UsageError, match="int4_per_token_head stores two channels .* 25 is odd"):
        online.quantize(normal(1, 1, 1, 25), INT4_PER_TOKEN_HEAD)
    online.quantize(normal(1, 1, 1, 25), INT8_PER_TOKEN_HEAD)


# Oracles: the same formulas once more, in float64, number by number

# float32 moves a scaled value by a few of its last bits, and so over a rounding boundary that lies closer.
NEAR = 1e-4


def half_away(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def between(code: float, value: float, rounded: Any) -> bool:
    """Whether ``code`` is what ``value``, or one within the rounding of float32, becomes."""
    slack = NEAR * max(1.0, abs(value) / 100)
    return bool(rounded(value - slack) <= code <= rounded(value + slack))


def awkward(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """``(1, 1, tokens, head_dim)``: plain, with outliers, tiny, shifted, constant, zero."""
    x = normal(8, head_dim, seed=head_dim)
    x[1, 1] *= 50
    x[2] *= 1e-7
    x[3] += 2.0
    x[4] = 1.5
    x[5] = 0.0
    x[6] = torch.linspace(-127, 127, head_dim)
    x[7, 0] = 100.0
    return x.to(dtype).reshape(1, 1, 8, head_dim)


@every_dtype
@every_head_dim
def test_int8_is_what_python_makes_of_it(head_dim: int, dtype: torch.dtype) -> None:
    x = awkward(head_dim, dtype)
    stored = online.quantize(x, INT8_PER_TOKEN_HEAD)
    for row, codes, scale in zip(
        x[0, 0].tolist(), stored.codes[0, 0].tolist(), stored.scale[0, 0], strict=True
    ):
        expected = max(max(map(abs, row)) / 127, 1e-6)
        assert float(scale) == pytest.approx(expected, rel=1e-6)
        assert all(between(c, v / expected, half_away) for c, v in zip(codes, row, strict=True))


@every_dtype
@every_head_dim
def test_fp8_is_what_ml_dtypes_makes_of_it(head_dim: int, dtype: torch.dtype) -> None:
    x = awkward(head_dim, dtype)
    stored = online.quantize(x, FP8_PER_TOKEN_HEAD)
    values = x.double().numpy()
    scale = np.maximum(np.abs(values).max(-1, keepdims=True) / 448, 1e-6)
    np.testing.assert_allclose(stored.scale.numpy(), scale, rtol=1e-6)
    codes = stored.codes.float().numpy()

    def cast(scaled: Any) -> Any:
        return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)

    slack = np.abs(values / scale) * 1e-6
    assert (cast(values / scale - slack) <= codes).all()
    assert (codes <= cast(values / scale + slack)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_head_dim
def test_int4_is_what_python_makes_of_it(head_dim: int, dtype: torch.dtype) -> None:
    x = awkward(head_dim, dtype)
    stored = online.quantize(x, INT4_PER_TOKEN_HEAD)
    assert stored.zero_point is not None
    rotated = x[0, 0].double().numpy() @ rotation(head_dim)
    for i, row in enumerate(rotated.tolist()):
        low, high = min(row), max(row)
        step = max((high - low) / 15, 1e-6)
        if max(map(abs, row)) / step > 100:
            continue  # all but constant: nothing but the rounding of float32 would be compared

        def saturated(value: float) -> int:
            return min(max(half_away(value), 0), 15)

        zero_point = int(stored.zero_point[0, 0, i])
        assert between(zero_point, -low / step, saturated)
        assert all(
            between(c, v / step + zero_point, saturated)
            for c, v in zip(stored.codes[0, 0, i].tolist(), row, strict=True)
        )
        held = float(stored.scale[0, 0, i])
        assert held == pytest.approx(step, rel=4e-6)
        assert struct.unpack("<I", struct.pack("<f", held))[0] % 16 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rotated_vectors_are_rounded_to_the_dtype_of_the_model_before_they_are_quantized(
    dtype: torch.dtype,
) -> None:
    x = (normal(1, 1, 200, 64) * 3).to(dtype)
    signs = reference.random_signs(64, online.SIGN_SEED)
    rotated = reference.random_hadamard(x.float(), signs, normalized=False).to(dtype).float()
    step = (rotated.amax(-1) - rotated.amin(-1)) / 15
    read = (online.quantize(x, INT4_PER_TOKEN_HEAD).scale[..., 0].view(torch.int32)) >> 4
    assert torch.equal(read, step.view(torch.int32) >> 4)


def test_int8_rounds_halves_away_from_zero() -> None:
    x = torch.tensor([127.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 126.5]).reshape(1, 1, 1, 8)
    codes = online.quantize(x, INT8_PER_TOKEN_HEAD).codes
    assert codes.flatten().tolist() == [127, 1, -1, 2, -2, 3, -3, 127]


def test_scaling_is_a_product_with_the_reciprocal_so_some_halves_are_missed() -> None:
    x = torch.tensor([254 * 41.0, 127 * 41.0, -127 * 41.0, 41.0]).reshape(1, 1, 1, 4)
    codes = online.quantize(x, INT8_PER_TOKEN_HEAD).codes
    assert codes.flatten().tolist() == [127, 63, -63, 1]  # 5207 / 82 is 63.5, 5207 * (1 / 82) is less


def test_fp8_rounds_halves_to_even() -> None:
    x = torch.tensor([448.0, 17.0, 19.0, -17.0, 2**-10, 3 * 2**-10, 432.0, 0.0]).reshape(1, 1, 1, 8)
    codes = online.quantize(x, FP8_PER_TOKEN_HEAD).codes.float()
    assert codes.flatten().tolist() == [448, 16, 20, -16, 0, 2**-8, 448, 0]


def unrotated(rows: list[list[float]]) -> torch.Tensor:
    """``(1, 1, rows, n)`` that the engine rotates into ``rows``, exactly if they are small dyadics."""
    wanted = torch.tensor(rows)
    signs = reference.random_signs(wanted.shape[-1], online.SIGN_SEED)
    return reference.random_hadamard(wanted, signs, inverse=True, normalized=False)[None, None]


# Steps of 1 from -6.5 to 8.5, so zero point 6.5 and every code a tie; and from -6 to 9, with ties between.
TIES = [
    [-6.5, 8.5, 0.0, 0.5, -0.5, 3.0, -3.5, 8.0],
    [-6.0, 9.0, 0.5, 1.5, 2.5, -0.5, -1.5, -5.5],
]


def test_int4_rounds_halves_away_from_zero_twice() -> None:
    stored = online.quantize(unrotated(TIES), INT4_PER_TOKEN_HEAD)
    assert stored.zero_point is not None
    assert stored.scale.flatten().tolist() == [1.0, 1.0]
    assert stored.zero_point.flatten().tolist() == [7, 6]
    assert stored.codes[0, 0].tolist() == [[1, 15, 7, 8, 7, 10, 4, 15], [0, 15, 7, 8, 9, 6, 5, 1]]


# vLLM's own kernels


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's kernels made of :func:`engine_cases`, one start for all."""
    try:
        python = live_engine.engine_python(None)
    except UsageError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("online")
    torch.save(engine_cases(), folder / "cases.pt")
    command = [str(python), str(PROBE), str(folder / "cases.pt"), str(folder / "answer.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = torch.load(folder / "answer.pt")
    return answer


ENGINE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ENGINE_CASES = [
    f"{fmt.name}-{head_dim}-{dtype}"
    for fmt in DYNAMIC
    for head_dim in (128, 96, 80, 64)
    for dtype in ENGINE_DTYPES
]
ATTENTION_CASES = [
    name for name in ENGINE_CASES if name.startswith("int4") and name.split("-")[1] in "128 96"
]


@functools.cache
def engine_cases() -> dict[str, dict[str, Any]]:
    """``(tokens, heads, head_dim)``: awkward rows, ties, an outlier channel; V on another scale than K."""
    cases: dict[str, dict[str, Any]] = {}
    for seed, name in enumerate([*ENGINE_CASES, "ties"]):
        if name == "ties":
            ties = unrotated(TIES)[0].transpose(0, 1)
            cases[name] = {"format": INT4_PER_TOKEN_HEAD.name, "key": ties, "value": -ties}
            continue
        fmt, size, dtype = name.split("-")
        head_dim = int(size)
        key = normal(12, 2, head_dim, seed=seed)
        key[..., 5] *= 30.0
        key[:8, 0] = awkward(head_dim, torch.float32)[0, 0]
        key[0, 1] = torch.arange(head_dim).remainder(32) - 15.5
        key[0, 1, 0] = 127.0  # INT8: a step of 1, ties everywhere else
        key[1, 1] = torch.arange(head_dim) + 16.0
        key[1, 1, 0] = 448.0  # FP8: a step of 1, and of 2 where E4M3 has every second or eighth integer
        cases[name] = {
            "format": fmt,
            "key": key.to(ENGINE_DTYPES[dtype]),
            "value": (normal(12, 2, head_dim, seed=seed + 1000) * 0.2).to(ENGINE_DTYPES[dtype]),
        }
        if name in ATTENTION_CASES:
            plain = normal(12, 2, head_dim, seed=seed + 2000)
            plain[..., 5] *= 10.0
            cases[name]["key"][8:] = plain[8:]
            cases[name]["query"] = normal(12, 4, head_dim, seed=seed + 3000).to(ENGINE_DTYPES[dtype])
    return cases


def per_head(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", [*ENGINE_CASES, "ties"])
def test_vllm_writes_the_same_bits(engine: dict[str, Any], name: str, side: str) -> None:
    case = engine_cases()[name]
    stored = online.quantize(per_head(case[side]), formats.get(case["format"]))
    codes, scale = stored.codes.view(torch.uint8), stored.scale.view(torch.int32)
    if stored.zero_point is not None:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
        scale = scale | stored.zero_point
    assert torch.equal(codes, per_head(engine[name][side]))
    assert torch.equal(scale[..., 0], per_head(engine[name][f"{side}_scale"].view(torch.int32)))


@pytest.mark.slow
def test_vllm_draws_the_same_signs(engine: dict[str, Any]) -> None:
    assert torch.equal(engine["signs"], reference.random_signs(128, online.SIGN_SEED))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_vllm_attends_to_what_is_given_back_in_the_original_basis(engine: dict[str, Any], name: str) -> None:
    case = engine_cases()[name]
    scaling = case["key"].shape[-1] ** -0.5
    q, k, v = (per_head(case[tensor]) for tensor in ("query", "key", "value"))
    read = [online.dequantize(online.quantize(x, INT4_PER_TOKEN_HEAD), INT4_PER_TOKEN_HEAD) for x in (k, v)]
    expected = reference.attention(q.double(), *(x.double() for x in read), scaling=scaling)
    output = per_head(engine[name]["output"]).double()
    error = float((output - expected).norm() / expected.norm())
    # The engine rounds rotated queries and the output, before and after it is rotated back, to their dtype.
    assert error < max(2 * torch.finfo(q.dtype).eps, 1e-5)
    plain = reference.attention(q.double(), k.double(), v.double(), scaling=scaling)
    assert float((output - plain).norm() / plain.norm()) > 10 * error
