"""A power of two on a cached latent and one on its rotary key, for caches at the fixed scale 1.0.

The latent ``c`` leaves an RMS norm with gains ``g`` and meets nothing but the up-projection ``U``; the rotary
key ``r`` meets the rotary channels of Q alone. So ``g <- g / s`` with ``U <- U s``, and ``r / t`` with Q's
rotary rows times ``t``, change no K, no V and no logit, and with powers of two not a bit of them. Kernels
round Q with ``U`` absorbed, which grows as the cached vector shrinks: the factor that leaves both alike is
``√(amax_k / amax_q)``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcal.arch import LayerSpec, ModelSpec
from kvcal.formats import FP8_E4M3
from kvcal.recipe import Side
from kvcal.scales import UNDERFLOW_RMS
from kvcal.statistics import SideStatistics, Statistics
from kvcal.transforms.record import LayerTransform, Transforms

HEADROOM = 1.25


def propose(statistics: Statistics, model: ModelSpec) -> Transforms:
    """Parts outside E4M3's range at scale 1.0 into it; layers without such are left out."""
    found = {}
    for layer in model.layers:
        factors = _factors(layer, statistics.layers[layer.index])
        if bool((factors != 1).any()):
            found[layer.index] = LayerTransform(latent_scale=factors)
    return Transforms(found)


def _factors(layer: LayerSpec, sides: Mapping[Side, SideStatistics]) -> torch.Tensor:
    """``(2,)`` float64: of the latent and of the rotary key."""
    assert layer.latent is not None
    rank, query = layer.latent.rank, sides["q"].amax
    parts = ((sides["k"], query[:, :rank]), (sides["v"], query[:, rank:]))
    return torch.tensor([_factor(seen, float(q.max())) for seen, q in parts], dtype=torch.float64)


def _factor(seen: SideStatistics, query: float) -> float:
    cached, largest = float(seen.amax.max()), FP8_E4M3.max / HEADROOM
    inside = max(cached, query) <= largest and float(seen.rms) >= UNDERFLOW_RMS
    if inside or 0.0 in (cached, query):
        return 1.0
    ratio = torch.tensor(cached / query, dtype=torch.float64).clamp(2.0**-40, 2.0**40)
    return float(torch.exp2(torch.log2(ratio).div(2).round()))
