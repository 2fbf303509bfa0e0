"""Streaming, mergeable statistics of K, V and Q: memory does not grow with the number of tokens.

One :class:`SideStatistics` holds what is known of one side of one layer, per head and channel. Extremes
are exact; sums are float64. Padding is left out by the caller's mask.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvcal.errors import StatisticsError
from kvcal.formats import KVFormat
from kvcal.recipe import SIDES, Side

_FILE_VERSION = "1"


@dataclass
class SideStatistics:
    """What was seen of one side of one layer.

    Attributes:
        tokens: number of tokens observed, int64 scalar.
        minimum: ``(heads, head_dim)`` float32.
        maximum: ``(heads, head_dim)`` float32.
        total: sum of x, ``(heads, head_dim)`` float64.
        squares: sum of x², ``(heads, head_dim)`` float64.
        saturated: elements beyond the format's maximum at scale 1.0, ``(heads,)`` int64.
        zeroed: non-zero elements that would be stored as 0 at scale 1.0, ``(heads,)`` int64.
    """

    tokens: torch.Tensor
    minimum: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor
    saturated: torch.Tensor
    zeroed: torch.Tensor

    @classmethod
    def empty(cls, heads: int, head_dim: int, device: torch.device) -> SideStatistics:
        """Statistics of no token at all: the neutral element of :meth:`merge`."""
        shape = (heads, head_dim)
        return cls(
            tokens=torch.zeros((), dtype=torch.int64, device=device),
            minimum=torch.full(shape, float("inf"), device=device),
            maximum=torch.full(shape, float("-inf"), device=device),
            total=torch.zeros(shape, dtype=torch.float64, device=device),
            squares=torch.zeros(shape, dtype=torch.float64, device=device),
            saturated=torch.zeros(heads, dtype=torch.int64, device=device),
            zeroed=torch.zeros(heads, dtype=torch.int64, device=device),
        )

    @property
    def amax(self) -> torch.Tensor:
        """Largest magnitude per head and channel, ``(heads, head_dim)`` float32."""
        return torch.maximum(self.maximum, -self.minimum)

    @property
    def rms(self) -> torch.Tensor:
        """Root mean square per head, ``(heads,)`` float64."""
        return (self.squares.mean(-1) / self.tokens).sqrt()

    def update(self, x: torch.Tensor, keep: torch.Tensor | None, fmt: KVFormat | None) -> None:
        """Add a batch.

        Args:
            x: ``(batch, heads, tokens, head_dim)``, any float dtype.
            keep: ``(batch, tokens)`` bool, False on padding; None where nothing is padded.
            fmt: the format whose range is counted against; None collects extremes only.
        """
        if keep is not None:
            # (kept, heads, head_dim) -> (1, heads, kept, head_dim)
            x = x.transpose(1, 2)[keep].transpose(0, 1).unsqueeze(0)
        self.tokens += x.shape[0] * x.shape[2]
        if x.shape[0] * x.shape[2] == 0:
            return
        self.minimum = torch.minimum(self.minimum, x.amin((0, 2)).float())
        self.maximum = torch.maximum(self.maximum, x.amax((0, 2)).float())
        if fmt is None:
            return
        self.total += x.sum((0, 2), dtype=torch.float64)
        self.squares += x.float().square().sum((0, 2), dtype=torch.float64)
        magnitude = x.abs()
        self.saturated += (magnitude > fmt.max).sum((0, 2, 3))
        self.zeroed += ((magnitude <= fmt.rounds_to_zero) & (magnitude > 0)).sum((0, 2, 3))

    def merge(self, other: SideStatistics) -> SideStatistics:
        """Statistics of both sets of tokens together; associative and commutative, extremes exactly."""
        return SideStatistics(
            tokens=self.tokens + other.tokens,
            minimum=torch.minimum(self.minimum, other.minimum),
            maximum=torch.maximum(self.maximum, other.maximum),
            total=self.total + other.total,
            squares=self.squares + other.squares,
            saturated=self.saturated + other.saturated,
            zeroed=self.zeroed + other.zeroed,
        )

    def cpu(self) -> SideStatistics:
        return SideStatistics(**{name: tensor.cpu() for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass
class Statistics:
    """Statistics of every attention layer: ``layers[index][side]``."""

    layers: dict[int, dict[Side, SideStatistics]]

    def merge(self, other: Statistics) -> Statistics:
        """Statistics of both runs. Both must cover the same layers."""
        if self.layers.keys() != other.layers.keys():
            raise StatisticsError("statistics of different layers cannot be merged")
        return Statistics(
            {
                index: {side: sides[side].merge(other.layers[index][side]) for side in SIDES}
                for index, sides in self.layers.items()
            }
        )

    def require_sound(self) -> None:
        """Refuse a layer without tokens, with NaN or infinity, or all zero.

        Raises:
            StatisticsError: naming the first such layer and the likely cause.
        """
        for index, sides in sorted(self.layers.items()):
            for side in SIDES:
                _require_sound(index, side, sides[side])

    def save(self, path: Path) -> None:
        """Write all tensors as ``layers.<index>.<side>.<field>``."""
        tensors = {
            f"layers.{index}.{side}.{name}": tensor.contiguous()
            for index, sides in self.layers.items()
            for side in SIDES
            for name, tensor in sides[side].cpu().tensors().items()
        }
        save_file(tensors, path, metadata={"kvcal_statistics": _FILE_VERSION})

    @classmethod
    def load(cls, path: Path) -> Statistics:
        """Read what :meth:`save` wrote."""
        layers: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kvcal_statistics") != _FILE_VERSION:
                raise StatisticsError(
                    f"{path} is not a statistics file of this version: {json.dumps(metadata)}"
                )
            for key in file.keys():  # noqa: SIM118  (not a dict)
                _, index, side, name = key.split(".")
                layers.setdefault(int(index), {}).setdefault(side, {})[name] = file.get_tensor(key)
        return cls(
            {
                i: {side: SideStatistics(**sides[side]) for side in SIDES}
                for i, sides in sorted(layers.items())
            }
        )


def _require_sound(index: int, side: Side, seen: SideStatistics) -> None:
    where = f"layer {index}: {side.upper()}"
    if int(seen.tokens) == 0:
        raise StatisticsError(f"{where} was never observed; no calibration token reached this layer")
    extremes = torch.stack([seen.minimum, seen.maximum])
    if not bool(extremes.isfinite().all()):
        what = "NaN" if bool(extremes.isnan().any()) else "infinity"
        heads = (~extremes.isfinite()).any(0).any(-1).nonzero().flatten().tolist()
        raise StatisticsError(
            f"{where} holds {what} in head {', '.join(map(str, heads))}; likely a non-finite weight at or"
            " before this layer, or an overflow of the compute dtype"
        )
    if float(seen.amax.max()) == 0.0:
        raise StatisticsError(f"{where} is zero for every token; the projection's weights look empty")
