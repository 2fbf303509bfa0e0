"""Random transforms that fit a layer: what RoPE ties is tied, heads that share gains share their numbers."""

from __future__ import annotations

import random
from typing import Any

import torch

from kvcal import arch
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.transforms.record import LayerTransform, Transforms


def spec_of(model: Any) -> ModelSpec:
    return arch.read(model.config.to_dict() | {"architectures": [type(model).__name__]})


def key_scale(layer: LayerSpec, spec: ModelSpec, seed: int, *, powers_of_two: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    heads = 1 if spec.qk_norm == "head" else layer.kv_heads
    ties = torch.tensor(layer.channel_ties)
    log2 = torch.rand(heads, int(ties.max()) + 1, generator=generator, dtype=torch.float64) * 8 - 4
    scale = torch.exp2(log2.round() if powers_of_two else log2)
    return scale[:, ties].expand(layer.kv_heads, -1).contiguous()


def key_turn(layer: LayerSpec, spec: ModelSpec, seed: int) -> torch.Tensor:
    rng = random.Random(seed)
    ties = layer.channel_ties
    turn = torch.zeros(layer.kv_heads, layer.head_dim, layer.head_dim, dtype=torch.float64)
    for tie in range(max(ties) + 1):
        channels = [c for c, t in enumerate(ties) if t == tie]
        for head in range(layer.kv_heads):
            if spec.qk_norm == "head" and head:
                turn[head] = turn[0]
                continue
            if len(channels) == 1 or spec.qk_norm != "none":
                sign = rng.choice((1.0, -1.0))
                for channel in channels:
                    turn[head, channel, channel] = sign
                continue
            quarter = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
            block = torch.linalg.matrix_power(quarter, rng.randrange(4))
            for i, row in enumerate(channels):
                for j, column in enumerate(channels):
                    turn[head, row, column] = block[i, j]
    return turn


def value_map(layer: LayerSpec, seed: int, *, dense: bool = True) -> torch.Tensor:
    """Well conditioned and different for every head; a number per head if not dense."""
    generator = torch.Generator().manual_seed(seed)
    if not dense:
        factor = torch.rand(layer.kv_heads, 1, 1, generator=generator, dtype=torch.float64) + 0.5
        return factor * torch.eye(layer.head_dim, dtype=torch.float64)
    shape = (layer.kv_heads, layer.head_dim, layer.head_dim)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64) / layer.head_dim**0.5
    return noise + 2 * torch.eye(layer.head_dim, dtype=torch.float64)


def everything(spec: ModelSpec, seed: int = 0) -> Transforms:
    return Transforms(
        {
            layer.index: LayerTransform(
                key_scale=key_scale(layer, spec, seed + layer.index),
                key_turn=key_turn(layer, spec, seed + layer.index),
                # A gate per channel leaves no room for more than a number per head.
                value_map=value_map(layer, seed + layer.index, dense=not spec.output_gate),
            )
            for layer in spec.layers
        }
    )


def exact(spec: ModelSpec, seed: int = 0) -> Transforms:
    """Powers of two and turns: what BF16 holds without rounding."""
    found = {}
    for layer in spec.layers:
        generator = torch.Generator().manual_seed(seed + layer.index)
        factor = torch.exp2(torch.randint(-9, 10, (layer.kv_heads, 1, 1), generator=generator).double())
        found[layer.index] = LayerTransform(
            key_scale=key_scale(layer, spec, seed + layer.index, powers_of_two=True),
            key_turn=key_turn(layer, spec, seed + layer.index),
            value_map=torch.eye(layer.head_dim, dtype=torch.float64) * factor,
        )
    return Transforms(found)
