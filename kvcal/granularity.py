"""How many elements share one scale.

Each granularity maps a cached tensor ``(batch, heads, tokens, head_dim)`` to the canonical layout
``(observations, *scale_shape, group)``: reducing over the first and last dimension gives one value per
scale, whatever the granularity. (The layout is that of llm-compressor's ``observers/helpers.py``.)

Static scales exist before the tokens, which all are observations of them. Those of the others come with the
tokens: of them there is one observation, and the scales' first dimension grows with what is cached.

K and V count KV heads, Q counts query heads. Tensors are duck-typed; this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcal.errors import UsageError


@dataclass(frozen=True)
class PerTensor:
    """One scale for all heads of a layer: ``scale_shape == (1,)``."""

    name = "per_tensor"
    static = True
    compressed_tensors_strategy = "tensor"

    def scale_shape(self, heads: int, head_dim: int = 1) -> tuple[int, ...]:
        return (1,)

    def scales_per_element(self, heads: int, head_dim: int) -> float:
        return 0.0

    def to_canonical(self, x: Any) -> Any:
        """``(batch, heads, tokens, head_dim)`` -> ``(batch, 1, heads * tokens * head_dim)``."""
        return x.reshape(x.shape[0], 1, -1)

    def from_canonical(self, y: Any, shape: Sequence[int]) -> Any:
        """The tensor of ``shape`` whose canonical layout is ``y``."""
        return y.reshape(*shape)


@dataclass(frozen=True)
class PerHead:
    """One scale per head of a layer: ``scale_shape == (heads, 1, 1)``.

    compressed-tensors calls this ``attn_head``.
    """

    name = "per_head"
    static = True
    compressed_tensors_strategy = "attn_head"

    def scale_shape(self, heads: int, head_dim: int = 1) -> tuple[int, ...]:
        return (heads, 1, 1)

    def scales_per_element(self, heads: int, head_dim: int) -> float:
        return 0.0

    def to_canonical(self, x: Any) -> Any:
        """``(batch, heads, tokens, head_dim)`` -> ``(batch * tokens, heads, 1, 1, head_dim)``."""
        batch, heads, tokens, head_dim = x.shape
        return x.transpose(1, 2).reshape(batch * tokens, heads, 1, 1, head_dim)

    def from_canonical(self, y: Any, shape: Sequence[int]) -> Any:
        """The tensor of ``shape`` whose canonical layout is ``y``."""
        return _with_heads_first(y, shape)


@dataclass(frozen=True)
class PerChannel:
    """One static scale per channel of every head: ``scale_shape == (heads, 1, head_dim)``."""

    name = "per_channel"
    static = True
    compressed_tensors_strategy = "channel"

    def scale_shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        return (heads, 1, head_dim)

    def scales_per_element(self, heads: int, head_dim: int) -> float:
        return 0.0

    def to_canonical(self, x: Any) -> Any:
        """``(batch, heads, tokens, head_dim)`` -> ``(batch * tokens, heads, 1, head_dim, 1)``."""
        batch, heads, tokens, head_dim = x.shape
        return x.transpose(1, 2).reshape(batch * tokens, heads, 1, head_dim, 1)

    def from_canonical(self, y: Any, shape: Sequence[int]) -> Any:
        """The tensor of ``shape`` whose canonical layout is ``y``."""
        return _with_heads_first(y, shape)


@dataclass(frozen=True)
class PerToken:
    """One scale per token for all heads of a layer: of ``n`` tokens, ``(n, 1, 1)``."""

    name = "per_token"
    static = False
    compressed_tensors_strategy = "token"

    def scale_shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        """Of one token."""
        return (1, 1, 1)

    def scales_per_element(self, heads: int, head_dim: int) -> float:
        return 1 / (heads * head_dim)

    def to_canonical(self, x: Any) -> Any:
        """``(batch, heads, tokens, head_dim)`` -> ``(1, batch * tokens, 1, 1, heads * head_dim)``."""
        batch, heads, tokens, head_dim = x.shape
        return x.transpose(1, 2).reshape(1, batch * tokens, 1, 1, heads * head_dim)

    def from_canonical(self, y: Any, shape: Sequence[int]) -> Any:
        """The tensor of ``shape`` whose canonical layout is ``y``."""
        return _with_heads_first(y, shape)


@dataclass(frozen=True)
class PerTokenHead:
    """One scale per token and head: of ``n`` tokens, ``(n, heads, 1)``."""

    name = "per_token_head"
    static = False
    compressed_tensors_strategy = None

    def scale_shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        """Of one token."""
        return (1, heads, 1)

    def scales_per_element(self, heads: int, head_dim: int) -> float:
        return 1 / head_dim

    def to_canonical(self, x: Any) -> Any:
        """``(batch, heads, tokens, head_dim)`` -> ``(1, batch * tokens, heads, 1, head_dim)``."""
        batch, heads, tokens, head_dim = x.shape
        return x.transpose(1, 2).reshape(1, batch * tokens, heads, 1, head_dim)

    def from_canonical(self, y: Any, shape: Sequence[int]) -> Any:
        """The tensor of ``shape`` whose canonical layout is ``y``."""
        return _with_heads_first(y, shape)


@dataclass(frozen=True)
class PerGroup:
    """One scale for every ``size`` elements that follow one another in a head.

    Along the channels of a token, ``n`` tokens have ``(n, heads, head_dim / size)`` scales. Along the tokens
    of a channel, as KIVI scales K, ``n`` rows of the batch have ``(n, heads, tokens / size, head_dim)``.

    Raises:
        UsageError: when made, if there is no such group; in use, if ``size`` does not divide the dimension.
    """

    size: int
    along: Literal["channels", "tokens"] = "channels"

    name = "per_group"
    static = False
    compressed_tensors_strategy = "group"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"groups of {self.size} elements do not exist; size must be at least 1")
        if self.along not in ("channels", "tokens"):
            raise UsageError(f"groups lie along channels or tokens, not {self.along!r}")

    def scale_shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        """Of one token, or along tokens of one group of them.

        >>> PerGroup(32).scale_shape(8, 128), PerGroup(32, "tokens").scale_shape(8, 128)
        ((1, 8, 4), (1, 8, 1, 128))
        """
        if self.along == "tokens":
            return (1, heads, 1, head_dim)
        return (1, heads, self._groups(head_dim))

    def scales_per_element(self, heads: int, head_dim: int) -> float:
        scales = math.prod(self.scale_shape(heads, head_dim))
        return scales / (heads * head_dim * (self.size if self.along == "tokens" else 1))

    def to_canonical(self, x: Any) -> Any:
        """``(batch, heads, tokens, head_dim)`` in groups.

        Along channels ``(1, batch * tokens, heads, head_dim / size, size)``, along tokens
        ``(1, batch, heads, tokens / size, head_dim, size)``.
        """
        batch, heads, tokens, head_dim = x.shape
        if self.along == "tokens":
            grouped = x.reshape(1, batch, heads, self._groups(tokens), self.size, head_dim)
            return grouped.transpose(-1, -2)
        groups = self._groups(head_dim)
        return x.transpose(1, 2).reshape(1, batch * tokens, heads, groups, self.size)

    def from_canonical(self, y: Any, shape: Sequence[int]) -> Any:
        """The tensor of ``shape`` whose canonical layout is ``y``."""
        if self.along == "tokens":
            return y.transpose(-1, -2).reshape(*shape)
        return _with_heads_first(y, shape)

    def _groups(self, length: int) -> int:
        if length % self.size:
            raise UsageError(
                f"{length} {self.along} do not make whole groups of {self.size}; use a divisor of {length}"
            )
        return length // self.size


Granularity = PerTensor | PerHead | PerChannel | PerToken | PerTokenHead | PerGroup

# Those that a name alone describes.
GRANULARITIES: tuple[Granularity, ...] = (PerTensor(), PerHead(), PerChannel(), PerToken(), PerTokenHead())


def names() -> list[str]:
    """Of :data:`GRANULARITIES`."""
    return [g.name for g in GRANULARITIES]


def get(
    name: str, *, size: int | None = None, along: Literal["channels", "tokens"] | None = None
) -> Granularity:
    """Look a granularity up by name; ``per_group`` has a ``size`` too and a direction, channels by default.

    >>> get("per_head").scale_shape(3, 64)
    (3, 1, 1)
    >>> get("per_group", size=32)
    PerGroup(size=32, along='channels')

    Raises:
        UsageError: there is no such name, or a size or direction is missing or makes no sense.
    """
    if name == PerGroup.name:
        if size is None:
            raise UsageError("per_group needs the size of a group")
        return PerGroup(size, along or "channels")
    for granularity in GRANULARITIES:
        if granularity.name == name:
            if size is not None or along is not None:
                raise UsageError(f"{name} has no groups to give a size or direction; per_group has")
            return granularity
    raise UsageError(f"unknown granularity {name!r}; known: {', '.join(names())}")


def _with_heads_first(y: Any, shape: Sequence[int]) -> Any:
    """Elements in the order batch, tokens, heads, head_dim, to ``(batch, heads, tokens, head_dim)``."""
    batch, heads, tokens, head_dim = shape
    return y.reshape(batch, tokens, heads, head_dim).transpose(1, 2)
