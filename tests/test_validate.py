"""Errors of the quantized attention, against an independent float64 computation."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvcal import capture, scales, validate
from kvcal.data import TokenSet
from kvcal.kernels import dispatch, reference
from kvcal.plan import Plan
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set
from tests.test_evaluate import through_e4m3


def prepared(family: str, tokens: TokenSet) -> tuple[Any, Plan, scales.Scales]:
    model = tiny.build_model(family)
    model.config._attn_implementation = "eager"
    resolved = plan_for(model, granularity="per_head")
    return model, resolved, scales.compute(run(model, tokens, granularity="per_head"), resolved)


def row_by_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> np.ndarray:
    """Causal attention of one sample in float64: ``(heads, tokens, head_dim)``."""
    q, k, v = (t[0].double() for t in (q, k, v))
    group = q.shape[0] // k.shape[0]
    out = torch.zeros_like(q)
    for head in range(q.shape[0]):
        for i in range(q.shape[1]):
            weights = (k[head // group, : i + 1] @ q[head, i] * scaling).softmax(0)
            out[head, i] = weights @ v[head // group, : i + 1]
    return out.numpy()


def test_errors_are_those_of_a_float64_computation() -> None:
    tokens = token_set([29, 17])
    model, resolved, found = prepared("llama", tokens)
    measured = validate.validate(model, resolved, found, tokens)
    calls: list[capture.AttentionCall] = []
    with torch.inference_mode(), capture.intercept(model, calls.append):
        for sample in tokens.samples:
            model(torch.tensor([sample]), use_cache=False)
    assert measured.tokens == 46
    for index in range(3):
        noise = signal = 0.0
        for call in (c for c in calls if c.layer == index):
            of = found.layers[index]
            exact = row_by_row(call.query, call.key, call.value, call.scaling)
            rounded = row_by_row(
                call.query, through_e4m3(call.key, of["k"]), through_e4m3(call.value, of["v"]), call.scaling
            )
            noise = noise + ((rounded - exact) ** 2).sum((1, 2))
            signal = signal + (exact**2).sum((1, 2))
        assert measured.layers[index].cache == pytest.approx(np.sqrt(noise / signal), rel=1e-3)


def test_logit_snr_counts_visible_pairs_only() -> None:
    tokens = token_set([23])
    model, resolved, found = prepared("llama", tokens)
    measured = validate.validate(model, resolved, found, tokens)
    cache = DynamicCache()
    calls: list[capture.AttentionCall] = []
    with torch.inference_mode(), capture.intercept(model, calls.append):
        model(torch.tensor(tokens.samples), past_key_values=cache, use_cache=True)
    call = calls[0]
    rounded = through_e4m3(call.key, found.layers[0]["k"]).double()
    for head in range(6):
        exact = (call.query[0, head].double() @ call.key[0, head // 3].double().T).tril()
        error = (call.query[0, head].double() @ rounded[0, head // 3].T).tril() - exact
        wanted = 10 * math.log10(float(exact.square().sum() / error.square().sum()))
        assert measured.layers[0].logit_snr_db[head] == pytest.approx(wanted, abs=1e-2)


def test_quantizing_q_and_p_costs_more_and_scales_too_small_cost_most() -> None:
    tokens = token_set([48])
    model, resolved, found = prepared("llama", tokens)
    right = validate.validate(model, resolved, found, tokens)
    small = scales.Scales({i: {s: t / 64 for s, t in of.items()} for i, of in found.layers.items()})
    wrong = validate.validate(model, resolved, small, tokens)
    for index, layer in right.layers.items():
        assert all(a > c for a, c in zip(layer.attention, layer.cache, strict=True))
        assert min(wrong.layers[index].cache) > 3 * max(layer.cache)
    assert wrong.worst[1] > 0.5 > 0.15 > right.worst[1]


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "granite", "qwen2"])
def test_geometry_of_the_model_is_honoured(family: str) -> None:
    """With full-precision codes impossible, agreement with the model's own attention proves the geometry."""
    model = tiny.build_model(family)
    model.config._attn_implementation = "eager"
    ids = torch.tensor(token_set([40]).samples)
    calls: list[capture.AttentionCall] = []
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
        for layer in model.model.layers
    ]
    with torch.inference_mode(), capture.intercept(model, calls.append):
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for call, own in zip(calls, outputs, strict=True):
        found = reference.attention(
            call.query, call.key, call.value, scaling=call.scaling, window=call.window, softcap=call.softcap
        )
        torch.testing.assert_close(found.transpose(1, 2).flatten(2), own, rtol=1e-4, atol=1e-5)


def test_the_reference_runs_on_a_cpu_and_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.choose(torch.device("cpu")).name == "torch reference"
    monkeypatch.setenv("KVCAL_EAGER", "1")
    assert dispatch.choose(torch.device("cuda")).name == "torch reference"
    monkeypatch.delenv("KVCAL_EAGER")
    chosen = dispatch.choose(torch.device("cuda"))
    assert chosen.name == "triton"
    assert chosen.quantized_attention is not reference.quantized_attention


def test_a_head_whose_k_is_always_zero_has_no_logit_error() -> None:
    tokens = token_set([24])
    model = tiny.build_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[:16] = 0
    resolved = plan_for(model, granularity="per_head")
    found = scales.compute(run(model, tokens, granularity="per_head"), resolved)
    layer = validate.validate(model, resolved, found, tokens).layers[1]
    assert layer.logit_snr_db[:3] == [None] * 3
    assert all(snr is not None and snr > 20 for snr in layer.logit_snr_db[3:])
    assert json.dumps(layer.cache, allow_nan=False)
