"""Schemes side by side on one model: loaded once, calibrated in one pass, one shared reference pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcal import allocate, basis, calibrate, capture, second_pass, sensitivity, storage
from kvcal.allocate import Assignment, Option
from kvcal.cache import Cache
from kvcal.calibrate import View
from kvcal.data import TokenSet
from kvcal.evaluate import Fidelity, Variant, fidelities
from kvcal.kernels import reference
from kvcal.progress import Narrator
from kvcal.scheme import Scheme
from kvcal.statistics import Statistics
from kvcal.trial import Trial, served_as

# Samples of a backward pass: enough for codebooks of 16 levels, and what memory and time allow.
_FISHER_SAMPLES = 2


@dataclass(frozen=True)
class Row:
    """One scheme.

    Attributes:
        scheme: its name.
        description: what it is.
        source: where it comes from.
        bits_per_element: in a sequence as long as an evaluated one, tokens in 16 bits included.
        bits_at_full_context: the same at the model's longest context.
        fidelity: of the whole model on held-out text.
        worst_layer: index of the layer whose attention output errs most, and its relative error.
        worst_error: ``‖ô - o‖ / ‖o‖`` there.
        serves: vLLM's cache dtype that stores exactly this, if there is one.
        mixture: of a mixed scheme, side -> scheme -> layers.
        efficient: no other row is better in bits and KL.
    """

    scheme: str
    description: str
    source: str
    bits_per_element: float
    bits_at_full_context: float
    fidelity: Fidelity
    worst_layer: int
    worst_error: float
    serves: str | None
    mixture: dict[str, dict[str, list[int]]] | None
    efficient: bool = False


@dataclass(frozen=True)
class Selection:
    """What a mixed scheme comes to on this model.

    Attributes:
        chosen: scheme of each item.
        cache: all of them together.
        trial: for the geometry.
    """

    chosen: dict[sensitivity.Item, str]
    cache: Cache
    trial: Trial

    @property
    def layers(self) -> dict[str, dict[str, list[int]]]:
        """Side -> scheme -> layers."""
        found: dict[str, dict[str, list[int]]] = {"k": {}, "v": {}}
        for item, name in self.chosen.items():
            for layer, side in item.places:
                found[side].setdefault(name, []).append(layer)
        return found

    def bits(self, context: int) -> float:
        """Bits per element in ``context`` tokens."""
        shares = sensitivity.shares(list(self.chosen), self.trial.layers, context)
        return sum(
            share * self.trial.item_bits(item.places, self.chosen[item], context)
            for item, share in shares.items()
        )


def compare(job: Comparison) -> list[Row]:
    """One row per scheme, in order of bits, then of KL."""
    trial = job.trial
    plain = {name: s for name, s in {**trial.candidates, **trial.schemes}.items() if s.mixed is None}
    fitted = job.caches(plain)
    mixtures = {name: job.mix(s, fitted) for name, s in trial.schemes.items() if s.mixed is not None}
    caches = {name: mixtures[name].cache if name in mixtures else fitted[name] for name in trial.schemes}
    errors = job.layer_errors(caches)
    found = job.fidelities(caches)
    rows = []
    for name, scheme in trial.schemes.items():
        worst = max(errors[name], key=errors[name].__getitem__)
        mixture = mixtures.get(name)
        bits = [
            mixture.bits(context) if mixture else trial.bits(scheme, context)
            for context in (trial.evaluation_seq_len, trial.model.max_context)
        ]
        rows.append(
            Row(
                scheme=name,
                description=scheme.description,
                source=scheme.source,
                bits_per_element=bits[0],
                bits_at_full_context=bits[1],
                fidelity=found[name],
                worst_layer=worst,
                worst_error=errors[name][worst],
                serves=served_as(scheme),
                mixture=mixture.layers if mixture else None,
            )
        )
    best = efficient({row.scheme: (row.bits_per_element, row.fidelity.kl_mean) for row in rows})
    marked = [replace(row, efficient=row.scheme in best) for row in rows]
    return sorted(marked, key=lambda row: (row.bits_per_element, row.fidelity.kl_mean))


@dataclass
class Comparison:
    """What the steps share: calibration text, a part of it that judges mixtures, and held-out text."""

    trial: Trial
    model: Any
    text: TokenSet
    judging: TokenSet
    held_out: TokenSet
    narrator: Narrator

    def caches(self, schemes: Mapping[str, Scheme]) -> dict[str, Cache]:
        """Every scheme fitted, from one calibration pass."""
        views = {name: view_of(scheme) for name, scheme in schemes.items()}
        statistics = self._statistics(set(views.values()))
        reading = basis.readers(self.model, self.trial.model)
        extras = {name: self._extras(scheme, statistics[views[name]]) for name, scheme in schemes.items()}
        found = {}
        with self.narrator.stage("fit", len(schemes), "schemes") as on_schemes:
            for name, scheme in schemes.items():
                found[name] = self._fit(scheme, statistics[views[name]], reading, extras[name])
                on_schemes(1)
        return found

    def mix(self, scheme: Scheme, fitted: Mapping[str, Cache]) -> Selection:
        """Measure what each layer's K and V costs in each candidate, and choose within the scheme's limit."""
        wanted, trial = scheme.mixed, self.trial
        assert wanted is not None
        candidates = {name: fitted[name] for name in scheme.candidates}
        items = sensitivity.items(trial.layers, ("k", "v"), len(candidates), wanted.passes)
        batch_size = trial.recipe.evaluation.batch_size
        with self.narrator.stage("sensitivity", self.judging.tokens) as on_tokens:
            kls = sensitivity.measure(
                self.model, items, candidates, batch_size, self.judging, on_tokens=on_tokens
            )
        context = trial.evaluation_seq_len
        options = {
            item: [Option(n, trial.item_bits(item.places, n, context), kl) for n, kl in kls[item].items()]
            for item in items
        }
        shares = sensitivity.shares(items, trial.layers, context)

        def together(found: Assignment[sensitivity.Item]) -> Cache:
            return sensitivity.assembled({item: fitted[o.name] for item, o in found.options.items()})

        def measured(found: Assignment[sensitivity.Item]) -> float:
            variants = {"whole": Variant(together(found))}
            return fidelities(self.model, variants, batch_size, self.judging)["whole"].kl_mean

        with self.narrator.stage("choose layers"):
            if wanted.max_kl is not None:
                found, _ = allocate.measured_within_kl(options, shares, wanted.max_kl, measured)
            else:
                assert wanted.bits_budget is not None
                found = allocate.within_bits(options, shares, wanted.bits_budget)
        chosen = {item: option.name for item, option in found.options.items()}
        return Selection(chosen, together(found), trial)

    def fidelities(self, caches: Mapping[str, Cache]) -> dict[str, Fidelity]:
        """KL, agreement and perplexity of each, on held-out text."""
        with self.narrator.stage("compare", self.held_out.tokens) as on_tokens:
            return fidelities(
                self.model,
                {name: Variant(cache) for name, cache in caches.items()},
                self.trial.recipe.evaluation.batch_size,
                self.held_out,
                on_tokens=on_tokens,
            )

    @torch.inference_mode()
    def layer_errors(self, caches: Mapping[str, Cache]) -> dict[str, dict[int, float]]:
        """Relative error of each layer's attention output, on the Q, K and V of the unquantized model.

        One pass over one held-out sample for all schemes.
        """
        held = {name: cache.to(self.model.device) for name, cache in caches.items()}
        found: dict[str, dict[int, float]] = {name: {} for name in caches}

        def compare(call: capture.AttentionCall) -> None:
            exact = _attend(call, (call.query, call.key, call.value))
            for name, cache in held.items():
                off = _attend(call, cache.replace(call)) - exact
                found[name][call.layer] = float(off.norm() / exact.norm())
            on_layers(1)

        first = next(self.held_out.singly())

        def examine(call: capture.AttentionCall, output: torch.Tensor) -> None:
            if first.images is not None:
                calibrate.require_emulated(call, output, first)

        with (
            self.narrator.stage("attention errors", len(self.trial.layers), "layers") as on_layers,
            capture.intercept(self.model, compare, rotary=True, after=examine),
        ):
            inputs = first.inputs(self.model.device, dtype=self.model.dtype)
            self.model.base_model(**inputs, use_cache=False)
        return found

    def _statistics(self, views: set[View]) -> dict[View, Statistics]:
        with self.narrator.stage("calibrate", self.text.tokens) as on_tokens:
            return calibrate.views(
                self.model,
                self.trial.layers,
                self.trial.recipe.calibration.batch_size,
                self.text,
                views,
                on_tokens=on_tokens,
                collect="distribution",
            )

    def _fit(
        self,
        scheme: Scheme,
        statistics: Statistics,
        reading: Mapping[int, torch.Tensor],
        extras: storage.Extras,
    ) -> Cache:
        return storage.fit(
            scheme,
            self.trial.model,
            reading,
            statistics,
            extras=extras,
            seed=self.trial.recipe.calibration.seed,
        )

    def _extras(self, scheme: Scheme, statistics: Statistics) -> storage.Extras:
        layers = {layer.index: layer for layer in self.trial.layers}
        levels: Mapping[int, Any] = {}
        moving: Mapping[int, Any] = {}
        k, v = scheme.sides()["k"], scheme.sides()["v"]
        if k.codebook == "nuq" and k.number is not None and v.number is not None:
            ranges = {
                index: storage.static_range(k, "k", seen, torch.zeros(0))
                for index, seen in statistics.layers.items()
            }
            few = self.text.part(slice(_FISHER_SAMPLES))
            with self.narrator.stage("codebooks", few.tokens) as on_tokens:
                levels = second_pass.fisher_levels(
                    self.model,
                    layers,
                    ranges,
                    few,
                    bits={"k": k.number.bits, "v": v.number.bits},
                    skip=scheme.sinks,
                    before_rope=k.before_rope,
                    on_tokens=on_tokens,
                )
        if "moving_average" in (k.fixed, v.fixed):
            with self.narrator.stage("moving averages", self.text.tokens) as on_tokens:
                moving = second_pass.moving_extremes(self.model, layers, self.text, on_tokens)
        return storage.Extras(levels, moving)


def view_of(scheme: Scheme) -> View:
    """How statistics must look at K and Q for this scheme."""
    return View(before_rope=scheme.sides()["k"].before_rope, skip=scheme.sinks)


def efficient(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Names of the (bits, KL) points that no other point beats in one and equals or beats in the other."""
    return {
        name
        for name, (bits, kl) in points.items()
        if not any(b <= bits and k <= kl and (b, k) != (bits, kl) for b, k in points.values())
    }


def _attend(call: capture.AttentionCall, given: capture.Tensors | capture.Versions) -> torch.Tensor:
    """Attention output in float32, for tensors or versions of them."""
    if isinstance(given, capture.Versions):
        return reference.attention_over_versions(
            given.query.float(),
            tuple(k.float() for k in given.keys),
            tuple(v.float() for v in given.values),
            given.seen,
            **call.geometry,
        )
    q, k, v = (x.float() for x in given)
    return reference.attention(q, k, v, **call.geometry)
