"""Storage formats of cached K and V. Names are text: this module imports no torch.

Add a format by adding a row to :data:`FORMATS`, its rounding to ``kernels/reference`` and its
engine names to ``engines``.

>>> fp8 = get("fp8")
>>> fp8.name, fp8.max, fp8.min_normal == 2**-6, fp8.min_subnormal == 2**-9
('fp8_e4m3', 448.0, True, True)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcal.errors import UsageError


@dataclass(frozen=True)
class KVFormat:
    """How one cached element is stored.

    ``max`` is the largest finite magnitude; values beyond it saturate. ``min_normal`` and
    ``min_subnormal`` are the smallest magnitudes with full and with any precision. The static scale
    is the dequantization multiplier ``amax / max`` (float32).
    """

    name: str
    aliases: tuple[str, ...]
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    min_normal: float
    min_subnormal: float
    storage_dtype: str  # attribute of torch
    scale_dtype: str

    @property
    def rounds_to_zero(self) -> float:
        """Magnitudes up to and including this one are stored as 0 (ties go to even)."""
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

FORMATS: tuple[KVFormat, ...] = (FP8_E4M3,)


def names() -> list[str]:
    """Every accepted name, canonical ones first."""
    return [f.name for f in FORMATS] + [a for f in FORMATS for a in f.aliases]


def get(name: str) -> KVFormat:
    """Look a format up by name or alias.

    >>> get("int5")
    Traceback (most recent call last):
    kvcal.errors.UsageError: unknown format 'int5'; known: fp8_e4m3, fp8
    """
    for fmt in FORMATS:
        if name == fmt.name or name in fmt.aliases:
            return fmt
    raise UsageError(f"unknown format {name!r}; known: {', '.join(names())}")
