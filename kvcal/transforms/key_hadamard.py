"""A randomized Hadamard rotation of K and Q after RoPE: ``k' = H D k``, ``q' = H D q``.

Orthogonal, so logits stay; it spreads outlier channels of K over the head. RoPE turns pairs of channels at
speeds of their own and commutes with no rotation that mixes pairs, so this cannot be folded in front of it:
the engine would have to rotate at every cache write and every query. vLLM reads such a request and ignores it
(``transform_config`` reaches linear layers only), and would then serve scales of a basis that it is not in.
kvcal evaluates it, and refuses to export it.

A bias of K is no outlier channel but a common offset: rotation spreads it over all channels, where it costs
every one of them range. Such layers are better scaled or centred first.
"""

from __future__ import annotations

from kvcal.arch import ModelSpec
from kvcal.kernels import reference
from kvcal.statistics import Statistics
from kvcal.transforms.record import LayerTransform, Transforms

# Share of a head's energy in the mean of K beyond which rotation spreads a bias rather than outliers.
_BIASED = 0.9


def propose(model: ModelSpec, *, seed: int) -> Transforms:
    """Signs of every layer, drawn from ``seed`` and the layer's index."""
    return Transforms(
        {
            layer.index: LayerTransform(
                key_signs=reference.random_signs(layer.head_dim, seed + layer.index).double()
            )
            for layer in model.layers
        }
    )


def biased_layers(statistics: Statistics) -> list[int]:
    """Layers where rotating K would spread a bias: a head whose mean carries most of its energy."""
    found = []
    for index, sides in statistics.layers.items():
        k = sides["k"]
        tokens = int(k.tokens)
        mean_energy = (k.total / tokens).square().sum(-1)
        if bool((mean_energy > _BIASED * k.squares.sum(-1) / tokens).any()):
            found.append(index)
    return found


def warning(statistics: Statistics) -> str | None:
    """One line about layers whose bias a rotation would spread; None if there are none."""
    layers = biased_layers(statistics)
    if not layers:
        return None
    named = ", ".join(map(str, layers[:8])) + (" …" if len(layers) > 8 else "")
    return (
        f"K of layer {named} is mostly one constant vector, which a Hadamard rotation spreads over all"
        " channels; expect less of rotated formats here than of int8_per_token_head"
    )
