"""What is seen of K, V or Q in one forward pass, in rows that merge: the definition, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcal.formats import KVFormat


@dataclass(frozen=True)
class Seen:
    """Parts of a tensor side by side; merging all rows gives what the whole tensor holds.

    Attributes:
        low: smallest value, ``(rows, heads, head_dim)``, float32 or the dtype of the tensor; NaN where there
            is one, infinite in a row that keeps no token.
        high: largest value, alike.
        total: sum of x, ``(rows, heads, head_dim)`` float32; this and what follows is None if only extremes
            were wanted.
        squares: sum of x², alike.
        saturated: elements beyond the format's maximum at scale 1.0, ``(rows, heads)`` int64.
        zeroed: non-zero elements that would be stored as 0 at scale 1.0, alike.
    """

    low: torch.Tensor
    high: torch.Tensor
    total: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    saturated: torch.Tensor | None = None
    zeroed: torch.Tensor | None = None


def observe(x: torch.Tensor, keep: torch.Tensor | None, fmt: KVFormat | None) -> Seen:
    """Look at a tensor once.

    Args:
        x: ``(batch, heads, tokens, head_dim)``, 16-bit floats or wider, any strides.
        keep: ``(batch, tokens)`` bool, False on padding; None where nothing is padded.
        fmt: whose saturation is counted; None for extremes alone.
    """
    if keep is not None:
        if not bool(keep.any()):
            return _nothing(x, fmt)
        # (kept, heads, head_dim) -> (1, heads, kept, head_dim)
        x = x.transpose(1, 2)[keep].transpose(0, 1).unsqueeze(0)
    # aminmax, which reads once, takes ten times as long on a CPU.
    low, high = x.amin(2), x.amax(2)
    if fmt is None:
        return Seen(low, high)
    magnitude = x.abs()
    return Seen(
        low,
        high,
        # torch sums pairwise; in float64 it takes thirty times as long on a CPU.
        total=x.sum(2, dtype=torch.float32),
        squares=x.float().square().sum(2),
        saturated=_above(magnitude, fmt.max),
        zeroed=_above(magnitude, 0.0) - _above(magnitude, fmt.rounds_to_zero),
    )


def _nothing(x: torch.Tensor, fmt: KVFormat | None) -> Seen:
    infinite = x.new_full((1, x.shape[1], x.shape[3]), float("inf"))
    if fmt is None:
        return Seen(infinite, -infinite)
    sums, counts = infinite.new_zeros(infinite.shape, dtype=torch.float32), infinite.new_zeros(1, x.shape[1])
    return Seen(infinite, -infinite, sums, sums.clone(), counts.long(), counts.long())


def _above(magnitude: torch.Tensor, limit: float) -> torch.Tensor:
    """Number of elements above a limit, ``(rows, heads)`` int64.

    The sign of a difference is exact in every float dtype; comparing takes five times as long on a CPU.
    """
    over = (magnitude - limit).clamp_(min=0).sign_()
    return over.sum((2, 3), dtype=torch.float32).long()
