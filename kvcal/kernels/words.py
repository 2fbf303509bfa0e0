"""Stored codes to 16-bit floats, for Triton: two at a time, with masks instead of conversions.

A word is 16 bits of a token: ``per_word`` codes of neighbouring channels. The ``j``-th code of every word
makes a tile of its own, which meets the ``j``-th channels of Q in a dot of its own, so that nothing is ever
put back in order. Masking bits into the mantissa of a float16 of known exponent gives ``offset + code``; the
offset leaves with one subtraction per row, outside the loop. (The trick is that of Kim et al., "Who says
elephants can't run", WMT 2022, section 3.3; there it converts weights of int4 and int8.)
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

SIGN = 0x8000


@dataclass(frozen=True)
class _Bits:
    """``(word >> shift & mask) | ...`` over ``terms``, then XOR ``constant``: the bits of a float16."""

    terms: tuple[tuple[int, int], ...]
    constant: int = 0
    offset: int = 0


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _integer(shift: int, at: int, bits: int, zero: int, toggle: int = 0) -> _Bits:
    """A code at mantissa bit ``at`` after the shift, under the exponent where its unit is 1."""
    unit = 10 - at  # 2 ** unit has steps of 2 ** (unit - 10) = 2 ** -at
    mask = (1 << bits) - 1 << at
    return _Bits(((shift, mask),), (15 + unit << 10) | toggle << at, 2**unit + zero)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _bits(kind: str, j: int) -> _Bits:
    """Where the ``j``-th code of a word goes. Unsigned kinds (``u``) have their zero at code 0."""
    if kind == "fp8_e5m2":  # the upper byte of a float16
        return _Bits(((8 * (j - 1), 0xFF00),))
    if kind == "fp8_e4m3":  # one exponent bit less, and a bias of 7 for 15: 2 ** -8 of its value
        return _Bits(((8 * (j - 1), SIGN), (8 * j - 7, 0x3F80)))
    if kind == "nvfp4":  # E2M1 has the bias 1: 2 ** -14 of its value
        return _Bits(((4 * j - 12, SIGN), (4 * j - 9, 0x0E00)))
    if kind in ("int8", "uint8"):  # two's complement with its sign bit flipped counts from -128
        integer: _Bits = _integer(8 * j, 0, 8, 0 if kind == "uint8" else 128, 0 if kind == "uint8" else 0x80)
        return integer
    bits = int(kind.removeprefix("u").removeprefix("int"))
    zero = 0 if kind.startswith("u") else 1 << bits - 1
    at = bits * j
    shift = 0 if at + bits <= 10 else (8 if bits == 4 else 6)  # one shift serves all the upper codes
    packed: _Bits = _integer(shift, at - shift, bits, zero)
    return packed


@triton.constexpr_function  # type: ignore[untyped-decorator]
def per_word(kind: str) -> int:
    """Codes in 16 bits."""
    if kind in ("float16", "bfloat16"):
        return 1
    return {"int4": 4, "uint4": 4, "nvfp4": 4, "int2": 8, "uint2": 8}.get(kind, 2)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def offset(kind: str, j: int) -> float:
    """What :func:`decode` adds to the ``j``-th code."""
    return 0.0 if kind in ("float16", "bfloat16") else float(_bits(kind, j).offset)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def summed_offset(kind: str, j: int) -> float:
    """The part of :func:`offset` that may stay in a sum of values.

    Over long contexts values cancel, and what offsets leave behind does not: float32 sums of 1024 + code
    would be off by a few percent of a mean that is a thousandth of a code.
    """
    found = float(offset(kind, j))
    return found if found < 100 else 0.0


@triton.constexpr_function  # type: ignore[untyped-decorator]
def factor(kind: str) -> float:
    """What :func:`decode` leaves out of a value."""
    return {"fp8_e4m3": 2.0**8, "nvfp4": 2.0**14}.get(kind, 1.0)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _ptx(kind: str, j: int) -> str:
    """Two words in, two float16 out. ``lop3`` with 0xEA is ``(a & b) | c``, with 0x6A ``(a & b) ^ c``."""
    bits = _bits(kind, j)
    shift, mask = bits.terms[-1]
    lines = [".reg .b32 x, y;", _shift("x", shift)]
    if len(bits.terms) == 1:
        lines += [f"lop3.b32 $0, x, {_twice(mask)}, {_twice(bits.constant)}, 0x6a;"]
    else:
        shift, sign = bits.terms[0]
        lines += [f"and.b32 x, x, {_twice(mask)};", _shift("y", shift)]
        lines += [f"lop3.b32 $0, y, {_twice(sign)}, x, 0xea;"]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _shift(to: str, by: int) -> str:
    if by > 0:
        return f"shr.u32 {to}, $1, {by};"
    return f"shl.b32 {to}, $1, {-by};"


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _twice(mask: int) -> str:
    return f"0x{mask:04x}{mask:04x}"


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _terms(kind: str, j: int) -> int:
    return len(_bits(kind, j).terms)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _right(kind: str, j: int, term: int) -> int:
    return int(max(_bits(kind, j).terms[term][0], 0))


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _left(kind: str, j: int, term: int) -> int:
    return int(max(-_bits(kind, j).terms[term][0], 0))


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _mask(kind: str, j: int, term: int) -> int:
    return int(_bits(kind, j).terms[term][1])


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _constant(kind: str, j: int) -> int:
    return int(_bits(kind, j).constant)


@triton.jit  # type: ignore[untyped-decorator]
def decode(word: tl.tensor, J: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr) -> tl.tensor:
    """``(value + offset) / factor`` of the ``J``-th code of each word, float16, exactly.

    Args:
        word: int16, or the 16-bit floats themselves.
        J: which code of a word.
        KIND: a format's name, ``u`` before an integer's for unsigned codes, or ``float16``, ``bfloat16``.
        PTX: use the instructions of a GPU; without, operations that Triton's interpreter has too.

    NaN of E4M3 (0x7F, 0xFF) decodes to ±480: a cache that was written with saturation holds none.
    """
    if KIND == "float16" or KIND == "bfloat16":
        return word
    elif PTX:
        return tl.inline_asm_elementwise(
            _ptx(KIND, J), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        bits = word.to(tl.int32) & 0xFFFF
        half = ((bits << _left(KIND, J, 0)) >> _right(KIND, J, 0)) & _mask(KIND, J, 0)
        if _terms(KIND, J) == 2:
            half |= ((bits << _left(KIND, J, 1)) >> _right(KIND, J, 1)) & _mask(KIND, J, 1)
        half ^= _constant(KIND, J)
        return half.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def spread(x: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr) -> tl.tensor:
    """``(ROWS, COLUMNS)`` to ``(ROWS, COLUMNS * EACH)``, each value repeated."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, COLUMNS, EACH)), (ROWS, COLUMNS * EACH))
