"""What each rank of a tensor-parallel engine holds of the scales that a checkpoint carries.

vLLM slices scales per head as it slices the heads (compressed_tensors.py, CompressedTensorsKVCacheMethod): KV
heads are dealt out in runs, or copied where there are more ranks than heads; scales of Q are first reduced to
the largest of each group of query heads. One scale per layer goes to every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcal import check, engines
from kvcal.arch import LayerSpec
from kvcal.errors import UsageError
from kvcal.recipe import Side


@dataclass(frozen=True)
class RankScales:
    """One rank's share of one layer: its first KV head and the one after its last, and scales per side."""

    rank: int
    layer: int
    first_head: int
    stop_head: int
    scales: dict[Side, list[float]]


def shares(folder: Path, engine: str, ranks: int) -> list[RankScales]:
    """Every rank's share of every layer, layer by layer.

    Raises:
        UsageError: the engine could not deal out the heads, or has no scales.
    """
    row = engines.get(engine)
    if row.standalone or not row.scale_suffixes:
        raise UsageError(f"--tensor-parallel shows what ranks hold of scales, and {engine} deals out none")
    model, written, _ = check.scales_of(folder, engine)
    return [
        _share(layer, written[layer.index], rank, ranks) for layer in model.layers for rank in range(ranks)
    ]


def _share(layer: LayerSpec, written: dict[Side, list[float]], rank: int, ranks: int) -> RankScales:
    if layer.kv_heads % ranks == 0:
        each = layer.kv_heads // ranks
        first = rank * each
    elif ranks % layer.kv_heads == 0:
        each, first = 1, rank // (ranks // layer.kv_heads)
    else:
        raise UsageError(
            f"{layer.kv_heads} KV heads cannot be dealt out to {ranks} ranks;"
            f" --tensor-parallel takes divisors and multiples of {layer.kv_heads}"
        )
    group = layer.heads // layer.kv_heads
    found: dict[Side, list[float]] = {}
    for side, values in written.items():
        if len(values) == 1:
            found[side] = values
            continue
        if side == "q":
            values = [max(values[i * group : (i + 1) * group]) for i in range(layer.kv_heads)]
        found[side] = values[first : first + each]
    return RankScales(rank, layer.index, first, first + each, found)
