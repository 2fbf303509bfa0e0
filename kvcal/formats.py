"""Storage formats of cached K and V. Names are text: this module imports no torch.

Add a format by adding a row to :data:`FORMATS`; rounding of a kind that is not there yet goes to
``kernels/codes``, and the names of engines that have the format to ``engines``.

A static format has fixed scales that kvcal computes; a dynamic one is scaled by the engine, per token and
head, with no knowledge of the model: all that calibration can do for it is done in the weights. A block
format brings a scale with every few elements and takes no other, NVFP4 but for one of the whole tensor.

>>> fp8 = get("fp8")
>>> fp8.name, fp8.max, fp8.min_normal == 2**-6, fp8.min_subnormal == 2**-9
('fp8_e4m3', 448.0, True, True)
>>> [f.name for f in FORMATS if f.dynamic]
['int8_per_token_head', 'fp8_per_token_head', 'int4_per_token_head']
>>> [(f.name, f.max) for f in FORMATS if f.integer and not f.dynamic]
[('int8', 127.0), ('int6', 31.0), ('int5', 15.0), ('int4', 7.0), ('int3', 3.0), ('int2', 1.0)]
>>> [(f.name, f.block, f.bits_per_element) for f in FORMATS if f.block]
[('nvfp4', 16, 4.5), ('mxfp4', 32, 4.25)]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcal.errors import UsageError

REFERENCE_BITS = 16  # an unquantized cache is BF16 or FP16


@dataclass(frozen=True)
class KVFormat:
    """How one cached element is stored.

    ``max`` is the largest finite magnitude; values beyond it saturate. Static integers have one code more
    below zero, ``-max - 1``, so that ``bits`` are used up; their ``max`` is the one that a symmetric
    threshold meets. ``min_normal`` and ``min_subnormal`` are the smallest magnitudes with full and with any
    precision, of integers both 1. The static scale is the dequantization multiplier ``amax / max``
    (float32). ``dynamic`` formats store ``scale_bits`` beside the codes of one token and head; ``rotated``
    ones store the vector after a randomized Hadamard transform. ``block`` elements of a vector share a scale
    of the dtype ``block_scale_dtype``; for formats without blocks these are 0 and empty. ``latent_only``: a
    layer's cached latent is stored so, its rotary key in BF16, and there is nothing that other layers could
    store.
    """

    name: str
    aliases: tuple[str, ...]
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    min_normal: float
    min_subnormal: float
    storage_dtype: str  # attribute of torch; uint8 holds codes that are packed
    scale_dtype: str
    dynamic: bool = False
    rotated: bool = False
    scale_bits: int = 0
    block: int = 0
    block_scale_dtype: str = ""  # attribute of torch
    latent_only: bool = False

    @property
    def bits_per_element(self) -> float:
        """Bits of one code and its part of the block scale, which has 8 bits in every block format."""
        return self.bits + (8 / self.block if self.block else 0)

    @property
    def integer(self) -> bool:
        """Codes are integers, evenly spaced."""
        return self.exponent_bits == 0

    @property
    def reach(self) -> float:
        """The largest magnitude at a static scale of 1: with the largest block scale, if there are any.

        >>> FP8_E4M3.reach, NVFP4.reach
        (448.0, 2688.0)
        """
        return self.max * (FP8_E4M3.max if self.block_scale_dtype == "float8_e4m3fn" else 1.0)

    @property
    def rounds_query(self) -> bool:
        """Whether kernels compute attention in this format, and round Q to it."""
        return not (self.dynamic or self.block or self.latent_only)

    @property
    def rounds_to_zero(self) -> float:
        """Magnitudes below this one are stored as 0; so is this one, unless the format is ``integer``.

        Floats round ties to even, the engine's integers away from zero.
        """
        return self.min_subnormal / 2


FP8_E4M3 = KVFormat(
    name="fp8_e4m3",
    aliases=("fp8",),
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    max=448.0,
    min_normal=2.0**-6,
    min_subnormal=2.0**-9,
    storage_dtype="float8_e4m3fn",
    scale_dtype="float32",
)

# vLLM's modes of these names (v1/attention/ops/triton_reshape_and_cache_flash.py, int4_per_token_head.py).
INT8_PER_TOKEN_HEAD = KVFormat(
    name="int8_per_token_head",
    aliases=(),
    bits=8,
    exponent_bits=0,
    mantissa_bits=7,
    max=127.0,
    min_normal=1.0,
    min_subnormal=1.0,
    storage_dtype="int8",
    scale_dtype="float32",
    dynamic=True,
    scale_bits=32,
)
FP8_PER_TOKEN_HEAD = replace(FP8_E4M3, name="fp8_per_token_head", aliases=(), dynamic=True, scale_bits=32)
# Codes 0 to 15 around a zero point, which the engine hides in the low bits of the scale.
INT4_PER_TOKEN_HEAD = KVFormat(
    name="int4_per_token_head",
    aliases=(),
    bits=4,
    exponent_bits=0,
    mantissa_bits=4,
    max=15.0,
    min_normal=1.0,
    min_subnormal=1.0,
    storage_dtype="uint8",
    scale_dtype="float32",
    dynamic=True,
    rotated=True,
    scale_bits=32,
)

# What the kernels of DeepSeek-V3.2 read (fp8_ds_mla in vLLM) differs in its scales alone: one for each 128
# channels of the latent, found online.
FP8_LATENT_BF16_ROPE = replace(FP8_E4M3, name="fp8_latent_bf16_rope", aliases=(), latent_only=True)

# OCP 8-bit floating point: E5M2 has infinities and NaN as IEEE 754 does, and saturates before them.
FP8_E5M2 = KVFormat(
    name="fp8_e5m2",
    aliases=(),
    bits=8,
    exponent_bits=5,
    mantissa_bits=2,
    max=57344.0,
    min_normal=2.0**-14,
    min_subnormal=2.0**-16,
    storage_dtype="float8_e5m2",
    scale_dtype="float32",
)


def _integer(bits: int) -> KVFormat:
    """A signed integer with a static scale; below 8 bits, codes are packed."""
    return KVFormat(
        name=f"int{bits}",
        aliases=(),
        bits=bits,
        exponent_bits=0,
        mantissa_bits=bits - 1,
        max=2.0 ** (bits - 1) - 1,
        min_normal=1.0,
        min_subnormal=1.0,
        storage_dtype="int8" if bits == 8 else "uint8",
        scale_dtype="float32",
    )


INT8, INT6, INT5, INT4, INT3, INT2 = (_integer(bits) for bits in (8, 6, 5, 4, 3, 2))

# OCP Microscaling 1.0: elements E2M1, scales E8M0 (powers of two). NVFP4 has smaller blocks with scales E4M3,
# and a float32 scale of the whole tensor, which brings those into their range.
MXFP4 = KVFormat(
    name="mxfp4",
    aliases=(),
    bits=4,
    exponent_bits=2,
    mantissa_bits=1,
    max=6.0,
    min_normal=1.0,
    min_subnormal=0.5,
    storage_dtype="uint8",
    scale_dtype="float32",
    block=32,
    block_scale_dtype="float8_e8m0fnu",
)
NVFP4 = replace(MXFP4, name="nvfp4", block=16, block_scale_dtype="float8_e4m3fn")

FORMATS: tuple[KVFormat, ...] = (
    FP8_E4M3,
    INT8_PER_TOKEN_HEAD,
    FP8_PER_TOKEN_HEAD,
    INT4_PER_TOKEN_HEAD,
    FP8_E5M2,
    INT8,
    INT6,
    INT5,
    INT4,
    INT3,
    INT2,
    NVFP4,
    MXFP4,
    FP8_LATENT_BF16_ROPE,
)


def names() -> list[str]:
    """Every accepted name, canonical ones first."""
    return [f.name for f in FORMATS] + [a for f in FORMATS for a in f.aliases]


def get(name: str) -> KVFormat:
    """Look a format up by name or alias.

    >>> get("int7")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvcal.errors.UsageError: unknown format 'int7'; known: fp8_e4m3, int8_per_token_head, ...
    """
    for fmt in FORMATS:
        if name == fmt.name or name in fmt.aliases:
            return fmt
    raise UsageError(f"unknown format {name!r}; known: {', '.join(names())}")
