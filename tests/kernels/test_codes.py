"""Codes against tables written out, ml_dtypes, torch's own FP8, compressed-tensors, and big integers."""

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import formats
from kvcal.formats import FP8_E4M3, FP8_E5M2, INT4, INT4_PER_TOKEN_HEAD, INT8, MXFP4, NVFP4
from kvcal.kernels import codes

quick = settings(deadline=None, max_examples=60)

INTEGERS = [f for f in formats.FORMATS if f.integer and not f.dynamic]
FLOATS = {FP8_E4M3: "float8_e4m3fn", FP8_E5M2: "float8_e5m2", NVFP4: "float4_e2m1fn", MXFP4: "float4_e2m1fn"}
STATIC = [*FLOATS, *INTEGERS]
DYNAMIC = [f for f in formats.FORMATS if f.dynamic]

every_integer = pytest.mark.parametrize("fmt", INTEGERS, ids=lambda f: f.name)
every_float = pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
every_static = pytest.mark.parametrize("fmt", STATIC, ids=lambda f: f.name)
every_dynamic = pytest.mark.parametrize("fmt", DYNAMIC, ids=lambda f: f.name)
both_blocks = pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda f: f.name)

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
seeds = st.integers(0, 2**32 - 1)


def grid(fmt):
    """All values of one element in float64, ascending, made without the module under test."""
    if fmt.integer:
        half = 2 ** (fmt.bits - 1)
        return np.arange(-half, half, dtype=np.float64)
    code = np.arange(2**fmt.bits, dtype=np.uint8)
    values = code.view(getattr(ml_dtypes, FLOATS[fmt])).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def even(fmt, index):
    """Whether the grid's value of this index has an even code, as its distance from 0 tells."""
    return (index - int(np.searchsorted(grid(fmt), 0.0))) % 2 == 0


def nearest(x, fmt):
    """Float64 values nearest to ``x``, ties to the even code."""
    values = grid(fmt)
    x = np.clip(x, values[0], values[-1])
    above = np.searchsorted(values, x).clip(1, len(values) - 1)
    down, up = x - values[above - 1], values[above] - x
    take_above = (up < down) | ((up == down) & even(fmt, above))
    return values[np.where(take_above, above, above - 1)]


def normal(*shape, seed=0, spread=0.0):
    """Gaussian values whose rows differ in size by ``e ** spread`` or so."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    return torch.randn(*shape, generator=generator) * size


def scales_like(*shape, seed=0):
    """Scales that are all different and none of which is 1."""
    return 0.01 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) / 3


class TestRoundToFormat:
    @every_static
    def test_every_value_and_every_midpoint(self, fmt):
        values = grid(fmt)
        middle = (values[1:] + values[:-1]) / 2
        around = [np.nextafter(middle.astype(np.float32), np.float32(side)) for side in (-np.inf, np.inf)]
        x = np.concatenate([values, middle, *around]).astype(np.float32)
        assert np.array_equal(codes.round_to_format(torch.from_numpy(x), fmt), nearest(x.astype(float), fmt))

    @every_static
    @quick
    @given(seed=seeds, magnitude=st.floats(-8, 8))
    def test_is_the_nearest_value(self, fmt, seed, magnitude):
        x = normal(3, 50, seed=seed) * 10.0**magnitude
        assert np.array_equal(codes.round_to_format(x, fmt), nearest(x.double().numpy(), fmt))

    @every_float
    def test_equals_the_cast_of_ml_dtypes(self, fmt):
        x = normal(20000, 1, spread=6.0).clamp(-fmt.max, fmt.max)
        theirs = x.numpy().astype(getattr(ml_dtypes, FLOATS[fmt])).astype(np.float32)
        assert np.array_equal(codes.round_to_format(x, fmt).numpy().view(np.int32), theirs.view(np.int32))

    @pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
    def test_equals_the_cast_of_torch_for_every_half(self, fmt):
        x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
        x = x[x.isfinite()]
        theirs = x.float().clamp(-fmt.max, fmt.max).to(getattr(torch, fmt.storage_dtype)).float()
        assert torch.equal(codes.round_to_format(x, fmt), theirs)

    def test_e2m1_equals_compressed_tensors(self):
        x = torch.cat([torch.linspace(-8, 8, 4097), normal(5000, 1, seed=3).flatten() * 2])
        assert torch.equal(codes.round_to_format(x, NVFP4), cast_to_fp4(x.clone()))

    @every_static
    def test_saturates_and_keeps_nan(self, fmt):
        x = torch.tensor([3.0e38, -3.0e38, float("inf"), float("-inf"), float("nan")])
        low = -fmt.max - 1 if fmt.integer else -fmt.max
        found = codes.round_to_format(x, fmt)
        assert found[:4].tolist() == [fmt.max, low, fmt.max, low]
        assert bool(found[4].isnan())

    @every_static
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_takes_any_float_dtype_and_shape_and_gives_float32(self, fmt, dtype):
        x = normal(2, 3, 1, 5).to(dtype)
        found = codes.round_to_format(x, fmt)
        assert (found.dtype, found.shape) == (torch.float32, x.shape)
        assert torch.equal(found, codes.round_to_format(x.float(), fmt))
        assert codes.round_to_format(x[:0], fmt).shape == (0, 3, 1, 5)

    @every_dynamic
    def test_refuses_what_the_engine_rounds(self, fmt):
        with pytest.raises(ValueError, match=f"{fmt.name} is rounded by the engine; kvcal.online"):
            codes.round_to_format(torch.ones(3), fmt)


class TestSymmetric:
    @every_integer
    def test_every_code_comes_back(self, fmt):
        every = torch.arange(-fmt.max - 1, fmt.max + 1).to(torch.int8)
        scale = scales_like(7, 1)
        x = codes.dequantize_symmetric(every, scale)
        assert x.dtype == torch.float32
        assert torch.equal(codes.quantize_symmetric(x, scale, fmt), every.expand(7, -1))

    @every_integer
    @quick
    @given(seed=seeds)
    def test_is_off_by_half_a_step_inside_the_range_and_saturates_outside(self, fmt, seed):
        scale = scales_like(4, 1, seed=seed)
        x = normal(4, 33, seed=seed) * scale * fmt.max
        found = codes.dequantize_symmetric(codes.quantize_symmetric(x, scale, fmt), scale)
        inside = (x <= (fmt.max + 0.5) * scale) & (x >= -(fmt.max + 1.5) * scale)
        assert bool(inside.any())
        assert bool(((found - x).abs() <= 0.500001 * scale)[inside].all())
        ends = torch.where(x > 0, fmt.max * scale, (-fmt.max - 1) * scale)
        assert torch.equal(found[~inside], ends[~inside])

    @every_integer
    def test_equals_compressed_tensors(self, fmt):
        x, scale = normal(6, 40, seed=2), scales_like(6, 1)
        args = QuantizationArgs(num_bits=fmt.bits, type="int", symmetric=True, strategy="channel")
        theirs = fake_quantize(x, scale, torch.zeros_like(scale), args)
        ours = codes.dequantize_symmetric(codes.quantize_symmetric(x, scale, fmt), scale)
        assert torch.equal(ours, theirs)

    def test_a_scale_of_zero_gives_back_zero(self):
        scale = torch.tensor([0.0, 0.3]).unsqueeze(-1)
        x = torch.tensor([[0.0, 5.0, -5.0], [0.3, -0.6, 0.1]])
        found = codes.quantize_symmetric(x, scale, INT4)
        assert found.tolist() == [[0, 0, 0], [1, -2, 0]]
        assert codes.dequantize_symmetric(found, scale)[0].tolist() == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("fmt", [*FLOATS, *DYNAMIC], ids=lambda f: f.name)
    def test_refuses_all_but_static_integers(self, fmt):
        one = torch.ones(1)
        with pytest.raises(ValueError, match=fmt.name):
            codes.quantize_symmetric(one, one, fmt)
        with pytest.raises(ValueError, match=fmt.name):
            codes.quantize_asymmetric(one, one, one, fmt)


class TestAsymmetric:
    def test_the_example_of_kivi(self):
        x = torch.tensor([-1.0, 0.2, 0.9, 2.0])
        found = codes.quantize_asymmetric(x, torch.tensor(-1.0), torch.tensor(1.0), formats.INT2)
        assert (found.dtype, found.tolist()) == (torch.uint8, [0, 1, 2, 3])
        given_back = codes.dequantize_asymmetric(found, torch.tensor(-1.0), torch.tensor(1.0))
        assert given_back.tolist() == [-1, 0, 1, 2]

    @every_integer
    def test_every_code_comes_back(self, fmt):
        every = torch.arange(2**fmt.bits).to(torch.uint8)
        low, scale = normal(7, 1), scales_like(7, 1)
        x = codes.dequantize_asymmetric(every, low, scale)
        assert torch.equal(codes.quantize_asymmetric(x, low, scale, fmt), every.expand(7, -1))

    @every_integer
    @quick
    @given(seed=seeds, offset=st.floats(-20, 20))
    def test_is_off_by_half_a_step_between_the_extremes(self, fmt, seed, offset):
        x = normal(3, 5, 24, seed=seed, spread=1.0) + offset
        low, high = x.aminmax(dim=-1, keepdim=True)
        scale = (high - low) / (2**fmt.bits - 1)
        found = codes.dequantize_asymmetric(codes.quantize_asymmetric(x, low, scale, fmt), low, scale)
        assert bool(((found - x).abs() <= 0.5 * scale + 2e-6 * (1 + abs(offset))).all())

    @every_integer
    def test_saturates(self, fmt):
        x = torch.tensor([-9.0, 1e30, -1e30])
        low, scale = torch.tensor(-1.5), torch.tensor(0.25)
        assert codes.quantize_asymmetric(x, low, scale, fmt).tolist() == [0, 2**fmt.bits - 1, 0]

    def test_halves_go_to_the_even_code(self):
        x = torch.tensor([0.5, 1.5, 2.5, 3.5])
        assert codes.quantize_asymmetric(x, torch.tensor(0.0), torch.tensor(1.0), INT4).tolist() == [
            0,
            2,
            2,
            4,
        ]
        assert codes.quantize_symmetric(-x, torch.tensor(1.0), INT4).tolist() == [0, -2, -2, -4]

    @every_integer
    def test_equals_compressed_tensors_where_the_offset_is_a_whole_number_of_steps(self, fmt):
        half = 2 ** (fmt.bits - 1)
        x, zero_point = (
            normal(6, 40, seed=5),
            torch.tensor([[-half], [0], [1], [half - 1], [-1], [-half // 2]]),
        )
        scale = 2.0 ** torch.tensor(
            [[-4], [-3], [-2], [-1], [-5], [-3]]
        )  # so that no rounding but the codes'
        args = QuantizationArgs(num_bits=fmt.bits, type="int", symmetric=False, strategy="channel")
        theirs = fake_quantize(x, scale, zero_point, args)
        low = -(zero_point + half) * scale  # their codes begin at -half
        ours = codes.dequantize_asymmetric(codes.quantize_asymmetric(x, low, scale, fmt), low, scale)
        # A float offset is subtracted before the division, theirs added behind the rounding: ties may differ.
        tie = ((x / scale).frac().abs() - 0.5).abs() < 1e-6
        assert torch.equal(ours[~tie], theirs[~tie])

    def test_a_constant_group_comes_back_exactly(self):
        x = torch.tensor([[0.1, 0.1, 0.1], [-3.7, -3.7, -3.7], [0.0, 0.0, 0.0]])
        low = x[:, :1]
        found = codes.quantize_asymmetric(x, low, torch.zeros(3, 1), INT4)
        assert found.eq(0).all()
        assert torch.equal(codes.dequantize_asymmetric(found, low, torch.zeros(3, 1)), x)


def block_reference(x, fmt, tensor_scale):
    """Given-back values of one block ``(block,)`` by the definitions, its scale in float32."""
    amax = max(abs(float(v)) for v in x)
    if fmt is NVFP4:
        wanted = np.float32(amax) / (np.float32(6) * np.float32(tensor_scale))
        stored = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        scale = max(stored, np.float32(2**-9)) * np.float32(tensor_scale)
    else:
        scale = np.float32(2.0 ** max(-127, np.floor(np.log2(amax)) - 2 if amax else -127))
    elements = nearest((x / scale).astype(np.float64), fmt)
    return elements.astype(np.float32) * scale


class TestBlocks:
    @both_blocks
    @quick
    @given(seed=seeds, blocks=st.integers(1, 5), spread=st.floats(0, 4), tensor=st.floats(-3, 3))
    def test_equals_the_definition(self, fmt, seed, blocks, spread, tensor):
        x = normal(2, 3, blocks, fmt.block, seed=seed, spread=spread)
        scale = None if fmt is MXFP4 else torch.tensor([10.0**tensor / 2688])
        stored = codes.quantize_blocks(x.flatten(-2), fmt, scale)
        expected = [block_reference(row, fmt, scale) for row in x.reshape(-1, fmt.block).numpy()]
        found = codes.dequantize_blocks(stored)
        assert found.shape == (2, 3, blocks * fmt.block)
        assert stored.block_scale.shape == (2, 3, blocks)
        assert stored.block_scale.dtype == getattr(torch, fmt.block_scale_dtype)
        assert np.array_equal(found.reshape(-1, fmt.block), np.stack(expected))

    def test_the_example_of_mxfp4(self):
        x = torch.tensor([0.7, -0.2, 0.1, 0.05] + 28 * [0.0])
        stored = codes.quantize_blocks(x, MXFP4)
        assert stored.block_scale.float().tolist() == [2**-3]
        assert stored.codes[:4].tolist() == [7, 8 + 3, 2, 1]
        assert codes.dequantize_blocks(stored)[:4].tolist() == [0.75, -0.1875, 0.125, 0.0625]

    @both_blocks
    def test_every_code_comes_back(self, fmt):
        every = torch.arange(16, dtype=torch.uint8).repeat(fmt.block // 16)
        scale = None if fmt is MXFP4 else torch.tensor([0.37])
        block_scale = torch.tensor([2.0, 0.25, 64.0]).to(getattr(torch, fmt.block_scale_dtype))
        stored = codes.BlockCodes(every.repeat(3), block_scale, scale)
        again = codes.quantize_blocks(codes.dequantize_blocks(stored), fmt, scale)
        assert torch.equal(again.codes, stored.codes)
        assert torch.equal(again.block_scale.float(), stored.block_scale.float())

    def test_elements_decode_as_those_of_ml_dtypes_and_compressed_tensors(self):
        every = torch.arange(16, dtype=torch.uint8)
        stored = codes.BlockCodes(every, torch.ones(1).to(torch.float8_e4m3fn), torch.ones(1))
        found = codes.dequantize_blocks(stored)
        assert np.array_equal(found, every.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32))
        packed = codes.pack(every, 4).unsqueeze(0)
        assert torch.equal(found, unpack_fp4_from_uint8(packed, 1, 16, torch.float32)[0])
        assert found.signbit().tolist() == 8 * [False] + 8 * [True]

    def test_packed_codes_are_those_of_compressed_tensors(self):
        x = codes.round_to_format(normal(5, 64, seed=8) * 3, NVFP4)
        x[:, 0] = 6.0
        ones = torch.tensor([1 / 448])  # tensor scale that makes every block scale 448
        x[:, ::16] = 6.0
        stored = codes.quantize_blocks(x, NVFP4, ones)
        assert torch.equal(codes.dequantize_blocks(stored), x)
        assert torch.equal(codes.pack(stored.codes, 4), pack_fp4_to_uint8(x))

    def test_nvfp4_equals_compressed_tensors(self):
        x = normal(6, 64, seed=4, spread=1.0)
        tensor_scale = codes.nvfp4_tensor_scale(x.abs().max())
        stored = codes.quantize_blocks(x, NVFP4, tensor_scale)
        args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
        # compressed-tensors divides by its global scale, the reciprocal of ours.
        block_scale, reciprocal = stored.block_scale.float(), 1 / tensor_scale.reshape(1)
        zeros = torch.zeros_like(block_scale)
        theirs = fake_quantize(x, block_scale, zeros, args, global_scale=reciprocal)
        ours = codes.dequantize_blocks(stored)
        same = (ours - theirs).abs() <= 1e-6 * theirs.abs()
        assert float(same.float().mean()) > 0.99  # the reciprocal may move a value across a midpoint
        largest = stored.block_scale.float().max()
        assert float(largest) == 448

    def test_the_scale_of_the_tensor_brings_the_largest_block_to_448(self):
        x = normal(3, 48, seed=1, spread=2.0)
        stored = codes.quantize_blocks(x, NVFP4)
        assert float(stored.block_scale.float().max()) == 448
        assert float(stored.tensor_scale) == pytest.approx(float(x.abs().max()) / 2688, rel=1e-7)
        given_back = codes.dequantize_blocks(stored)
        at = x.abs().argmax()
        assert float(given_back.flatten()[at]) == pytest.approx(float(x.flatten()[at]), rel=1e-6)

    def test_a_scale_of_the_tensor_may_differ_by_head(self):
        x = normal(2, 3, 5, 32, seed=6)
        scale = torch.tensor([0.001, 0.0004, 0.01]).reshape(3, 1, 1)
        together = codes.dequantize_blocks(codes.quantize_blocks(x, NVFP4, scale))
        for head in range(3):
            alone = codes.quantize_blocks(x[:, head], NVFP4, scale[head])
            assert torch.equal(together[:, head], codes.dequantize_blocks(alone))

    def test_a_block_scale_that_would_be_zero_is_the_smallest(self):
        x = torch.cat([torch.full((16,), 1.0), torch.full((16,), 1e-6)])
        stored = codes.quantize_blocks(x, NVFP4, torch.tensor(1.0 / 6))
        assert stored.block_scale.float().tolist() == [1.0, 2**-9]
        assert codes.dequantize_blocks(stored).tolist() == pytest.approx(16 * [1.0] + 16 * [0.0])

    def test_block_scales_saturate(self):
        x = torch.full((16,), 1e6)
        stored = codes.quantize_blocks(x, NVFP4, torch.tensor(1.0))
        assert codes.dequantize_blocks(stored).tolist() == 16 * [6 * 448.0]

    @both_blocks
    def test_zeros_stay_zero_whatever_the_scale_of_the_tensor(self, fmt):
        x = torch.zeros(2, 64)
        scales = [None] if fmt is MXFP4 else [None, torch.tensor(0.0), torch.tensor(0.3)]
        for scale in scales:
            stored = codes.quantize_blocks(x, fmt, scale)
            assert torch.equal(codes.dequantize_blocks(stored), x)
            smallest = 2**-127 if fmt is MXFP4 else 2**-9
            assert stored.block_scale.double().unique().tolist() == [smallest]
        assert float(codes.nvfp4_tensor_scale(torch.tensor(0.0))) == 1.0

    def test_a_scale_of_the_tensor_of_zero_gives_back_zero(self):
        stored = codes.quantize_blocks(normal(1, 32), NVFP4, torch.tensor(0.0))
        assert codes.dequantize_blocks(stored).abs().max() == 0

    def test_e8m0_reaches_from_the_smallest_to_the_largest_float(self):
        powers = torch.cat([torch.tensor([0.0, 2.0**-149, 2.0**-126]), 2.0 ** torch.arange(-125.0, 128)])
        x = powers.unsqueeze(-1).repeat(1, 32)
        stored = codes.quantize_blocks(x, MXFP4)
        exponents = stored.block_scale.view(torch.uint8).flatten().int() - 127
        wanted = [-127] * 3 + [max(-127, e - 2) for e in range(-125, 128)]
        assert exponents.tolist() == wanted
        scale = stored.block_scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        assert np.array_equal(stored.block_scale.double(), scale)
        found = codes.dequantize_blocks(stored)
        assert torch.equal(found[2:], x[2:])

    @both_blocks
    def test_blocks_do_not_touch_each_other(self, fmt):
        x = normal(1, 4 * fmt.block, seed=9)
        louder = x.clone()
        louder[:, fmt.block : 2 * fmt.block] *= 1000
        scale = None if fmt is MXFP4 else torch.tensor(0.001)
        before, after = (codes.dequantize_blocks(codes.quantize_blocks(t, fmt, scale)) for t in (x, louder))
        changed = (before != after).reshape(4, fmt.block).any(-1)
        assert changed.tolist() == [False, True, False, False]

    @pytest.mark.parametrize(("fmt", "decibel"), [(NVFP4, 20.4), (MXFP4, 18.8)])
    def test_signal_to_noise_of_gaussian_values(self, fmt, decibel):
        x = normal(2**10, 2**10, seed=1)
        noise = codes.dequantize_blocks(codes.quantize_blocks(x, fmt)) - x
        found = 10 * torch.log10(x.square().sum() / noise.square().sum())
        assert float(found) == pytest.approx(decibel, abs=0.1)

    def test_refusals_name_the_number(self):
        with pytest.raises(ValueError, match="nvfp4 stores blocks of 16 elements; 40 is no multiple"):
            codes.quantize_blocks(torch.ones(2, 40), NVFP4)
        with pytest.raises(ValueError, match="mxfp4 stores blocks of 32 elements; 48 is no multiple"):
            codes.quantize_blocks(torch.ones(2, 48), MXFP4)
        with pytest.raises(ValueError, match="mxfp4 has no scale of the tensor"):
            codes.quantize_blocks(torch.ones(2, 32), MXFP4, torch.ones(1))
        with pytest.raises(ValueError, match="int4 has no blocks; quantize_blocks takes nvfp4 and mxfp4"):
            codes.quantize_blocks(torch.ones(2, 32), INT4)

    @both_blocks
    def test_float16_extremes_and_empty_tensors(self, fmt):
        x = torch.tensor([65504.0, -6e-8] * 16, dtype=torch.float16)
        found = codes.dequantize_blocks(codes.quantize_blocks(x, fmt))
        assert bool(found.isfinite().all())
        empty = torch.ones(0, 2 * fmt.block)
        scale = None if fmt is MXFP4 else torch.tensor(1.0)
        assert codes.dequantize_blocks(codes.quantize_blocks(empty, fmt, scale)).shape == empty.shape


class TestPacking:
    @quick
    @given(bits=st.integers(1, 8), n=st.integers(0, 41), rows=st.integers(0, 3), seed=seeds)
    def test_is_a_little_endian_stream_of_bits(self, bits, n, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 2**bits, (2, rows, n), generator=generator).to(torch.uint8)
        packed = codes.pack(x, bits)
        length = (n * bits + 7) // 8
        assert (packed.dtype, packed.shape) == (torch.uint8, (2, rows, length))
        for row, found in zip(x.reshape(2 * rows, n), packed.reshape(2 * rows, length), strict=True):
            stream = sum(code << (bits * i) for i, code in enumerate(row.tolist()))
            assert bytes(found.tolist()) == stream.to_bytes(length, "little")
        assert torch.equal(codes.unpack(packed, bits, n), x)

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_unused_bits_are_zero_and_written(self, bits, poisoned_outputs):
        x = torch.full((3, 7), 2**bits - 1, dtype=torch.uint8)
        packed = codes.pack(x, bits)
        spare = 8 * packed.shape[-1] - 7 * bits
        assert packed[:, -1].tolist() == 3 * [0xFF >> spare]
        assert torch.equal(codes.unpack(packed, bits, 7), x)

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_signed_codes_are_packed_as_compressed_tensors_does(self, bits):
        every = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).to(torch.int8).repeat(32).reshape(4, -1)
        packed = codes.pack(codes.to_unsigned(every, bits), bits)
        theirs = pack_to_int32(every, bits).numpy().astype("<i4").view(np.uint8)
        assert np.array_equal(packed, theirs[:, : packed.shape[-1]])
        assert not theirs[:, packed.shape[-1] :].any()
        back = codes.to_signed(codes.unpack(packed, bits, every.shape[-1]), bits)
        assert back.dtype == torch.int8
        assert torch.equal(back, every)

    def test_rows_of_any_strides(self):
        x = torch.arange(60, dtype=torch.uint8).reshape(6, 10) % 8
        assert torch.equal(codes.pack(x.T, 3), codes.pack(x.T.contiguous(), 3))

    def test_refusals_name_the_number(self):
        with pytest.raises(ValueError, match="code 8 does not fit into 3 bits"):
            codes.pack(torch.tensor([1, 8], dtype=torch.uint8), 3)
        with pytest.raises(ValueError, match="codes are torch.int8; pack takes uint8, signed codes through"):
            codes.pack(torch.tensor([1, -1], dtype=torch.int8), 3)
        for bits in (0, 9):
            with pytest.raises(ValueError, match=f"codes of {bits} bits cannot be packed; 1 to 8 can"):
                codes.pack(torch.zeros(3, dtype=torch.uint8), bits)
        with pytest.raises(ValueError, match="5 codes of 3 bits take 2 bytes, not 3"):
            codes.unpack(torch.zeros(3, dtype=torch.uint8), 3, 5)


def test_int4_per_token_head_is_not_int4():
    with pytest.raises(ValueError, match="int4_per_token_head is rounded by the engine"):
        codes.quantize_symmetric(torch.ones(1), torch.ones(1), INT4_PER_TOKEN_HEAD)
    assert codes.quantize_symmetric(torch.tensor(99.0), torch.tensor(0.5), INT8) == 127
