"""Decode-equal evaluation: one prefill pass shows what token-by-token decode over the cache would."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvcal import evaluate, scales
from kvcal.data import TokenSet
from kvcal.errors import ModelError
from kvcal.plan import Plan
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set


class QuantizedCache(DynamicCache):
    """Stores every new token in E4M3 and hands back all of it dequantized; rounding is ml_dtypes'."""

    def __init__(self, found: scales.Scales):
        super().__init__()
        self.found = found

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        of = self.found.layers[layer_idx]
        return super().update(
            through_e4m3(key, of["k"]), through_e4m3(value, of["v"]), layer_idx, *args, **kwargs
        )


def through_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.reshape(-1, 1, 1).numpy()
    codes = np.clip(x.float().numpy() / wide, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(codes.astype(np.float32) * wide).to(x.dtype)


def prepared(family: str, tokens: TokenSet) -> tuple[Any, Plan, scales.Scales]:
    model = tiny.build_model(family)
    model.config._attn_implementation = "eager"
    resolved = plan_for(model, granularity="per_head")
    statistics = run(model, tokens, granularity="per_head")
    found = scales.compute(statistics, resolved)
    # Other than the calibrated ones and small enough to clip: errors must agree there as well.
    distorted = {
        i: {s: t * (0.2 + 0.3 * i + 0.1 * torch.arange(len(t)).reshape(t.shape)) for s, t in sides.items()}
        for i, sides in found.layers.items()
    }
    return model, resolved, scales.Scales(distorted)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral"])
def test_prefill_equals_token_by_token_decode(family: str) -> None:
    tokens = token_set([41])
    model, resolved, found = prepared(family, tokens)
    # In float64 no two roundings fall on different sides of an E4M3 tie, whatever the processor.
    model = model.double()
    ids = torch.tensor(tokens.samples)
    with torch.inference_mode():
        plain = model(ids).logits
        with evaluate.quantized_cache(model, resolved, found, with_query=False):
            prefill = model(ids, use_cache=False).logits
        cache = QuantizedCache(found)
        decode = torch.cat(
            [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(41)], dim=1
        )
    error = (prefill - decode).norm() / decode.norm()
    effect = (prefill - plain).norm() / plain.norm()
    assert effect > 1e-2  # the quantization is there to be seen
    assert error < 1e-6


def test_fidelity_equals_a_float64_evaluation() -> None:
    tokens = token_set([30, 22, 30])
    model, resolved, found = prepared("llama", tokens)
    measured = evaluate.evaluate(model, resolved, found, tokens)
    kl, same, loss, loss_reference = [], [], [], []
    for sample in tokens.samples:
        ids = torch.tensor([sample])
        with torch.inference_mode():
            p = model(ids).logits[0].double().log_softmax(-1)
            with evaluate.quantized_cache(model, resolved, found, with_query=False):
                q = model(ids).logits[0].double().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        rows = torch.arange(len(sample) - 1)
        loss.append(-q[rows, ids[0, 1:]])
        loss_reference.append(-p[rows, ids[0, 1:]])
    cache = measured.cache
    assert cache.tokens == 82
    assert cache.kl_mean == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    assert cache.kl_p99 == pytest.approx(float(torch.cat(kl).quantile(0.99)), rel=1e-4)
    assert cache.top1_agreement == pytest.approx(float(torch.cat(same).double().mean()))
    assert cache.perplexity == pytest.approx(math.exp(float(torch.cat(loss).mean())), rel=1e-5)
    assert cache.perplexity_reference == pytest.approx(
        math.exp(float(torch.cat(loss_reference).mean())), rel=1e-5
    )
    assert measured.attention.kl_mean > cache.kl_mean


def test_padding_does_not_change_fidelity() -> None:
    tokens = token_set([30, 11, 23])
    model, resolved, found = prepared("llama", tokens)
    alone = evaluate.evaluate(model, resolved, found, tokens)
    batched = plan_for(model, granularity="per_head", evaluation={"batch_size": 3})
    together = evaluate.evaluate(model, batched, found, tokens)
    for field in ("kl_mean", "kl_p99", "top1_agreement", "perplexity", "perplexity_reference", "tokens"):
        assert getattr(together.cache, field) == pytest.approx(getattr(alone.cache, field), rel=1e-3)


def test_exact_scales_cost_nothing_when_values_are_on_the_grid() -> None:
    """With K, V zero but for sign bits E4M3 holds, nothing is lost: the metric must be 0, not small."""
    tokens = token_set([20])
    model, resolved, found = prepared("llama", tokens)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.k_proj.weight.zero_()
    measured = evaluate.evaluate(model, resolved, found, tokens).cache
    assert measured.kl_mean == pytest.approx(0, abs=1e-12)
    assert measured.top1_agreement == 1.0
    assert measured.perplexity == measured.perplexity_reference


def test_non_finite_logits_are_an_error() -> None:
    tokens = token_set([20])
    model, resolved, found = prepared("llama", tokens)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="logits hold NaN"):
        evaluate.evaluate(model, resolved, found, tokens)
