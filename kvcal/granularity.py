"""How many elements share one scale.

Each granularity maps a cached tensor ``(batch, heads, tokens, head_dim)`` to the canonical layout
``(observations, *scale_shape, group)``: reducing over the first and last dimension gives one value per
scale, whatever the granularity. (The layout is that of llm-compressor's ``observers/helpers.py``.)
Tensors are duck-typed; this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcal.errors import UsageError


@dataclass(frozen=True)
class PerTensor:
    """One scale for all heads of a layer: ``scale_shape == (1,)``."""

    name = "per_tensor"
    compressed_tensors_strategy = "tensor"

    def scale_shape(self, heads: int) -> tuple[int, ...]:
        return (1,)

    def to_canonical(self, x: Any) -> Any:
        """``(batch, heads, tokens, head_dim)`` -> ``(batch, 1, heads * tokens * head_dim)``."""
        return x.reshape(x.shape[0], 1, -1)


@dataclass(frozen=True)
class PerHead:
    """One scale per head of a layer: ``scale_shape == (heads, 1, 1)``.

    K and V count KV heads, Q counts query heads. compressed-tensors calls this ``attn_head``.
    """

    name = "per_head"
    compressed_tensors_strategy = "attn_head"

    def scale_shape(self, heads: int) -> tuple[int, ...]:
        return (heads, 1, 1)

    def to_canonical(self, x: Any) -> Any:
        """``(batch, heads, tokens, head_dim)`` -> ``(batch * tokens, heads, 1, 1, head_dim)``."""
        batch, heads, tokens, head_dim = x.shape
        return x.transpose(1, 2).reshape(batch * tokens, heads, 1, 1, head_dim)


Granularity = PerTensor | PerHead

GRANULARITIES: tuple[Granularity, ...] = (PerTensor(), PerHead())


def names() -> list[str]:
    return [g.name for g in GRANULARITIES]


def get(name: str) -> Granularity:
    """Look a granularity up by name.

    >>> get("per_head").scale_shape(3)
    (3, 1, 1)
    """
    for granularity in GRANULARITIES:
        if granularity.name == name:
            return granularity
    raise UsageError(f"unknown granularity {name!r}; known: {', '.join(names())}")
