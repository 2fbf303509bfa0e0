"""From a model's name and a recipe to a plan, without loading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcal import arch, families, plan, sources
from kvcal.arch import ModelSpec
from kvcal.errors import PlanRefused, UsageError
from kvcal.planner import known_shapes, served_model
from kvcal.planner.served_model import ServedModel
from kvcal.progress import Narrator
from kvcal.recipe import Recipe


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """The model behind a ``config.json``; torch is needed only where its family has no row of its own."""
    if families.model_type_of(config) in families.FAMILIES:
        return arch.read(config)
    from kvcal import probe

    return probe.read(config)


def resolve(
    model: str, revision: str | None, recipe: Recipe, narrator: Narrator
) -> tuple[plan.Plan, sources.Source]:
    """Find the model, read its config, cross it with recipe and engine; tell the plan's notices."""
    source = sources.locate(model, revision, weights=False, say=narrator.say)
    resolved = plan.resolve(recipe, spec(source.config()))
    for notice in resolved.notices:
        narrator.notice(notice)
    return resolved, source


def refuse_encoder(model: str, revision: str | None, narrator: Narrator) -> None:
    """Refuse a model with an encoder before an engine is asked, which not every benchmark lets choose.

    Raises:
        PlanRefused: it has one.
    """
    source = sources.locate(model, revision, weights=False, say=narrator.say)
    found = spec(source.config())
    if found.encoder_decoder:
        raise PlanRefused(
            [
                f"{found.model_type} is an encoder-decoder, and benchmarks run decoders alone;"
                " kvcal calibrate --engine kernel measures it"
            ]
        )


def verdicts(
    model: str, revision: str | None, recipe: Recipe, narrator: Narrator
) -> tuple[list[plan.EngineVerdict], sources.Source]:
    """What every engine would make of a recipe for this model."""
    source = sources.locate(model, revision, weights=False, say=narrator.say)
    return plan.verdicts(recipe, spec(source.config())), source


def served_model_named(
    model: str | None,
    shape: str | None,
    revision: str | None,
    weights_gib: float | None,
    weights_bits: float | None,
    narrator: Narrator,
) -> ServedModel:
    """A model, or the shape of a known one, as a server of it sees it.

    Raises:
        UsageError: neither or both are given.
    """
    if (model is None) == (shape is None):
        raise UsageError("--gpu needs one of --model and --shape")
    if shape is not None:
        name, config = shape, known_shapes.get(shape)
    else:
        source = sources.locate(model or "", revision, weights=False, say=narrator.say)
        name, config = source.name, source.config()
    return served_model.of(config, name, weights_gib, weights_bits, spec)
