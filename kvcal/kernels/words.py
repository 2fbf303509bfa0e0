"""Stored codes to 16-bit floats, for Triton: two at a time, with masks instead of conversions.

A word is 16 bits of a token: ``per_word`` codes of neighbouring channels. The ``j``-th code of every word
makes a tile of its own, which meets the ``j``-th channels of Q in a dot of its own, so that nothing is ever
put back in order. An integer's bits, masked out where they lie in the mantissa, are a subnormal float16 that
is the code times a power of two; tensor cores take subnormals exactly (Fasi et al., "Numerical behavior of
NVIDIA tensor cores", PeerJ Computer Science 2021), and the power leaves outside the loop.
Arithmetic outside a dot needs normal floats: there the bits go under a known exponent, which gives ``offset +
code`` (Kim et al., "Who says elephants can't run", WMT 2022, section 3.3, for weights of int4 and int8).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

SIGN = 0x8000


@dataclass(frozen=True)
class _Bits:
    """``(word >> shift & mask) | ...`` over ``terms``, then XOR ``constant``: the bits of a float16.

    It is ``(value + offset) / 2 ** exponent``.
    """

    terms: tuple[tuple[int, int], ...]
    constant: int = 0
    exponent: int = 0
    offset: int = 0


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _integer(shift: int, at: int, bits: int, zero: int, normal: bool, toggle: int = 0) -> _Bits:
    """A code at mantissa bit ``at`` after the shift, alone or under the exponent where its unit is 1."""
    mask = (1 << bits) - 1 << at
    if not normal:
        return _Bits(((shift, mask),), toggle << at, 24 - at, zero)
    unit = 10 - at  # 2 ** unit has steps of 2 ** (unit - 10) = 2 ** -at
    return _Bits(((shift, mask),), (15 + unit << 10) | toggle << at, 0, 2**unit + zero)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _bits(kind: str, j: int, normal: bool) -> _Bits:
    """Where the ``j``-th code of a word goes. Unsigned kinds (``u``) have their zero at code 0."""
    if kind == "fp8_e5m2":  # the upper byte of a float16
        return _Bits(((8 * (j - 1), 0xFF00),))
    if kind == "fp8_e4m3":  # one exponent bit less, and a bias of 7 for 15
        return _Bits(((8 * (j - 1), SIGN), (8 * j - 7, 0x3F80)), exponent=8)
    if kind == "nvfp4":  # E2M1 has the bias 1
        return _Bits(((4 * j - 12, SIGN), (4 * j - 9, 0x0E00)), exponent=14)
    signed = not kind.startswith("u")
    if kind in ("int8", "uint8"):  # two's complement with its sign bit flipped counts from -128
        integer: _Bits = _integer(8 * j, 0, 8, 128 * signed, normal, 0x80 * signed)
        return integer
    bits = int(kind.removeprefix("u").removeprefix("int"))
    at = bits * j
    shift = 0 if at + bits <= 10 else (8 if bits == 4 else 6)  # one shift serves all the upper codes
    packed: _Bits = _integer(shift, at - shift, bits, (1 << bits - 1) * signed, normal)
    return packed


@triton.constexpr_function  # type: ignore[untyped-decorator]
def per_word(kind: str) -> int:
    """Codes in 16 bits."""
    if kind in ("float16", "bfloat16"):
        return 1
    return {"int4": 4, "uint4": 4, "nvfp4": 4, "int2": 8, "uint2": 8}.get(kind, 2)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def factor(kind: str, j: int, normal: bool = False) -> float:
    """What :func:`decode` leaves out of the ``j``-th value; largest for ``j = 0``."""
    return 1.0 if kind in ("float16", "bfloat16") else 2.0 ** _bits(kind, j, normal).exponent


@triton.constexpr_function  # type: ignore[untyped-decorator]
def least_factor(kind: str, normal: bool = False) -> float:
    """Of all the codes of a word."""
    return float(min(factor(kind, j, normal) for j in range(per_word(kind))))


@triton.constexpr_function  # type: ignore[untyped-decorator]
def offset(kind: str, j: int = 0, normal: bool = False) -> float:
    """What :func:`decode` adds to the ``j``-th value, in units of a code. Subnormals have all the same."""
    return 0.0 if kind in ("float16", "bfloat16") else float(_bits(kind, j, normal).offset)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _ptx(kind: str, j: int, normal: bool) -> str:
    """Two words in, two float16 out. ``lop3`` with 0xEA is ``(a & b) | c``, with 0x6A ``(a & b) ^ c``."""
    bits = _bits(kind, j, normal)
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
def _terms(kind: str, j: int, normal: bool) -> int:
    return len(_bits(kind, j, normal).terms)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _right(kind: str, j: int, normal: bool, term: int) -> int:
    return int(max(_bits(kind, j, normal).terms[term][0], 0))


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _left(kind: str, j: int, normal: bool, term: int) -> int:
    return int(max(-_bits(kind, j, normal).terms[term][0], 0))


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _mask(kind: str, j: int, normal: bool, term: int) -> int:
    return int(_bits(kind, j, normal).terms[term][1])


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _constant(kind: str, j: int, normal: bool) -> int:
    return int(_bits(kind, j, normal).constant)


@triton.jit  # type: ignore[untyped-decorator]
def decode(
    word: tl.tensor, J: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, PTX: tl.constexpr
) -> tl.tensor:
    """``(value + offset) / factor`` of the ``J``-th code of each word, float16, exactly.

    Args:
        word: int16, or the 16-bit floats themselves.
        J: which code of a word.
        KIND: a format's name, ``u`` before an integer's for unsigned codes, or ``float16``, ``bfloat16``.
        NORMAL: integers as normal floats, for arithmetic; else as subnormals, for a dot.
        PTX: use the instructions of a GPU; without, operations that Triton's interpreter has too.

    NaN of E4M3 (0x7F, 0xFF) decodes to ±480: a cache that was written with saturation holds none.
    """
    if KIND == "float16" or KIND == "bfloat16":
        return word
    elif PTX:
        return tl.inline_asm_elementwise(
            _ptx(KIND, J, NORMAL), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        bits = word.to(tl.int32) & 0xFFFF
        half = _term(bits, J, KIND, NORMAL, 0)
        if _terms(KIND, J, NORMAL) == 2:
            half |= _term(bits, J, KIND, NORMAL, 1)
        half ^= _constant(KIND, J, NORMAL)
        return half.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _term(
    bits: tl.tensor, J: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, TERM: tl.constexpr
) -> tl.tensor:
    moved = (bits << _left(KIND, J, NORMAL, TERM)) >> _right(KIND, J, NORMAL, TERM)
    return moved & _mask(KIND, J, NORMAL, TERM)


@triton.jit  # type: ignore[untyped-decorator]
def spread(x: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr) -> tl.tensor:
    """``(ROWS, COLUMNS)`` to ``(ROWS, COLUMNS * EACH)``, each value repeated."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, COLUMNS, EACH)), (ROWS, COLUMNS * EACH))


@triton.jit  # type: ignore[untyped-decorator]
def parted(x: tl.tensor, ROWS: tl.constexpr, WORDS: tl.constexpr, EACH: tl.constexpr) -> tl.tensor:
    """``(ROWS, WORDS * EACH)`` to ``EACH`` tiles ``(ROWS, WORDS)``, of the first, second ... of each word."""
    if EACH == 1:
        return (x,)
    elif EACH == 2:
        return tl.split(tl.reshape(x, (ROWS, WORDS, 2)))
    else:
        even, odd = tl.split(tl.reshape(x, (ROWS, WORDS * EACH // 2, 2)))
        even = parted(even, ROWS, WORDS, EACH // 2)
        odd = parted(odd, ROWS, WORDS, EACH // 2)
        parts = ()
        for i in tl.static_range(EACH // 2):
            parts += (even[i], odd[i])  # type: ignore[assignment]
        return parts


@triton.jit  # type: ignore[untyped-decorator]
def united(parts: tl.tensor, ROWS: tl.constexpr, CHANNELS: tl.constexpr, EACH: tl.constexpr) -> tl.tensor:
    """The inverse of :func:`parted`."""
    if EACH == 1:
        return parts[0]
    elif EACH == 2:
        return tl.reshape(tl.join(parts[0], parts[1]), (ROWS, CHANNELS))
    else:
        even = ()
        odd = ()
        for i in tl.static_range(EACH // 2):
            even += (parts[2 * i],)  # type: ignore[assignment]
            odd += (parts[2 * i + 1],)  # type: ignore[assignment]
        joined = tl.join(
            united(even, ROWS, CHANNELS // 2, EACH // 2), united(odd, ROWS, CHANNELS // 2, EACH // 2)
        )
        return tl.reshape(joined, (ROWS, CHANNELS))
