"""Fidelity of the model over a quantized cache, on held-out text.

One prefill pass equals token-by-token decode here: the cache stores every token quantized, the query's own
included, so replacing K and V by what the cache would give back shows each row exactly what decode would
(engines that write before they attend: vLLM, SGLang). ``tests/test_evaluate.py`` proves it against a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvcal import capture
from kvcal.data import TokenSet
from kvcal.errors import ModelError
from kvcal.kernels import reference
from kvcal.plan import Plan
from kvcal.scales import Scales


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
    """``cache``: K and V quantized. ``attention``: Q too, as FP8 attention kernels do."""

    cache: Fidelity
    attention: Fidelity


@torch.inference_mode()
def evaluate(
    model: Any,
    plan: Plan,
    scales: Scales,
    tokens: TokenSet,
    *,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Three forward passes per batch: unquantized, quantized cache, quantized cache and Q."""
    scales = scales.to(model.device)
    cache, attention = _Tally(), _Tally()
    for batch in tokens.batches(plan.recipe.evaluation.batch_size):
        inputs = batch.inputs(model.device)
        keep = batch.attention_mask.bool().to(model.device)
        expected = model(**inputs, use_cache=False).logits
        for tally, with_query in ((cache, False), (attention, True)):
            with quantized_cache(model, plan, scales, with_query=with_query):
                tally.add(expected, model(**inputs, use_cache=False).logits, inputs["input_ids"], keep)
        on_tokens(batch.tokens)
    return Evaluation(cache.fidelity(), attention.fidelity())


def quantized_cache(model: Any, plan: Plan, scales: Scales, *, with_query: bool) -> Any:
    """Context in which every layer attends to K and V as the quantized cache gives them back."""

    def replace(call: capture.AttentionCall) -> capture.Tensors:
        of = scales.layers[call.layer]
        query = call.query
        if with_query:
            query = reference.quantize_dequantize(query, of["q"], plan.format)
        return (
            query,
            reference.quantize_dequantize(call.key, of["k"], plan.format),
            reference.quantize_dequantize(call.value, of["v"], plan.format),
        )

    return capture.intercept(model, replace)


class _Tally:
    """Gathers per-position values; a float per token is small beside one row of logits."""

    def __init__(self) -> None:
        self._kl: list[torch.Tensor] = []
        self._same: list[torch.Tensor] = []
        self._loss: list[torch.Tensor] = []
        self._loss_reference: list[torch.Tensor] = []

    def add(
        self, expected: torch.Tensor, found: torch.Tensor, input_ids: torch.Tensor, keep: torch.Tensor
    ) -> None:
        """``expected`` and ``found`` are logits ``(batch, tokens, vocab)``."""
        for row in range(expected.shape[0]):
            # One row at a time: with a large vocabulary, two more copies of a batch of logits do not fit.
            p = expected[row][keep[row]].float().log_softmax(-1)
            q = found[row][keep[row]].float().log_softmax(-1)
            self._kl.append((p.exp() * (p - q)).sum(-1).double().cpu())
            self._same.append((p.argmax(-1) == q.argmax(-1)).cpu())
            label = input_ids[row][keep[row]][1:, None]
            self._loss_reference.append(-p[:-1].gather(-1, label).flatten().double().cpu())
            self._loss.append(-q[:-1].gather(-1, label).flatten().double().cpu())

    def fidelity(self) -> Fidelity:
        kl = torch.cat(self._kl)
        if not bool(kl.isfinite().all()):
            raise ModelError(
                "the model's logits hold NaN or infinity; look for a non-finite weight after attention"
            )
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
