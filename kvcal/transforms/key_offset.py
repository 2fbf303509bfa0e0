"""A constant subtracted from K after RoPE: ``k' = k - o`` for all keys of a head.

``q · (k - o) = q · k - q · o`` shifts all logits of a query alike, and softmax ignores that: the cache may
hold centred keys and nobody need add anything back. It takes a tanh softcap or a learned sink to notice. In
front of RoPE the constant would turn with the position, so it can be folded only into channels that RoPE
leaves alone (partial rotary, layers without positions), and there only through a bias that K has already: a
model without one would need another architecture. Elsewhere it is evaluated and reported.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcal import exactness
from kvcal.arch import ModelSpec
from kvcal.statistics import Statistics
from kvcal.transforms.record import LayerTransform, Transforms


def mean(statistics: Statistics, model: ModelSpec) -> Transforms:
    """The mean of K over calibration tokens, all channels: for evaluation."""
    return Transforms(
        {layer.index: LayerTransform(key_offset=_mean(statistics, layer.index)) for layer in model.layers}
    )


def foldable(statistics: Statistics, model: ModelSpec, weights: Any) -> Transforms:
    """The part of the mean that biases of this model can carry; ``weights`` is the model."""
    found = {}
    for layer in model.layers:
        assert model.projections is not None
        projection = weights.get_submodule(f"{layer.module}.{model.projections.k}")
        free = list(exactness.free_channels(layer))
        if projection.bias is None or not free:
            continue
        offset = torch.zeros_like(_mean(statistics, layer.index))
        offset[:, free] = _mean(statistics, layer.index)[:, free]
        found[layer.index] = LayerTransform(key_offset=offset)
    return Transforms(found)


def _mean(statistics: Statistics, index: int) -> torch.Tensor:
    k = statistics.layers[index]["k"]
    return k.total / int(k.tokens)
