"""Which layers the engine keeps in 16 bits, so that its cache keeps within a limit on KL or on bits.

vLLM takes one quantized format for all layers, and a list of layers that it leaves alone; K and V of a layer
go together. So each layer, or group of layers, has two options, and one forward pass tells them apart.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcal import allocate, evaluate, sensitivity
from kvcal.allocate import Assignment, Option
from kvcal.cache import QuantizedCache
from kvcal.data import TokenSet
from kvcal.errors import ModelError
from kvcal.evaluate import Variant
from kvcal.formats import REFERENCE_BITS
from kvcal.plan import Plan, bits_over
from kvcal.progress import Narrator
from kvcal.sensitivity import Item

RECORD = "mixed.json"

_SKIPPED = "16 bits"
# Nats. What is quantized never counts as free, or no limit would be small enough to skip it.
_LEAST_KL = 1e-12


@dataclass(frozen=True)
class Group:
    """Layers that were measured together: KL with them alone quantized, and what was decided."""

    layers: tuple[int, ...]
    kl_mean: float
    skipped: bool


@dataclass(frozen=True)
class Mixture:
    """What was chosen, and what it was chosen from; KLs in nats per token of the judging text.

    Attributes:
        groups: all layers.
        kl_sum: of the groups that are quantized, each measured alone.
        kl_mean: measured with them quantized together.
        kl_mean_all: measured with every layer quantized.
        tokens: of the judging text.
    """

    groups: list[Group]
    kl_sum: float
    kl_mean: float
    kl_mean_all: float
    tokens: int

    @property
    def skipped(self) -> tuple[int, ...]:
        return tuple(sorted(layer for group in self.groups if group.skipped for layer in group.layers))


def choose(model: Any, plan: Plan, cache: QuantizedCache, judging: TokenSet, narrator: Narrator) -> Mixture:
    """Measure each group of layers, give the limit to the knapsack, and measure what it chose as a whole.

    As the engine computes: where the format has kernels that round Q, they do so in quantized layers. KLs of
    groups only nearly add up, so while the whole exceeds ``max_kl`` it is chosen again for a smaller sum,
    down to a cache with every layer skipped. A ``bits_budget`` is kept by counting.
    """
    wanted = plan.recipe.mixed
    assert wanted is not None
    groups = sensitivity.items(plan.layers, ("kv",), options=1, bound=wanted.passes)
    batch_size, with_query = plan.recipe.evaluation.batch_size, plan.format.rounds_query
    candidates = {plan.format.name: cache}
    with narrator.stage("sensitivity", judging.tokens) as on_tokens:
        measured = sensitivity.measure(
            model, groups, candidates, batch_size, judging, with_query=with_query, on_tokens=on_tokens
        )
    kls = {group: found[plan.format.name] for group, found in measured.items()}

    def kl_over(skipped: tuple[int, ...]) -> float:
        variants = {"whole": Variant(dataclasses.replace(cache, skipped=skipped), with_query=with_query)}
        return evaluate.fidelities(model, variants, batch_size, judging)["whole"].kl_mean

    def whole(assignment: Assignment[Item]) -> float:
        return kl_over(_skipped(assignment))

    options, shares = _options(plan, kls), sensitivity.shares(groups, plan.layers, plan.model.max_context)
    with narrator.stage("choose layers"):
        if wanted.max_kl is not None:
            found, kl_mean = allocate.measured_within_kl(options, shares, wanted.max_kl, whole)
        else:
            assert wanted.bits_budget is not None
            found = allocate.within_bits(options, shares, wanted.bits_budget)
            kl_mean = whole(found)
        kl_mean_all = kl_over(())
    return Mixture(
        groups=[
            Group(item.layers, kls[item], option.name == _SKIPPED) for item, option in found.options.items()
        ],
        kl_sum=sum(kls[item] for item, option in found.options.items() if option.name != _SKIPPED),
        kl_mean=kl_mean,
        kl_mean_all=kl_mean_all,
        tokens=judging.tokens,
    )


def read_skipped(path: Path, plan: Plan) -> tuple[int, ...]:
    """The skipped layers of a record.

    Raises:
        ModelError: it is not there, cannot be read, or names layers that the model does not have.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["skipped_layers"]
        if not set(found) <= {layer.index for layer in plan.layers}:
            raise ValueError(f"names other layers than config.json announces: {found}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path}: holds no skipped layers that can be read: {error}; calibrate again"
        ) from None
    return tuple(found)


def _options(plan: Plan, kls: Mapping[Item, float]) -> dict[Item, list[Option]]:
    layers = {layer.index: layer for layer in plan.layers}
    return {
        item: [
            Option(
                plan.format.name,
                bits_over(
                    [layers[index] for index in item.layers], plan.format, context=plan.model.max_context
                ),
                max(kl, _LEAST_KL),
            ),
            Option(_SKIPPED, REFERENCE_BITS, 0.0),
        ]
        for item, kl in kls.items()
    }


def _skipped(assignment: Assignment[Item]) -> tuple[int, ...]:
    chosen = assignment.options.items()
    return tuple(sorted(i for item, option in chosen if option.name == _SKIPPED for i in item.layers))
