"""What the quantized cache does to the model's own text: greedy continuations of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcal import generation, scoring
from kvcal.errors import ModelError
from kvcal.evaluate import NOT_FINITE
from kvcal.generation import Served


@dataclass(frozen=True)
class Continuations:
    """Greedy text of the unquantized cache, and what becomes of it over the quantized one.

    Attributes:
        prompts: continued texts.
        prompt_tokens: of each prompt, at most.
        tokens: of all continuations together.
        kl_mean: KL(reference || quantized) where both read the reference's text, nats per token.
        kl_low: lower end of its confidence interval over prompts: bootstrap; None of a single prompt.
        kl_high: its upper end.
        top1_agreement: share of tokens that the quantized cache finds likeliest too.
        reference_agreement: the same of the unquantized cache, run in chunks as the quantized one was; less
            than 1 only by the arithmetic of the machine.
        divergence: per prompt, tokens before the quantized cache's own text is another one; None where it
            never is.
        lengths: tokens of each continuation.
    """

    prompts: int
    prompt_tokens: int
    tokens: int
    kl_mean: float
    kl_low: float | None
    kl_high: float | None
    top1_agreement: float
    reference_agreement: float
    divergence: tuple[int | None, ...]
    lengths: tuple[int, ...]

    @property
    def diverged(self) -> int:
        """Prompts whose text becomes another one."""
        return sum(at is not None for at in self.divergence)


def measure(
    model: Any,
    reference: Served,
    quantized: Served,
    prompts: Sequence[Sequence[int]],
    room: int,
    stop: Collection[int],
    seed: int,
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> Continuations:
    """Continue each prompt by at most ``room`` tokens.

    Raises:
        ModelError: logits hold NaN or infinity, or no prompt is continued at all.
    """
    kl: list[torch.Tensor] = []
    same: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    divergence: list[int | None] = []
    for prompt in prompts:
        text = generation.greedy(model, reference, prompt, room, stop)
        if text:
            p, q = (
                generation.forced(model, served, prompt, text).float().log_softmax(-1)
                for served in (reference, quantized)
            )
            given = torch.tensor(text, device=p.device)
            kl.append((p.exp() * (p - q)).sum(-1).double().cpu())
            own.append((p.argmax(-1) == given).cpu())
            same.append((q.argmax(-1) == given).cpu())
            other = generation.greedy(model, quantized, prompt, room, stop)
            divergence.append(diverges(text, other))
        on_tokens(len(prompt))
    if not kl:
        raise ModelError("the model ends every held-out text at once; its greedy continuations are empty")
    if not bool(torch.cat(kl).isfinite().all()):
        raise ModelError(NOT_FINITE)
    low, high = scoring.ratio_bounds([float(k.sum()) for k in kl], [len(k) for k in kl], seed)
    return Continuations(
        prompts=len(kl),
        prompt_tokens=max(map(len, prompts)),
        tokens=sum(map(len, kl)),
        kl_mean=float(torch.cat(kl).mean()),
        kl_low=low,
        kl_high=high,
        top1_agreement=float(torch.cat(same).double().mean()),
        reference_agreement=float(torch.cat(own).double().mean()),
        divergence=tuple(divergence),
        lengths=tuple(map(len, kl)),
    )


def diverges(text: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, an end that only one of them has included; None if none does.

    >>> diverges([5, 6, 7], [5, 9, 7]), diverges([5, 6], [5]), diverges([5], [5])
    (1, 1, None)
    """
    if list(text) == list(other):
        return None
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
