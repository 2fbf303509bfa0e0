"""Words of codes against the bytes they are made of, every one of the 65,536."""

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is published for Linux only")
import triton
import triton.language as tl
from triton import knobs

from kvcal.kernels import words
from kvcal.kernels.words import decode

WORDS = np.arange(2**16, dtype="<u2")
FLOATS = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "nvfp4": ml_dtypes.float4_e2m1fn,
}
BITS = {"fp8_e4m3": 8, "fp8_e5m2": 8, "nvfp4": 4} | {f"{u}int{b}": b for u in ("", "u") for b in (8, 4, 2)}
CODES = [pytest.param(kind, j, id=f"{kind}-{j}") for kind, bits in BITS.items() for j in range(16 // bits)]


@triton.jit
def _decode_all(
    word_ptr,
    out_ptr,
    J: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    NORMAL: tl.constexpr,  # noqa: N803
    PTX: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out_ptr + at, decode(tl.load(word_ptr + at), J, KIND, NORMAL, PTX))


def decoded(kind, j, normal, ptx, device):
    """What the kernel makes of every word, float64."""
    word = torch.from_numpy(WORDS.view(np.int16)).to(device)
    out = torch.full((2**16,), torch.nan, dtype=torch.float16, device=device)
    _decode_all[(16,)](word, out, j, kind, normal, ptx)
    return out.cpu().double().numpy()


def expected(kind, j):
    """The ``j``-th code of every word and its value, which torch's own FP8 agrees with."""
    bits = BITS[kind]
    code = (WORDS >> (bits * j) & (2**bits - 1)).astype(np.uint8)
    if kind in FLOATS:
        return code, code.view(FLOATS[kind]).astype(np.float64)
    if kind == "int8":
        return code, code.view(np.int8).astype(np.float64)
    return code, code - (0.0 if kind.startswith("u") else 2.0 ** (bits - 1))


class TestDecode:
    @pytest.mark.parametrize(
        "ptx",
        [
            False,
            pytest.param(
                True,
                marks=[
                    pytest.mark.gpu,
                    pytest.mark.skipif(knobs.runtime.interpret, reason="the interpreter knows no PTX"),
                ],
            ),
        ],
        ids=["operations", "ptx"],
    )
    @pytest.mark.parametrize("normal", [False, True], ids=["subnormal", "normal"])
    @pytest.mark.parametrize(("kind", "j"), CODES)
    def test_every_word(self, kind, j, normal, ptx, device):
        code, value = expected(kind, j)
        found = decoded(kind, j, normal, ptx, device)
        found = found * words.factor(kind, j, normal) - words.offset(kind, j, normal)
        nan = code & 0x7F == 0x7F if kind == "fp8_e4m3" else np.zeros(2**16, bool)
        assert np.array_equal(found[~nan], value[~nan], equal_nan=True)
        assert np.array_equal(found[nan], np.where(code[nan] > 0x7F, -480.0, 480.0))

    @pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
    @pytest.mark.parametrize("j", [0, 1])
    def test_the_bytes_are_those_of_torch(self, kind, j):
        dtype = torch.float8_e4m3fn if kind == "fp8_e4m3" else torch.float8_e5m2
        bytes_ = torch.from_numpy(WORDS.view(np.uint8)).reshape(-1, 2)
        theirs = bytes_[:, j].contiguous().view(dtype).double().numpy()
        assert np.array_equal(expected(kind, j)[1], theirs, equal_nan=True)

    def test_16_bit_floats_are_words_themselves(self, device):
        word = torch.from_numpy(WORDS.view(np.int16)).to(device).view(torch.float16)
        out = torch.zeros_like(word)
        _decode_all[(16,)](word, out, 0, "float16", False, False)
        nan = word.isnan()
        assert torch.equal(out.isnan(), nan)
        assert torch.equal(out.view(torch.int16)[~nan], word.view(torch.int16)[~nan])
        assert words.offset("float16", 0) == 0
        assert words.factor("float16", 0) == words.least_factor("bfloat16") == 1

    @pytest.mark.parametrize("kind", BITS)
    @pytest.mark.parametrize("normal", [False, True], ids=["subnormal", "normal"])
    def test_one_offset_and_powers_of_two_for_a_dot(self, kind, normal):
        each = range(words.per_word(kind))
        factors = [words.factor(kind, j, normal) for j in each]
        assert words.least_factor(kind, normal) == min(factors)
        assert all(np.log2(factor).is_integer() for factor in factors)
        # A float16 query of [1, 2) still holds them.
        assert max(factors) / min(factors) <= 2**8
        if not normal:
            assert len({words.offset(kind, j) for j in each}) == 1

    @pytest.mark.parametrize("kind", [*BITS, "float16", "bfloat16"])
    def test_codes_of_a_word(self, kind):
        assert words.per_word(kind) == 16 // BITS.get(kind, 16)
