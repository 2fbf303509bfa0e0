"""The caches that vLLM scales itself: one scale per token and head, computed as the vector is written.

No calibration reaches these formats but through the weights. Each function here does what vLLM's Triton code
does to one vector of ``head_dim`` channels, in the same float32 operations in the same order, so that codes
can be compared bit for bit (``vllm/v1/attention/ops``: ``triton_reshape_and_cache_flash.py`` for INT8 and
FP8, ``int4_per_token_head.py`` for INT4).

A GPU may differ in the last bit of a scale: Triton divides approximately and fuses ``x * inverse + zero``
there. Values next to a rounding boundary can then take the neighbouring code. Before INT4, a GPU with the
Hadacore kernel also rounds rotated vectors to BF16 whatever the model's dtype; here they are rotated in
float32, as vLLM does elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcal.errors import UsageError
from kvcal.formats import KVFormat
from kvcal.kernels import reference

# Smallest scale, of every format.
SCALE_FLOOR = 1e-6

# Seed of the signs in front of the Hadamard transform, the same for K, V, Q and every block of channels.
SIGN_SEED = 0x9E3779B9


@dataclass(frozen=True)
class Codes:
    """What the cache holds for vectors of shape ``(batch, heads, tokens, head_dim)``.

    INT8 and FP8 decode to ``codes * scale``. INT4 decodes to ``(codes - zero_point) * scale``, which is the
    rotated vector, ``√order`` times as long as the original.
    """

    codes: torch.Tensor
    """One element per channel, in the storage dtype; INT4 as uint8 of 0 to 15, not packed."""

    scale: torch.Tensor
    """``(batch, heads, tokens, 1)`` float32, as attention reads it."""

    zero_point: torch.Tensor | None = None
    """``(batch, heads, tokens, 1)`` uint8 of 0 to 15; INT4 only."""


def quantize(x: torch.Tensor, fmt: KVFormat) -> Codes:
    """Codes, scales and zero points that vLLM writes for ``x``.

    Args:
        x: ``(batch, heads, tokens, head_dim)``, K (after RoPE) or V in the dtype of the model. Its values
            must be finite, and stay so in float32; for INT4 after the rotation too, which makes them up to
            ``order`` times larger before they are rounded to the dtype of ``x`` again.
        fmt: a dynamic format.

    Raises:
        UsageError: ``fmt`` has static scales, or cannot store vectors of this length.
    """
    _require_dynamic(fmt, x.shape[-1])
    if fmt.rotated:
        return _quantize_around_zero_point(_rotate(x), fmt)
    values = x.float()
    scale = _at_least_the_floor(values.abs().amax(-1, keepdim=True), fmt.max)
    scaled = values * (1.0 / scale)
    dtype = getattr(torch, fmt.storage_dtype)
    if fmt.integer:
        # The conversion truncates, so this rounds half away from zero.
        scaled = torch.where(scaled >= 0, scaled + 0.5, scaled - 0.5).clamp(torch.iinfo(dtype).min, fmt.max)
    else:
        scaled = scaled.clamp(-fmt.max, fmt.max)
    return Codes(scaled.to(dtype), scale)


def dequantize(stored: Codes, fmt: KVFormat) -> torch.Tensor:
    """The vectors that attention works with, in the original basis, float32.

    vLLM never rotates a cached vector back: it rotates Q as it did K, and the output back in place of V. With
    ``R`` the rotation, ``(q R) · k̂ = q · (k̂ Rᵀ)`` and ``Σ p (v̂ Rᵀ) = (Σ p v̂) Rᵀ``, so attention over
    the vectors returned here is the same, but for the rounding of rotated Q and output to the model's dtype.

    Raises:
        UsageError: ``fmt`` has static scales.
    """
    _require_dynamic(fmt, stored.codes.shape[-1])
    if stored.zero_point is None:
        return stored.codes.float() * stored.scale
    rotated = (stored.codes.float() - stored.zero_point.float()) * stored.scale
    return rotate_back(rotated)


def quantize_dequantize(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """What the engine's cache gives back for ``x``, in the original basis and the dtype of ``x``.

    Args:
        x: as in :func:`quantize`.
        fmt: a dynamic format.

    Raises:
        UsageError: ``fmt`` has static scales, or cannot store vectors of this length.
    """
    return dequantize(quantize(x, fmt), fmt).to(x.dtype)


def rotate_query(q: torch.Tensor) -> torch.Tensor:
    """``R⁻ᵀ q``: Q that meets INT4's rotated codes of K in place of K itself, in the dtype of ``q``."""
    order = reference.hadamard_order(q.shape[-1])
    return reference.random_hadamard(q, _signs(q), normalized=False) / order


def rotate_back(out: torch.Tensor) -> torch.Tensor:
    """Sums of INT4's rotated V in the basis of the V handed over."""
    return reference.random_hadamard(out, _signs(out), inverse=True, normalized=False)


def rotation(head_dim: int) -> torch.Tensor:
    """The matrix ``(head_dim, head_dim)`` that INT4 applies to a vector first, float32, not normalized."""
    eye = torch.eye(head_dim)
    return reference.random_hadamard(eye, _signs(eye), normalized=False).T.contiguous()


def _require_dynamic(fmt: KVFormat, head_dim: int) -> None:
    if not fmt.dynamic:
        raise UsageError(f"{fmt.name} has static scales; only dynamic formats are scaled by the engine")
    if fmt.bits == 4 and head_dim % 2:
        raise UsageError(f"{fmt.name} stores two channels in a byte; a head size of {head_dim} is odd")


def _at_least_the_floor(extent: torch.Tensor, steps: float) -> torch.Tensor:
    # A tensor, because torch on CUDA divides by a Python number through its reciprocal, which is not exact.
    return (extent / torch.full_like(extent, steps)).clamp(min=SCALE_FLOOR)


def _signs(x: torch.Tensor) -> torch.Tensor:
    return reference.random_signs(reference.hadamard_order(x.shape[-1]), SIGN_SEED).to(x.device)


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotated and rounded to the dtype of ``x``, as vLLM hands it to its quantizer."""
    values = x.float()
    return reference.random_hadamard(values, _signs(values), normalized=False).to(x.dtype)


def _quantize_around_zero_point(x: torch.Tensor, fmt: KVFormat) -> Codes:
    """Codes ``x / scale + zero_point``, both saturated to 0 to 15.

    A vector that does not reach zero on one side is not moved there: what lies beyond 15 steps from zero is
    lost, and of a constant vector nearly everything. Rotated, that is one with an outlier in the first
    channel of a block and little else.
    """
    values = x.float()
    low, high = values.aminmax(dim=-1, keepdim=True)
    scale = _at_least_the_floor(high - low, fmt.max)
    zero_point = _round_and_saturate(-low / scale, fmt)
    codes = _round_and_saturate(values * (1.0 / scale) + zero_point, fmt)
    # The zero point is kept in the low four bits of the scale, and a reader clears them.
    read = (scale.view(torch.int32) & -16).view(torch.float32)
    return Codes(codes.to(torch.uint8), read, zero_point.to(torch.uint8))


def _round_and_saturate(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Half away from zero, within ``0`` to ``fmt.max``.

    Saturated before it is truncated: what an integer conversion makes of values beyond 32 bits depends on the
    machine, and on a GPU it saturates.
    """
    return (x + 0.5).clamp(0.0, fmt.max).floor()
