"""Capture sees what the cache stores, changes nothing unless asked, and leaves no trace."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcal import capture
from tests import tiny

IDS = torch.arange(2 * 37).reshape(2, 37) % 250


def load(family: str) -> torch.nn.Module:
    return tiny.build_model(family)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sees_the_tensors_that_the_cache_stores(family: str) -> None:
    model = load(family)
    seen: dict[int, capture.AttentionCall] = {}
    with torch.inference_mode(), capture.intercept(model, lambda call: seen.update({call.layer: call})):
        model(IDS)
    # Without a config it keeps every token of sliding layers too, but knows no other layers than attention.
    cache = DynamicCache(config=model.config) if family == "qwen3_next" else DynamicCache()
    with torch.inference_mode():
        model(IDS, past_key_values=cache, use_cache=True)
    others = [
        i for i, kind in enumerate(getattr(model.config, "layer_types", None) or ()) if "linear" in kind
    ]
    assert sorted([*seen, *others]) == list(range(model.config.num_hidden_layers))
    for index, call in seen.items():
        assert torch.equal(call.key, cache.layers[index].keys)
        assert torch.equal(call.value, cache.layers[index].values)
        assert call.query.shape == (2, model.config.num_attention_heads, 37, 16)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_observing_keeps_logits_bit_for_bit(family: str) -> None:
    model = load(family)
    with torch.inference_mode():
        plain = model(IDS).logits
        with capture.intercept(model, lambda call: None):
            observed = model(IDS).logits
        after = model(IDS).logits
    assert torch.equal(plain, observed)
    assert torch.equal(plain, after)


def test_replacing_reaches_the_logits_and_only_inside() -> None:
    model = load("llama")
    with torch.inference_mode():
        plain = model(IDS).logits
        with capture.intercept(model, lambda call: (call.query, call.key, call.value * 1.5)):
            replaced = model(IDS).logits
        assert not torch.equal(plain, replaced)
        assert torch.equal(plain, model(IDS).logits)


def traces(model: torch.nn.Module) -> tuple[object, ...]:
    return (
        model.config.to_dict(),
        dict(vars(model.config)),
        sorted(ALL_ATTENTION_FUNCTIONS.keys()),
        sorted(ALL_MASK_ATTENTION_FUNCTIONS.keys()),
        [
            (name, type(m), len(m._forward_hooks), len(m._forward_pre_hooks))
            for name, m in model.named_modules()
        ],
    )


class Planted(Exception):
    pass


@pytest.mark.parametrize("raises", [False, True], ids=["normal", "after an exception"])
def test_leaves_no_trace(raises: bool) -> None:
    model = load("llama")
    before = traces(model)

    def see(call: capture.AttentionCall) -> None:
        if raises and call.layer == 1:
            raise Planted

    try:
        with capture.intercept(model, see):
            model(IDS)
    except Planted:
        assert raises
    assert traces(model) == before


def test_contexts_nest_outer_sees_what_inner_put_in() -> None:
    model = load("llama")
    outer: list[torch.Tensor] = []
    inner: list[torch.Tensor] = []

    def double(call: capture.AttentionCall) -> capture.Tensors:
        inner.append(call.value)
        return call.query, call.key, call.value * 2

    with (
        torch.inference_mode(),
        capture.intercept(model, lambda call: outer.append(call.value)),
        capture.intercept(model, double),
    ):
        model(IDS)
    assert torch.equal(outer[0], inner[0] * 2)


def test_geometry_of_a_softcapped_sliding_model_is_handed_over() -> None:
    model = load("gemma2")
    calls: list[capture.AttentionCall] = []
    with torch.inference_mode(), capture.intercept(model, calls.append):
        model(IDS)
    assert [call.window for call in calls] == [24, None, 24]
    assert {call.softcap for call in calls} == {5.0}
    assert calls[0].scaling == pytest.approx(0.25)
