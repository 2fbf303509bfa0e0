"""Which transforms fold into the weights of a model without changing what it computes, and why others do not.

The mathematics of each stands in the module of its name in ``transforms``; this table imports no torch, so
that a plan can refuse before anything is loaded. ``transforms/proof`` checks the claims in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcal.arch import LayerSpec, ModelSpec

Reason = str | None


def _always(model: ModelSpec) -> Reason:
    return None


def _not_through_a_gate(model: ModelSpec) -> Reason:
    if model.output_gate:
        return "a gate per channel stands between attention and the output projection"
    return None


def _key_turn(model: ModelSpec) -> Reason:
    if model.qk_norm != "none" and model.norm_adds_one:
        return "gains of 1 + w cannot change sign without rounding w"
    return None


def _key_hadamard(model: ModelSpec) -> Reason:
    if any(layer.rope != "none" for layer in model.layers):
        return "a rotation that mixes channels of different RoPE pairs does not commute with RoPE"
    return "kvcal folds the rotation of V only; K can be rotated online"


def _key_offset(model: ModelSpec) -> Reason:
    if model.softcap is not None:
        return "the logit softcap is not invariant under a shift of all logits"
    if model.sinks:
        return "learned sinks are not shifted with the logits of keys"
    if model.qk_norm != "none":
        return "the QK-norm follows the bias that would carry the offset"
    if not any(free_channels(layer) for layer in model.layers):
        return "after RoPE a constant is no constant of the weights; only channels without RoPE can carry it"
    if not model.key_bias:
        return "the model has no bias of K that could carry the offset"
    return None


# Transform -> why it cannot be folded into this model; None if it can.
WHY_NOT_FOLDED: Mapping[str, Callable[[ModelSpec], Reason]] = {
    "key_scale": _always,
    "key_turn": _key_turn,
    "key_offset": _key_offset,
    "key_hadamard": _key_hadamard,
    "value_scale": _always,
    "value_hadamard": _not_through_a_gate,
    "value_random_hadamard": _not_through_a_gate,
    "value_balanced": _not_through_a_gate,
    "latent_scale": _always,
}


def free_channels(layer: LayerSpec) -> tuple[int, ...]:
    """Channels of a head that RoPE leaves alone."""
    return tuple(range(layer.rotary_dim, layer.head_dim))


def table(model: ModelSpec) -> dict[str, Reason]:
    """Every transform with the reason why it cannot be folded into this model; None if it can."""
    if model.projections is None:
        unknown = f"which weights of {model.model_type} make Q, K and V is not known"
        return dict.fromkeys(WHY_NOT_FOLDED, unknown)
    found = {name: why_not(model) for name, why_not in WHY_NOT_FOLDED.items()}
    return {name: _of_another_cache(name, model) or reason for name, reason in found.items()}


def concerns(name: str, model: ModelSpec) -> bool:
    """Whether a transform is one of what this model caches: K and V of heads, or latents."""
    return _of_another_cache(name, model) is None


def _of_another_cache(name: str, model: ModelSpec) -> Reason:
    if name == "latent_scale":
        return "it caches K and V, no latent" if model.latent is None else None
    return None if model.latent is None else "it caches a latent, from which all heads make their K and V"
