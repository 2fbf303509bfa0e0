"""The quantized cache as attention sees it: what a layer gets back for the Q, K and V it hands over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcal import online
from kvcal.capture import AttentionCall
from kvcal.formats import KVFormat
from kvcal.kernels import reference
from kvcal.scales import Scales
from kvcal.transforms.record import LayerTransform, Tensors, Transforms

_NOTHING = LayerTransform()


@dataclass(frozen=True)
class QuantizedCache:
    """One format with what belongs to it.

    Attributes:
        format: how elements are stored.
        scales: static scales; None for a dynamic format.
        transforms: done to Q, K and V before the cache and undone behind it. Emulates a fold without touching
            a weight, and is the only form of a transform that has no fold.
    """

    format: KVFormat
    scales: Scales | None = None
    transforms: Transforms | None = None

    needs_rotary = False

    def to(self, device: torch.device) -> QuantizedCache:
        """The same with its scales on another device."""
        return QuantizedCache(self.format, self.scales and self.scales.to(device), self.transforms)

    def replace(self, call: AttentionCall, *, with_query: bool = False) -> Tensors:
        """What the layer attends with in place of the Q, K and V of ``call``."""
        return self.give_back(call.layer, call.query, call.key, call.value, with_query=with_query)

    def give_back(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, with_query: bool = False
    ) -> Tensors:
        """Q, K and V to attend with, in the shapes, dtype and basis of those handed over.

        ``with_query``: Q is rounded too, as kernels that compute attention in FP8 do.
        """
        transform = self.transforms.layers.get(layer, _NOTHING) if self.transforms else _NOTHING
        seen_q, seen_k, seen_v = transform.apply(q, k, v)
        if with_query:
            seen_q = self._round(layer, "q", seen_q)
        found_q, found_k, found_v = transform.undo(
            seen_q, self._round(layer, "k", seen_k), self._round(layer, "v", seen_v)
        )
        return (found_q if with_query else q), found_k, found_v

    def _round(self, layer: int, side: str, x: torch.Tensor) -> torch.Tensor:
        if self.scales is None:
            return online.quantize_dequantize(x, self.format)
        scale = self.scales.layers[layer][side]  # type: ignore[index]
        return reference.quantize_dequantize(x, scale, self.format)
