"""Schemes as they run: one prefill pass shows what token-by-token decode over each cache would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvcal import arch, basis, calibrate, capture, evaluate, scheme, storage
from kvcal.comparison import view_of
from kvcal.data import TokenSet
from kvcal.errors import RecipeError
from kvcal.scheme import Scheme
from tests import tiny
from tests.test_calibrate import token_set

Array = np.ndarray[Any, Any]

TOKENS = token_set([45, 45, 38])
IDS = torch.tensor([TOKENS.samples[0]])

PER_TOKEN = {"format": "int4", "granularity": "per_token_head", "zero_point": "float", "scale_bits": 32}


def scheme_of(**fields: Any) -> Scheme:
    return scheme.parse({"description": "a test", "source": "here"} | fields, "test")


def kivi(bits: int, recent: int, group: int, sinks: int = 0) -> Scheme:
    shared = {"format": f"int{bits}", "granularity": "per_group", "group": group, "zero_point": "float"}
    return scheme_of(
        k=shared | {"along": "tokens", "scale_bits": 32},
        v=shared | {"along": "channels", "scale_bits": 32},
        recent=recent,
        flush="block",
        sinks=sinks,
    )


def model_of(family: str) -> Any:
    model = tiny.build_model(family).double()
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    model.config._attn_implementation = "eager" if softcap else "sdpa"
    return model


def spec_of(model: Any) -> arch.ModelSpec:
    return arch.read(model.config.to_dict() | {"architectures": [type(model).__name__]})


def fitted(model: Any, wanted: Scheme, tokens: TokenSet = TOKENS) -> storage.StoredCache:
    spec, view = spec_of(model), view_of(wanted)
    seen = calibrate.views(model, spec.layers, 1, tokens, (view,), collect="distribution")[view]
    return storage.fit(wanted, spec, basis.readers(model, spec), seen)


def prefill(model: Any, cache: evaluate.Cache) -> torch.Tensor:
    with torch.inference_mode(), evaluate.through(model, cache):
        return model(IDS, use_cache=False).logits


def asymmetric(x: Array, axis: int, bits: int) -> Array:
    """KIVI's quantizer over a whole axis, in float64."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = (high - low) / (2**bits - 1)
    return np.round((x - low) / np.where(step == 0, 1, step)) * step + low


class Kept:
    """What one layer of a decoding engine holds: quantized tokens first, then those in 16 bits."""

    def __init__(self, wanted: Scheme):
        self.wanted = wanted
        self.keys: list[Array] = []  # (batch, heads, head_dim) each
        self.values: list[Array] = []
        self.old_keys: dict[int, Array] = {}
        self.old_values: dict[int, Array] = {}

    def quantize_value(self, j: int) -> None:
        v = self.wanted.sides()["v"]
        x = self.values[j]
        groups = x.reshape(*x.shape[:-1], -1, v.group or x.shape[-1])
        self.old_values[j] = asymmetric(groups, -1, v.number.bits).reshape(x.shape)

    def quantize_key(self, j: int) -> None:
        self.old_keys[j] = asymmetric(self.keys[j], -1, self.wanted.sides()["k"].number.bits)

    def quantize_key_block(self, first: int) -> None:
        k = self.wanted.sides()["k"]
        for start in range(first, first + self.wanted.recent, k.group):
            block = np.stack(self.keys[start : start + k.group])
            for j, row in enumerate(asymmetric(block, 0, k.number.bits)):
                self.old_keys[start + j] = row

    def see(self, key: Array, value: Array) -> tuple[Array, Array]:
        """A new token comes, and the query attends to what is returned."""
        sinks, recent = self.wanted.sinks, self.wanted.recent
        self.keys.append(key)
        self.values.append(value)
        now = len(self.keys) - 1
        if self.wanted.flush == "token":  # evict, then attend
            j = now - recent
            if j >= sinks:
                self.quantize_key(j)
                self.quantize_value(j)
            return self.attended()
        found = self.attended()  # attend, then flush
        waiting = [j for j in range(sinks, now + 1) if j not in self.old_keys]
        if len(waiting) == recent:
            self.quantize_key_block(waiting[0])
        if now - recent >= sinks:
            self.quantize_value(now - recent)
        return found

    def attended(self) -> tuple[Array, Array]:
        keys = [self.old_keys.get(j, k) for j, k in enumerate(self.keys)]
        values = [self.old_values.get(j, v) for j, v in enumerate(self.values)]
        return np.stack(keys, 2), np.stack(values, 2)


class DecodingCache(DynamicCache):
    def __init__(self, wanted: Scheme):
        super().__init__()
        self.wanted = wanted
        self.kept: dict[int, Kept] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        super().update(key, value, layer_idx, *args, **kwargs)  # counts the tokens
        layer = self.kept.setdefault(layer_idx, Kept(self.wanted))
        found = layer.see(key[:, :, 0].numpy(), value[:, :, 0].numpy())
        return tuple(torch.from_numpy(x) for x in found)


def decode(model: Any, wanted: Scheme) -> torch.Tensor:
    held = DecodingCache(wanted)
    with torch.inference_mode():
        each = [
            model(IDS[:, i : i + 1], past_key_values=held, use_cache=True).logits for i in range(IDS.shape[1])
        ]
    return torch.cat(each, 1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "cohere2"])
@pytest.mark.parametrize(
    "wanted",
    [
        kivi(2, recent=8, group=4),
        kivi(4, recent=16, group=16),
        kivi(2, recent=8, group=4, sinks=3),
        scheme_of(k=PER_TOKEN, v=PER_TOKEN, recent=7, sinks=3),
        scheme_of(k=PER_TOKEN, v=PER_TOKEN, recent=1),
        scheme_of(k=PER_TOKEN, v=PER_TOKEN, sinks=4),
        scheme_of(k=PER_TOKEN, v=PER_TOKEN),
    ],
    ids=["kivi", "kivi-one-group", "kivi-sinks", "window-sinks", "window-1", "sinks", "all"],
)
def test_prefill_equals_token_by_token_decode(family: str, wanted: Scheme) -> None:
    model = model_of(family)
    with torch.inference_mode():
        plain = model(IDS, use_cache=False).logits
    found, expected = prefill(model, fitted(model, wanted)), decode(model, wanted)
    effect = (expected - plain).norm() / plain.norm()
    assert effect > 1e-3
    # Quantizers here work in float32, those above in float64.
    assert (found - expected).norm() / expected.norm() < 1e-4 * max(1.0, float(effect))


@pytest.mark.parametrize("name", scheme.shipped())
def test_every_shipped_scheme_is_cited_and_says_what_it_is(name: str) -> None:
    found = scheme.load(name)
    assert len(found.source) >= 5
    assert 20 < len(found.description) <= 150
    assert scheme.parse(__import__("yaml").safe_load(scheme.to_yaml(found)), name) == found


def without_codebook_passes(name: str) -> bool:
    found = scheme.load(name)
    return found.mixed is None and not any(
        side.codebook == "nuq" or side.fixed == "moving_average" for side in found.sides().values()
    )


@pytest.mark.parametrize("name", [n for n in scheme.shipped() if without_codebook_passes(n)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "cohere2"])
def test_every_shipped_scheme_runs_and_leaves_sinks_alone(name: str, family: str) -> None:
    wanted = scheme.load(name)
    model = tiny.build_model(family, head_dim=32, hidden_size=192)
    cache = fitted(model, wanted)
    calls: dict[int, capture.AttentionCall] = {}
    with torch.inference_mode(), capture.intercept(model, lambda c: calls.update({c.layer: c}), rotary=True):
        model(IDS)
    for call in calls.values():
        given = cache.replace(call)
        if isinstance(given, capture.Versions):
            assert torch.equal(given.keys[-1], call.key)
            seen = torch.stack(given.seen)
            assert bool((seen.sum(0) == 1).all())  # each query meets each token once
            continue
        _, k, v = given
        assert torch.equal(k[:, :, : wanted.sinks], call.key[:, :, : wanted.sinks])
        assert torch.equal(v[:, :, : wanted.sinks], call.value[:, :, : wanted.sinks])
        for found, exact in ((k, call.key), (v, call.value)):
            assert found.dtype == exact.dtype
            error = (found - exact).norm() / exact.norm()
            assert 1e-4 < error < 0.75


def test_more_bits_err_less() -> None:
    model = tiny.build_model("llama", head_dim=32, hidden_size=192)
    errors = []
    for bits in (2, 3, 4, 5, 6, 8):
        side = {"format": f"int{bits}", "granularity": "per_token_head", "zero_point": "integer"}
        side |= {"basis": "balanced", "scale_bits": 8}
        logits = prefill(model, fitted(model, scheme_of(k=side, v=side)))
        with torch.inference_mode():
            errors.append(float((logits - model(IDS).logits).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * errors[-1]


def test_a_tail_that_fills_no_group_is_never_read() -> None:
    wanted = kivi(2, recent=8, group=4)
    model = model_of("llama")
    cache = fitted(model, wanted)
    calls: list[capture.AttentionCall] = []
    with torch.inference_mode(), capture.intercept(model, calls.append):
        model(IDS)
    given = cache.replace(calls[0])
    assert isinstance(given, capture.Versions)
    for keys, seen in list(zip(given.keys, given.seen, strict=True))[:-1]:
        changed = (keys != calls[0].key).any(-1).any(1)[0]
        assert not bool((seen & ~changed).any())  # what is read as quantized was quantized


@pytest.mark.parametrize(
    ("context", "bits"), [(512, 5 + 128 / 512 * 11), (32768, 5 + 128 / 32768 * 11), (100, 16.0)]
)
def test_bits_of_kivi_count_its_scales_and_its_window(context: int, bits: float) -> None:
    assert scheme.load("kivi-4").bits_per_element(3, 64, context) == pytest.approx(bits)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("vllm-int4-per-token-head", 4 + 32 / 64),
        ("vllm-int8-per-token-head", 8 + 32 / 64),
        ("nvfp4", 4.5),
        ("mxfp4", 4.25),
        ("quarot-4", 4 + 32 / 64),
        ("turboquant-4", 4 + 16 / 64),
        ("fp8", 8.0),
        ("balanced-4", (4 + 12 / 64) * 510 / 512 + 16 * 2 / 512),
        ("balanced-2", (2 + 16 / 64) * 508 / 512 + 16 * 4 / 512),
        ("kvquant-nuq-4", (4 * 2 + 32 / 192) / 2 * 511 / 512 + 16 / 512),
        ("int8-per-channel", 8 * 508 / 512 + 16 * 4 / 512),
    ],
)
def test_bits_count_everything_that_grows_with_the_tokens(name: str, bits: float) -> None:
    assert scheme.load(name).bits_per_element(3, 64, 512) == pytest.approx(bits)


INT4 = {"format": "int4", "granularity": "per_token_head"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"k": {"format": "int4"}, "v": INT4}, "granularity: int4 needs one of"),
        ({"k": INT4 | {"granularity": "per_group"}, "v": INT4}, "per_group needs the size"),
        ({"k": INT4 | {"group": 32}, "v": INT4}, "per_token_head has no groups"),
        ({"k": {"format": "fp8", "granularity": "per_token", "zero_point": "float"}, "v": INT4}, "integers"),
        ({"k": {"format": "int8", "granularity": "per_head", "clip": 0.9}, "v": INT4}, "scale.objective"),
        ({"k": {"format": "int8", "granularity": "per_head", "basis": "hadamard"}, "v": INT4}, "dynamic"),
        ({"k": INT4 | {"scale": {"objective": "mse"}}, "v": INT4}, "clip narrows a dynamic range"),
        ({"k": {"format": "bf16", "granularity": "per_head"}, "v": INT4}, "is not quantized"),
        ({"k": {"format": "int8_per_token_head", "clip": 0.9}, "v": INT4}, "is scaled by its engine"),
        ({"k": {"format": "nvfp4", "granularity": "per_head"}, "v": INT4}, "scales its blocks itself"),
        ({"k": INT4, "v": INT4 | {"before_rope": True}}, "V has no positions"),
        ({"k": INT4, "v": INT4 | {"center": True}}, "V is not centred"),
        ({"k": INT4, "v": INT4, "flush": "block"}, "flush: block needs recent"),
        ({"k": INT4 | {"codebook": "nuq"}, "v": INT4}, "codebook nuq needs"),
        ({"k": INT4 | {"granularity": "per_token", "codebook": "gaussian"}, "v": INT4}, "gaussian needs"),
        ({"k": INT4 | {"granularity": "per_token", "scale_bits": 8}, "v": INT4}, "scale_bits 8 needs"),
        (
            {
                "k": {"format": "int4", "granularity": "per_head", "zero_point": "float", "scale": {}},
                "v": INT4,
            },
            "two ends",
        ),
        (
            {"k": INT4 | {"granularity": "per_channel", "codebook": "nuq"}, "v": INT4},
            "nuq is for both K and V",
        ),
        ({"k": INT4}, "a scheme has k and v"),
        ({"k": INT4, "v": {"format": "int7", "granularity": "per_head"}}, "unknown format 'int7'"),
        ({"k": INT4, "v": INT4, "sink": 4}, "did you mean 'sinks'"),
        ({"k": INT4 | {"clip": 1.5}, "v": INT4}, "clip"),
    ],
)
def test_what_makes_no_scheme_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError) as raised:
        scheme_of(**fields)
    assert reason in str(raised.value)
