"""Errors of the quantized attention, against an independent float64 computation."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvcal import capture, formats, report, scales, validate
from kvcal.cache import QuantizedCache
from kvcal.data import TokenSet
from kvcal.formats import FP8_E4M3, KVFormat
from kvcal.kernels import dispatch, reference
from kvcal.recipe import Side
from kvcal.transforms.record import LayerTransform, Transforms
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set
from tests.test_evaluate import DYNAMIC, every_dynamic_format, every_format, through_e4m3, through_online


def prepared(
    family: str, tokens: TokenSet, fmt: KVFormat = FP8_E4M3, head_dim: int | None = None
) -> tuple[Any, QuantizedCache, scales.Scales | None]:
    wanted = head_dim or (32 if fmt.dynamic else None)
    model = tiny.build_model(family, **({"head_dim": wanted} if wanted else {}))
    model.config._attn_implementation = "eager"
    if fmt.dynamic:
        return model, QuantizedCache(fmt), None
    resolved = plan_for(model, granularity="per_head")
    found = scales.compute(run(model, tokens, granularity="per_head"), resolved)
    return model, QuantizedCache(fmt, found), found


def rounded(x: torch.Tensor, layer: int, side: Side, cache: QuantizedCache) -> torch.Tensor:
    """What the cache gives back, computed independently of it."""
    if cache.scales is None:
        return through_online(x, cache.format)
    return through_e4m3(x, cache.scales.layers[layer][side])


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


@pytest.mark.parametrize("head_dim", [32, 64], ids=["without pages", "in pages"])
@every_format
def test_errors_are_those_of_a_float64_computation(fmt: KVFormat, head_dim: int) -> None:
    tokens = token_set([29, 17])
    model, cache, _ = prepared("llama", tokens, fmt, head_dim)
    measured = validate.validate(model, cache, tokens)
    calls: list[capture.AttentionCall] = []
    with torch.inference_mode(), capture.intercept(model, calls.append):
        for sample in tokens.samples:
            model(torch.tensor([sample]), use_cache=False)
    assert measured.tokens == 46
    for index in range(3):
        noise = signal = 0.0
        for call in (c for c in calls if c.layer == index):
            exact = row_by_row(call.query, call.key, call.value, call.scaling)
            k, v = rounded(call.key, index, "k", cache), rounded(call.value, index, "v", cache)
            found = row_by_row(call.query, k, v, call.scaling)
            noise = noise + ((found - exact) ** 2).sum((1, 2))
            signal = signal + (exact**2).sum((1, 2))
        assert measured.layers[index].cache == pytest.approx(np.sqrt(noise / signal), rel=1e-3)


@every_format
def test_logit_snr_counts_visible_pairs_only(fmt: KVFormat) -> None:
    tokens = token_set([23])
    model, cache, _ = prepared("llama", tokens, fmt)
    measured = validate.validate(model, cache, tokens)
    calls: list[capture.AttentionCall] = []
    with torch.inference_mode(), capture.intercept(model, calls.append):
        model(torch.tensor(tokens.samples), past_key_values=DynamicCache(), use_cache=True)
    call = calls[0]
    k_hat = rounded(call.key, 0, "k", cache).double()
    for head in range(6):
        exact = (call.query[0, head].double() @ call.key[0, head // 3].double().T).tril()
        error = (call.query[0, head].double() @ k_hat[0, head // 3].T).tril() - exact
        wanted = 10 * math.log10(float(exact.square().sum() / error.square().sum()))
        assert measured.layers[0].logit_snr_db[head] == pytest.approx(wanted, abs=1e-2)


@every_dynamic_format
def test_no_kernel_computes_attention_in_a_format_that_the_engine_scales(fmt: KVFormat) -> None:
    tokens = token_set([23])
    model, cache, _ = prepared("llama", tokens, fmt)
    measured = validate.validate(model, cache, tokens)
    assert [layer.attention for layer in measured.layers.values()] == [None] * 3
    assert measured.implementation == "torch reference"
    assert all(0 < error < 0.3 for layer in measured.layers.values() for error in layer.cache)
    each = [error for layer in measured.layers.values() for error in layer.cache]
    assert measured.mean == pytest.approx(sum(each) / len(each))
    assert measured.worst[1] == max(each)
    assert json.dumps(report.validation_document(measured), allow_nan=False)


def test_fewer_bits_cost_more() -> None:
    tokens = token_set([40])
    model, _, _ = prepared("llama", tokens, formats.INT8_PER_TOKEN_HEAD)
    each = {f.name: validate.validate(model, QuantizedCache(f), tokens).mean for f in DYNAMIC}
    assert each["int8_per_token_head"] < each["fp8_per_token_head"] < each["int4_per_token_head"]


def test_quantizing_q_and_p_costs_more_and_scales_too_small_cost_most() -> None:
    tokens = token_set([48])
    model, cache, found = prepared("llama", tokens)
    assert found is not None
    right = validate.validate(model, cache, tokens)
    small = scales.Scales({i: {s: t / 64 for s, t in of.items()} for i, of in found.layers.items()})
    wrong = validate.validate(model, QuantizedCache(FP8_E4M3, small), tokens)
    for index, layer in right.layers.items():
        assert layer.attention is not None
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
    layer = validate.validate(model, QuantizedCache(FP8_E4M3, found), tokens).layers[1]
    assert layer.logit_snr_db[:3] == [None] * 3
    assert all(snr is not None and snr > 20 for snr in layer.logit_snr_db[3:])
    assert json.dumps(layer.cache, allow_nan=False)


@every_dynamic_format
def test_a_dead_head_has_no_error_in_a_dynamic_format_either(fmt: KVFormat) -> None:
    tokens = token_set([24])
    model, cache, _ = prepared("llama", tokens, fmt)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[:32] = 0
        model.model.layers[1].self_attn.v_proj.weight[:32] = 0
    layer = validate.validate(model, cache, tokens).layers[1]
    assert layer.logit_snr_db[:3] == [None] * 3
    assert layer.cache[:3] == [0.0] * 3
    assert all(snr is not None and snr > 15 for snr in layer.logit_snr_db[3:])
    assert all(error > 0 for error in layer.cache[3:])


def test_transforms_before_the_cache_are_undone_behind_it() -> None:
    """Powers of two change no relative error of FP8 within range; errors are in the model's own basis."""
    tokens = token_set([24])
    model, cache, _ = prepared("llama", tokens, formats.FP8_PER_TOKEN_HEAD)
    plain = validate.validate(model, cache, tokens)
    halves = Transforms(
        {
            layer: LayerTransform(
                key_scale=torch.full((2, 32), 2.0, dtype=torch.float64),
                value_map=torch.eye(32, dtype=torch.float64).expand(2, -1, -1) / 2,
            )
            for layer in range(3)
        }
    )
    transformed = validate.validate(model, QuantizedCache(cache.format, None, halves), tokens)
    for index, layer in plain.layers.items():
        assert transformed.layers[index].cache == pytest.approx(layer.cache, rel=1e-6)
        assert transformed.layers[index].logit_snr_db == pytest.approx(layer.logit_snr_db, rel=1e-6)
