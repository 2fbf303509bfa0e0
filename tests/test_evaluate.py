"""Decode-equal evaluation: one prefill pass shows what token-by-token decode over the cache would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvcal import evaluate, formats, scales
from kvcal.cache import QuantizedCache
from kvcal.data import TokenSet
from kvcal.engines import VLLM
from kvcal.errors import ModelError
from kvcal.evaluate import Variant
from kvcal.formats import FP8_E4M3, FP8_PER_TOKEN_HEAD, INT4_PER_TOKEN_HEAD, INT8_PER_TOKEN_HEAD, KVFormat
from kvcal.plan import Plan
from kvcal.transforms.record import LayerTransform, Transforms
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set
from tests.test_online import rotation

Array = np.ndarray[Any, Any]
Rounding = Callable[[int, str, torch.Tensor], torch.Tensor]  # layer, side, K or V

DYNAMIC = [f for f in formats.FORMATS if f.dynamic]
every_dynamic_format = pytest.mark.parametrize("fmt", DYNAMIC, ids=lambda f: f.name)
SERVED = [f for f in formats.FORMATS if f.name in VLLM.cache_dtype]
every_format = pytest.mark.parametrize("fmt", SERVED, ids=lambda f: f.name)


class RoundedCache(DynamicCache):
    """Stores every new token rounded and hands back all of it."""

    def __init__(self, rounding: Rounding):
        super().__init__()
        self.rounding = rounding

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        rounded = (self.rounding(layer_idx, side, x) for side, x in (("k", key), ("v", value)))
        return super().update(*rounded, layer_idx, *args, **kwargs)


def through_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 with static scales; rounding is ml_dtypes'."""
    wide = scale.reshape(-1, 1, 1).numpy()
    codes = np.clip(x.float().numpy() / wide, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(codes.astype(np.float32) * wide).to(x.dtype)


def through_online(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """The formulas of the dynamic formats once more, in float64 and without torch."""
    values: Array = x.double().numpy()
    given_back = {
        INT8_PER_TOKEN_HEAD: _through_int8,
        FP8_PER_TOKEN_HEAD: _through_scaled_e4m3,
        INT4_PER_TOKEN_HEAD: _through_int4,
    }[fmt](values)
    return torch.from_numpy(given_back).to(x.dtype)


def _step(extent: Array, steps: int) -> Array:
    return np.maximum(extent / steps, 1e-6)


def _through_int8(x: Array) -> Array:
    step = _step(np.abs(x).max(-1, keepdims=True), 127)
    return np.sign(x) * np.floor(np.abs(x) / step + 0.5) * step


def _through_scaled_e4m3(x: Array) -> Array:
    step = _step(np.abs(x).max(-1, keepdims=True), 448)
    return np.clip(x / step, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * step


def _through_int4(x: Array) -> Array:
    matrix = rotation(x.shape[-1])
    rotated = x @ matrix
    low, high = rotated.min(-1, keepdims=True), rotated.max(-1, keepdims=True)
    step = _step(high - low, 15)
    zero_point = np.clip(np.floor(-low / step + 0.5), 0, 15)
    codes = np.clip(np.floor(rotated / step + zero_point + 0.5), 0, 15)
    # The last four bits of the step are where the zero point lies.
    read = (step.astype(np.float32).view(np.int32) & -16).view(np.float32).astype(np.float64)
    order = float(matrix[:, 0] @ matrix[:, 0])
    return (codes - zero_point) * read @ matrix.T / order


def prepared(
    family: str, tokens: TokenSet, fmt: KVFormat = FP8_E4M3
) -> tuple[Any, Plan, QuantizedCache, Rounding]:
    """A model, its cache, and what an independent computation makes of K and V."""
    if fmt.dynamic:
        model = tiny.build_model(family, head_dim=32)
        model.config._attn_implementation = "eager"
        resolved = plan_for(model, format=fmt.name)
        return model, resolved, QuantizedCache(fmt), lambda layer, side, x: through_online(x, fmt)
    model = tiny.build_model(family)
    model.config._attn_implementation = "eager"
    resolved = plan_for(model, granularity="per_head")
    statistics = run(model, tokens, granularity="per_head")
    found = scales.compute(statistics, resolved)
    # Other than the calibrated ones and small enough to clip: errors must agree there as well.
    distorted: dict[int, Any] = {
        i: {s: t * (0.2 + 0.3 * i + 0.1 * torch.arange(len(t)).reshape(t.shape)) for s, t in sides.items()}
        for i, sides in found.layers.items()
    }
    cache = QuantizedCache(fmt, scales.Scales(distorted))
    return model, resolved, cache, lambda layer, side, x: through_e4m3(x, distorted[layer][side])


FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral"]


@pytest.mark.parametrize(
    ("family", "fmt"),
    [(family, FP8_E4M3) for family in FAMILIES]
    + [(family, fmt) for family in ("llama", "gemma3_text") for fmt in DYNAMIC],
    ids=lambda value: getattr(value, "name", value),
)
def test_prefill_equals_token_by_token_decode(family: str, fmt: KVFormat) -> None:
    tokens = token_set([41])
    model, _, cache, rounding = prepared(family, tokens, fmt)
    # In float64 no two roundings fall on different sides of a tie, whatever the processor.
    model = model.double()
    ids = torch.tensor(tokens.samples)
    with torch.inference_mode():
        plain = model(ids).logits
        with evaluate.through(model, cache):
            prefill = model(ids, use_cache=False).logits
        held = RoundedCache(rounding)
        decode = torch.cat(
            [model(ids[:, i : i + 1], past_key_values=held, use_cache=True).logits for i in range(41)], dim=1
        )
    error = (prefill - decode).norm() / decode.norm()
    effect = (prefill - plain).norm() / plain.norm()
    assert effect > (1e-3 if fmt is INT8_PER_TOKEN_HEAD else 1e-2)  # the quantization is there to be seen
    # A last bit of INT4's step may carry into those that hold the zero point: 16 of float32's, not a code.
    assert error < (1e-5 if fmt.rotated else 1e-6)


@every_format
def test_fidelity_equals_a_float64_evaluation(fmt: KVFormat) -> None:
    tokens = token_set([30, 22, 30])
    model, resolved, cache, rounding = prepared("llama", tokens, fmt)
    model = model.double()
    measured = evaluate.evaluate(model, resolved, cache, tokens)
    kl, same, loss, loss_reference = [], [], [], []
    for sample in tokens.samples:
        ids = torch.tensor([sample])
        with torch.inference_mode():
            p = model(ids).logits[0].log_softmax(-1)
            q = model(ids, past_key_values=RoundedCache(rounding), use_cache=True).logits[0].log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        rows = torch.arange(len(sample) - 1)
        loss.append(-q[rows, ids[0, 1:]])
        loss_reference.append(-p[rows, ids[0, 1:]])
    found = measured.cache
    assert found.tokens == 82
    assert found.kl_mean > 1e-6
    assert found.kl_mean == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4, abs=1e-7)
    assert found.kl_p99 == pytest.approx(float(torch.cat(kl).quantile(0.99)), rel=1e-4, abs=1e-7)
    assert found.top1_agreement == pytest.approx(float(torch.cat(same).double().mean()))
    assert found.perplexity == pytest.approx(math.exp(float(torch.cat(loss).mean())), rel=1e-5)
    assert found.perplexity_reference == pytest.approx(
        math.exp(float(torch.cat(loss_reference).mean())), rel=1e-5
    )
    if fmt.dynamic:
        assert measured.attention is None  # no kernel computes attention in it
    else:
        assert measured.attention is not None
        assert measured.attention.kl_mean > found.kl_mean


FIELDS = ("kl_mean", "kl_p99", "top1_agreement", "perplexity", "perplexity_reference", "tokens")


@every_format
def test_padding_does_not_change_fidelity(fmt: KVFormat) -> None:
    tokens = token_set([30, 11, 23])
    model, resolved, cache, _ = prepared("llama", tokens, fmt)
    alone = evaluate.evaluate(model, resolved, cache, tokens)
    batched = plan_for(model, format=fmt.name, evaluation={"batch_size": 3})
    together = evaluate.evaluate(model, batched, cache, tokens)
    for field in FIELDS:
        assert getattr(together.cache, field) == pytest.approx(getattr(alone.cache, field), rel=1e-3)


@every_format
def test_exact_scales_cost_nothing_when_values_are_on_the_grid(fmt: KVFormat) -> None:
    """With K, V zero but for sign bits every format holds, nothing is lost: the metric is 0, not small."""
    tokens = token_set([20])
    model, resolved, cache, _ = prepared("llama", tokens, fmt)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.k_proj.weight.zero_()
    measured = evaluate.evaluate(model, resolved, cache, tokens).cache
    assert measured.kl_mean == pytest.approx(0, abs=1e-12)
    assert measured.top1_agreement == 1.0
    assert measured.perplexity == measured.perplexity_reference


def test_non_finite_logits_are_an_error() -> None:
    tokens = token_set([20])
    model, resolved, cache, _ = prepared("llama", tokens)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="logits hold NaN"):
        evaluate.evaluate(model, resolved, cache, tokens)


# Several at once


def test_fewer_bits_cost_more_and_each_format_is_judged_as_if_alone() -> None:
    tokens = token_set([30, 22])
    model, _, _, _ = prepared("llama", tokens, INT8_PER_TOKEN_HEAD)
    variants = {fmt.name: Variant(QuantizedCache(fmt)) for fmt in DYNAMIC} | {"none": Variant(None)}
    told: list[float] = []
    found = evaluate.fidelities(model, variants, 2, tokens, on_tokens=told.append)
    assert len(told) == 1 + len(variants)
    assert sum(told) == pytest.approx(52)
    assert list(found) == list(variants)
    kl = {name: fidelity.kl_mean for name, fidelity in found.items()}
    assert kl["none"] == pytest.approx(0, abs=1e-12)
    assert found["none"].perplexity == found["none"].perplexity_reference
    assert 0 < kl["int8_per_token_head"] < kl["fp8_per_token_head"] < kl["int4_per_token_head"]
    for fmt in DYNAMIC:
        (alone,) = evaluate.fidelities(model, {0: Variant(QuantizedCache(fmt))}, 2, tokens).values()
        assert found[fmt.name] == alone


def test_weights_of_a_variant_are_in_place_for_it_alone() -> None:
    tokens = token_set([30, 22])
    model, _, _, _ = prepared("llama", tokens, INT8_PER_TOKEN_HEAD)
    weight, entered = model.model.layers[1].self_attn.o_proj.weight, []

    @contextmanager
    def doubled() -> Iterator[None]:
        entered.append(True)
        weight.data.mul_(2)
        try:
            yield
        finally:
            weight.data.div_(2)

    cache = QuantizedCache(INT8_PER_TOKEN_HEAD)
    both = {"own": (cache, no_change), "doubled": (cache, doubled)}
    found = evaluate.evaluations(model, both, 1, tokens)
    assert len(entered) == len(tokens.samples)
    assert found["doubled"].cache.kl_mean > 10 * found["own"].cache.kl_mean
    assert found["doubled"].cache.perplexity_reference == found["own"].cache.perplexity_reference
    assert found["own"] == evaluate.evaluations(model, {"own": (cache, no_change)}, 1, tokens)["own"]


@contextmanager
def no_change() -> Iterator[None]:
    yield


# What attention gets back


def attended(fmt: KVFormat) -> tuple[QuantizedCache, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, 7, 32, generator=generator).bfloat16() for heads in (6, 2, 2))
    of = {side: torch.rand(h, 1, 1, generator=generator) / 64 for side, h in (("k", 2), ("v", 2), ("q", 6))}
    static = None if fmt.dynamic else scales.Scales({3: of})  # type: ignore[dict-item]
    return QuantizedCache(fmt, static), (q, k, v)


@every_format
def test_k_and_v_come_back_rounded_and_q_as_it_was(fmt: KVFormat) -> None:
    cache, (q, k, v) = attended(fmt)
    found_q, found_k, found_v = cache.give_back(3, q, k, v)
    assert found_q is q
    for found, side, x in ((found_k, "k", k), (found_v, "v", v)):
        assert (found.dtype, found.shape) == (x.dtype, x.shape)
        assert not torch.equal(found, x)
        if fmt.dynamic:
            # BF16 and a rotation that is rounded to it: a code may be the next one.
            expected = through_online(x, fmt)
            assert (found - expected).norm() < 0.02 * x.norm()
        else:
            assert cache.scales is not None
            assert torch.equal(found, through_e4m3(x, cache.scales.layers[3][side]))  # type: ignore[index]


def test_q_is_rounded_with_its_own_scale_where_kernels_do() -> None:
    cache, (q, k, v) = attended(FP8_E4M3)
    found_q, found_k, found_v = cache.give_back(3, q, k, v, with_query=True)
    assert cache.scales is not None
    assert torch.equal(found_q, through_e4m3(q, cache.scales.layers[3]["q"]))
    _, same_k, same_v = cache.give_back(3, q, k, v)
    assert torch.equal(found_k, same_k)
    assert torch.equal(found_v, same_v)


@every_format
def test_transforms_are_done_before_the_cache_and_undone_behind_it(fmt: KVFormat) -> None:
    plain, (q, k, v) = attended(fmt)
    k_scale = torch.full((2, 32), 4.0, dtype=torch.float64)
    v_map = 0.5 * torch.eye(32, dtype=torch.float64).expand(2, -1, -1)
    transforms = Transforms({3: LayerTransform(key_scale=k_scale, value_map=v_map)})
    cache = QuantizedCache(fmt, plain.scales, transforms)
    found_q, found_k, found_v = cache.give_back(3, q, k, v)
    assert found_q is q
    _, scaled_k, scaled_v = plain.give_back(3, q, k / 4, v / 2)
    assert torch.equal(found_k, scaled_k * 4)
    assert torch.equal(found_v, scaled_v * 2)
    assert not cache.give_back(3, q, k, v, with_query=not fmt.dynamic)[0].isnan().any()
    # a layer without a transform
    elsewhere = QuantizedCache(fmt, plain.scales, Transforms({2: transforms.layers[3]}))
    assert all(
        torch.equal(a, b)
        for a, b in zip(elsewhere.give_back(3, q, k, v), plain.give_back(3, q, k, v), strict=True)
    )


@every_format
def test_a_cache_on_a_device_is_the_same_cache(fmt: KVFormat) -> None:
    plain, _ = attended(fmt)
    cache = QuantizedCache(fmt, plain.scales, Transforms({}))
    moved = cache.to(torch.device("meta"))
    assert (moved.format, moved.transforms) == (fmt, cache.transforms)
    assert (moved.scales is None) == fmt.dynamic
    if moved.scales is not None:
        assert {t.device.type for t in moved.scales.layers[3].values()} == {"meta"}
