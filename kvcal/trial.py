"""Crosses schemes and a model, no engine asked. What cannot work is refused before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvcal import engines
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.errors import PlanRefused
from kvcal.plan import sample_lengths
from kvcal.recipe import Recipe, Side
from kvcal.scheme import Scheme, SideScheme


@dataclass(frozen=True)
class Trial:
    """Schemes that can be tried on this model, and the text to try them on.

    ``candidates`` are those that mixed schemes choose from.
    """

    recipe: Recipe
    model: ModelSpec
    schemes: Mapping[str, Scheme]
    candidates: Mapping[str, Scheme]
    seq_len: int
    evaluation_seq_len: int
    notices: tuple[str, ...]

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.model.layers

    def item_bits(self, places: Iterable[tuple[int, Side]], name: str, context: int) -> float:
        """Bits per element of some layers' K or V, stored as a candidate does."""
        layers = {layer.index: layer for layer in self.layers}
        scheme, elements, total = self.candidates[name], 0, 0.0
        for index, side in places:
            layer = layers[index]
            assert side != "q"
            size = layer.elements_held(context)
            elements += size
            total += size * scheme.side_bits(side, layer.kv_heads, layer.head_dim, context)
        return total / elements

    def bits(self, scheme: Scheme, context: int) -> float:
        """Bits per cached element over all layers, each with its own geometry, in ``context`` tokens."""
        weighted = [
            (
                layer.elements_held(context),
                scheme.bits_per_element(layer.kv_heads, layer.head_dim, context),
            )
            for layer in self.layers
        ]
        return sum(n * bits for n, bits in weighted) / sum(n for n, _ in weighted)


def resolve(
    recipe: Recipe,
    model: ModelSpec,
    schemes: dict[str, Scheme],
    candidates: dict[str, Scheme],
    *,
    skip: bool,
) -> Trial:
    """Make the trial.

    Args:
        recipe: for its text and seed.
        model: geometry.
        schemes: by name.
        candidates: of those that are mixed.
        skip: leave out, with a notice, what this model cannot store, instead of refusing.

    Raises:
        PlanRefused: with every reason found.
    """
    if model.encoder_decoder:
        raise PlanRefused(
            [
                f"{model.model_type} is an encoder-decoder, and schemes are compared for decoders alone;"
                " kvcal calibrate --engine kernel measures fp8 for it"
            ]
        )
    if model.latent is not None:
        raise PlanRefused(
            [
                f"{model.model_type} caches a latent, and schemes are for K and V; kvcal calibrate measures"
                " fp8 and fp8_latent_bf16_rope for it"
            ]
        )
    refused = {name: refusals(scheme, model, candidates) for name, scheme in (schemes | candidates).items()}
    reasons = [f"{name}: {reason}" for name, found in refused.items() for reason in found]
    usable = {
        name: scheme
        for name, scheme in schemes.items()
        if not any(refused[each] for each in (name, *scheme.candidates))
    }
    if (reasons and not skip) or not usable:
        raise PlanRefused(reasons)
    lengths, notices = sample_lengths(recipe, model)
    return Trial(
        recipe=recipe,
        model=model,
        schemes=usable,
        candidates={name: scheme for name, scheme in candidates.items() if not refused[name]},
        seq_len=lengths["calibration"],
        evaluation_seq_len=lengths["evaluation"],
        notices=(*notices, *(f"left out: {reason}" for reason in reasons)),
    )


def refusals(scheme: Scheme, model: ModelSpec, candidates: Mapping[str, Scheme]) -> list[str]:
    """Why this model's vectors cannot be stored so; empty if they can."""
    if scheme.mixed is not None:
        windows = {(each.recent, each.flush) for name in scheme.candidates for each in [candidates[name]]}
        if len(windows) > 1:
            return [f"its candidates keep different recent tokens in 16 bits: {', '.join(scheme.candidates)}"]
        return []
    sizes = {layer.head_dim for layer in model.layers}
    found = []
    if model.shares_caches:
        found.append(
            "some layers of this model read another layer's cache; compare knows one cache per layer"
        )
    if model.projections is None:
        found += _of_unknown_weights(scheme, model)
    for side, part in scheme.sides().items():
        found += [f"{side}: {reason}" for size in sorted(sizes) for reason in _of_size(part, size)]
    return found


def _of_unknown_weights(scheme: Scheme, model: ModelSpec) -> list[str]:
    """What cannot be done for a model of which nobody stated how its weights make Q, K and V."""
    sides = scheme.sides()
    found = []
    if sides["k"].before_rope and any(layer.rope == "unknown" for layer in model.layers):
        found.append(
            f"how RoPE pairs the channels of {model.model_type} is not known, so it cannot be undone"
        )
    if sides["v"].basis == "balanced" or (sides["v"].static and sides["v"].rule.objective == "attention"):
        found.append(f"what reads V in {model.model_type} is not known, so errors of V cannot be weighted")
    return found


def served_as(scheme: Scheme) -> str | None:
    """The value of vLLM's cache dtype flag that stores exactly this, given a checkpoint by kvcal."""
    if scheme.mixed is not None or scheme.sinks or scheme.recent:
        return None
    engine = engines.get("vllm")
    k, v = scheme.sides()["k"], scheme.sides()["v"]
    if k.format != v.format or k.format not in engine.cache_dtype:
        return None
    if k.granularity is not None and k.granularity not in engine.granularities:
        return None
    return engine.cache_dtype[k.format]


def _of_size(part: SideScheme, head_dim: int) -> list[str]:
    fmt = part.number
    if fmt is None:
        return []
    if fmt.block and head_dim % fmt.block:
        return [f"{fmt.name} stores blocks of {fmt.block} channels; a head of {head_dim} is no multiple"]
    if part.group and not part.by_tokens and head_dim % part.group:
        return [f"a head of {head_dim} channels does not divide into groups of {part.group}"]
    if fmt.dynamic and fmt.bits == 4 and head_dim % 2:
        return [f"{fmt.name} stores two channels in a byte; a head size of {head_dim} is odd"]
    return []
