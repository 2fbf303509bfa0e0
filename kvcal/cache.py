"""The quantized cache as attention sees it: what a layer gets back for the Q, K and V it hands over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvcal import online
from kvcal.capture import AttentionCall, Versions
from kvcal.errors import UsageError
from kvcal.formats import KVFormat
from kvcal.kernels import codes, reference
from kvcal.recipe import Side
from kvcal.scales import Scales
from kvcal.transforms.record import LayerTransform, Tensors, Transforms

_NOTHING = LayerTransform()


class Cache(Protocol):
    """What stands between a layer and its attention.

    ``needs_rotary``: ``replace`` wants RoPE's cosines and sines in its call.
    """

    @property
    def needs_rotary(self) -> bool: ...

    def to(self, device: torch.device) -> Cache: ...

    def replace(self, call: AttentionCall, *, with_query: bool = False) -> Tensors | Versions: ...


@dataclass(frozen=True)
class QuantizedCache:
    """One format with what belongs to it.

    Attributes:
        format: how elements are stored.
        scales: static scales; None for a dynamic format.
        transforms: done to Q, K and V before the cache and undone behind it. Emulates a fold without touching
            a weight, and is the only form of a transform that has no fold.
        skipped: layers that the engine keeps in 16 bits, Q included.
    """

    format: KVFormat
    scales: Scales | None = None
    transforms: Transforms | None = None
    skipped: tuple[int, ...] = ()

    needs_rotary = False

    def to(self, device: torch.device) -> QuantizedCache:
        """The same with its scales on another device."""
        return replace(self, scales=self.scales and self.scales.to(device))

    def replace(self, call: AttentionCall, *, with_query: bool = False) -> Tensors:
        """What the layer attends with in place of the Q, K and V of ``call``."""
        return self.give_back(call.layer, call.query, call.key, call.value, with_query=with_query)

    def give_back(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, with_query: bool = False
    ) -> Tensors:
        """Q, K and V to attend with, in the shapes, dtype and basis of those handed over.

        ``with_query``: Q is rounded too, as kernels that compute attention in FP8 do.
        """
        if layer in self.skipped:
            return q, k, v
        transform = self.transforms.layers.get(layer, _NOTHING) if self.transforms else _NOTHING
        seen_q, seen_k, seen_v = transform.apply(q, k, v)
        if with_query:
            seen_q = self._round(layer, "q", seen_q)
        found_q, found_k, found_v = transform.undo(
            seen_q, self._round(layer, "k", seen_k), self._round(layer, "v", seen_v)
        )
        return (found_q if with_query else q), found_k, found_v

    def _round(self, layer: int, side: str, x: torch.Tensor) -> torch.Tensor:
        if self.format.latent_only and side == "v":  # the rotary key
            return x.to(torch.bfloat16).to(x.dtype)
        if self.scales is None:
            return online.quantize_dequantize(x, self.format)
        scale = self.scales.layers[layer][side]  # type: ignore[index]
        if self.format.block:
            return codes.dequantize_blocks(codes.quantize_blocks(x, self.format, scale)).to(x.dtype)
        return reference.quantize_dequantize(x, scale, self.format)


@dataclass(frozen=True)
class Parted:
    """A cache whose layers and sides come from different caches; what has no part stays in 16 bits.

    A layer's Q goes with its K: it is what the part for K makes of it, and is rounded only where that part
    has static scales, since no kernel rounds the Q of a layer kept in 16 bits or scaled online.
    """

    parts: Mapping[tuple[int, Side], Cache]

    @property
    def needs_rotary(self) -> bool:
        return any(part.needs_rotary for part in self.parts.values())

    def to(self, device: torch.device) -> Parted:
        """The same with its parts on another device; a part of many places is moved once."""
        each = {id(part): part for part in self.parts.values()}
        moved = {identity: part.to(device) for identity, part in each.items()}
        return Parted({place: moved[id(part)] for place, part in self.parts.items()})

    def replace(self, call: AttentionCall, *, with_query: bool = False) -> Tensors | Versions:
        """K from one part, V from another.

        Raises:
            UsageError: both keep a window of tokens in 16 bits, and not the same one.
        """
        key_part, value_part = self.parts.get((call.layer, "k")), self.parts.get((call.layer, "v"))
        rounded = with_query and isinstance(key_part, QuantizedCache) and key_part.scales is not None
        plain = (call.query, call.key, call.value)
        for_keys = plain if key_part is None else key_part.replace(call, with_query=rounded)
        if value_part is key_part:
            return for_keys
        for_values = plain if value_part is None else value_part.replace(call)
        return _joined(call.layer, for_keys, for_values)


def _joined(layer: int, for_keys: Tensors | Versions, for_values: Tensors | Versions) -> Tensors | Versions:
    """Q and K of one, V of the other."""
    if not isinstance(for_keys, Versions) and not isinstance(for_values, Versions):
        return for_keys[0], for_keys[1], for_values[2]
    seen = for_keys.seen if isinstance(for_keys, Versions) else for_values.seen  # type: ignore[union-attr]
    of_keys, of_values = _versions(for_keys, seen), _versions(for_values, seen)
    masks = zip(of_keys.seen, of_values.seen, strict=False)
    if len(of_keys.seen) != len(of_values.seen) or not all(torch.equal(a, b) for a, b in masks):
        raise UsageError(
            f"layer {layer}: K and V keep different tokens in 16 bits; give both the same windows"
        )
    return Versions(of_keys.query, of_keys.keys, of_values.values, seen)


def _versions(found: Tensors | Versions, seen: tuple[torch.Tensor, ...]) -> Versions:
    """What has one version only has that one for every query."""
    if isinstance(found, Versions):
        return found
    query, key, value = found
    return Versions(query, (key,) * len(seen), (value,) * len(seen), seen)
