"""What each part of a cache costs: KL of the model with that part quantized alone and the rest in 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcal import evaluate
from kvcal.arch import LayerSpec
from kvcal.cache import Cache, Parted
from kvcal.data import TokenSet
from kvcal.errors import UsageError
from kvcal.evaluate import Variant
from kvcal.recipe import Side

ItemSide = Literal["k", "v", "kv"]


@dataclass(frozen=True)
class Item:
    """Layers that get one format together, for their K, their V or both."""

    layers: tuple[int, ...]
    side: ItemSide

    @property
    def places(self) -> tuple[tuple[int, Side], ...]:
        """Layer and side of each of its caches, as :class:`kvcal.cache.Parted` names them."""
        sides: tuple[Side, ...] = ("k", "v") if self.side == "kv" else (self.side,)
        return tuple((layer, side) for layer in self.layers for side in sides)

    def __str__(self) -> str:
        sides = {"k": "K", "v": "V", "kv": "K and V"}[self.side]
        return f"{sides} of layer{'s' if len(self.layers) > 1 else ''} {', '.join(map(str, self.layers))}"


def items(layers: Sequence[LayerSpec], sides: Sequence[ItemSide], options: int, bound: int) -> list[Item]:
    """Items for every layer, as fine as ``bound`` forward passes over one text can measure.

    One pass finds one of ``options`` formats of one item. Where there are too few for every layer, neighbours
    among the layers of a kind (full or sliding) share an item; the items of a kind differ by one layer at
    most, and no kind has items much larger than another's.

    Raises:
        UsageError: fewer than two groups of layers, or not one for each kind, could be told apart.
    """
    kinds: dict[str, list[int]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer.index)
    passes_each = len(sides) * options
    allowed = min(bound // passes_each, len(layers))
    fewest = min(max(2, len(kinds)), len(layers))
    if allowed < fewest:
        raise UsageError(
            f"{bound} forward passes are too few to tell layers apart: {fewest} groups of layers in {options}"
            f" formats, {' and '.join(map(str, sides)).upper()} each, take {fewest * passes_each}"
        )
    groups = dict.fromkeys(kinds, 1)
    while sum(groups.values()) < allowed:
        groups[max(kinds, key=lambda kind: len(kinds[kind]) / groups[kind])] += 1
    parts = sorted(part for kind, of_kind in kinds.items() for part in _evenly(of_kind, groups[kind]))
    return [Item(part, side) for part in parts for side in sides]


def _evenly(layers: list[int], count: int) -> list[tuple[int, ...]]:
    edges = [len(layers) * step // count for step in range(count + 1)]
    return [tuple(layers[a:b]) for a, b in itertools.pairwise(edges)]


def shares(items: Sequence[Item], layers: Sequence[LayerSpec], context: int = 1) -> dict[Item, float]:
    """Of all elements that the layers cache of a sequence of ``context`` tokens, the share of each item."""
    elements = {
        (layer.index, side): layer.elements_held(context)
        * layer.size_of(side)
        / (layer.size_of("k") + layer.size_of("v"))
        for layer in layers
        for side in ("k", "v")
    }
    total = sum(elements.values())
    return {item: sum(elements[place] for place in item.places) / total for item in items}


def assembled(chosen: Mapping[Item, Cache | None]) -> Parted:
    """The cache in which each item is stored as its own says; None is 16 bits."""
    return Parted(
        {place: cache for item, cache in chosen.items() if cache is not None for place in item.places}
    )


def measure(
    model: Any,
    items: Sequence[Item],
    candidates: Mapping[str, Cache],
    batch_size: int,
    tokens: TokenSet,
    *,
    with_query: bool = False,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> dict[Item, dict[str, float]]:
    """KL of the model with one item alone stored as one candidate does, nats per token of ``tokens``.

    One forward pass for each batch, item and candidate, and one for the reference. ``with_query``: Q is
    rounded too where K has static scales. ``tokens`` should be text that set no scale and is not for
    evaluation.
    """
    variants = {
        (item, name): Variant(assembled({item: cache}), with_query=with_query)
        for item in items
        for name, cache in candidates.items()
    }
    found = evaluate.fidelities(model, variants, batch_size, tokens, on_tokens=on_tokens)
    return {item: {name: found[item, name].kl_mean for name in candidates} for item in items}
