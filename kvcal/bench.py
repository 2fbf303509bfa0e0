"""Benchmarks behind figures and defaults of kvcal. Ratios come from paired runs on the same inputs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any, get_args

import torch

from kvcal import basis, calibrate, evaluate, folding, formats, forward, objectives, peaks, scales, storage
from kvcal.cache import QuantizedCache
from kvcal.calibrate import View
from kvcal.data import TokenSet
from kvcal.evaluate import Variant
from kvcal.plan import Plan
from kvcal.recipe import Objective, ScaleRule
from kvcal.scheme import Scheme
from kvcal.statistics import Collect, Statistics
from kvcal.transforms import key_hadamard, key_offset, key_scale, key_turn, value_map
from kvcal.transforms.proof import FoldedWeights
from kvcal.transforms.record import Transforms

# First tokens of a sample that benchmarks of static ranges leave in 16 bits: their outliers set the range.
_SINKS = 4
_STATIC = ("per_tensor", "per_head", "per_channel")


@dataclass(frozen=True)
class Overhead:
    """Time of a forward pass with collection over one without, per pair of runs.

    ``low`` and ``high`` are the quartiles of the ratio. ``memory`` is the peak of allocated GPU memory over
    that of the pass without, the model included; None on a CPU. ``plain_seconds`` is the median of the passes
    without.
    """

    mode: str
    ratio: float
    low: float
    high: float
    memory: float | None
    plain_seconds: float
    pairs: int


@dataclass(frozen=True)
class RuleRow:
    """One scale rule, judged on calibration text that did not set it."""

    rule: str
    objective: str | None
    headroom: float | None
    kl_mean: float
    kl_p99: float
    top1_agreement: float


@dataclass(frozen=True)
class ObjectiveRow:
    """One way to choose a static range, for K and V alike; the first 4 tokens of a sample stay in 16 bits."""

    format: str
    granularity: str
    objective: str
    zero_point: str
    kl_mean: float
    kl_p99: float
    top1_agreement: float


@dataclass(frozen=True)
class FoldRow:
    """One transform alone on the engine's own quantizer, judged on calibration text that did not shape it.

    ``where``: in the weights, rounded as the checkpoint would round them, or online, which no engine
    executes.
    """

    transform: str
    where: str
    kl_mean: float
    kl_p99: float
    top1_agreement: float


@dataclass(frozen=True)
class ReductionRow:
    """Scales as coarse as an engine takes them, judged on calibration text that did not set them.

    ``rounded``: with Q, as in kernels that compute attention in FP8, or without. KL in nats per token.
    """

    scales: str
    rounded: str
    kl_mean: float
    kl_p99: float
    top1_agreement: float


_DEPTHS: dict[str, Collect] = {
    "extremes only": "extremes",
    "sums and counts": "summary",
    "histograms and second moments": "distribution",
}

# None is the fixed scale 1.0 of an uncalibrated engine.
RULES: tuple[ScaleRule | None, ...] = (
    None,
    ScaleRule(rule="amax", headroom=1.0),
    ScaleRule(rule="amax", headroom=1.25),
    ScaleRule(rule="amax", headroom=2.0),
    ScaleRule(rule="power_of_two", headroom=1.0),
    ScaleRule(rule="power_of_two", headroom=1.25),
    ScaleRule(rule="amax", headroom=1.0, objective="percentile"),
    ScaleRule(rule="amax", headroom=1.0, objective="mse"),
    ScaleRule(rule="amax", headroom=1.0, objective="attention"),
)


@torch.inference_mode()
def capture_overhead(
    model: Any, plan: Plan, tokens: TokenSet, pairs: int, on_tokens: Callable[[float], None]
) -> list[Overhead]:
    """Plain forward pass against each depth of collection, alternating which goes first."""
    device = model.device

    def plain(text: TokenSet) -> None:
        for part in forward.parts(model, text.batches(plan.recipe.calibration.batch_size)):
            for step in forward.steps(model, part):
                step.run()

    def collect(depth: Collect) -> Callable[[TokenSet], object]:
        return lambda text: calibrate.calibrate(model, plan, text, collect=depth)

    def measured(run: Callable[[TokenSet], object]) -> tuple[float, int]:
        """Seconds, and peak bytes on a GPU."""
        if gpu:
            torch.cuda.synchronize(device)
            peaks.restart()
        start = time.perf_counter()
        run(tokens)
        if gpu:
            torch.cuda.synchronize(device)
        on_tokens(tokens.tokens)
        return time.perf_counter() - start, torch.cuda.max_memory_allocated(device) if gpu else 0

    gpu = device.type == "cuda"
    first = tokens.part(slice(plan.recipe.calibration.batch_size))
    rows = []
    for mode, depth in _DEPTHS.items():
        run = collect(depth)
        plain(first)  # compiles and fills caches
        run(first)
        ratios, seconds, memory = [], [], []
        for pair in range(pairs):
            if pair % 2:
                with_collection, without = measured(run), measured(plain)
            else:
                without, with_collection = measured(plain), measured(run)
            ratios.append(with_collection[0] / without[0])
            seconds.append(without[0])
            memory.append(with_collection[1] / without[1] if gpu else 0.0)
        low, _, high = quantiles(ratios, n=4)
        rows.append(
            Overhead(mode, median(ratios), low, high, max(memory) if gpu else None, median(seconds), pairs)
        )
    return rows


def folds(
    model: Any,
    plan: Plan,
    tokens: TokenSet,
    on_tokens: Callable[[float], None],
    notice: Callable[[str], None] = lambda _: None,
) -> list[FoldRow]:
    """Fidelity of every transform alone, those that can only be done online included.

    ``notice`` hears where a rotation would spread a bias.
    """
    spec = plan.model
    shaping, judging = folding.split(tokens, len(tokens.samples) // 2)
    statistics = calibrate.calibrate(model, plan, shaping, on_tokens=on_tokens)
    warning = key_hadamard.warning(statistics)
    if warning is not None:
        notice(warning)
    unit = None if plan.format.dynamic else scales.unit(plan)
    plain = QuantizedCache(plan.format, unit)
    variants = {("none", ""): Variant(plain, with_query=not plan.format.dynamic)}
    for name, option in _foldable(model, plan, statistics, shaping).items():
        weights = FoldedWeights(model, spec, option, getattr(torch, spec.dtype))
        variants[name, "weights"] = replace(variants["none", ""], weights=weights)
    for name, option in {
        "key_hadamard": key_hadamard.propose(spec, seed=plan.recipe.folds.seed),
        "key_offset": key_offset.mean(statistics, spec),
    }.items():
        cache = QuantizedCache(plan.format, unit, option)
        variants[name, "online"] = replace(variants["none", ""], cache=cache)
    found = evaluate.fidelities(
        model, variants, plan.recipe.evaluation.batch_size, judging, on_tokens=on_tokens
    )
    return [
        FoldRow(name, where, fidelity.kl_mean, fidelity.kl_p99, fidelity.top1_agreement)
        for (name, where), fidelity in found.items()
    ]


def static_objectives(
    model: Any, plan: Plan, tokens: TokenSet, names: Sequence[str], on_tokens: Callable[[float], None]
) -> list[ObjectiveRow]:
    """Fidelity of every objective for static ranges: half of the text sets them, the other half judges.

    ``names`` are formats. Integers are tried with and without a zero point.
    """
    setting, judging = folding.split(tokens, len(tokens.samples) // 2)
    view = View(skip=_SINKS)
    batch_size = plan.recipe.calibration.batch_size
    seen = calibrate.views(
        model, plan.layers, batch_size, setting, (view,), on_tokens=on_tokens, collect="distribution"
    )
    reading = basis.readers(model, plan.model)
    variants: dict[tuple[str, str, str, str], Variant] = {}
    for name in names:
        zeros = ("none", "float") if formats.get(name).integer else ("none",)
        for gran, objective, zero in itertools.product(_STATIC, get_args(Objective), zeros):
            rule = ScaleRule(rule="amax", headroom=1.0, objective=objective)
            side = {"format": name, "granularity": gran, "scale": rule, "zero_point": zero}
            tried = {"description": objective, "source": "", "k": side, "v": side, "sinks": _SINKS}
            scheme = Scheme.model_validate(tried)
            variants[name, gran, objective, zero] = Variant(
                storage.fit(scheme, plan.model, reading, seen[view])
            )
    found = evaluate.fidelities(
        model, variants, plan.recipe.evaluation.batch_size, judging, on_tokens=on_tokens
    )
    return [
        ObjectiveRow(name, gran, objective, zero, f.kl_mean, f.kl_p99, f.top1_agreement)
        for (name, gran, objective, zero), f in found.items()
    ]


def _foldable(model: Any, plan: Plan, statistics: Statistics, shaping: TokenSet) -> dict[str, Transforms]:
    spec, seed = plan.model, plan.recipe.folds.seed
    scaled = {
        f"key_scale {name}": key_scale.propose(statistics, spec, strength=1.0, powers_of_two=powers)
        for name, powers in (("power_of_two", True), ("free", False))
    }
    found = scaled | {
        "value_scale": value_map.scale(statistics, spec, plan.recipe.scale),
        "value_hadamard": value_map.hadamard(spec, seed=None),
        "value_random_hadamard": value_map.hadamard(spec, seed=seed),
        "value_balanced": value_map.balanced(statistics, spec, model),
        "key_offset (part)": key_offset.foldable(statistics, spec, model),
    }
    if plan.format.rotated:
        keys, powers = key_turn.sample(model, spec, shaping), scaled["key_scale power_of_two"]
        found["key_turn"] = key_turn.propose(keys, spec, Transforms({}))
        found["key_scale power_of_two, key_turn"] = powers.then(key_turn.propose(keys, spec, powers))
    return {name: option for name, option in found.items() if option.layers}


def scale_rules(
    model: Any, plan: Plan, tokens: TokenSet, on_tokens: Callable[[float], None]
) -> list[RuleRow]:
    """Fidelity of each rule: one half of the calibration text sets scales, the other half judges them.

    The evaluation text is not touched: a default must not be chosen on it.
    """
    half = len(tokens.samples) // 2
    setting, judging = tokens.part(slice(half)), tokens.part(slice(half, None))
    statistics = calibrate.calibrate(model, plan, setting, on_tokens=on_tokens, collect="distribution")
    weights = objectives.value_weights(model, plan.model)
    rows = []
    for rule in RULES:
        if rule is None:
            found = scales.unit(plan)
        else:
            found = scales.compute(statistics, plan, rule, value_weights=weights)
        cache = QuantizedCache(plan.format, found)
        fidelity = evaluate.evaluate(model, plan, cache, judging, on_tokens=on_tokens).cache
        rows.append(
            RuleRow(
                rule=rule.rule if rule else "scale 1.0",
                objective=rule.objective if rule else None,
                headroom=rule.headroom if rule else None,
                kl_mean=fidelity.kl_mean,
                kl_p99=fidelity.kl_p99,
                top1_agreement=fidelity.top1_agreement,
            )
        )
    return rows


def scale_reductions(
    model: Any, plan: Plan, tokens: TokenSet, on_tokens: Callable[[float], None]
) -> list[ReductionRow]:
    """Fidelity of per-head scales and of what engines make of them that take coarser ones or none.

    All come from one calibration on one half of the text, and the other half judges them.

    Args:
        model: as loaded.
        plan: of static FP8 scales per head.
        tokens: calibration text alone.
        on_tokens: hears of the tokens of each finished batch, which add up to those of ``tokens``.

    Raises:
        UsageError: the plan has no static scales.
    """
    setting, judging = folding.split(tokens, len(tokens.samples) // 2)
    collected = scales.collect(plan)
    statistics = calibrate.calibrate(model, plan, setting, on_tokens=on_tokens, collect=collected)
    per_head = scales.compute(statistics, plan)
    coarser = {
        "per head": per_head,
        "per tensor": scales.reduced(per_head, "per_tensor"),
        "one per layer": scales.reduced(per_head, "shared"),
        "scale 1.0": scales.unit(plan),
    }
    variants = {
        (name, rounded): Variant(QuantizedCache(plan.format, each), with_query=with_query)
        for rounded, with_query in (("K, V", False), ("K, V, Q", True))
        for name, each in coarser.items()
    }
    found = evaluate.fidelities(
        model, variants, plan.recipe.evaluation.batch_size, judging, on_tokens=on_tokens
    )
    return [
        ReductionRow(name, rounded, fidelity.kl_mean, fidelity.kl_p99, fidelity.top1_agreement)
        for (name, rounded), fidelity in found.items()
    ]
