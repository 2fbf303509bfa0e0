"""Models that cache a latent and a rotary key (MLA), against transformers' own cache and float64."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from kvcal import arch, capture, engines, evaluate, folding, formats, plan, recipe, scales, trial, validate
from kvcal import scheme as schemes
from kvcal.cache import QuantizedCache
from kvcal.errors import ModelError, PlanRefused, RecipeError
from kvcal.evaluate import Variant
from kvcal.export import kernel
from kvcal.formats import FP8_E4M3, FP8_LATENT_BF16_ROPE, KVFormat
from kvcal.transforms import latent_scale, proof
from kvcal.transforms.record import LayerTransform, Transforms
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set
from tests.test_evaluate import RoundedCache, through_e4m3
from tests.transforms.drawn import spec_of

RANK, ROTARY, KEY, VALUE, HEADS = 40, 8, 20, 12, 6

every_family = pytest.mark.parametrize("family", tiny.LATENT_FAMILIES)
every_format = pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_LATENT_BF16_ROPE], ids=lambda f: f.name)

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "dtype": "bfloat16",
}


def built(family: str, **changes: Any) -> Any:
    model = tiny.build_model(family, **changes)
    model.config._attn_implementation = "eager"
    return model


def calls_of(model: Any, ids: torch.Tensor, **kwargs: Any) -> dict[int, capture.AttentionCall]:
    calls: dict[int, capture.AttentionCall] = {}
    with capture.intercept(model, lambda call: calls.update({call.layer: call})), torch.inference_mode():
        model(ids, **kwargs)
    return calls


# What is cached


def test_deepseek_v3_caches_576_elements_in_each_of_61_layers() -> None:
    model = arch.read(DEEPSEEK_V3)
    assert model.cached_elements_per_token == (512 + 64) * 61
    wide = plan.resolve(recipe.parse({}, "test"), model)
    assert wide.bytes_per_token_reference == 2 * 576 * 61
    assert wide.bytes_per_token_quantized == 576 * 61
    mixed = plan.resolve(recipe.parse({"format": "fp8_latent_bf16_rope", "engine": "kernel"}, "test"), model)
    assert mixed.bytes_per_token_quantized == pytest.approx((512 + 2 * 64) * 61)
    assert mixed.bits_per_element == pytest.approx((512 * 8 + 64 * 16) / 576, rel=1e-5)
    assert plan.bits_over(model.layers, FP8_LATENT_BF16_ROPE, range(61)) == 16


def test_small_models_project_to_q_in_one_step() -> None:
    small, large = (arch.read(DEEPSEEK_V3 | {"q_lora_rank": rank}).latent for rank in (None, 1536))
    assert small is not None
    assert large is not None
    assert (small.query, large.query) == ("q_proj", "q_b_proj")


@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_lora_rank", None), ("qk_rope_head_dim", 7), ("v_head_dim", -1), ("v_head_dim", True)],
)
def test_sizes_that_cannot_be_meant_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ModelError, match=field):
        arch.read(DEEPSEEK_V3 | {field: value})


@every_family
@pytest.mark.parametrize("q_lora_rank", [None, 56])
def test_spec_is_what_the_real_model_has(family: str, q_lora_rank: int | None) -> None:
    model = built(family, q_lora_rank=q_lora_rank)
    spec = spec_of(model)
    calls = calls_of(model, torch.arange(9)[None])
    modules = dict(model.named_modules())
    assert sorted(calls) == [0, 1, 2]
    for layer in spec.layers:
        call, of = calls[layer.index], layer.latent
        assert of is not None
        for side, x in (("k", call.key), ("v", call.value), ("q", call.query)):
            assert x.shape == (1, layer.heads_of(side), 9, layer.size_of(side))
        assert spec.cached_elements_per_token == 3 * (call.key.numel() + call.value.numel()) / 9
        sizes = {
            of.query: HEADS * (of.key + of.rotary),
            of.down: of.rank + of.rotary,
            of.up: HEADS * (of.key + of.value),
        }
        for path, rows in sizes.items():
            assert modules[f"{layer.module}.{path}"].weight.shape[0] == rows
        assert modules[f"{layer.module}.{of.norm}"].weight.shape == (of.rank,)


@every_family
def test_rotary_channels_are_the_last_and_tied_as_the_cached_key_has_them(family: str) -> None:
    """A rotation keeps the length of each pair that it turns, at every position."""
    model = built(family)
    ids = torch.full((1, 12), 7)  # the first layer's keys then differ by their positions alone
    key = calls_of(model, ids)[0].value[0, 0].double()
    ties = spec_of(model).layers[0].channel_ties
    assert len(ties) == RANK + ROTARY
    assert sorted(ties[:RANK]) == list(range(ROTARY // 2, ROTARY // 2 + RANK))
    for pair in range(ROTARY // 2):
        a, b = (channel for channel, tie in enumerate(ties[RANK:]) if tie == pair)
        length = key[:, a] ** 2 + key[:, b] ** 2
        torch.testing.assert_close(length, length[:1].expand(12), rtol=1e-5, atol=1e-9)
        assert (key[:, a] - key[:1, a]).abs().max() > 1e-3


# Capture


@every_family
def test_capture_sees_what_transformers_caches_and_leaves_no_trace(family: str) -> None:
    model, ids = built(family), torch.tensor(token_set([19]).samples)
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        cache = DynamicCache()
        model(ids, past_key_values=cache, use_cache=True)
    calls = calls_of(model, ids, use_cache=False)
    again = calls_of(model, ids, past_key_values=DynamicCache(), use_cache=True)
    for index, layer in enumerate(cache.layers):
        for found in (calls[index], again[index]):
            assert torch.equal(found.key, layer.keys)
            assert torch.equal(found.value, layer.values)
    assert not [m for m in model.modules() if m._forward_pre_hooks]
    with torch.inference_mode():
        assert torch.equal(model(ids, use_cache=False).logits, before)
        with capture.intercept(model, lambda call: (call.query, call.key, call.value)):
            assert torch.equal(model(ids, use_cache=False).logits, before)


@every_family
def test_absorbed_queries_give_the_logits_of_the_expanded_keys(family: str) -> None:
    # Without experts, whose kernels take no float64.
    model, ids = built(family, first_k_dense_replace=3).double(), torch.tensor(token_set([19]).samples)
    expanded: dict[int, tuple[torch.Tensor, ...]] = {}

    def see(call: capture.AttentionCall) -> None:
        absorbed = call.query @ torch.cat([call.key, call.value], -1).mT
        q, k, v = call.attended()
        expanded[call.layer] = absorbed, q @ k.mT, v, call.expansion.values(call.key)  # type: ignore[union-attr]

    with capture.intercept(model, see), torch.inference_mode():
        model(ids, use_cache=False)
    for absorbed, logits, v, from_latent in expanded.values():
        assert logits.shape == (1, HEADS, 19, 19)
        torch.testing.assert_close(absorbed, logits, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(from_latent.expand_as(v), v, rtol=1e-6, atol=1e-6)


def test_a_model_whose_code_expands_before_it_caches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("deepseek_v3")
    monkeypatch.delattr(type(model.model.layers[0].self_attn), "expand_kv")
    with pytest.raises(ModelError, match="layer 0: DeepseekV3Attention of this transformers caches K and V"):
        calls_of(model, torch.arange(5)[None])


# Scales


def planted(family: str, latent: float, rotary: float) -> Any:
    """The same model with another range of what it caches: no K, V or Q of any head changes."""
    model = built(family)
    with torch.no_grad():
        for layer in model.model.layers:
            block = layer.self_attn
            block.kv_a_layernorm.weight.mul_(latent)
            block.kv_b_proj.weight.div_(latent)
            block.kv_a_proj_with_mqa.weight[RANK:].mul_(rotary)
            block.q_b_proj.weight.view(HEADS, KEY + ROTARY, -1)[:, KEY:].div_(rotary)
    return model


@pytest.mark.parametrize(("latent", "rotary"), [(64.0, 1.0), (1.0, 64.0)])
def test_one_scale_covers_latent_and_rotary_key(latent: float, rotary: float) -> None:
    model, tokens = planted("deepseek_v3", latent, rotary), token_set([40, 23])
    shared, alone = (
        scales.compute(run(model, tokens, **fields), plan_for(model, **fields))
        for fields in ({"engine": "kernel"}, {"engine": "kernel", "format": "fp8_latent_bf16_rope"})
    )
    cached: dict[int, list[torch.Tensor]] = {}
    for sample in tokens.samples:
        for index, call in calls_of(model, torch.tensor([sample])).items():
            cached.setdefault(index, []).append(torch.stack([call.key.abs().max(), call.value.abs().max()]))
    for index, parts in cached.items():
        of_latent, of_rotary = (torch.stack(parts).amax(0) / 448).tolist()
        assert not 0.1 < of_latent / of_rotary < 10
        for side in ("k", "v"):
            assert float(shared.layers[index][side]) == pytest.approx(max(of_latent, of_rotary))  # type: ignore[index]
        assert float(alone.layers[index]["k"]) == pytest.approx(of_latent)
        assert float(alone.layers[index]["v"]) == 1.0


# Decode-equal evaluation


def cache_for(model: Any, fmt: KVFormat) -> QuantizedCache:
    """Scales of latent, rotary key and Q that differ by layer and part, some small enough to clip."""
    found = scales.compute(run(model, token_set([41])), plan_for(model, engine="kernel"))
    distorted: dict[int, Any] = {
        i: {side: t * (0.3 + 0.3 * i + 0.2 * j) for j, (side, t) in enumerate(sides.items())}
        for i, sides in found.layers.items()
    }
    return QuantizedCache(fmt, scales.Scales(distorted))


def as_stored(cache: QuantizedCache, layer: int, side: str, x: torch.Tensor) -> torch.Tensor:
    """What a plain cast leaves of a latent (k) or rotary key (v)."""
    assert cache.scales is not None
    if cache.format.latent_only and side == "v":
        return x.to(torch.bfloat16).to(x.dtype)
    scale = float(cache.scales.layers[layer][side])  # type: ignore[index]
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


@every_family
@every_format
def test_prefill_equals_token_by_token_decode(family: str, fmt: KVFormat) -> None:
    model, ids = built(family), torch.tensor(token_set([41], seed=3).samples)
    cache = cache_for(model, fmt)
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
        with evaluate.through(model, cache):
            found = model(ids, use_cache=False).logits
        stored = RoundedCache(lambda layer, side, x: as_stored(cache, layer, side, x))
        rows = [model(ids[:, i : i + 1], past_key_values=stored, use_cache=True).logits for i in range(41)]
    decoded = torch.cat(rows, 1)
    assert float((decoded - plain).norm()) > 100 * float((found - decoded).norm())
    torch.testing.assert_close(found, decoded, rtol=1e-4, atol=1e-4)


@every_family
def test_long_samples_in_chunks_are_the_same(family: str) -> None:
    """Over transformers' own cache, which then holds the latents of earlier chunks."""
    model, tokens = built(family), token_set([45, 30], seed=5)
    chunked = dataclasses.replace(tokens, chunk=16)
    whole, parts = run(model, tokens, engine="kernel"), run(model, chunked, engine="kernel")
    for index, sides in whole.layers.items():
        for side, seen in sides.items():
            assert int(seen.tokens) == int(parts.layers[index][side].tokens) == 75
            torch.testing.assert_close(parts.layers[index][side].amax, seen.amax, rtol=1e-5, atol=1e-6)
    cache = cache_for(model, FP8_E4M3)
    a, b = (validate.validate(model, cache, each).layers for each in (tokens, chunked))
    resolved = plan_for(model, engine="kernel")
    kl, again = (evaluate.evaluate(model, resolved, cache, each) for each in (tokens, chunked))
    for index in a:
        assert a[index].cache == pytest.approx(b[index].cache, rel=1e-3)
        assert a[index].attention == pytest.approx(b[index].attention, rel=1e-3)
    assert again.cache.kl_mean == pytest.approx(kl.cache.kl_mean, rel=1e-3)
    assert again.attention is not None
    assert kl.attention is not None
    assert again.attention.kl_mean == pytest.approx(kl.attention.kl_mean, rel=1e-3)


@every_family
def test_rounded_queries_are_the_absorbed_ones(family: str) -> None:
    """As kernels do that decode over latents: the output of each head in float64, from its definition."""
    model, tokens = built(family), token_set([23])
    cache = cache_for(model, FP8_E4M3)
    assert cache.scales is not None
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
        for layer in model.model.layers
    ]
    ids = torch.tensor(tokens.samples)
    call = calls_of(model, ids)[0]
    outputs.clear()
    with torch.inference_mode(), evaluate.through(model, cache, with_query=True):
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    up = model.model.layers[0].self_attn.kv_b_proj.weight.detach().double().view(HEADS, KEY + VALUE, RANK)
    q = through_e4m3(call.query, cache.scales.layers[0]["q"])[0].double()
    latent = as_stored(cache, 0, "k", call.key)[0, 0].double()
    rotary = as_stored(cache, 0, "v", call.value)[0, 0].double()
    for head in range(HEADS):
        for i in range(23):
            keys = torch.cat([latent[: i + 1], rotary[: i + 1]], -1)
            weights = (keys @ q[head, i] * call.scaling).softmax(0)
            expected = up[head, KEY:] @ (weights @ latent[: i + 1])
            own = outputs[0][0, i].view(HEADS, VALUE)[head].double()
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@every_family
@every_format
def test_errors_are_those_of_a_float64_computation(family: str, fmt: KVFormat) -> None:
    model, tokens = built(family), token_set([29, 17])
    cache = cache_for(model, fmt)
    measured = validate.validate(model, cache, tokens)
    assert measured.implementation == "torch reference"
    noise, signal = torch.zeros(3, HEADS).double(), torch.zeros(3, HEADS).double()
    for sample in tokens.samples:
        for index, call in calls_of(model, torch.tensor([sample])).items():
            block = model.model.layers[index].self_attn
            up = block.kv_b_proj.weight.detach().double().view(HEADS, KEY + VALUE, RANK)
            q = call.query[0].double()
            held = [(call.key, call.value)]
            held += [tuple(as_stored(cache, index, side, x) for side, x in zip("kv", held[0], strict=True))]  # type: ignore[list-item]
            exact, found = (
                causal(q, latent[0, 0], rotary[0, 0], up, call.scaling) for latent, rotary in held
            )
            noise[index] += (found - exact).square().sum((1, 2))
            signal[index] += exact.square().sum((1, 2))
    for index, layer in measured.layers.items():
        assert layer.cache == pytest.approx((noise / signal).sqrt()[index].tolist(), rel=1e-3)
        assert (layer.attention is None) == fmt.latent_only


@every_family
def test_rounded_attention_is_that_over_latents(family: str) -> None:
    """Q with the up-projection absorbed and the probabilities rounded too, as FP8 kernels do; in float64."""
    model, tokens = built(family), token_set([29, 17])
    cache = cache_for(model, FP8_E4M3)
    assert cache.scales is not None
    measured = validate.validate(model, cache, tokens)
    noise, signal = torch.zeros(3, HEADS).double(), torch.zeros(3, HEADS).double()
    for sample in tokens.samples:
        for index, call in calls_of(model, torch.tensor([sample])).items():
            up = model.model.layers[index].self_attn.kv_b_proj.weight.detach().double()
            up = up.view(HEADS, KEY + VALUE, RANK)
            exact = causal(call.query[0].double(), call.key[0, 0], call.value[0, 0], up, call.scaling)
            q = through_e4m3(call.query, cache.scales.layers[index]["q"])[0].double()
            latent, rotary = (
                as_stored(cache, index, side, x)[0, 0].double()
                for side, x in (("k", call.key), ("v", call.value))
            )
            logits = q @ torch.cat([latent, rotary], -1).mT * call.scaling
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            weights = logits.masked_fill(hidden, -torch.inf)
            weights = (weights - weights.amax(-1, keepdim=True)).exp()
            rounded = (256 * weights).to(torch.float8_e4m3fn).double() / 256
            found = (rounded @ latent / weights.sum(-1, keepdim=True)) @ up[:, KEY:].mT
            noise[index] += (found - exact).square().sum((1, 2))
            signal[index] += exact.square().sum((1, 2))
    for index, layer in measured.layers.items():
        assert layer.attention == pytest.approx((noise / signal).sqrt()[index].tolist(), rel=1e-2)


def causal(
    q: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, up: torch.Tensor, scaling: float
) -> torch.Tensor:
    """``(heads, tokens, value)`` in float64."""
    keys, values = torch.cat([latent, rotary], -1).double(), latent.double() @ up[:, KEY:].mT
    logits = q @ keys.mT * scaling
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values


def test_the_rotary_key_in_16_bits_costs_less_and_skipped_layers_nothing() -> None:
    model, tokens = built("deepseek_v2"), token_set([40, 33])
    found = scales.compute(run(model, tokens), plan_for(model, engine="kernel"))
    caches = {
        "fp8": QuantizedCache(FP8_E4M3, found),
        "latent": QuantizedCache(FP8_LATENT_BF16_ROPE, found),
        "none": QuantizedCache(FP8_E4M3, found, skipped=(0, 1, 2)),
    }
    snr = {
        name: [
            x for layer in validate.validate(model, cache, tokens).layers.values() for x in layer.logit_snr_db
        ]
        for name, cache in caches.items()
    }
    assert all(a > b for a, b in zip(snr["latent"], snr["fp8"], strict=True))  # type: ignore[operator]
    assert set(snr["none"]) == {None}
    variants = {name: Variant(cache, with_query=True) for name, cache in caches.items() if name == "none"}
    assert evaluate.fidelities(model, variants, 1, tokens)["none"].kl_mean == pytest.approx(0, abs=1e-9)


# Engines


OUTCOMES = {
    ("vllm", "metadata"): ("ignored", "no parameter for a scale.*--deliver fold reaches it"),
    ("vllm", "fold"): ("folded", "MLA"),
    ("vllm-modelopt", "metadata"): ("ignored", "maps the names of MLA scales twice"),
    ("sglang", "metadata"): ("ignored", "not known to load scales for MLA"),
    ("sglang", "fold"): ("folded", "MLA"),
    ("trtllm", "metadata"): ("ignored", "scale 1.0 whatever"),
    ("tgi", "metadata"): ("refused", "K and V of every head"),
    ("tgi", "fold"): ("refused", "K and V of every head"),
    ("lmdeploy", "fold"): ("refused", "not known to quantize a cached latent"),
    ("transformers", "metadata"): ("refused", "which these models have"),
    ("kernel", "metadata"): ("consumed", "given the vectors"),
}


@pytest.mark.parametrize(("name", "deliver"), OUTCOMES, ids="-".join)
def test_each_engine_says_what_becomes_of_a_latent(name: str, deliver: Any) -> None:
    outcome, why = OUTCOMES[name, deliver]
    wanted = recipe.parse({"deliver": deliver}, "test")
    (found,) = (v for v in plan.verdicts(wanted, arch.read(DEEPSEEK_V3)) if v.engine.name == name)
    assert found.verdict.outcome == outcome
    assert any(re.search(why, reason) for reason in found.verdict.reasons), found


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vllm, scales": ({"deliver": "metadata"}, "MLA attention has no parameter for a scale"),
    "scales per head": ({"engine": "kernel", "granularity": "per_head"}, "all heads read one cached latent"),
    "INT8 online": (
        {"format": "int8_per_token_head"},
        "vllm 0.33 stores no cached latent in int8_per_token_head",
    ),
    "NVFP4": ({"format": "nvfp4", "engine": "trtllm"}, "stores no cached latent in nvfp4; use fp8_e4m3"),
    "BF16 rotary key": ({"format": "fp8_latent_bf16_rope"}, "vllm 0.33 has no fp8_latent_bf16_rope cache"),
    "another objective": (
        {"engine": "kernel", "scale": {"objective": "mse"}},
        "mse is not measured for a cached latent",
    ),
    "a fold of heads": ({"folds": {"transforms": ["value_hadamard"]}}, "it caches a latent, from which"),
}


@pytest.mark.parametrize(("fields", "why"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_reach_a_latent_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanRefused, match=why):
        plan.resolve(recipe.parse(fields, "test"), arch.read(DEEPSEEK_V3))


def test_formats_and_folds_of_latents_are_refused_for_other_models() -> None:
    model = spec_of(tiny.build_model())
    for fields, why in (
        ({"format": "fp8_latent_bf16_rope", "engine": "kernel"}, "is for models that cache a latent"),
        ({"deliver": "fold", "folds": {"transforms": ["latent_scale"]}}, "it caches K and V, no latent"),
    ):
        with pytest.raises(PlanRefused, match=why):
            plan.resolve(recipe.parse(fields, "test"), model)
    chosen = {"fp8": schemes.load("fp8")}
    with pytest.raises(PlanRefused, match="schemes are for K and V"):
        trial.resolve(recipe.Recipe(), arch.read(DEEPSEEK_V3), chosen, {}, skip=True)
    part = {"format": "fp8_latent_bf16_rope"}
    with pytest.raises(RecipeError, match="stores latents, and a scheme is for K and V"):
        schemes.parse({"description": "", "source": "", "k": part, "v": part}, "test")


def test_the_latent_format_is_stored_by_the_engines_that_say_so() -> None:
    known = {e.name for e in engines.ENGINES if "fp8_latent_bf16_rope" in e.cache_dtype}
    assert known == {"kernel"}


# The fold


@every_family
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_the_fold_changes_nothing_in_float64(family: str, bias: bool) -> None:
    model = built(family, attention_bias=bias)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    spec = spec_of(model)
    drawn = Transforms(
        {i: LayerTransform(latent_scale=torch.tensor([2.0**-3, 0.3 + i]).double()) for i in range(3)}
    )
    errors = proof.block_errors(model, spec, drawn)
    assert errors.keys() == {0, 1, 2}
    assert max(errors.values()) < 1e-12
    ids = torch.arange(12)[None]
    before = calls_of(model, ids)
    with proof.FoldedWeights(model, spec, drawn)():
        after = calls_of(model, ids)
    for index, scaled in drawn.layers.items():
        expected = scaled.apply(before[index].query, before[index].key, before[index].value)
        found = after[index].query, after[index].key, after[index].value
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        for a, b in zip(scaled.undo(*expected), scaled.inverse().apply(*expected), strict=True):
            torch.testing.assert_close(a, b)


def test_the_fold_is_powers_of_two_and_only_where_the_range_is_left() -> None:
    tokens = token_set([40, 40])
    quiet, loud = built("deepseek_v3"), planted("deepseek_v3", 2.0**12, 2.0**-9)
    assert latent_scale.propose(run(quiet, tokens), spec_of(quiet)).layers == {}
    found = latent_scale.propose(run(loud, tokens), spec_of(loud))
    assert found.powers_of_two
    for layer in found.layers.values():
        assert layer.latent_scale is not None
        of_latent, of_rotary = torch.log2(layer.latent_scale).tolist()
        assert 11 <= of_latent <= 13
        assert -10 <= of_rotary <= -8


def test_a_cache_at_scale_1_gets_back_what_planting_took(tmp_path: Path, kvcal: Callable[..., Any]) -> None:
    """vLLM's way: no scale is loaded, so only weights can bring the latent into E4M3's range."""
    base, output, again = tmp_path / "base", tmp_path / "out", tmp_path / "again"
    planted("deepseek_v3", 2.0**12, 2.0**-9).to(torch.bfloat16).save_pretrained(base)
    tiny.build_tokenizer().save_pretrained(base)
    options = (
        "--samples",
        "6",
        "--evaluation-samples",
        "3",
        "--seq-len",
        "48",
        "--batch-size",
        "2",
        "--json",
    )
    done = kvcal("calibrate", "--model", base, "--output", output, *options)
    assert done.code == 0, done.stderr
    folds = done.document["folds"]
    assert folds["kept"] == ["latent_scale"]
    assert folds["reversible"]
    assert folds["proof"]["kl"] == 0.0  # bit for bit
    assert folds["before"]["fidelity"]["kl_mean"] > 20 * done.document["fidelity"]["kl_mean"]
    assert json.loads((output / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert kvcal("check", output).code == 0
    before, between = load_file(base / "model.safetensors"), load_file(output / "model.safetensors")
    changed = {n.split("self_attn.")[1] for n in before if not torch.equal(before[n], between[n])}
    assert changed == {
        "kv_a_layernorm.weight",
        "kv_b_proj.weight",
        "kv_a_proj_with_mqa.weight",
        "q_b_proj.weight",
    }
    assert kvcal("unfold", output, "--output", again).code == 0
    after = load_file(again / "model.safetensors")
    assert all(torch.equal(before[n].view(torch.int16), after[n].view(torch.int16)) for n in before)


def test_transforms_of_heads_are_not_tried_on_latents_nor_the_other_way_round() -> None:
    tried = {
        family: folding._tried(plan_for(tiny.build_model(family), deliver="fold"))
        for family in ("llama", "deepseek_v2")
    }
    assert tried == {"llama": ["key_scale", "key_turn", "value_scale"], "deepseek_v2": ["latent_scale"]}


# The whole job


JOBS = {
    "vllm, folded": ((), "vllm", ()),
    "kernel": (("--engine", "kernel"), "kernel", ("latent_scale", "q_scale")),
    "kernel, BF16 rotary key": (
        ("--engine", "kernel", "--format", "fp8_latent_bf16_rope"),
        "kernel",
        ("latent_scale",),
    ),
}


@pytest.mark.parametrize(
    ("family", "job"),
    [
        *(("deepseek_v3", job) for job in JOBS),
        ("deepseek_v2", "vllm, folded"),
        ("deepseek_v2", "kernel"),
    ],
)
def test_plan_to_check(
    family: str, job: str, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    options, engine, written = JOBS[job]
    folder, output = tiny.save(tmp_path / "model", family), tmp_path / "out"
    planned = kvcal("plan", "--model", folder, "--json", *options, *small)
    assert planned.code == 0, planned.stderr
    assert planned.document["latent"] == {"rank": RANK, "rotary": ROTARY}
    assert planned.document["bytes_per_token"] == {
        "reference": 3 * (RANK + ROTARY) * 2,
        "quantized": 3 * (RANK + ROTARY * (2 if "rope" in options[-1:][0] else 1)) if options else 144,
    }
    done = kvcal("calibrate", "--model", folder, "--output", output, "--json", *options, *small)
    assert done.code == 0, done.stderr
    report = done.document
    assert 0 < report["fidelity"]["kl_mean"] < 0.1
    assert 0 < report["attention_error"]["worst"] < 0.2
    assert (
        "| latent amax | rotary key amax | absorbed Q amax |" in (output / "kvcal" / "report.md").read_text()
    )
    shard = output / (kernel.TENSORS if engine == "kernel" else "kvcal-scales.safetensors")
    found = sorted(load_file(shard)) if written else []
    assert sorted({name.rpartition(".")[2] for name in found}) == sorted(written)
    assert len(found) == 3 * len(written)
    assert kvcal("check", output, "--engine", engine).code == 0
    again = kvcal("evaluate", output, "--samples", "2", "--seq-len", "48", "--json")
    assert again.code == 0, again.stderr
    assert again.document["fidelity"] == pytest.approx(report["fidelity"], rel=1e-5)
    validated = kvcal("validate", output, "--seq-len", "48", "--json")
    assert validated.document["implementation"] == "torch reference"


def test_exports_of_one_calibration(
    tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    folder, output = tiny.save(tmp_path / "model", "deepseek_v3"), tmp_path / "out"
    done = kvcal("calibrate", "--model", folder, "--output", output, "--engine", "kernel", *small)
    assert done.code == 0, done.stderr
    refused = kvcal("export", output, "--engine", "vllm", "--output", tmp_path / "vllm")
    assert refused.code == PlanRefused.exit_code
    assert "calibrate again with --engine vllm --deliver fold" in refused.stderr
    again = kvcal("export", output, "--engine", "kernel", "--output", tmp_path / "kernel")
    assert again.code == 0, again.stderr
    written, exported = (load_file(f / kernel.TENSORS) for f in (output, tmp_path / "kernel"))
    assert all(torch.equal(written[name], exported[name]) for name in written | exported)
    assert not (tmp_path / "kernel" / "config.json").exists()
    plain = tmp_path / "folded"
    assert kvcal("calibrate", "--model", folder, "--output", plain, *small).code == 0
    for engine in ("sglang", "trtllm"):
        target = tmp_path / engine
        assert kvcal("export", plain, "--engine", engine, "--output", target).code == 0
        assert kvcal("check", target, "--engine", engine).code == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda t: t.pop("layers.1.latent_scale"), "layers.1.latent_scale is missing"),
        (
            lambda t: t.update({"layers.0.k_scale": torch.ones(1)}),
            "layers.0.k_scale is no name of the layout",
        ),
        (lambda t: t["layers.2.latent_scale"].zero_(), "layers.2.latent_scale holds a scale"),
        (lambda t: t.update({"layers.2.q_scale": torch.ones(5)}), r"layers.2.q_scale is torch.float32 \[5\]"),
    ],
)
def test_faults_in_vectors_of_latents_are_found(
    fault: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path
) -> None:
    model = built("deepseek_v3")
    resolved = plan_for(model, engine="kernel")
    found = scales.compute(run(model, token_set([20]), engine="kernel"), resolved)
    written = kernel.to_bundle(found, resolved, None)
    (tmp_path / kernel.LAYOUT).write_text(json.dumps(written.alone[2]))  # type: ignore[index]
    save_file(written.tensors, tmp_path / kernel.TENSORS)
    assert list(kernel.faults(tmp_path)) == []
    fault(written.tensors)
    save_file(written.tensors, tmp_path / kernel.TENSORS)
    assert any(re.search(message, line) for line in kernel.faults(tmp_path))


def test_the_format_rounds_no_query_and_is_found_by_name() -> None:
    assert formats.get("fp8_latent_bf16_rope") is FP8_LATENT_BF16_ROPE
    assert not FP8_LATENT_BF16_ROPE.rounds_query
