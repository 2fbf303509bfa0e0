"""The reference against definitions written another way: a table, ml_dtypes, loops, torch's own SDPA."""

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal.formats import FP8_E4M3
from kvcal.kernels import reference

BIAS = 7  # OCP E4M3: sign, 4 exponent bits, 3 mantissa bits; no infinity, one NaN per sign


def e4m3_values():
    """Values of codes 0x00 .. 0x7E in float64, ascending."""
    code = np.arange(0x7F)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - BIAS)
    return np.where(exponent == 0, np.ldexp(mantissa / 8, 1 - BIAS), normal)


def nearest_code(x):
    """Codes of finite float64 ``x``: the nearest table entry, ties to the even code, saturating."""
    values = e4m3_values()
    magnitude = np.minimum(np.abs(x), values[-1])
    above = np.searchsorted(values, magnitude).clip(1)
    below = above - 1
    down, up = magnitude - values[below], values[above] - magnitude
    take_above = (up < down) | ((up == down) & (above % 2 == 0))
    return (np.where(take_above, above, below) | (np.signbit(x) << 7)).astype(np.uint8)


def code_values(code):
    return np.where(code & 0x80, -1.0, 1.0) * e4m3_values()[code & 0x7F]


def codes_of(x, scale):
    return reference.quantize(x, torch.as_tensor(scale), FP8_E4M3).view(torch.uint8).numpy()


def per_head(*scales):
    return torch.tensor(scales).reshape(-1, 1, 1)


def all_finite_float16():
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    return x[x.isfinite()]


def midpoints():
    """Every tie in float32, with its two neighbours, of both signs."""
    values = e4m3_values()
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    around = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(1e9))])
    return np.concatenate([around, -around])


class TestQuantize:
    def test_every_finite_float16(self):
        x = all_finite_float16()
        assert np.array_equal(codes_of(x.reshape(1, 1, -1), [1.0]).ravel(), nearest_code(x.double().numpy()))

    def test_ties_go_to_even_and_their_neighbours_do_not(self):
        x = midpoints()
        assert np.array_equal(
            codes_of(torch.from_numpy(x).reshape(1, 1, -1), [1.0]).ravel(), nearest_code(x.astype(np.float64))
        )

    @pytest.mark.parametrize(
        ("value", "stored"),
        [
            pytest.param(448.0, 448.0, id="max"),
            pytest.param(449.0, 448.0, id="rounds down to max"),
            pytest.param(464.0, 448.0, id="tie with the value that is NaN"),
            pytest.param(1e30, 448.0, id="far beyond"),
            pytest.param(float("inf"), 448.0, id="infinity"),
            pytest.param(2.0**-9, 2.0**-9, id="smallest subnormal"),
            pytest.param(2.0**-10, 0.0, id="tie with zero"),
            pytest.param(1.01 * 2.0**-10, 2.0**-9, id="just above that tie"),
            pytest.param(3 * 2.0**-10, 2.0**-8, id="subnormal tie, up to even"),
            pytest.param(7.5 * 2.0**-9, 2.0**-6, id="tie with the smallest normal"),
        ],
    )
    @pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
    def test_edges(self, value, stored, sign):
        codes = reference.quantize(torch.full((1, 1, 1), sign * value), torch.ones(1), FP8_E4M3)
        assert codes.float().item() == sign * stored

    def test_nan_stays_nan_and_zero_keeps_its_sign(self):
        x = torch.tensor([float("nan"), 0.0, -0.0]).reshape(1, 1, -1)
        codes = reference.quantize(x, torch.ones(1), FP8_E4M3)
        assert codes.float().isnan().flatten().tolist() == [True, False, False]
        assert codes.view(torch.uint8).flatten()[1:].tolist() == [0x00, 0x80]

    @settings(deadline=None, max_examples=100)
    @given(
        x=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
        scale=st.floats(min_value=2.0**-20, max_value=2.0**20, width=32),
    )
    def test_agrees_with_ml_dtypes(self, x, scale):
        x = np.array(x, dtype=np.float32)
        with np.errstate(over="ignore"):
            scaled = x / np.float32(scale)
        expected = scaled.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)  # its cast makes NaN beyond 464
        codes = codes_of(torch.from_numpy(x).reshape(1, 1, -1), [scale])
        assert np.array_equal(codes.ravel(), expected.view(np.uint8))

    @settings(deadline=None, max_examples=100)
    @given(
        x=st.lists(st.floats(-600, 600, width=32), min_size=6, max_size=6),
        scales=st.lists(
            st.floats(min_value=2.0**-8, max_value=2.0**8, width=32), min_size=3, max_size=3, unique=True
        ),
    )
    def test_each_head_has_its_own_scale(self, x, scales):
        x = np.array(x, dtype=np.float32).reshape(1, 3, 1, 2)
        codes = codes_of(torch.from_numpy(x), per_head(*scales))
        for head, scale in enumerate(scales):
            scaled = (x[:, head] / np.float32(scale)).astype(np.float64)
            assert np.array_equal(codes[:, head], nearest_code(scaled))

    def test_divides_and_does_not_multiply_by_a_reciprocal(self):
        scale = np.float32(0.0123)
        x = midpoints() * scale
        quotients, products = (y.astype(np.float64) for y in (x / scale, x * (1 / scale)))
        assert not np.array_equal(nearest_code(quotients), nearest_code(products))
        codes = codes_of(torch.from_numpy(x).reshape(1, 1, -1), [scale])
        assert np.array_equal(codes.ravel(), nearest_code(quotients))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_divides_in_float32_whatever_the_input(self, dtype):
        x = (torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
        scales = [0.37, 0.0123, 1.9]
        codes = codes_of(x, per_head(*scales))
        for head, scale in enumerate(scales):
            scaled = x[:, head].float().numpy() / np.float32(scale)
            assert np.array_equal(codes[:, head], nearest_code(scaled.astype(np.float64)))


class TestDequantize:
    def test_every_code_exactly(self):
        code = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
        codes = torch.from_numpy(code).view(torch.float8_e4m3fn).reshape(1, 2, -1, 1)
        scales = [0.0371, 3.3]
        out = reference.dequantize(codes, per_head(*scales)).numpy()
        expected = code_values(code).reshape(1, 2, -1, 1) * np.float32(scales).reshape(2, 1, 1)
        assert out.dtype == np.float32
        assert np.array_equal(out, expected.astype(np.float32))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_round_trip_keeps_the_dtype_and_half_a_step(self, dtype):
        x = torch.randn(2, 2, 64, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        scale = x.float().abs().amax((0, 2, 3)).reshape(2, 1, 1) / FP8_E4M3.max
        back = reference.quantize_dequantize(x, scale, FP8_E4M3)
        assert back.dtype == dtype
        # Half of the last mantissa bit; below the normal range half of the subnormal step.
        bound = torch.maximum(x.float().abs() * 2.0**-4, scale * FP8_E4M3.rounds_to_zero) * 1.01
        assert ((back.float() - x.float()).abs() <= bound).all()
        assert not torch.equal(back, x)


def naive_attention(q, k, v, scaling, window=None, softcap=None, lift=None):
    """One query at a time in float64 numpy; ``lift`` rounds ``lift * exp(s - max)`` to E4M3."""
    batch, heads, queries, _ = q.shape
    group, first = heads // k.shape[1], k.shape[2] - queries
    out = np.zeros(q.shape)
    for b, h, i in np.ndindex(batch, heads, queries):
        seen = slice(0 if window is None else max(0, first + i - window + 1), first + i + 1)
        logits = k[b, h // group, seen] @ q[b, h, i] * scaling
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        p = np.exp(logits - logits.max())
        total = p.sum()
        if lift:
            p = code_values(nearest_code(p * lift)) / lift
        out[b, h, i] = p @ v[b, h // group, seen] / total
    return out


def random_qkv(heads, kv_heads, queries, keys, head_dim, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(heads * 1000 + keys)
    q = torch.randn(batch, heads, queries, head_dim, generator=generator) * 2
    k, v = (torch.randn(batch, kv_heads, keys, head_dim, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def relative_error(out, expected):
    return np.linalg.norm(np.asarray(out, dtype=np.float64) - expected) / np.linalg.norm(expected)


class TestVisible:
    @pytest.mark.parametrize(
        ("queries", "window", "rows"),
        [
            pytest.param(4, None, ["1000", "1100", "1110", "1111"], id="square"),
            pytest.param(2, None, ["1110", "1111"], id="last queries"),
            pytest.param(4, 2, ["1000", "1100", "0110", "0011"], id="window"),
            pytest.param(1, 3, ["0111"], id="one query with a window"),
            pytest.param(2, 9, ["1110", "1111"], id="window beyond the keys"),
        ],
    )
    def test_drawn(self, queries, window, rows):
        mask = reference.visible(queries, 4, window, torch.device("cpu"))
        assert ["".join(str(int(seen)) for seen in row) for row in mask] == rows


class TestAttention:
    @pytest.mark.parametrize("window", [None, 1, 5, 100])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "queries", "keys"),
        [
            pytest.param(4, 4, 17, 17, id="mha"),
            pytest.param(6, 2, 13, 13, id="gqa3"),
            pytest.param(8, 1, 9, 9, id="mqa"),
            pytest.param(4, 2, 3, 20, id="fewer queries than keys"),
            pytest.param(4, 2, 1, 11, id="one query"),
        ],
    )
    def test_equals_sdpa(self, heads, kv_heads, queries, keys, window):
        q, k, v = random_qkv(heads, kv_heads, queries, keys, 16, dtype=torch.float64)
        mask = torch.ones(keys, keys, dtype=torch.bool).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        expected = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[keys - queries :], scale=0.3, enable_gqa=True
        )
        out = reference.attention(q, k, v, scaling=0.3, window=window)
        assert out.dtype == torch.float64
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("window", [None, 4])
    @pytest.mark.parametrize("softcap", [None, 2.5, 50.0])
    def test_equals_a_loop(self, window, softcap):
        q, k, v = random_qkv(6, 2, 11, 14, 8, dtype=torch.float64)
        expected = naive_attention(q.numpy(), k.numpy(), v.numpy(), 0.4, window, softcap)
        out = reference.attention(q, k, v, scaling=0.4, window=window, softcap=softcap)
        torch.testing.assert_close(out, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


class TestQuantizedAttention:
    @pytest.mark.parametrize("probabilities", [False, True], ids=["p16", "p8"])
    @pytest.mark.parametrize("quantized_q", [False, True], ids=["q16", "q8"])
    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({}, id="plain"),
            pytest.param({"window": 6}, id="window"),
            pytest.param({"softcap": 3.0}, id="softcap"),
            pytest.param({"window": 3, "softcap": 20.0}, id="window and softcap"),
        ],
    )
    @pytest.mark.parametrize("scales", ["per_tensor", "per_head"])
    def test_equals_a_loop(self, scales, options, quantized_q, probabilities):
        q, k, v = random_qkv(6, 2, 19, 23, 16, dtype=torch.bfloat16)
        if scales == "per_tensor":
            q_scale, k_scale, v_scale = (torch.tensor([s]) for s in (0.021, 0.0093, 0.0132))
        else:
            q_scale = per_head(0.021, 0.0032, 0.11, 0.047, 0.009, 0.3)
            k_scale, v_scale = per_head(0.0093, 0.0461), per_head(0.132, 0.0037)

        def stored(x, scale):
            scale = scale.numpy().reshape(-1, 1, 1)
            return code_values(nearest_code((x.float().numpy() / scale).astype(np.float64))) * scale

        expected = naive_attention(
            stored(q, q_scale) if quantized_q else q.double().numpy(),
            stored(k, k_scale),
            stored(v, v_scale),
            scaling=0.25,
            lift=256 if probabilities else None,
            **options,
        )
        out = reference.quantized_attention(
            q,
            reference.quantize(k, k_scale, FP8_E4M3),
            reference.quantize(v, v_scale, FP8_E4M3),
            k_scale=k_scale,
            v_scale=v_scale,
            q_scale=q_scale if quantized_q else None,
            fmt=FP8_E4M3,
            scaling=0.25,
            quantize_probabilities=probabilities,
            **options,
        )
        assert out.dtype == torch.float32
        # A probability that float32 puts across a rounding tie moves its row by up to 1/16 of its weight.
        assert relative_error(out, expected) < (2e-3 if probabilities else 2e-6)

    def test_probabilities_and_queries_do_lose_something(self):
        q, k, v = random_qkv(2, 2, 19, 23, 16)
        scale = torch.tensor([0.011])
        k, v = (reference.quantize(x, scale, FP8_E4M3) for x in (k, v))

        def attend(**options):
            return reference.quantized_attention(
                q, k, v, k_scale=scale, v_scale=scale, fmt=FP8_E4M3, scaling=0.25, **options
            )

        exact = attend().double().numpy()
        assert 2e-3 < relative_error(attend(quantize_probabilities=True), exact) < 5e-2
        assert 2e-3 < relative_error(attend(q_scale=torch.tensor([0.02])), exact) < 1e-1
