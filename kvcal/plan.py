"""Crosses recipe, model and engine. Whatever cannot work is refused here, before a weight is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcal import engines, formats, granularity
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.engines import EngineSpec
from kvcal.errors import PlanRefused
from kvcal.formats import KVFormat
from kvcal.granularity import Granularity
from kvcal.recipe import MIN_TOKENS, SIDES, Recipe

REFERENCE_BITS = 16  # an unquantized cache is BF16 or FP16


@dataclass(frozen=True)
class Plan:
    """A calibration that can be carried out and whose result the engine will load."""

    recipe: Recipe
    model: ModelSpec
    engine: EngineSpec
    format: KVFormat
    granularity: Granularity
    seq_len: int
    evaluation_seq_len: int
    notices: tuple[str, ...]

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.model.layers

    @property
    def bytes_per_token_reference(self) -> float:
        """Bytes that one token adds to a 16-bit cache, over all layers."""
        return self.model.cached_elements_per_token * REFERENCE_BITS / 8

    @property
    def bytes_per_token_quantized(self) -> float:
        """The same in the planned format. Static scales belong to the model, not to tokens."""
        return self.model.cached_elements_per_token * self.format.bits / 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of all K, V and Q scales together, whatever the number of tokens."""
        shapes = (
            self.granularity.scale_shape(layer.heads_of(side)) for layer in self.layers for side in SIDES
        )
        return 4 * sum(math.prod(shape) for shape in shapes)

    @property
    def bits_per_element(self) -> float:
        """Bits per cached element at the model's full context, static scales included."""
        elements = self.model.cached_elements_per_token * self.model.max_context
        return self.format.bits + 8 * self.scale_bytes / elements


def resolve(recipe: Recipe, model: ModelSpec) -> Plan:
    """Make the plan.

    Raises:
        PlanRefused: with every reason found, each saying what would work.
    """
    engine = engines.get(recipe.engine)
    fmt = formats.get(recipe.format)
    gran = granularity.get(recipe.granularity)
    reasons = engine.refusals(model, fmt, gran)
    if model.max_context < MIN_TOKENS:
        reasons.append(
            f"the model's context of {model.max_context} tokens is shorter than the {MIN_TOKENS} of a sample;"
            " is max_position_embeddings right?"
        )
    if reasons:
        raise PlanRefused(reasons)
    notices: list[str] = []
    lengths = {}
    for name, wanted in (
        ("calibration", recipe.calibration.seq_len),
        ("evaluation", recipe.evaluation.seq_len),
    ):
        lengths[name] = min(wanted, model.max_context)
        if wanted > model.max_context:
            notices.append(
                f"{name}: samples are cut from {wanted} to {model.max_context} tokens, the model's context"
            )
    return Plan(
        recipe=recipe,
        model=model,
        engine=engine,
        format=fmt,
        granularity=gran,
        seq_len=lengths["calibration"],
        evaluation_seq_len=lengths["evaluation"],
        notices=tuple(notices),
    )
