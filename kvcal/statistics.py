"""Streaming, mergeable statistics of K, V and Q: memory does not grow with the number of tokens.

One :class:`SideStatistics` holds what is known of one side of one layer, per head and channel. Extremes
are exact; sums are float64, in float32 within a sample, second moments within a batch. Padding is left out
by the caller's mask.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvcal import histogram
from kvcal.errors import StatisticsError
from kvcal.formats import KVFormat
from kvcal.kernels import dispatch
from kvcal.kernels.observe_reference import Seen
from kvcal.recipe import SIDES, Side

_FILE_VERSION = "1"

# What is gathered: extremes alone; sums and counts as well; histograms and second moments as well.
Collect = Literal["extremes", "summary", "distribution"]

# How two values of a field become that of both; by default they are added.
MERGED = {"minimum": torch.minimum, "maximum": torch.maximum}


@dataclass
class SideStatistics:
    """What was seen of one side of one layer. All tensors are on the CPU.

    Attributes:
        tokens: number of tokens observed, int64 scalar.
        minimum: ``(heads, head_dim)`` float32.
        maximum: ``(heads, head_dim)`` float32.
        total: sum of x, ``(heads, head_dim)`` float64.
        squares: sum of x², ``(heads, head_dim)`` float64.
        saturated: elements beyond the format's maximum at scale 1.0, ``(heads,)`` int64.
        zeroed: non-zero elements that would be stored as 0 at scale 1.0, ``(heads,)`` int64.
        histogram: counts in the bins of :mod:`kvcal.histogram`, ``(heads, head_dim, bins)`` int32 for K and
            V, ``(heads, 1, bins)`` int64 for Q. This and what follows is None unless distributions were
            collected.
        moments: sum of x xᵀ, ``(kv_heads, head_dim, head_dim)`` float64; Q's are pooled over the query
            heads that read one KV head.
        weighted_moments: of V only, sum of w v vᵀ in the shape of ``moments``, where a token's weight is the
            attention that it gets, ``w_t = Σ p²`` over queries and the query heads of the KV head: what an
            error of that token costs in the output (if errors of tokens are independent).
        weight: of V only, sum of w, ``(kv_heads,)`` float64.
    """

    tokens: torch.Tensor
    minimum: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor
    saturated: torch.Tensor
    zeroed: torch.Tensor
    histogram: torch.Tensor | None = None
    moments: torch.Tensor | None = None
    weighted_moments: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    @property
    def amax(self) -> torch.Tensor:
        """Largest magnitude per head and channel, ``(heads, head_dim)`` float32."""
        return torch.maximum(self.maximum, -self.minimum)

    @property
    def rms(self) -> torch.Tensor:
        """Root mean square per head, ``(heads,)`` float64."""
        return (self.squares.mean(-1) / int(self.tokens)).sqrt()

    def merge(self, other: SideStatistics) -> SideStatistics:
        """Statistics of both sets of tokens together; associative and commutative, extremes exactly.

        Raises:
            StatisticsError: only one of them holds distributions.
        """
        mine, theirs = self.tensors(), other.tensors()
        if mine.keys() != theirs.keys():
            raise StatisticsError("statistics with and without distributions cannot be merged")
        return SideStatistics(
            **{name: MERGED.get(name, torch.add)(mine[name], theirs[name]) for name in mine}
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every field that was collected."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}


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

    def save(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write all tensors as ``layers.<index>.<side>.<field>``, with ``metadata`` in the file's header."""
        tensors = {
            f"layers.{index}.{side}.{name}": tensor.contiguous()
            for index, sides in self.layers.items()
            for side in SIDES
            for name, tensor in sides[side].tensors().items()
        }
        save_file(tensors, path, metadata={"kvcal_statistics": _FILE_VERSION, **(metadata or {})})

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


class Collector:
    """Gathers statistics batch by batch.

    All layers live in a few flat tensors: extremes cost two reductions per tensor seen and one merge per
    batch, where a merge per layer and side would cost as many kernel launches as the layer itself.
    """

    def __init__(
        self,
        shapes: Mapping[tuple[int, Side], tuple[int, int]],
        collect: Collect,
        fmt: KVFormat,
        device: torch.device,
    ):
        """``shapes`` maps layer and side to ``(heads, head_dim)``; counts are those of ``fmt``."""
        self._collect = collect
        self._fmt = fmt
        self._shapes = dict(shapes)
        self._channels = _slices({key: heads * head_dim for key, (heads, head_dim) in shapes.items()})
        self._heads = _slices({key: heads for key, (heads, _) in shapes.items()})
        channels = sum(heads * head_dim for heads, head_dim in shapes.values())
        heads = sum(heads for heads, _ in shapes.values())
        self._low = torch.full((channels,), float("inf"), device=device)
        self._high = torch.full((channels,), float("-inf"), device=device)
        self._total = torch.zeros(channels, dtype=torch.float64, device=device)
        self._squares = torch.zeros(channels, dtype=torch.float64, device=device)
        self._saturated = torch.zeros(heads, dtype=torch.int64, device=device)
        self._zeroed = torch.zeros(heads, dtype=torch.int64, device=device)
        self._tokens = dict.fromkeys(shapes, 0)
        self._batch: dict[tuple[int, Side], Seen] = {}
        self._counted: tuple[torch.Tensor | None, int] = (None, 0)
        self._kernels = dispatch.choose(device)
        # Further fields of SideStatistics by layer and side.
        self._distributions: dict[tuple[int, Side], dict[str, torch.Tensor]] = {}
        if collect == "distribution":
            for layer, side in shapes:
                self._distributions[layer, side] = self._no_distribution(layer, side, device)

    def see(self, layer: int, side: Side, x: torch.Tensor, keep: torch.Tensor | None) -> None:
        """Take in one tensor of the current batch.

        Args:
            layer: index of the layer.
            side: k, v or q.
            x: ``(batch, heads, tokens, head_dim)``, any float dtype.
            keep: ``(batch, tokens)`` bool, False on padding; None where nothing is padded.
        """
        tokens = x.shape[0] * x.shape[2] if keep is None else self._kept(keep)
        if tokens == 0:
            return
        key = (layer, side)
        keep = keep if keep is None else keep.to(x.device)
        self._tokens[key] += tokens
        self._batch[key] = self._kernels.observe(x, keep, None if self._collect == "extremes" else self._fmt)
        if self._collect == "distribution":
            found = self._distribution(key, x.device)
            self._kernels.count(x, keep, found["histogram"])
            rows = x if keep is None else x.masked_fill(~keep[:, None, :, None], 0.0)
            found["moments"] += _second_moments(rows, len(found["moments"]))

    def see_weighted(self, layer: int, v: torch.Tensor, weight: torch.Tensor) -> None:
        """Take in V of some tokens, none of them padding, with the weight of each.

        Args:
            layer: index of the layer.
            v: ``(kv_heads, tokens, head_dim)``, any float dtype.
            weight: ``(kv_heads, tokens)`` float32, not negative.
        """
        found, wide = self._distribution((layer, "v"), v.device), v.float()
        found["weighted_moments"] += (wide * weight.unsqueeze(-1)).mT @ wide
        found["weight"] += weight.sum(-1, dtype=torch.float64)

    def _kept(self, keep: torch.Tensor) -> int:
        """Its tokens, counted once for all tensors of a batch: a GPU would be waited for each time."""
        if self._counted[0] is not keep:
            self._counted = keep, int(keep.sum())
        return self._counted[1]

    def _distribution(self, key: tuple[int, Side], device: torch.device) -> dict[str, torch.Tensor]:
        """The large fields of a layer and side, which stay where its tensors are."""
        found = self._distributions[key]
        if found["moments"].device != device:
            found.update({name: tensor.to(device) for name, tensor in found.items()})
        return found

    def end_batch(self) -> None:
        """Merge what was seen since the last call."""
        if self._batch.keys() == self._channels.keys() and len(self._rows()) == 1:
            everything = [self._batch[key] for key in self._channels]
            self._merge(everything, slice(None), slice(None))
        else:  # layer by layer, where going through all of them each time would add up
            for key, seen in self._batch.items():
                self._merge([seen], self._channels[key], self._heads[key])
        self._batch = {}

    def _rows(self) -> set[tuple[int, torch.device]]:
        return {(seen.low.shape[0], seen.low.device) for seen in self._batch.values()}

    def _merge(self, parts: list[Seen], channels: slice, heads: slice) -> None:
        """Take in layers and sides that follow one another in the flat tensors."""

        def rows(field: str) -> torch.Tensor:
            return torch.cat([getattr(seen, field).flatten(1) for seen in parts], 1)

        device = self._low.device
        low, high = rows("low").amin(0).to(device), rows("high").amax(0).to(device)
        self._low[channels] = torch.minimum(self._low[channels], low)
        self._high[channels] = torch.maximum(self._high[channels], high)
        if self._collect == "extremes":
            return
        self._total[channels] += rows("total").sum(0, dtype=torch.float64).to(device)
        self._squares[channels] += rows("squares").sum(0, dtype=torch.float64).to(device)
        self._saturated[heads] += rows("saturated").sum(0).to(device)
        self._zeroed[heads] += rows("zeroed").sum(0).to(device)

    def statistics(self) -> Statistics:
        """What was gathered up to the last :meth:`end_batch`, on the CPU."""
        flat = [self._low, self._high, self._total, self._squares, self._saturated, self._zeroed]
        low, high, total, squares, saturated, zeroed = (tensor.cpu() for tensor in flat)
        layers: dict[int, dict[Side, SideStatistics]] = {}
        for key, shape in self._shapes.items():
            layer, side = key
            channels, heads = self._channels[key], self._heads[key]
            layers.setdefault(layer, {})[side] = SideStatistics(
                tokens=torch.tensor(self._tokens[key]),
                minimum=low[channels].view(shape),
                maximum=high[channels].view(shape),
                total=total[channels].view(shape),
                squares=squares[channels].view(shape),
                saturated=saturated[heads],
                zeroed=zeroed[heads],
                **{name: tensor.cpu() for name, tensor in self._distributions.get(key, {}).items()},
            )
        return Statistics(layers)

    def restore(self, statistics: Statistics) -> None:
        """Go on from what :meth:`statistics` gave, as if nothing had come in between."""
        flat = {
            "minimum": self._low,
            "maximum": self._high,
            "total": self._total,
            "squares": self._squares,
            "saturated": self._saturated,
            "zeroed": self._zeroed,
        }
        for (layer, side), channels in self._channels.items():
            found = statistics.layers[layer][side]
            heads = self._heads[layer, side]
            self._tokens[layer, side] = int(found.tokens)
            for name, tensor in flat.items():
                where = heads if name in ("saturated", "zeroed") else channels
                tensor[where] = getattr(found, name).flatten().to(tensor.device)
            for name, tensor in self._distributions.get((layer, side), {}).items():
                tensor.copy_(getattr(found, name))

    def _no_distribution(self, layer: int, side: Side, device: torch.device) -> dict[str, torch.Tensor]:
        heads, head_dim = self._shapes[layer, side]
        kv_heads = self._shapes[layer, "k"][0]
        # A head of Q counts tokens times channels, which int32 might not hold.
        channels, dtype = (1, torch.int64) if side == "q" else (head_dim, torch.int32)
        moments = torch.zeros(kv_heads, head_dim, head_dim, dtype=torch.float64, device=device)
        found = {
            "histogram": torch.zeros(heads, channels, histogram.BINS, dtype=dtype, device=device),
            "moments": moments,
        }
        if side == "v":
            found["weighted_moments"] = moments.clone()
            found["weight"] = moments.new_zeros(kv_heads)
        return found


def floored(moments: torch.Tensor) -> torch.Tensor:
    """Second moments, none below a millionth of the largest: less is noise or a dead channel.

    A scale made from it would only spread outliers. All ones where everything is zero.
    """
    largest = float(moments.max())
    return moments.clamp(min=1e-6 * largest) if largest > 0 else torch.ones_like(moments)


def _second_moments(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Sum of x xᵀ over ``(batch, heads, tokens, head_dim)``, ``(kv_heads, head_dim, head_dim)`` float32."""
    rows = x.flatten(0, 1)
    if x.is_cuda and x.dtype.itemsize == 2:  # tensor cores multiply 16-bit floats exactly
        each = torch.bmm(rows.mT, rows, out_dtype=torch.float32)
    else:
        each = rows.float().mT @ rows.float()
    # (batch, kv_heads, query heads of each, head_dim, head_dim)
    return each.view(x.shape[0], kv_heads, -1, *each.shape[1:]).sum((0, 2))


def _slices(lengths: Mapping[tuple[int, Side], int]) -> dict[tuple[int, Side], slice]:
    """Where each key's elements lie when all are laid one after another."""
    stops = list(itertools.accumulate(lengths.values()))
    return {key: slice(stop - lengths[key], stop) for key, stop in zip(lengths, stops, strict=True)}


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
