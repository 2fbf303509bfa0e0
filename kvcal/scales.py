"""Statistics and a plan to scales.

A scale is the dequantization multiplier, ``x ≈ code * scale``: float32, finite, above zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvcal import objectives
from kvcal.errors import ModelError, UsageError
from kvcal.plan import Plan
from kvcal.recipe import SIDES, ScaleRule, Side
from kvcal.statistics import Collect, SideStatistics, Statistics

# Below this rms at scale 1.0, E4M3 spends too many elements on subnormals: its signal-to-noise ratio is
# 31.5 dB down to sigma = 2^-4, 30.9 at 2^-5, 28.3 at 2^-6 (Gaussian input).
UNDERFLOW_RMS = 2.0**-5


@dataclass(frozen=True)
class Scales:
    """One tensor per layer and side: ``(1,)`` per tensor, ``(heads, 1, 1)`` per head."""

    layers: dict[int, dict[Side, torch.Tensor]]

    def to(self, device: torch.device) -> Scales:
        return Scales({i: {s: t.to(device) for s, t in sides.items()} for i, sides in self.layers.items()})

    def save(self, path: Path) -> None:
        """Write as ``layers.<index>.<side>``."""
        save_file({f"layers.{i}.{s}": t for i, sides in self.layers.items() for s, t in sides.items()}, path)

    @classmethod
    def load(cls, path: Path) -> Scales:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: the file is broken or holds something else.
        """
        layers: dict[int, dict[Side, torch.Tensor]] = {}
        try:
            for key, tensor in load_file(path).items():
                _, index, side = key.split(".")
                layers.setdefault(int(index), {})[side] = tensor
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path}: holds no scales that can be read: {error}; calibrate again") from None
        return cls(dict(sorted(layers.items())))


@dataclass(frozen=True)
class SideSummary:
    """What the report says about one side of one layer.

    ``saturated`` and ``zeroed`` are the fractions of elements that scale 1.0 would clip or store as 0.
    """

    amax: float
    scale: list[float]
    saturated: float
    zeroed: float
    flags: list[str]


def compute(
    statistics: Statistics,
    plan: Plan,
    rule: ScaleRule | None = None,
    *,
    value_weights: Mapping[int, torch.Tensor] | None = None,
) -> Scales:
    """Scales of every layer for K, V and Q, by the recipe's rule or another one.

    ``value_weights`` are those of :func:`kvcal.objectives.value_weights`; the objective ``attention`` needs
    them, and distributions as every objective but ``amax`` does.
    """
    rule = rule or plan.recipe.scale
    found: dict[int, dict[Side, torch.Tensor]] = {}
    for index, sides in statistics.layers.items():
        weights: dict[Side, torch.Tensor] = {}
        if rule.objective == "attention":
            weights["k"] = objectives.key_weight(sides)
            if value_weights is not None:
                weights["v"] = value_weights[index]
        found[index] = {side: _scale(sides[side], side, plan, rule, weights.get(side)) for side in SIDES}
        if plan.format.latent_only:
            found[index]["v"] = torch.ones(1)  # of the rotary key, which stays as it is
        elif plan.model.latent is not None:
            _share(found[index])  # one vector to the kernels that read it
    for layer in plan.layers:
        if layer.shares is not None:  # it reads what that layer has written
            found[layer.index]["k"] = found[layer.shares]["k"].clone()
            found[layer.index]["v"] = found[layer.shares]["v"].clone()
    return Scales(found)


def collect(plan: Plan) -> Collect:
    """What has to be collected for the scales of a plan."""
    static = plan.granularity is not None
    return "distribution" if static and plan.recipe.scale.objective != "amax" else "summary"


def unit(plan: Plan) -> Scales:
    """Scale 1.0 everywhere: what an engine uses for a format whose scales it was not given."""
    return Scales({layer.index: {side: torch.ones(1) for side in SIDES} for layer in plan.layers})


def times(scales: Scales, factor: float) -> Scales:
    """Every scale multiplied by ``factor``, in shape and dtype as before."""
    return Scales({i: {s: t * factor for s, t in sides.items()} for i, sides in scales.layers.items()})


def reduced(scales: Scales, to: Literal["per_tensor", "shared"]) -> Scales:
    """The coarser scales that are left where an engine's files have no room for finer ones.

    The largest scale wins, so nothing clips that did not clip before. Heads that needed a smaller one pay
    with precision, once their elements reach the format's subnormals.

    Args:
        scales: of any shape.
        to: ``per_tensor``: one scale for K, one for V and one for Q of a layer. ``shared``: K and V have one
            between them, as in SGLang's ``--quantization-param-path`` (python/sglang/srt/models/llama.py,
            load_kv_cache_scales) and in TensorRT-LLM's ``kv_cache_scaling_factor``
            (tensorrt_llm/quantization/quantize.py, kv_cache_quantize); Q as in ``per_tensor``.

    Returns:
        Tensors ``(1,)`` float32, on the device of those they come from.
    """
    found: dict[int, dict[Side, torch.Tensor]] = {}
    for index, sides in scales.layers.items():
        largest = {side: scale.max().reshape(1) for side, scale in sides.items()}
        if to == "shared":
            _share(largest)
        found[index] = largest
    return Scales(found)


def _share(of: dict[Side, torch.Tensor]) -> None:
    """The larger scale of K and V for both."""
    of["k"] = torch.maximum(of["k"], of["v"])
    of["v"] = of["k"].clone()  # safetensors refuses one tensor under two names


def from_amax(amax: torch.Tensor, largest: float, rule: ScaleRule) -> torch.Tensor:
    """Scales for absolute maxima, float32.

    ``largest`` is what the format reaches at scale 1 (448 for E4M3, 2688 or 448 for NVFP4, by the engine's
    convention). A head that was zero throughout gets 1.0: any scale keeps zeros, and this one is the
    identity.
    """
    scale = amax.double() * rule.headroom / largest
    if rule.rule == "power_of_two":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny).float()
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def summarize(
    statistics: Statistics, scales: Scales | None, plan: Plan
) -> dict[int, dict[Side, SideSummary]]:
    """Per layer and side: amax, scale, and how scale 1.0 would fare, which only concerns static formats."""
    return {
        index: {
            side: _summary(side, sides[side], scales.layers[index][side] if scales else None, plan)
            for side in SIDES
        }
        for index, sides in statistics.layers.items()
    }


def _scale(
    seen: SideStatistics, side: Side, plan: Plan, rule: ScaleRule, weight: torch.Tensor | None
) -> torch.Tensor:
    if plan.granularity is None:
        raise UsageError(f"{plan.format.name} with --deliver {plan.deliver} has no static scales")
    # Nothing weighs the channels of Q, which is not cached.
    objective = "mse" if rule.objective == "attention" and side == "q" else rule.objective
    _, high = objectives.ranges(
        seen,
        plan.granularity,
        plan.format,
        objective,
        symmetric=True,
        percentile=rule.percentile,
        weight=weight,
    )
    return from_amax(high, plan.engine.reach(plan.format), rule)


def _summary(side: Side, seen: SideStatistics, scale: torch.Tensor | None, plan: Plan) -> SideSummary:
    heads, head_dim = seen.amax.shape
    elements = int(seen.tokens) * heads * head_dim
    saturated, zeroed = int(seen.saturated.sum()) / elements, int(seen.zeroed.sum()) / elements
    flags = []
    fmt = plan.format
    static = fmt.rounds_query or (fmt.latent_only and side == "k")
    if saturated > 0 and static:
        flags.append("saturates at scale 1.0")
    if float(seen.rms.min()) < UNDERFLOW_RMS and static:
        flags.append("underflows at scale 1.0")
    if bool((seen.amax.amax(-1) == 0).any()):
        flags.append("has a head that is always zero")
    return SideSummary(
        amax=float(seen.amax.max()),
        scale=[] if scale is None else [float(s) for s in scale.flatten()],
        saturated=saturated,
        zeroed=zeroed,
        flags=flags,
    )
