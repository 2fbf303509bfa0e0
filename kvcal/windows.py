"""Which query finds which key quantized, where some tokens are kept in 16 bits.

One causal pass with these masks equals token-by-token decode: row ``i`` of attention uses only its own view
of the cache, and a token's two versions do not depend on who looks.
"""

from __future__ import annotations

from typing import Literal

import torch


def quantized(
    tokens: int,
    *,
    sinks: int,
    recent: int,
    flush: Literal["token", "block"],
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of K and of V, ``(tokens, tokens)`` bool: query ``i`` finds key ``j`` quantized.

    ``token``: the window holds the ``recent`` latest tokens, the query's own included; a token is quantized
    before the query attends: ``j >= sinks and i - j >= recent``.

    ``block`` (KIVI, models/llama_kivi.py): the query attends first. K is quantized ``recent`` tokens at a
    time, as soon as so many are together: ``j < sinks + recent * floor((i - sinks) / recent)``. V is
    quantized token by token, and ``recent + 1`` of them are in 16 bits while the query attends:
    ``j < i - recent``.
    """
    query = torch.arange(tokens, device=device).unsqueeze(1)
    key = torch.arange(tokens, device=device).unsqueeze(0)
    stored = key >= sinks
    if flush == "token":
        old = stored & (query - key >= recent)
        return old, old
    blocks = (query - sinks).clamp(min=0) // recent
    return stored & (key < sinks + recent * blocks), stored & (key < query - recent)
