"""How batches go through a model: whole, or layer by layer, and long samples in chunks over a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import Cache

from kvcal import models
from kvcal.data import Batch
from kvcal.layerwise import Context, Layerwise, Step, cache_for, inputs


def parts(model: Any, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """Batches that are finished together: each alone, or layer by layer all."""
    if isinstance(model, Layerwise):
        yield list(batches)
    else:
        yield from ([batch] for batch in batches)


def steps(model: Any, part: Sequence[Batch]) -> Iterator[Step]:
    """One forward pass over a part, without the output head.

    Run each step before the next is taken. Every attention layer sees every token in exactly one step, as a
    query and as the newest of its keys.

    Args:
        model: as loaded.
        part: one of :func:`parts`.
    """
    if isinstance(model, Layerwise):
        yield from model.steps(part)
        return
    for batch in part:
        cache: Cache | None = None
        for queries in batch.pieces():
            if queries.start == 0:
                cache = cache_for(model, batch, queries)
            yield Step(
                batch,
                queries,
                batch.tokens_in(queries),
                partial(model.base_model, **inputs(batch, queries, models.device_of(model), cache)),
            )


def logits(
    model: Any,
    part: Sequence[Batch],
    variants: Sequence[Context],
    on_tokens: Callable[[float], None] = lambda _: None,
) -> Iterator[tuple[Batch, slice, int, torch.Tensor]]:
    """Logits of each batch, piece and variant, in this order.

    Args:
        model: as loaded.
        part: one of :func:`parts`.
        variants: contexts that each open anew for every forward pass.
        on_tokens: hears of each finished step as its share of the tokens.

    Yields:
        The batch, its columns, the index of the variant, and logits ``(batch, tokens, vocab)``.
    """
    if isinstance(model, Layerwise):
        yield from model.logits(part, variants, on_tokens)
        return
    for batch in part:
        caches: list[Cache | None] = []
        device = models.device_of(model)
        for queries in batch.pieces():
            if queries.start == 0:
                caches = [cache_for(model, batch, queries) for _ in variants]
            for index, variant in enumerate(variants):
                with variant():
                    found = model(**inputs(batch, queries, device, caches[index])).logits
                on_tokens(batch.tokens_in(queries) / len(variants))
                yield batch, queries, index, found
