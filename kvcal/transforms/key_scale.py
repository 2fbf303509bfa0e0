"""A scale per channel of K, tied over RoPE pairs and the query heads of a group.

Attention needs only the products ``q · k``, so K may be divided by ``s`` and Q multiplied by it. Folded in
front of RoPE this commutes with the rotation if both channels of a pair have the same ``s``; after a QK-norm
it moves into the norm's gains, which all heads of a layer share, and ``s`` with them.

A cache whose rounding error spreads evenly over the channels, in proportion to the length of the vector (one
scale per token), costs the logits ``Σ_c λ_k,c / s_c² · Σ_c λ_q,c s_c²`` with the second moments ``λ =
E[x²]``. The minimum over ``s`` lies at ``s_c = (λ_k,c / λ_q,c)^¼``, where Q and K are balanced. Rounding
``s`` to powers of two costs little of the gain, and the fold is then exact in every floating-point dtype.

FP8 at the fixed scale 1.0 wants values inside its range besides; a common factor per KV head, which changes
nothing for a scale per token, moves K up and Q down or the other way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcal.arch import LayerSpec, ModelSpec
from kvcal.formats import FP8_E4M3
from kvcal.recipe import Side
from kvcal.statistics import SideStatistics, Statistics, floored
from kvcal.transforms.record import LayerTransform, Transforms

HEADROOM = 1.25


def propose(statistics: Statistics, model: ModelSpec, *, strength: float, powers_of_two: bool) -> Transforms:
    """``s = (λ_k / λ_q)^(strength / 4)`` for every layer; ``strength`` 1 is the closed form."""
    return Transforms(
        {
            layer.index: LayerTransform(
                key_scale=_scale(layer, model, statistics.layers[layer.index], strength, powers_of_two)
            )
            for layer in model.layers
        }
    )


def _scale(
    layer: LayerSpec,
    model: ModelSpec,
    sides: Mapping[Side, SideStatistics],
    strength: float,
    powers_of_two: bool,
) -> torch.Tensor:
    """``(kv_heads, head_dim)`` float64."""
    group = layer.heads // layer.kv_heads
    k = sides["k"].squares
    q = sides["q"].squares.view(layer.kv_heads, group, layer.head_dim).mean(1)
    if model.qk_norm == "head":
        k, q = k.mean(0, keepdim=True), q.mean(0, keepdim=True)
    ties = torch.tensor(layer.channel_ties)
    k, q = (_tied(x, ties) for x in (k, q))
    log2 = torch.log2(floored(k) / floored(q)) * strength / 4
    shape = log2.round() if powers_of_two else log2
    scale = torch.exp2(shape)[:, ties].expand(layer.kv_heads, -1)
    return scale * _into_range(scale, layer, model, sides)


def _tied(moments: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    """Moments ``(heads, head_dim)`` summed over tied channels."""
    out = torch.zeros(moments.shape[0], int(ties.max()) + 1, dtype=moments.dtype)
    return out.index_add_(1, ties, moments)


def _into_range(
    scale: torch.Tensor, layer: LayerSpec, model: ModelSpec, sides: Mapping[Side, SideStatistics]
) -> torch.Tensor:
    """A power of two per KV head ``(kv_heads, 1)`` that brings K and Q into E4M3's range at scale 1.0."""
    group = layer.heads // layer.kv_heads
    k = (sides["k"].amax.double() / scale).amax(-1)
    q = sides["q"].amax.double().view(layer.kv_heads, group, -1).amax(1)
    q = (q * scale).amax(-1)
    if model.qk_norm == "head":
        k, q = k.amax().expand_as(k), q.amax().expand_as(q)
    largest = FP8_E4M3.max / HEADROOM
    inside = (k <= largest) & (q <= largest)
    balance = torch.exp2(torch.log2((k / q).clamp(2.0**-40, 2.0**40)).div(2).round())
    return torch.where(inside | (k == 0) | (q == 0), 1.0, balance).unsqueeze(-1)
