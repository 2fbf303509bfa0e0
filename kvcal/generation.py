"""Long prompts in chunks, and greedy decode, over a cache that holds what the quantized cache would.

Each token's K and V are rounded once, as they are written, and read back ever after; its own query reads them
rounded too. So prefill in chunks of any size and decode token by token give the same logits, and those of
:mod:`kvcal.evaluate`'s one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvcal import capture, models
from kvcal.cache import QuantizedCache
from kvcal.errors import ModelError
from kvcal.evaluate import NOT_FINITE


@dataclass(frozen=True)
class Served:
    """How the model is served: over which cache, and whether kernels round Q too.

    ``cache`` None leaves K and V as they are. ``chunk``: so many tokens of a prompt at a time.
    """

    cache: QuantizedCache | None
    with_query: bool = False
    chunk: int = 4096


class WrittenCache(DynamicCache):  # type: ignore[misc]
    """A cache of transformers whose K and V are written as ``held`` would give them back."""

    def __init__(self, config: Any, held: QuantizedCache):
        super().__init__(config=config)
        self._on = functools.cache(held.to)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round K and V ``(batch, kv_heads, new tokens, head_dim)`` and return those of all tokens."""
        held = self._on(key_states.device)
        _require_heads(held, layer_idx, key_states.shape[1])
        nobody = key_states[:, :, :0]  # Q is not the cache's business
        _, k, v = held.give_back(layer_idx, nobody, key_states, value_states)
        found: tuple[torch.Tensor, torch.Tensor] = super().update(k, v, layer_idx, *args, **kwargs)
        return found


def _require_heads(held: QuantizedCache, layer: int, heads: int) -> None:
    """Refuse a model that caches K and V as often as its queries read them, and scales of fewer heads."""
    if held.scales is None or layer in held.skipped:
        return
    scaled = held.scales.layers[layer]["k"].shape[0]
    if scaled not in (1, heads):
        raise ModelError(
            f"layer {layer}: the model caches {heads} heads, repeated for its queries, and its scales are of"
            f" {scaled}; calibrate per tensor"
        )


def empty_cache(model: Any, served: Served) -> DynamicCache:
    """A cache for one prompt, with the model's sliding windows."""
    if served.cache is None:
        return DynamicCache(config=model.config)
    return WrittenCache(model.config, served.cache)


def rounding_query(model: Any, served: Served) -> AbstractContextManager[None]:
    """Context in which Q is rounded if kernels do; K and V are the cache's."""
    if served.cache is None or not served.with_query:
        return nullcontext()
    on = functools.cache(served.cache.to)

    def replace(call: capture.AttentionCall) -> capture.Tensors:
        nothing = call.key[:, :, :0], call.value[:, :, :0]
        query, _, _ = on(call.query.device).give_back(call.layer, call.query, *nothing, with_query=True)
        return query, call.key, call.value

    return capture.intercept(model, replace)


@torch.inference_mode()
def greedy(model: Any, served: Served, prompt: Sequence[int], room: int, stop: Collection[int]) -> list[int]:
    """The most likely continuation, token by token.

    Args:
        model: on devices, not layer by layer.
        served: how.
        prompt: token ids, one or more.
        room: tokens at most.
        stop: ids that end the text; they are not returned.

    Raises:
        ModelError: logits hold NaN or infinity, or the model keeps K and V elsewhere or in another form.
    """
    found: list[int] = []
    with rounding_query(model, served):
        cache, token = _prefilled(model, served, prompt[:-1]), prompt[-1]
        for _ in range(room):
            ids = torch.tensor([[token]], device=models.device_of(model))
            best, token = model(ids, past_key_values=cache, use_cache=True).logits[0, -1].max(-1)
            if not bool(best.isfinite()):
                raise ModelError(NOT_FINITE)
            token = int(token)
            if token in stop:
                break
            found.append(token)
    return found


@torch.inference_mode()
def forced(model: Any, served: Served, prompt: Sequence[int], given: Sequence[int]) -> torch.Tensor:
    """Logits ``(len(given), vocab)`` that predict each of the given tokens behind the prompt."""
    found = []
    with rounding_query(model, served):
        cache = _prefilled(model, served, prompt[:-1])
        for ids in _pieces(model, (prompt[-1], *given[:-1]), served.chunk):
            found.append(model(ids, past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(found)


def _prefilled(model: Any, served: Served, tokens: Sequence[int]) -> DynamicCache:
    """A cache that holds ``tokens``."""
    cache = empty_cache(model, served)
    for ids in _pieces(model, tokens, served.chunk):
        model.base_model(ids, past_key_values=cache, use_cache=True)
    if cache.get_seq_length() != len(tokens):
        raise ModelError(
            f"{type(model).__name__} does not write K and V into a cache of transformers, and nothing can be"
            " decoded over a quantized one"
        )
    return cache


def _pieces(model: Any, tokens: Sequence[int], chunk: int) -> Iterator[torch.Tensor]:
    device = models.device_of(model)
    for start in range(0, len(tokens), chunk):
        yield torch.tensor([tokens[start : start + chunk]], device=device)
