"""The measured part of the main job: statistics, folds, scales, validation and fidelity of one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcal import (
    calibrate,
    data,
    evaluate,
    folding,
    memory,
    mixed,
    objectives,
    resume,
    scales,
    validate,
)
from kvcal.cache import QuantizedCache
from kvcal.errors import ModelError
from kvcal.evaluate import Evaluation
from kvcal.export import bundle
from kvcal.export.folded import Folding
from kvcal.mixed import Mixture
from kvcal.plan import Plan
from kvcal.progress import Narrator
from kvcal.recipe import Side
from kvcal.statistics import Statistics
from kvcal.transforms import key_hadamard, proof
from kvcal.validate import Validation

VALIDATION_SAMPLES = 2
# The definition of attention holds all scores of a layer.
VALIDATION_TOKENS = 4096
_PROOF_TOKENS = 128

Weights = Callable[[], AbstractContextManager[None]]


@dataclass
class Job:
    """What the steps work on.

    ``digest`` is :func:`kvcal.models.digest` of the folder that the model is from. ``state`` keeps statistics
    for a run that goes on from an interrupted one. ``memory``: what each pass was expected to take, and took.
    """

    plan: Plan
    model: Any
    text: data.TokenSet
    held_out: data.TokenSet
    narrator: Narrator
    digest: str
    state: resume.State | None = None
    memory: dict[str, Any] = field(default_factory=dict)

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
        rounding_kl: what rounding the folded weights once more does to the folded model.
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
class Folds:
    """What is to be folded, chosen and proven on the unfolded model.

    ``weights`` puts the folded weights in place of the model's own, rounded as the checkpoint rounds them.
    ``statistics`` are of the unfolded model. ``sample`` and ``expected`` are tokens ``(1, tokens)`` and the
    original's logits for them, ``(tokens, vocab)``, for :func:`prove_written`.
    """

    choice: folding.Choice
    folding: Folding
    proof: Proof
    weights: Weights
    statistics: Statistics
    sample: torch.Tensor
    expected: torch.Tensor

    def without_weights(self) -> Folds:
        """The same without a hold on the model's parameters."""
        return dataclasses.replace(self, weights=nullcontext)


@dataclass(frozen=True)
class Outcome:
    """What the run found.

    ``text`` is what the statistics are of. ``before`` is the same cache in front of unfolded weights, if any
    were folded. ``mixed`` is the choice of layers to skip, if there was one.
    """

    text: data.TokenSet
    statistics: Statistics
    cache: QuantizedCache
    validation: Validation
    evaluation: Evaluation
    before: Evaluation | None = None
    mixed: Mixture | None = None

    def summaries(self, plan: Plan) -> dict[int, dict[Side, scales.SideSummary]]:
        """What the report says of each layer and side."""
        return scales.summarize(self.statistics, self.cache.scales, plan)


def fold(job: Job) -> Folds:
    """Choose folds on calibration text and prove them in memory.

    Raises:
        ModelError: a fold is not exact for this model after all.
    """
    plan, model, spec = job.plan, job.model, job.plan.model
    shaping, judging = folding.split(job.text, plan.recipe.folds.samples)
    statistics = _statistics(job, "calibrate", shaping, job.digest)
    warning = key_hadamard.warning(statistics) if plan.format.rotated else None
    if warning is not None:
        job.narrator.notice(warning)
    with job.narrator.stage("choose folds", judging.tokens * folding.rounds(plan)) as on_tokens:
        choice = folding.choose(model, plan, statistics, shaping, judging, on_tokens=on_tokens)
    with job.narrator.stage("prove folds"):
        found, weights, sample, expected = _proven(job, choice)
    folds = Folding(spec, choice.transforms)
    return Folds(choice, folds, found, weights, statistics, sample.cpu(), expected.cpu())


def _proven(job: Job, choice: folding.Choice) -> tuple[Proof, Weights, torch.Tensor, torch.Tensor]:
    """Also the folded weights, and a sample ``(1, tokens)`` with the original's logits for it."""
    model, spec = job.model, job.plan.model
    errors = proof.block_errors(model, spec, choice.transforms)
    proof.require_exact(errors)
    stored = getattr(torch, spec.dtype)
    weights = proof.FoldedWeights(model, spec, choice.transforms, stored)
    sample = torch.tensor([job.held_out.samples[0][:_PROOF_TOKENS]], device=model.device)
    expected = _logits(model, sample, nullcontext)
    folded = _logits(model, sample, weights)
    again = proof.rounded_again(model, spec, choice.transforms, stored)
    found = Proof(
        block_error=max(errors.values(), default=0.0),
        kl=_kl(model, sample, expected, weights),
        rounding_kl=_kl(model, sample, folded, again),
        tokens=sample.shape[1],
    )
    return found, weights, sample, expected


def measure(job: Job, folds: Folds | None) -> Outcome:
    """Statistics, scales, errors and fidelity of the model with its folds.

    A mixed recipe's judging text sets no scales, and the job's plan is then one with skipped layers.
    """
    weights: Weights = nullcontext if folds is None else folds.weights
    wanted, text, choice = job.plan.recipe.mixed, job.text, None
    if wanted is not None:
        text, judging = folding.split(job.text, wanted.samples)
    with weights():
        name, digest = "calibrate", job.digest
        if folds is not None:
            name, digest = "calibrate folded", folds.choice.transforms.digest
        statistics = _statistics(job, name, text, digest)
        with job.narrator.stage("scales"):
            cache = cache_of(job.plan, statistics, job.model)
        if wanted is not None:
            choice = mixed.choose(job.model, job.plan, cache, judging, job.narrator)
            job.plan = dataclasses.replace(job.plan, skipped_layers=choice.skipped)
            cache = dataclasses.replace(cache, skipped=choice.skipped)
        validation = validated(job.model, cache, job.held_out, job.narrator)
    caches = {"after": (cache, weights)}
    if folds is not None:
        caches["before"] = (cache_of(job.plan, folds.statistics, job.model), nullcontext)
    found = _evaluations(job, caches)
    return Outcome(text, statistics, cache, validation, found["after"], found.get("before"), choice)


def prove_written(folds: Folds, written: Any) -> Folds:
    """Hold the written checkpoint, loaded again, against the original's logits.

    Raises:
        ModelError: it differs by more than rounding its weights explains.
    """
    device = written.device
    kl = _kl(written, folds.sample.to(device), folds.expected.to(device), nullcontext)
    found = dataclasses.replace(folds.proof, kl=kl)
    if not found.kl <= found.allowed_kl:
        raise ModelError(
            f"the folded checkpoint is {found.kl:.2g} nats from the original, rounding its weights explains"
            f" {found.allowed_kl:.2g}; take {' and '.join(folds.choice.transforms.steps)} out of"
            " folds.transforms"
        )
    return dataclasses.replace(folds, proof=found)


def validated(model: Any, cache: QuantizedCache, held_out: data.TokenSet, narrator: Narrator) -> Validation:
    """Attention error on the first tokens of the first held-out samples."""
    few = held_out.first(VALIDATION_SAMPLES, VALIDATION_TOKENS)
    if few.with_images and few.samples != held_out.samples[:VALIDATION_SAMPLES]:
        narrator.notice(f"attention error is that of {len(few.samples)} shorter samples; images are not cut")
    elif few.tokens < sum(map(len, held_out.samples[:VALIDATION_SAMPLES])):
        narrator.notice(f"attention error is that of the first {VALIDATION_TOKENS:,} tokens of a sample")
    with narrator.stage("validate", few.tokens) as on_tokens:
        return validate.validate(model, cache, few, on_tokens=on_tokens)


def _statistics(job: Job, name: str, text: data.TokenSet, weights: str) -> Statistics:
    """``weights`` tells those that the model has now from others."""
    collect, batch_size = scales.collect(job.plan), job.plan.recipe.calibration.batch_size
    expected = memory.estimate(job.model, job.plan.model, text, batch_size, collect=collect)
    state = job.state.checkpoint(name, weights) if job.state else None
    if state is not None and state.parts:
        job.narrator.say(f"{name}: going on after {state.parts} batches")
    with (
        memory.watched(name, job.model, expected, job.memory, job.narrator.say),
        job.narrator.stage(name, text.tokens) as on_tokens,
        bundle.translated_os_errors(state.path.parent) if state else nullcontext(),
    ):
        return calibrate.calibrate(
            job.model, job.plan, text, on_tokens=on_tokens, collect=collect, state=state
        )


def cache_of(plan: Plan, statistics: Statistics, model: Any) -> QuantizedCache:
    """The cache that the engine would keep for a model with these statistics and its present weights."""
    if plan.format.dynamic:
        return QuantizedCache(plan.format, skipped=plan.skipped_layers)
    if plan.granularity is None:
        return QuantizedCache(plan.format, scales.unit(plan), skipped=plan.skipped_layers)
    weights = (
        objectives.value_weights(model, plan.model) if plan.recipe.scale.objective == "attention" else None
    )
    found = scales.compute(statistics, plan, value_weights=weights)
    return QuantizedCache(plan.format, found, skipped=plan.skipped_layers)


def _evaluations(job: Job, caches: dict[str, tuple[QuantizedCache, Weights]]) -> dict[str, Evaluation]:
    batch_size, text = job.plan.recipe.evaluation.batch_size, job.held_out
    runs = 1 + len(caches) * (2 if job.plan.format.rounds_query else 1)
    expected = memory.estimate(job.model, job.plan.model, text, batch_size, variants=runs)
    with (
        memory.watched("evaluate", job.model, expected, job.memory, job.narrator.say),
        job.narrator.stage("evaluate", text.tokens) as on_tokens,
    ):
        return evaluate.evaluations(job.model, caches, batch_size, text, on_tokens=on_tokens)


@torch.inference_mode()
def _logits(model: Any, tokens: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Logits ``(tokens, vocab)`` of one sample."""
    with weights():
        logits: torch.Tensor = model(tokens, use_cache=False).logits[0]
    return logits


def _kl(model: Any, tokens: torch.Tensor, expected: torch.Tensor, weights: Weights) -> float:
    p = expected.double().log_softmax(-1)
    q = _logits(model, tokens, weights).double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
