"""How transforms are chosen from statistics: closed forms, searches, and what RoPE and norms leave free."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kvcal import online
from kvcal.recipe import ScaleRule
from kvcal.statistics import SideStatistics, Statistics
from kvcal.transforms import key_hadamard, key_scale, key_turn, value_map
from kvcal.transforms.record import Transforms
from tests import tiny
from tests.transforms import drawn

SPEC = drawn.spec_of(tiny.build_model("llama"))
LAYER = SPEC.layers[0]
TOKENS = 50


def side(x: torch.Tensor) -> SideStatistics:
    """Statistics of ``(heads, tokens, head_dim)``."""
    zero = torch.zeros(x.shape[0], dtype=torch.int64)
    wide = x.double()
    return SideStatistics(
        tokens=torch.tensor(x.shape[1]),
        minimum=x.amin(1).float(),
        maximum=x.amax(1).float(),
        total=wide.sum(1),
        squares=wide.square().sum(1),
        saturated=zero,
        zeroed=zero,
    )


def statistics(k: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> Statistics:
    return Statistics({layer.index: {"k": side(k), "q": side(q), "v": side(v)} for layer in SPEC.layers})


def balanced() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors whose second moments are exactly 1 in every channel."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(LAYER.kv_heads, TOKENS, 16), (LAYER.heads, TOKENS, 16), (LAYER.kv_heads, TOKENS, 16)]
    found = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    k, q, v = (x / x.square().mean(1, keepdim=True).sqrt() for x in found)
    return k, q, v


@pytest.mark.parametrize("powers_of_two", [True, False])
def test_a_planted_imbalance_is_undone_exactly(powers_of_two: bool) -> None:
    """K times f and Q over f in a pair: the moments' ratio grows by f⁴, its fourth root is f."""
    k, q, v = balanced()
    factors = torch.ones(LAYER.kv_heads, 16, dtype=torch.float64)
    factors[0, [2, 10]], factors[1, [5, 13]] = 16.0, 1 / 8
    group = LAYER.heads // LAYER.kv_heads
    planted = statistics(k * factors[:, None], q / factors.repeat_interleave(group, 0)[:, None], v)
    found = key_scale.propose(planted, SPEC, strength=1.0, powers_of_two=powers_of_two)
    scale = found.layers[0].key_scale
    assert scale is not None
    torch.testing.assert_close(scale / factors, torch.ones_like(scale), rtol=1e-9, atol=0)


@pytest.mark.parametrize("family", ["llama", "phi", "cohere2", "qwen3", "olmo2", "gemma3_text"])
def test_scales_respect_ties_and_shared_gains(family: str) -> None:
    spec = drawn.spec_of(tiny.build_model(family))
    generator = torch.Generator().manual_seed(1)
    layers = {}
    for layer in spec.layers:
        k, q, v = (
            torch.randn(h, TOKENS, 16, generator=generator) * torch.rand(h, 1, 16, generator=generator) * 9
            for h in (layer.kv_heads, layer.heads, layer.kv_heads)
        )
        layers[layer.index] = {"k": side(k), "q": side(q), "v": side(v)}
    found = key_scale.propose(Statistics(layers), spec, strength=1.0, powers_of_two=False)  # type: ignore[arg-type]
    for layer in spec.layers:
        scale = found.layers[layer.index].key_scale
        assert scale is not None
        for a in range(16):
            for b in range(16):
                if layer.channel_ties[a] == layer.channel_ties[b]:
                    assert torch.equal(scale[:, a], scale[:, b])
        assert torch.equal(scale[0], scale[1]) == (spec.qk_norm == "head")


def test_k_and_q_beyond_fp8_are_moved_towards_each_other() -> None:
    k, q, v = balanced()
    found = key_scale.propose(statistics(k * 2**12, q / 2**6, v), SPEC, strength=1.0, powers_of_two=True)
    scale = found.layers[0].key_scale
    assert scale is not None
    amax_k = float((k * 2**12).abs().amax(1).div(scale).max())
    amax_q = float((q / 2**6).abs().max()) * float(scale.max())
    assert amax_k < 448
    assert amax_q < 448
    assert found.powers_of_two


def test_heads_of_v_outside_the_range_come_in_and_others_stay() -> None:
    k, q, v = balanced()
    v = v * torch.tensor([1.0, 2.0**12])[:, None, None]
    found = value_map.scale(statistics(k, q, v), SPEC, ScaleRule())
    mapped = found.layers[0].value_map
    assert mapped is not None
    factors = mapped.diagonal(dim1=-2, dim2=-1)
    assert bool((factors[0] == 1).all())
    assert float(v[1].abs().max() * factors[1, 0]) <= 448 / 1.25
    assert found.powers_of_two
    assert value_map.scale(statistics(*balanced()), SPEC, ScaleRule()).layers == {}


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_hadamard_maps_are_orthogonal_and_random_ones_seeded(seed: int | None) -> None:
    found, again = value_map.hadamard(SPEC, seed=seed), value_map.hadamard(SPEC, seed=seed)
    mapped = found.layers[1].value_map
    assert mapped is not None
    torch.testing.assert_close(mapped[0] @ mapped[0].T, torch.eye(16, dtype=torch.float64))
    assert torch.equal(mapped, again.layers[1].value_map)  # type: ignore[arg-type]
    if seed is not None:
        assert not torch.equal(mapped, found.layers[2].value_map)  # type: ignore[arg-type]


def test_channels_that_are_zero_throughout_stay_finite() -> None:
    k, q, v = balanced()
    k[:, :, 3], q[:, :, 3], v[:, :, 3] = 0.0, 0.0, 0.0
    for transforms in (
        key_scale.propose(statistics(k, q, v), SPEC, strength=1.0, powers_of_two=True),
        key_scale.propose(statistics(k * 0, q * 0, v), SPEC, strength=1.0, powers_of_two=False),
    ):
        scale = transforms.layers[0].key_scale
        assert scale is not None
        assert bool((scale.isfinite() & (scale > 0)).all())


def keys_with_a_constant() -> key_turn.Keys:
    generator = torch.Generator().manual_seed(3)
    constant = torch.randn(LAYER.kv_heads, 1, 16, generator=generator) * 4
    k = torch.randn(LAYER.kv_heads, 64, 16, generator=generator) + constant
    return key_turn.Keys(dict.fromkeys(range(3), k), {i: torch.rand(LAYER.kv_heads, 64) for i in range(3)})


def mean_range(k: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rotated = k @ online.rotation(16).T
    extent = rotated.amax(-1).clamp(min=0) - rotated.amin(-1).clamp(max=0)
    return (extent.square() * weight).sum(-1) / weight.sum(-1)


def test_turns_lower_the_range_of_the_rotated_vector() -> None:
    keys = keys_with_a_constant()
    turned = key_turn.propose(keys, SPEC, Transforms({}))
    turn = turned.layers[0].key_turn
    assert turn is not None
    after = mean_range(keys.key[0] @ turn.float().transpose(1, 2), keys.weight[0])
    assert bool((after < 0.8 * mean_range(keys.key[0], keys.weight[0])).all())
    assert turned.powers_of_two
    again = key_turn.propose(keys, SPEC, Transforms({}))
    assert torch.equal(turn, again.layers[0].key_turn)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "phi", "cohere2", "qwen3", "olmo2"])
def test_turns_stay_inside_pairs_and_behind_norms_on_the_diagonal(family: str) -> None:
    spec = drawn.spec_of(tiny.build_model(family))
    found = key_turn.propose(keys_with_a_constant(), spec, Transforms({}))
    for layer in spec.layers:
        turn = found.layers[layer.index].key_turn
        assert turn is not None
        ties = np.array(layer.channel_ties)
        assert bool((turn.abs().sum(-1) == 1).all())
        assert not bool(turn[:, torch.from_numpy(ties[:, None] != ties[None])].any())
        if spec.qk_norm != "none":
            assert torch.equal(turn.abs(), torch.eye(16, dtype=torch.float64).expand_as(turn))
        if spec.qk_norm == "head":
            assert torch.equal(turn[0], turn[1])


def test_gains_of_one_plus_w_are_not_turned() -> None:
    spec = drawn.spec_of(tiny.build_model("gemma3_text"))
    assert key_turn.propose(keys_with_a_constant(), spec, Transforms({})).layers == {}
    plain = dataclasses.replace(spec, norm_adds_one=False)
    assert key_turn.propose(keys_with_a_constant(), plain, Transforms({})).layers != {}


def test_a_bias_is_told_from_outliers() -> None:
    k, q, v = balanced()
    assert key_hadamard.warning(statistics(k, q, v)) is None
    outliers = k * torch.where(torch.arange(16) == 4, 100.0, 1.0)
    assert key_hadamard.warning(statistics(outliers, q, v)) is None
    biased = k + torch.where(torch.arange(16) == 4, 100.0, 0.0)
    assert key_hadamard.biased_layers(statistics(biased, q, v)) == [0, 1, 2]
    assert "K of layer 0, 1, 2 is mostly one constant" in str(key_hadamard.warning(statistics(biased, q, v)))
