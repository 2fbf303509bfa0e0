"""RoPE taken off and put back, with the model's own angles."""

from __future__ import annotations

import pytest
import torch

from kvcal import calibrate, capture, rotary
from kvcal.capture import AttentionCall
from kvcal.errors import ModelError
from tests import tiny
from tests.test_calibrate import token_set
from tests.test_storage import spec_of

IDS = torch.tensor([token_set([37]).samples[0]])


def calls_of(model: torch.nn.Module) -> dict[int, AttentionCall]:
    calls: dict[int, AttentionCall] = {}
    with torch.inference_mode(), capture.intercept(model, lambda c: calls.update({c.layer: c}), rotary=True):
        model(IDS)
    return calls


# Learned positions are added to what layers read.
ROTATING = [family for family in tiny.FAMILIES if family not in ("gpt2", "opt")]


@pytest.mark.parametrize("family", ROTATING)
def test_before_rope_a_key_is_what_the_model_rotates(family: str) -> None:
    """With one token repeated, keys differ by their rotation alone in the first layer."""
    model = tiny.build_model(family)
    calls: dict[int, AttentionCall] = {}
    same = torch.full((1, 21), 65)
    with torch.inference_mode(), capture.intercept(model, lambda c: calls.update({c.layer: c}), rotary=True):
        model(same)
    layer, call = spec_of(model).layers[0], calls[0]
    found = rotary.apply(call.key, layer, call.rotary, inverse=True)
    assert torch.allclose(found, found[:, :, :1].expand_as(found), atol=2e-4 * float(found.abs().max()))
    if layer.rope != "none":
        assert not torch.allclose(call.key, call.key[:, :, :1].expand_as(call.key), atol=1e-3)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_there_and_back_changes_nothing(family: str) -> None:
    model = tiny.build_model(family)
    calls = calls_of(model)
    for layer in spec_of(model).layers:
        call = calls[layer.index]
        back = rotary.apply(rotary.apply(call.key, layer, call.rotary, inverse=True), layer, call.rotary)
        assert torch.allclose(back, call.key, atol=1e-5 * float(call.key.abs().max()))


def test_longer_cosines_are_divided_out() -> None:
    """As YaRN's, which scale the logits through RoPE."""
    layer = spec_of(tiny.build_model()).layers[0]
    angle = torch.rand(1, 9, 8)
    cos, sin = (1.3 * torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    x = torch.randn(1, 2, 9, 16)
    turned = rotary.apply(x, layer, (cos, sin))
    assert torch.allclose(turned.norm(dim=-1), 1.3 * x.norm(dim=-1), rtol=1e-4)
    assert torch.allclose(rotary.apply(turned, layer, (cos, sin), inverse=True), x, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_queries_are_turned_by_a_position_that_they_see(window: int | None) -> None:
    layer = spec_of(tiny.build_model()).layers[0]
    position = torch.arange(50.0)[None, :, None]
    angle = (position * torch.tensor([0.31] + [0.0] * 7)).repeat(1, 1, 2)
    x = torch.zeros(1, 1, 50, 16)
    x[..., 0] = 1.0
    turned = rotary.as_seen_by_keys(x, layer, (angle.cos(), angle.sin()), window)
    found = torch.atan2(-turned[0, 0, :, 8], turned[0, 0, :, 0])
    for query in range(50):
        first = 0 if window is None else max(0, query - window + 1)
        angles = torch.tensor([0.31 * j for j in range(first, query + 1)])
        off = torch.remainder(angles - found[query] + torch.pi, 2 * torch.pi) - torch.pi
        assert float(off.abs().min()) < 1e-4


def test_an_error_before_rope_costs_what_the_moments_of_such_queries_say() -> None:
    """The logit variance of isotropic-free noise, over all visible pairs, within sampling of positions."""
    model = tiny.build_model(num_hidden_layers=1)
    tokens = token_set([200] * 6)
    spec, view = spec_of(model), calibrate.View(before_rope=True)
    layer = spec.layers[0]
    seen = calibrate.views(model, spec.layers, 1, tokens, (view,), collect="distribution")[view].layers[0]
    assert seen["q"].moments is not None
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(16, 16, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, 16)
    covariance = mix @ mix.T
    predicted = (seen["q"].moments[0] * covariance).sum() / (int(seen["q"].tokens) * 3)
    measured, pairs = 0.0, 0
    for sample in tokens.samples:
        calls: dict[int, AttentionCall] = {}
        with (
            torch.inference_mode(),
            capture.intercept(model, lambda c, to=calls: to.update({c.layer: c}), rotary=True),
        ):
            model(torch.tensor([sample]))
        call = calls[0]
        noise = torch.randn(1, 1, 200, 16, generator=generator) @ mix.T.float()
        logits = call.query[:, :3] @ rotary.apply(noise, layer, call.rotary).mT
        per_query = torch.tril(logits.square()).sum(-1) / torch.arange(1, 201)
        measured += float(per_query.sum())
        pairs += per_query.numel()
    assert measured / pairs == pytest.approx(float(predicted), rel=0.1)


def test_angles_that_are_missing_are_not_taken_for_no_angles() -> None:
    layer = spec_of(tiny.build_model()).layers[0]
    with pytest.raises(ModelError, match="called without position_embeddings"):
        rotary.apply(torch.ones(1, 2, 3, 16), layer, None, inverse=True)
