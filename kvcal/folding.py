"""Chooses what to fold: each transform is tried on the engine's own quantizer and kept if it lowers KL.

Candidates are emulated where attention sees Q, K and V, so that trying one costs a forward pass and touches
no weight. They are judged on calibration text that did not shape them; the evaluation text is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcal import evaluate, exactness, scales
from kvcal.cache import QuantizedCache
from kvcal.data import TokenSet
from kvcal.evaluate import Fidelity, Variant
from kvcal.plan import Plan
from kvcal.recipe import Side
from kvcal.statistics import SideStatistics, Statistics
from kvcal.transforms import key_offset, key_scale, key_turn, latent_scale, value_map
from kvcal.transforms.record import LayerTransform, Transforms

# A gain below this share is within what another text would have decided otherwise: on a few thousand tokens
# the KL of one cache relative to another is known to about 3 %.
MARGIN = 0.03
_ORDER: tuple[Side, ...] = ("q", "k", "v")
# Powers of the closed form of the K scale; 1 is optimal for errors that spread evenly over channels. More of
# them would be told apart by noise.
STRENGTHS = (0.5, 1.0)


@dataclass(frozen=True)
class Candidate:
    """One transform on top of those kept before it.

    ``kl_mean`` is in nats per token of the judging text; None where the model has nothing to transform.
    """

    name: str
    kl_mean: float | None
    kept: bool


@dataclass(frozen=True)
class Choice:
    """What is kept, and what it was chosen from."""

    transforms: Transforms
    candidates: list[Candidate]
    kl_before: float
    kl_after: float
    tokens: int


def split(tokens: TokenSet, judging: int) -> tuple[TokenSet, TokenSet]:
    """Text that shapes candidates and text that judges them, at least one sample each if there are two."""
    count = max(1, min(judging, len(tokens.samples) // 2))
    if len(tokens.samples) == 1:
        return tokens, tokens
    return tokens.part(slice(-count)), tokens.part(slice(-count, None))


def rounds(plan: Plan) -> int:
    """Passes over the judging text that :func:`choose` makes at most, for a progress bar."""
    return 1 + len(_tried(plan))


def _tried(plan: Plan) -> list[str]:
    """The recipe's transforms but for those of another kind of cache."""
    return [name for name in plan.recipe.folds.transforms if exactness.concerns(name, plan.model)]


def choose(
    model: Any,
    plan: Plan,
    statistics: Statistics,
    shaping: TokenSet,
    judging: TokenSet,
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> Choice:
    """Go through the recipe's transforms in order and keep what pays."""
    keys = key_turn.sample(model, plan.model, shaping) if plan.format.rotated else None
    kept = Transforms({})
    (before,) = judge(model, plan, statistics, {"none": kept}, judging, on_tokens).values()
    best = before.kl_mean
    rows: list[Candidate] = []
    for name in _tried(plan):
        options = proposals(name, model, plan, statistics, keys, kept)
        if not options:
            rows.append(Candidate(name, None, kept=False))
            on_tokens(judging.tokens)
            continue
        tried = {label: kept.then(option) for label, option in options.items()}
        found = judge(model, plan, statistics, tried, judging, on_tokens)
        winner = min(found, key=lambda label: found[label].kl_mean)
        better = found[winner].kl_mean < best * (1 - MARGIN)
        rows += [
            Candidate(label, fidelity.kl_mean, kept=better and label == winner)
            for label, fidelity in found.items()
        ]
        if better:
            kept, best = tried[winner], found[winner].kl_mean
    return Choice(kept, rows, before.kl_mean, best, before.tokens)


def judge(
    model: Any,
    plan: Plan,
    statistics: Statistics,
    options: Mapping[str, Transforms],
    tokens: TokenSet,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> dict[str, Fidelity]:
    """Fidelity of the engine's own quantizer behind each set of transforms.

    FP8 is judged with the scales that would be written, 1.0 if none are, and with Q rounded too, as FP8
    attention kernels do.
    """
    variants = {
        label: Variant(
            QuantizedCache(plan.format, _scales(plan, statistics, option), option),
            with_query=plan.format.rounds_query,
        )
        for label, option in options.items()
    }
    return evaluate.fidelities(
        model, variants, plan.recipe.evaluation.batch_size, tokens, on_tokens=on_tokens
    )


def proposals(
    name: str, model: Any, plan: Plan, statistics: Statistics, keys: key_turn.Keys | None, kept: Transforms
) -> dict[str, Transforms]:
    """Candidates of one name on top of ``kept``, by label; none where this model or format has no use for it.

    ``keys`` is what turns are searched on; only formats that the engine rotates have a use for them.
    """
    spec, folds = plan.model, plan.recipe.folds
    if name == "key_scale":
        return {
            f"key_scale {folds.scales} x{strength:g}": key_scale.propose(
                statistics, spec, strength=strength, powers_of_two=folds.scales == "power_of_two"
            )
            for strength in STRENGTHS
        }
    found = {
        "key_turn": lambda: key_turn.propose(keys, spec, kept) if keys else Transforms({}),
        "value_scale": lambda: value_map.scale(statistics, spec, plan.recipe.scale),
        "value_hadamard": lambda: value_map.hadamard(spec, seed=None),
        "value_random_hadamard": lambda: value_map.hadamard(spec, seed=folds.seed),
        "value_balanced": lambda: value_map.balanced(statistics, spec, model),
        "key_offset": lambda: key_offset.foldable(statistics, spec, model),
        "latent_scale": lambda: latent_scale.propose(statistics, spec),
    }[name]()
    return {name: found} if found.layers else {}


def _scales(plan: Plan, statistics: Statistics, transforms: Transforms) -> scales.Scales | None:
    """What the engine would scale by behind these transforms."""
    if plan.format.dynamic:
        return None
    if plan.granularity is None:
        return scales.unit(plan)
    layers = {
        index: _behind(sides, transforms.layers[index]) if index in transforms.layers else sides
        for index, sides in statistics.layers.items()
    }
    # Only extremes have bounds behind a transform.
    rule = plan.recipe.scale.model_copy(update={"objective": "amax"})
    return scales.compute(Statistics(layers), plan, rule)


def _behind(sides: dict[Side, SideStatistics], transform: LayerTransform) -> dict[Side, SideStatistics]:
    """Bounds of the extremes behind a transform. FP8 does not mind a scale a few times too large."""
    magnitudes = {
        step: value.abs()
        for step in ("key_scale", "key_offset", "key_turn", "value_map", "latent_scale")
        if (value := getattr(transform, step)) is not None
    }
    if "key_offset" in magnitudes:
        magnitudes["key_offset"] = -magnitudes["key_offset"]  # subtracted, it could add
    amax = {side: sides[side].amax[None, :, None, :].double() for side in sides}
    bounds = LayerTransform(**magnitudes).apply(amax["q"], amax["k"], amax["v"])
    return {
        side: replace(sides[side], maximum=bound[0, :, 0].float(), minimum=-bound[0, :, 0].float())
        for side, bound in zip(_ORDER, bounds, strict=True)
    }
