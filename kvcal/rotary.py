"""RoPE taken off cached keys and put back, with the cosines and sines that the model itself used.

A key before RoPE has the same distribution at every position, so that constants and maps taken from
calibration fit it better than one that turns with its position (KVQuant, section 3.2).
"""

from __future__ import annotations

import torch

from kvcal.arch import LayerSpec
from kvcal.errors import ModelError

Rotary = tuple[torch.Tensor, torch.Tensor]

_GOLDEN = 0.6180339887498949


def apply(x: torch.Tensor, layer: LayerSpec, rotary: Rotary | None, *, inverse: bool = False) -> torch.Tensor:
    """Turn the pairs of each token by its position's angle, or back.

    Args:
        x: ``(batch, heads, tokens, head_dim)``.
        layer: which channels turn, and with which.
        rotary: ``(cos, sin)``, each ``(1 or batch, tokens, rotary_dim)``; of a layer without positions, which
            leaves ``x`` as it is, also None.
        inverse: turn by the negative angle. Where a model scales its cosines and sines (YaRN), division by
            their length makes up for it.

    Returns:
        In the shape of ``x``, float32.

    Raises:
        ModelError: the layer has positions, and its model did not hand over its angles.
    """
    if layer.rope == "none":
        return x.float()
    rotary = _required(rotary, layer)
    first, second = _paired(layer, x.device)
    cos, sin = (part.float().unsqueeze(1)[..., first] for part in rotary)
    if inverse:
        length = cos.square() + sin.square()
        cos, sin = cos / length, -sin / length
    y = x.float().clone()
    a, b = y[..., first], y[..., second]
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def as_seen_by_keys(
    q: torch.Tensor, layer: LayerSpec, rotary: Rotary | None, window: int | None
) -> torch.Tensor:
    """Queries turned back by the angle of a key that they see, so that they meet keys before RoPE.

    An error ``e`` of a key before RoPE moves the logit of a query by ``q · R_j e = (R_jᵀ q) · e``, ``j`` the
    key's position: the second moments of what this returns say what an error costs. Each query takes one of
    the positions it sees, evenly spread over all queries (multiples of the golden ratio), the same in every
    run.
    """
    if layer.rope == "none":
        return q.float()
    rotary = _required(rotary, layer)
    position = torch.arange(q.shape[2], device=q.device)
    spread = (position.double() * _GOLDEN).frac()
    reach = position + 1 if window is None else (position + 1).clamp(max=window)
    key = position - (spread * reach).long()
    cos, sin = rotary
    return apply(q, layer, (cos[:, key], sin[:, key]), inverse=True)


def frequencies(layer: LayerSpec, rotary: Rotary | None) -> torch.Tensor:
    """Radians per token of each pair, ``(pairs,)`` float64 on the CPU, from a first token and the next.

    Raises:
        ModelError: its model did not hand over its angles.
    """
    first, _ = _paired(layer, torch.device("cpu"))
    cos, sin = (part[0, :2].double().cpu()[:, first] for part in _required(rotary, layer))
    # Of the step between the two, so that it does not matter where the sample starts.
    return torch.atan2(sin[1] * cos[0] - cos[1] * sin[0], cos[1] * cos[0] + sin[1] * sin[0])


def _paired(layer: LayerSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two channels of each pair, ``(pairs,)`` each."""
    pairs = layer.rotary_dim // 2
    if layer.rope == "interleaved":
        first = torch.arange(0, layer.rotary_dim, 2, device=device)
        return first, first + 1
    first = torch.arange(pairs, device=device)
    return first, first + pairs


def _required(rotary: Rotary | None, layer: LayerSpec) -> Rotary:
    if rotary is None:
        raise ModelError(
            f"layer {layer.index}: {layer.module} was called without position_embeddings, so its angles and K"
            " before RoPE are not known; take schemes without before_rope, and leave bench phase"
        )
    return rotary
