"""From a model's name and a recipe to a plan, without loading a weight or torch."""

from __future__ import annotations

from kvcal import arch, plan, sources
from kvcal.progress import Narrator
from kvcal.recipe import Recipe


def resolve(
    model: str, revision: str | None, recipe: Recipe, narrator: Narrator
) -> tuple[plan.Plan, sources.Source]:
    """Find the model, read its config, cross it with recipe and engine; tell the plan's notices."""
    source = sources.locate(model, revision, weights=False, say=narrator.say)
    resolved = plan.resolve(recipe, arch.read(source.config()))
    for notice in resolved.notices:
        narrator.notice(notice)
    return resolved, source


def verdicts(
    model: str, revision: str | None, recipe: Recipe, narrator: Narrator
) -> tuple[list[plan.EngineVerdict], sources.Source]:
    """What every engine would make of a recipe for this model."""
    source = sources.locate(model, revision, weights=False, say=narrator.say)
    return plan.verdicts(recipe, arch.read(source.config())), source
