"""The measured part of the main job: statistics, folds, scales, validation and fidelity of one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kvcal import calibrate, data, evaluate, folding, manifest, scales, validate
from kvcal.cache import QuantizedCache
from kvcal.errors import ModelError
from kvcal.evaluate import Evaluation
from kvcal.export.folded import Folding
from kvcal.plan import Plan
from kvcal.progress import Narrator
from kvcal.recipe import Side
from kvcal.statistics import Statistics
from kvcal.transforms import proof
from kvcal.validate import Validation

VALIDATION_SAMPLES = 2
_PROOF_TOKENS = 128

Weights = Callable[[], AbstractContextManager[None]]


@dataclass
class Job:
    """What the steps work on."""

    plan: Plan
    model: Any
    text: data.TokenSet
    held_out: data.TokenSet
    narrator: Narrator
    clock: manifest.Clock

    def forget_model(self) -> None:
        """Free its memory."""
        self.model = None


@dataclass(frozen=True)
class Proof:
    """What shows that folding changed nothing.

    Attributes:
        block_error: largest relative error of a folded attention block in float64.
        kl: KL of the folded model, nothing quantized, to the original, nats per token; of the written
            checkpoint once that was loaded again.
        rounding_kl: the same where the touched weights are rounded once more, which is the noise of any
            change to them.
        tokens: positions that both were measured on.
    """

    block_error: float
    kl: float
    rounding_kl: float
    tokens: int

    @property
    def allowed_kl(self) -> float:
        """Bound of ``kl``: a few roundings, as a fold touches all four projections."""
        return 4 * self.rounding_kl + 1e-9


@dataclass(frozen=True)
class Outcome:
    """What the run found.

    ``before`` is the same cache in front of unfolded weights, with scales of their own where any are written;
    ``choice``, ``folding``, ``before`` and ``proof`` are None where nothing was to be folded. ``expected``
    has the original's logits for :func:`prove_written`.
    """

    statistics: Statistics
    cache: QuantizedCache
    validation: Validation
    evaluation: Evaluation
    before: Evaluation | None = None
    choice: folding.Choice | None = None
    folding: Folding | None = None
    proof: Proof | None = None
    expected: tuple[torch.Tensor, torch.Tensor] | None = None

    def summaries(self, plan: Plan) -> dict[int, dict[Side, scales.SideSummary]]:
        """What the report says of each layer and side."""
        return scales.summarize(self.statistics, self.cache.scales, plan)


def carry_out(job: Job) -> Outcome:
    """Everything up to the files."""
    return _folded(job) if job.plan.folds else _with_scales(job)


def _with_scales(job: Job) -> Outcome:
    statistics = _statistics(job, "calibrate", job.text)
    cache = _cache(job.plan, statistics)
    validation = validated(job.model, cache, job.held_out, job.narrator)
    job.clock.lap("validate")
    evaluation = _evaluations(job, {"after": (cache, nullcontext)})["after"]
    return Outcome(statistics, cache, validation, evaluation)


def _folded(job: Job) -> Outcome:
    plan, model, spec = job.plan, job.model, job.plan.model
    shaping, judging = folding.split(job.text, plan.recipe.folds.samples)
    statistics = _statistics(job, "calibrate", shaping)
    with job.narrator.bar("choose folds", judging.tokens * folding.rounds(plan)) as on_tokens:
        choice = folding.choose(model, plan, statistics, shaping, judging, on_tokens=on_tokens)
    job.clock.lap("choose folds")
    errors = proof.block_errors(model, spec, choice.transforms)
    proof.require_exact(errors)
    stored = getattr(torch, spec.dtype)
    weights = proof.FoldedWeights(model, spec, choice.transforms, stored)
    job.clock.lap("prove folds")

    before = _cache(plan, statistics)
    with weights():
        statistics = _statistics(job, "calibrate folded", job.text)
        cache = _cache(plan, statistics)
        validation = validated(model, cache, job.held_out, job.narrator)
    job.clock.lap("validate")
    found = _evaluations(job, {"before": (before, nullcontext), "after": (cache, weights)})
    few, expected = _unquantized(model, job.held_out)
    return Outcome(
        statistics,
        cache,
        validation,
        found["after"],
        before=found["before"],
        choice=choice,
        folding=Folding(spec, choice.transforms),
        proof=Proof(
            block_error=max(errors.values(), default=0.0),
            kl=_kl(model, few, expected, weights),
            rounding_kl=_kl(
                model, few, expected, proof.rounded_again(model, spec, choice.transforms, stored)
            ),
            tokens=few.shape[1],
        ),
        expected=(few, expected.cpu()),
    )


def prove_written(outcome: Outcome, written: Any) -> Outcome:
    """Hold the written checkpoint, loaded again, against the original's logits.

    Raises:
        ModelError: it differs by more than rounding its weights explains.
    """
    assert outcome.proof is not None
    assert outcome.expected is not None
    few, expected = outcome.expected
    found = dataclasses.replace(
        outcome.proof, kl=_kl(written, few.to(written.device), expected.to(written.device), nullcontext)
    )
    if not found.kl <= found.allowed_kl:
        raise ModelError(
            f"the folded checkpoint is {found.kl:.2g} nats from the original, rounding its weights explains"
            f" {found.allowed_kl:.2g}; use --deliver metadata for this model"
        )
    return dataclasses.replace(outcome, proof=found, expected=None)


def validated(model: Any, cache: QuantizedCache, held_out: data.TokenSet, narrator: Narrator) -> Validation:
    """Attention error on the first held-out samples."""
    few = data.TokenSet(held_out.samples[:VALIDATION_SAMPLES])
    with narrator.bar("validate", few.tokens) as on_tokens:
        return validate.validate(model, cache, few, on_tokens=on_tokens)


def _statistics(job: Job, name: str, text: data.TokenSet) -> Statistics:
    with job.narrator.bar(name, text.tokens) as on_tokens:
        found = calibrate.calibrate(job.model, job.plan, text, on_tokens=on_tokens)
    job.clock.lap(name)
    return found


def _cache(plan: Plan, statistics: Statistics) -> QuantizedCache:
    """The cache that the engine would keep for a model with these statistics."""
    if plan.format.dynamic:
        return QuantizedCache(plan.format)
    if plan.granularity is None:
        return QuantizedCache(plan.format, scales.unit(plan))
    return QuantizedCache(plan.format, scales.compute(statistics, plan))


def _evaluations(job: Job, caches: dict[str, tuple[QuantizedCache, Weights]]) -> dict[str, Evaluation]:
    with job.narrator.bar("evaluate", job.held_out.tokens) as on_tokens:
        found = evaluate.evaluations(
            job.model, caches, job.plan.recipe.evaluation.batch_size, job.held_out, on_tokens=on_tokens
        )
    job.clock.lap("evaluate")
    return found


@torch.inference_mode()
def _unquantized(model: Any, held_out: data.TokenSet) -> tuple[torch.Tensor, torch.Tensor]:
    few = torch.tensor([held_out.samples[0][:_PROOF_TOKENS]], device=model.device)
    return few, model(few, use_cache=False).logits[0]


@torch.inference_mode()
def _kl(model: Any, tokens: torch.Tensor, expected: torch.Tensor, weights: Weights) -> float:
    with weights():
        found = model(tokens, use_cache=False).logits[0].double().log_softmax(-1)
    p = expected.double().log_softmax(-1)
    return float((p.exp() * (p - found)).sum(-1).mean())
