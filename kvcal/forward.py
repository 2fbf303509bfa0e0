"""How batches go through a model: whole, or layer by layer, and long samples in chunks over a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import Cache

from kvcal import models
from kvcal.data import Batch
from kvcal.errors import ModelError, in_one_line
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
            named = inputs(batch, queries, models.device_of(model), cache, model.dtype)
            yield Step(
                batch, queries, batch.tokens_in(queries), partial(_run, model.base_model, batch, named)
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
                    named = inputs(batch, queries, device, caches[index], model.dtype)
                    found = _run(model, batch, named).logits
                on_tokens(batch.tokens_in(queries) / len(variants))
                yield batch, queries, index, found


def _run(module: Any, batch: Batch, named: dict[str, Any]) -> Any:
    """A forward pass that leaves the model as it was.

    Models with positions of several axes keep how far those of the last images were from plain ones, and
    would shift a chunk of text alone by that.
    """
    try:
        return module(**named)
    except (RuntimeError, StopIteration, TypeError, ValueError) as error:
        if batch.images is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(
            f"the model refuses what its processor made of a row with images: {in_one_line(error)}; are the"
            " files of its processor those of another model?"
        ) from error
    finally:
        for holder in (module, module.base_model):
            if getattr(holder, "rope_deltas", None) is not None:
                holder.rope_deltas = None
