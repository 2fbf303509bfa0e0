"""Fidelity of the model over a quantized cache, on held-out text.

One prefill pass equals token-by-token decode here: the cache stores every token quantized, the query's own
included, so replacing K and V by what the cache would give back shows each row exactly what decode would
(engines that write before they attend: vLLM, SGLang). ``tests/test_evaluate.py`` proves it against a cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kvcal import capture, distributed, forward
from kvcal.cache import Cache, QuantizedCache
from kvcal.data import Batch, TokenSet
from kvcal.errors import ModelError
from kvcal.plan import Plan

NOT_FINITE = "the model's logits hold NaN or infinity; look for a non-finite weight after attention"


@dataclass(frozen=True)
class Fidelity:
    """Quantized against unquantized cache, over all scored positions.

    Attributes:
        kl_mean: mean of KL(reference || quantized) of the next-token distributions, nats.
        kl_p99: its 99th percentile.
        top1_agreement: fraction of positions with the same most likely token.
        perplexity: of the text, over the quantized cache.
        perplexity_reference: of the text, over the unquantized cache.
        tokens: positions scored for KL and agreement.
    """

    kl_mean: float
    kl_p99: float
    top1_agreement: float
    perplexity: float
    perplexity_reference: float
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """``cache``: K and V quantized. ``attention``: Q too; None where no kernel rounds Q with this format."""

    cache: Fidelity
    attention: Fidelity | None


@dataclass(frozen=True)
class Variant:
    """One way to run the model: over which cache, with Q rounded or not, and with which weights.

    ``weights`` opens a context in which the model has other weights than its own; ``cache`` None leaves K
    and V as they are.
    """

    cache: Cache | None
    with_query: bool = False
    weights: Callable[[], AbstractContextManager[None]] = nullcontext


def evaluate(
    model: Any,
    plan: Plan,
    cache: QuantizedCache,
    tokens: TokenSet,
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> Evaluation:
    """Fidelity over one cache."""
    batch_size = plan.recipe.evaluation.batch_size
    return evaluations(model, {"only": (cache, nullcontext)}, batch_size, tokens, on_tokens=on_tokens)["only"]


def evaluations(
    model: Any,
    caches: Mapping[str, tuple[QuantizedCache, Callable[[], AbstractContextManager[None]]]],
    batch_size: int,
    tokens: TokenSet,
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> dict[str, Evaluation]:
    """Fidelity over several caches, each with its weights; what is unquantized is computed once."""
    variants: dict[tuple[str, bool], Variant] = {}
    for name, (cache, weights) in caches.items():
        variants[name, False] = Variant(cache, weights=weights)
        if cache.format.rounds_query:
            variants[name, True] = Variant(cache, with_query=True, weights=weights)
    found = fidelities(model, variants, batch_size, tokens, on_tokens=on_tokens)
    return {name: Evaluation(found[name, False], found.get((name, True))) for name in caches}


@torch.inference_mode()
def fidelities(
    model: Any,
    variants: Mapping[Any, Variant],
    batch_size: int,
    tokens: TokenSet,
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> dict[Any, Fidelity]:
    """Fidelity of each variant to the model as it is: one forward pass for each batch and variant.

    Batches are dealt out to the ranks of the run; every rank gets the fidelity that one process would find.
    ``on_tokens`` hears of each finished pass as its share of the batch's tokens.
    """
    mine: list[list[_Tally]] = []
    contexts = (nullcontext, *(_opener(model, variant) for variant in variants.values()))
    batches, share = distributed.dealt(tokens, batch_size)

    def heard(done: float) -> None:
        on_tokens(share * done)

    for part in forward.parts(model, batches):
        expected = torch.empty(0)
        for batch, queries, index, logits in forward.logits(model, part, contexts, on_tokens=heard):
            if index == 0:
                expected = logits
                if queries.start == 0:
                    mine.append([_Tally() for _ in variants])
            else:
                mine[-1][index - 1].add(expected, logits, batch, queries)
    every = distributed.in_order("fidelities", mine)
    return {name: _Tally.joined(each).fidelity() for name, *each in zip(variants, *every, strict=True)}


def through(model: Any, cache: Cache | None, *, with_query: bool = False) -> AbstractContextManager[None]:
    """Context in which every layer attends to K and V as the quantized cache gives them back."""
    return _opener(model, Variant(cache, with_query))()


def _opener(model: Any, variant: Variant) -> Callable[[], AbstractContextManager[None]]:
    """What puts the model into a variant, again and again; a device gets its copy of the cache once."""
    cache = variant.cache
    if cache is None:
        return variant.weights
    on = functools.cache(cache.to)

    def replace(call: capture.AttentionCall) -> capture.Tensors | capture.Versions:
        return on(call.query.device).replace(call, with_query=variant.with_query)

    @contextmanager
    def opened() -> Iterator[None]:
        with variant.weights(), capture.intercept(model, replace, rotary=cache.needs_rotary):
            yield

    return opened


class _Tally:
    """Gathers per-position values; a float per token is small beside one row of logits."""

    def __init__(self) -> None:
        self._kl: list[torch.Tensor] = []
        self._same: list[torch.Tensor] = []
        self._loss: list[torch.Tensor] = []
        self._loss_reference: list[torch.Tensor] = []

    @classmethod
    def joined(cls, tallies: Sequence[_Tally]) -> _Tally:
        """Of all positions together, in order."""
        found = cls()
        for tally in tallies:
            found._kl += tally._kl
            found._same += tally._same
            found._loss += tally._loss
            found._loss_reference += tally._loss_reference
        return found

    def add(self, expected: torch.Tensor, found: torch.Tensor, batch: Batch, queries: slice) -> None:
        """``expected`` and ``found`` are logits ``(batch, tokens, vocab)`` of some columns of a batch."""
        for row, (real, scored) in enumerate(zip(batch.attention_mask.bool(), batch.scored, strict=True)):
            # One row at a time: with a large vocabulary, two more copies of a batch of logits do not fit.
            keep = scored[queries].to(expected.device)
            p = expected[row][keep].float().log_softmax(-1)
            q = found[row][keep].float().log_softmax(-1)
            self._kl.append((p.exp() * (p - q)).sum(-1).double().cpu())
            self._same.append((p.argmax(-1) == q.argmax(-1)).cpu())
            # The next token of the last column is behind it, if the sample goes on.
            ahead = slice(queries.start, queries.stop + 1)
            label = batch.input_ids[row, ahead][real[ahead]][1:]
            label = label[scored[queries][real[queries]][: len(label)], None].to(expected.device)
            for losses, logs in ((self._loss_reference, p), (self._loss, q)):
                losses.append(-logs[: len(label)].gather(-1, label).flatten().double().cpu())

    def fidelity(self) -> Fidelity:
        kl = torch.cat(self._kl)
        if not bool(kl.isfinite().all()):
            raise ModelError(NOT_FINITE)
        return Fidelity(
            kl_mean=float(kl.mean()),
            kl_p99=float(kl.quantile(0.99)),
            top1_agreement=float(torch.cat(self._same).double().mean()),
            perplexity=_perplexity(self._loss),
            perplexity_reference=_perplexity(self._loss_reference),
            tokens=kl.numel(),
        )


def _perplexity(losses: list[torch.Tensor]) -> float:
    mean = float(torch.cat(losses).mean())
    try:
        return math.exp(mean)
    except OverflowError:
        raise ModelError(
            f"the model predicts the held-out text with {mean:.0f} nats per token;"
            " its weights or its tokenizer cannot be right"
        ) from None
