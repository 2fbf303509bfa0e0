"""Quarter turns of K and Q within RoPE pairs, for a quantizer that rotates by a fixed Hadamard transform.

RoPE commutes with every rotation inside its own pairs: ``(k_a, k_b) -> (k_b, -k_a)``, done to Q and K alike,
leaves each logit as it was. Quarter turns only exchange rows of ``W_q`` and ``W_k`` and change signs, so the
fold is exact in every dtype and can be taken back bit for bit. Behind a QK-norm, whose gains multiply each
channel by itself, half turns remain (both gains of a pair change sign); channels without RoPE may change sign
one by one.

Why it pays: an engine that stores ``H D k`` with signs ``D`` of its own and one scale per token is at the
mercy of the range ``max - min`` of the rotated vector. K has a large part that all tokens share, so the
pattern that ``D`` happens to make of that part costs range at every token. Turning pairs is choosing ``D``
anew for this model. The search goes through the pairs of a head one by one and keeps a turn that lowers the
mean of ``range²``, which the error variance of an asymmetric quantizer is proportional to, weighted by how
much each token's error costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcal import capture, online
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.data import TokenSet
from kvcal.kernels import reference
from kvcal.transforms.record import LayerTransform, Transforms

_SWEEPS = 4
# Searches per head, from the model as it is and from random turns: each ends in a minimum of its own.
_STARTS = 8
# A sweep that gains less than a thousandth is the last.
_SETTLED = 0.999
# The search looks at 512 tokens per head, 32 of each of 16 samples: few documents would be learnt by heart.
_SAMPLES = 16
_TOKENS_OF_SAMPLE = 32


@dataclass(frozen=True)
class Keys:
    """K of some calibration tokens, per layer.

    ``key`` is ``(kv_heads, tokens, head_dim)`` float32 on the CPU; ``weight`` is ``(kv_heads, tokens)``, the
    cost of an error of one token: over queries ``p² ‖v - o‖² ‖q‖²``, how far a logit's error moves the
    output, to first order.
    """

    key: dict[int, torch.Tensor]
    weight: dict[int, torch.Tensor]


@torch.inference_mode()
def sample(model: Any, spec: ModelSpec, tokens: TokenSet) -> Keys:
    """K and the weights of some tokens of the first samples; one forward pass without the output head."""
    key: dict[int, list[torch.Tensor]] = {layer.index: [] for layer in spec.layers}
    weight: dict[int, list[torch.Tensor]] = {layer.index: [] for layer in spec.layers}

    def see(call: capture.AttentionCall) -> None:
        step = -(-call.key.shape[2] // _TOKENS_OF_SAMPLE)
        key[call.layer].append(call.key[0, :, ::step].float().cpu())
        weight[call.layer].append(_cost(call)[:, ::step].cpu())

    with capture.intercept(model, see):
        for batch in tokens.part(slice(_SAMPLES)).batches(1):
            model.base_model(**batch.inputs(model.device, dtype=model.dtype), use_cache=False)
    return Keys(
        {i: torch.cat(parts, 1) for i, parts in key.items()},
        {i: torch.cat(parts, 1) for i, parts in weight.items()},
    )


def propose(keys: Keys, spec: ModelSpec, before: Transforms) -> Transforms:
    """Turns for each layer on top of the transforms ``before``."""
    found = {}
    for layer in spec.layers:
        k = keys.key[layer.index]
        if layer.index in before.layers:
            _, k, _ = before.layers[layer.index].apply(k[None], k[None], k[None])
            k = k[0]
        turn = _search(k, keys.weight[layer.index], layer, spec)
        if not torch.equal(turn, torch.eye(layer.head_dim, dtype=torch.float64).expand_as(turn)):
            found[layer.index] = LayerTransform(key_turn=turn)
    return Transforms(found)


def _cost(call: capture.AttentionCall) -> torch.Tensor:
    """``(kv_heads, tokens)``; of an error in any direction, as a rotated quantizer makes it."""
    q, k, v = call.query[0].float(), call.key[0].float(), call.value[0].float()
    heads, tokens, _ = q.shape
    group = heads // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    logits = torch.matmul(q, k.transpose(1, 2)) * call.scaling
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    hidden = ~reference.visible(tokens, tokens, call.window, q.device)
    logits = logits.masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        logits = torch.cat([logits, call.sinks.float().view(-1, 1, 1).expand(-1, tokens, 1)], -1)
    p = logits.softmax(-1)[..., :tokens]
    moved = torch.cdist(torch.matmul(p, v), v).square()  # ‖v_m - o_i‖²
    cost = torch.einsum("him,hi->hm", p.square() * moved, q.square().sum(-1))
    return cost.view(-1, group, tokens).sum(1)


def _search(k: torch.Tensor, weight: torch.Tensor, layer: LayerSpec, spec: ModelSpec) -> torch.Tensor:
    """Signed permutations ``(kv_heads, head_dim, head_dim)`` float64, ``k' = turn k``."""
    # numpy: thousands of steps on small arrays, where torch's threads would mostly wait for each other.
    rotation = online.rotation(layer.head_dim).numpy()  # rotated = rotation @ k
    shared = spec.qk_norm == "head"
    heads = k.shape[0]
    cost_of = np.tile((weight / weight.sum(-1, keepdim=True)).numpy(), (_STARTS, 1))
    # All starts side by side, as if each were a head more.
    turn = np.concatenate([_start(layer, spec, index) for index in range(_STARTS)])
    x = np.matmul(np.tile(k.float().numpy(), (_STARTS, 1, 1)), turn.transpose(0, 2, 1).astype(np.float32))
    y = x @ rotation.T
    best = _range(y, cost_of, heads, shared)
    for _ in range(_SWEEPS):
        start = best
        for channels in _tied_channels(layer):
            for signs, order in _turns(channels, spec):
                moved = x[:, :, order] * np.array(signs, dtype=x.dtype)
                tried = y + (moved - x[:, :, channels]) @ rotation[:, channels].T
                cost = _range(tried, cost_of, heads, shared)
                take = cost < best
                if not take.any():
                    continue
                best = np.where(take, cost, best)
                y[take] = tried[take]
                for head in np.flatnonzero(take):
                    x[head][:, channels] = moved[head]
                    turn[head, channels] = turn[head, order] * np.array(signs)[:, None]
        if (best > _SETTLED * start).all():
            break
    winner = best.reshape(_STARTS, heads).argmin(0)
    return torch.from_numpy(turn.reshape(_STARTS, heads, *turn.shape[1:])[winner, np.arange(heads)])


def _start(layer: LayerSpec, spec: ModelSpec, index: int) -> np.ndarray:
    """The model as it is, then turns at random; ``(kv_heads, head_dim, head_dim)``."""
    turn = np.tile(np.eye(layer.head_dim), (layer.kv_heads, 1, 1))
    generator = np.random.default_rng([index, layer.index])
    for channels in _tied_channels(layer):
        options = [([1.0] * len(channels), channels), *_turns(channels, spec)]
        drawn = generator.integers(len(options), size=layer.kv_heads) * (index > 0)
        for head in range(layer.kv_heads):
            signs, order = options[drawn[0 if spec.qk_norm == "head" else head]]
            turn[head, channels] = np.eye(layer.head_dim)[order] * np.array(signs)[:, None]
    return turn


def _range(y: np.ndarray, cost_of: np.ndarray, heads: int, shared: bool) -> np.ndarray:
    """Weighted mean of ``range²`` per head. The zero point cannot leave the range, so 0 is always in it."""
    extent = np.maximum(y.max(-1), 0) - np.minimum(y.min(-1), 0)
    cost: np.ndarray = (extent * extent * cost_of).sum(-1)
    if not shared:
        return cost
    together: np.ndarray = cost.reshape(-1, heads).sum(1).repeat(heads)  # heads that turn together are one
    return together


def _tied_channels(layer: LayerSpec) -> list[list[int]]:
    ties = layer.channel_ties
    return [[c for c in range(layer.head_dim) if ties[c] == tie] for tie in range(max(ties) + 1)]


def _turns(channels: list[int], spec: ModelSpec) -> list[tuple[list[float], list[int]]]:
    """Turns of one pair, or of one free channel: signs, and the channels that come to stand there."""
    if spec.qk_norm != "none" and spec.norm_adds_one:
        return []  # gains of 1 + w cannot change sign without rounding w
    if len(channels) == 1:
        return [([-1.0], channels)]
    a, b = channels
    half = [([-1.0, -1.0], [a, b])]
    if spec.qk_norm != "none":
        return half
    return [([1.0, -1.0], [b, a]), *half, ([-1.0, 1.0], [b, a])]
