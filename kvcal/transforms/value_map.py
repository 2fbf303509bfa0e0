"""A linear map of V per KV head, undone in the output projection.

Nothing nonlinear stands between V and the output projection, so for any invertible ``N`` the cache may hold
``v' = N v`` (``W_v <- N W_v``, ``b_v <- N b_v``) while the output projection reads ``W_o N^-1``: exact for
every RoPE, QK-norm, window, softcap and sink. An output gate between the two commutes with a number per
head alone, that is with ``scale``.

``scale``: a power of two per head, so that FP8 at scale 1.0 neither saturates nor underflows.

``hadamard``, ``random_hadamard``: spreads an outlier channel over the head, which a scale per token and head
likes. Orthogonal, so the inverse is the transpose; entries ``±size^-½``, block-diagonal where the head size
is no power of two.

``balanced``: with second moments ``C_v`` of what is cached and ``C_o = Σ_h W_o^(h)ᵀ W_o^(h)`` of what reads
it, an error that spreads evenly costs ``tr(N C_v Nᵀ) tr(N^-ᵀ C_o N^-1)``. The minimum is at ``N = H P^½``,
``P`` the matrix geometric mean ``C_v^-1 # C_o``. kvcal gathers the diagonals of the moments only, where this
becomes a scale per channel ``(c_o / c_v)^¼`` in front of the Hadamard transform.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcal import objectives
from kvcal.arch import ModelSpec
from kvcal.basis import orthogonal
from kvcal.formats import FP8_E4M3
from kvcal.kernels import reference
from kvcal.recipe import ScaleRule
from kvcal.scales import UNDERFLOW_RMS, from_amax
from kvcal.statistics import SideStatistics, Statistics, floored
from kvcal.transforms.record import LayerTransform, Transforms


def scale(statistics: Statistics, model: ModelSpec, rule: ScaleRule) -> Transforms:
    """Heads outside E4M3's range at scale 1.0 into it, by powers of two; layers without such are left out."""
    found = {}
    for layer in model.layers:
        factors = _into_range(statistics.layers[layer.index]["v"], rule)
        if bool((factors != 1).any()):
            eye = torch.eye(layer.head_dim, dtype=torch.float64)
            found[layer.index] = LayerTransform(value_map=eye / factors[:, None, None])
    return Transforms(found)


def hadamard(model: ModelSpec, *, seed: int | None) -> Transforms:
    """Orthonormal Hadamard transform of every head, with random signs if there is a seed."""
    found = {}
    for layer in model.layers:
        if seed is None:
            rotation = orthogonal("hadamard", layer.head_dim, 0)
        else:
            rotation = orthogonal("random_hadamard", layer.head_dim, seed + layer.index)
        found[layer.index] = LayerTransform(value_map=rotation.expand(layer.kv_heads, -1, -1).contiguous())
    return Transforms(found)


def balanced(statistics: Statistics, model: ModelSpec, weights: Any) -> Transforms:
    """The closed form with diagonal moments; ``weights`` is the model, for its output projections."""
    found = {}
    reading = objectives.value_weights(weights, model)
    for layer in model.layers:
        c_v, c_o = statistics.layers[layer.index]["v"].squares, reading[layer.index]
        factor = (floored(c_o) / floored(c_v)) ** 0.25
        eye = torch.eye(layer.head_dim, dtype=torch.float64)
        rotation = reference.hadamard(eye)
        found[layer.index] = LayerTransform(value_map=rotation * factor[:, None, :])
    return Transforms(found)


def _into_range(seen: SideStatistics, rule: ScaleRule) -> torch.Tensor:
    """Power of two per KV head, ``(kv_heads,)`` float64; 1 for heads that are in range as they are."""
    amax = seen.amax.amax(-1)
    rule = ScaleRule(rule="power_of_two", headroom=rule.headroom)
    inside = (amax * rule.headroom <= FP8_E4M3.max) & (seen.rms >= UNDERFLOW_RMS)
    return torch.where(inside, 1.0, from_amax(amax, FP8_E4M3.max, rule).double())
