"""Prefill in chunks and greedy decode over the written cache, against one pass and against plain casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvcal import evaluate, generation, scales
from kvcal.cache import QuantizedCache
from kvcal.errors import ModelError
from kvcal.formats import FP8_E4M3, INT8_PER_TOKEN_HEAD, KVFormat
from kvcal.generation import Served
from kvcal.scales import Scales
from kvcal.transforms.record import LayerTransform, Transforms
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set
from tests.test_evaluate import DYNAMIC, FAMILIES, RoundedCache, prepared

PROMPT, GIVEN = 37, 9


def of(family: str, fmt: KVFormat) -> tuple[Any, QuantizedCache, Any, list[int]]:
    tokens = token_set([PROMPT + GIVEN])
    model, _, cache, rounding = prepared(family, tokens, fmt)
    return model.double(), cache, rounding, list(tokens.samples[0])  # no rounding on two sides of a tie


def require_equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("with_query", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decode_equal_one_masked_pass(family: str, chunk: int, with_query: bool) -> None:
    model, cache, _, ids = of(family, FP8_E4M3)
    with torch.inference_mode(), evaluate.through(model, cache, with_query=with_query):
        expected = model(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 : -1]
        plain_q = expected
    if with_query:
        with torch.inference_mode(), evaluate.through(model, cache):
            plain_q = model(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 : -1]
        assert (plain_q - expected).norm() > 1e-3 * expected.norm()  # there is something to be seen
    served = Served(cache, with_query, chunk)
    require_equal(generation.forced(model, served, ids[:PROMPT], ids[PROMPT:]), expected)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_family_decodes_over_its_cache(family: str) -> None:
    """Sliding windows, sinks, shared and latent caches, layers that keep a state instead."""
    tokens = token_set([PROMPT + GIVEN])
    model, ids = tiny.build_model(family), list(tokens.samples[0])
    resolved = plan_for(model, granularity="per_tensor")
    cache = QuantizedCache(FP8_E4M3, scales.compute(run(model, tokens), resolved))
    experts = any("experts" in name for name, _ in model.named_modules())  # their kernels know no float64
    model, tolerance = (model, 1e-3) if experts else (model.double(), 1e-6)
    for with_query in (False, True):
        with torch.inference_mode(), evaluate.through(model, cache, with_query=with_query):
            expected = model(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 : -1]
        served = Served(cache, with_query, 10)
        found = generation.forced(model, served, ids[:PROMPT], ids[PROMPT:])
        plain = generation.forced(model, Served(None), ids[:PROMPT], ids[PROMPT:])
        require_equal(found, expected, tolerance)
        assert (plain - expected).norm() > 4 * tolerance * expected.norm()


@pytest.mark.parametrize("fmt", DYNAMIC, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_dynamic_formats_too(family: str, fmt: KVFormat) -> None:
    model, cache, rounding, ids = of(family, fmt)
    held = RoundedCache(rounding)
    with torch.inference_mode():
        expected = torch.cat(
            [model(torch.tensor([[i]]), past_key_values=held, use_cache=True).logits[0] for i in ids]
        )
    found = generation.forced(model, Served(cache, chunk=11), ids[:PROMPT], ids[PROMPT:])
    require_equal(found, expected[PROMPT - 1 : -1], 1e-5 if fmt.rotated else 1e-6)


def test_what_is_written_are_torchs_own_casts_token_by_token() -> None:
    """Chunks over the written cache, against a plain cache whose new tokens go through float8 one by one."""
    model, cache, _, ids = of("llama", FP8_E4M3)
    assert cache.scales is not None
    plain = DynamicCache()
    with torch.inference_mode():
        for token in ids:
            casting = _Casting(plain, cache.scales)
            logits = model(torch.tensor([[token]]), past_key_values=casting, use_cache=True).logits
        held = generation.empty_cache(model, Served(cache))
        for start in range(0, len(ids), 10):
            found = model(
                torch.tensor([ids[start : start + 10]]), past_key_values=held, use_cache=True
            ).logits[:, -1:]
    require_equal(found, logits)
    for ours, theirs in zip(held.layers[:1], plain.layers[:1], strict=True):
        # Of the first layer no earlier rounding could differ: bit for bit.
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


class _Casting:
    """Stands before a DynamicCache and casts what is new; everything else is the cache's own."""

    def __init__(self, cache: DynamicCache, scales: Scales):
        self._cache, self._scales = cache, scales

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        sides = self._scales.layers[layer]
        cast = []
        for x, scale in ((key, sides["k"]), (value, sides["v"])):
            stored = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            cast.append((stored.float() * scale).to(x.dtype))
        return self._cache.update(*cast, layer, *args, **kwargs)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_takes_the_likeliest_of_one_pass_each_time(family: str) -> None:
    model, cache, _, ids = of(family, FP8_E4M3)
    prompt = ids[:PROMPT]
    for served in (Served(cache, chunk=8), Served(None, chunk=8), Served(cache, with_query=True)):
        found = generation.greedy(model, served, prompt, GIVEN, stop=())
        expected = list(prompt)
        with torch.inference_mode(), evaluate.through(model, served.cache, with_query=served.with_query):
            for _ in range(GIVEN):
                logits = model(torch.tensor([expected]), use_cache=False).logits[0, -1]
                expected.append(int(logits.argmax()))
        assert found == expected[PROMPT:]


def test_text_ends_before_a_token_that_ends_it() -> None:
    model, _, _, ids = of("llama", FP8_E4M3)
    whole = generation.greedy(model, Served(None), ids[:PROMPT], 6, stop=())
    assert len(whole) == 6
    last = whole[3]
    assert generation.greedy(model, Served(None), ids[:PROMPT], 6, stop=[last]) == whole[: whole.index(last)]
    assert generation.greedy(model, Served(None), ids[:1], 0, stop=()) == []


def test_skipped_layers_and_transforms_are_those_of_the_emulation() -> None:
    model, cache, _, ids = of("llama", FP8_E4M3)
    heads, channels = 2, 16
    scale = 2.0 ** torch.arange(-4, channels - 4).expand(heads, -1).double() / 8
    transform = LayerTransform(key_scale=scale, key_signs=1 - 2 * (torch.arange(channels) % 3 == 0).double())
    changed = QuantizedCache(FP8_E4M3, cache.scales, Transforms({0: transform}), skipped=(2,))
    with torch.inference_mode(), evaluate.through(model, changed, with_query=True):
        expected = model(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 : -1]
    served = Served(changed, with_query=True, chunk=13)
    found = generation.forced(model, served, ids[:PROMPT], ids[PROMPT:])
    require_equal(found, expected)
    plainly = generation.forced(model, Served(cache, True, 13), ids[:PROMPT], ids[PROMPT:])
    assert (found - plainly).norm() > 1e-3 * found.norm()


def test_nothing_is_left_in_the_model() -> None:
    model, _, _, ids = of("llama", INT8_PER_TOKEN_HEAD)
    before = model.config._attn_implementation
    generation.greedy(model, Served(QuantizedCache(INT8_PER_TOKEN_HEAD)), ids, 3, stop=())
    assert model.config._attn_implementation == before


def test_a_model_that_keeps_its_cache_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, _, ids = of("llama", FP8_E4M3)
    own = model.base_model.forward
    monkeypatch.setattr(
        model.base_model, "forward", lambda ids, past_key_values, use_cache: own(ids, use_cache=False)
    )
    with pytest.raises(ModelError, match="LlamaForCausalLM does not write K and V into a cache"):
        generation.greedy(model, Served(cache), ids, 3, stop=())


def test_scales_of_other_heads_than_are_cached_are_refused() -> None:
    model, cache, _, ids = of("llama", FP8_E4M3)
    assert cache.scales is not None
    three = {
        i: {s: t.repeat(3, 1, 1)[:3] for s, t in sides.items()} for i, sides in cache.scales.layers.items()
    }
    with pytest.raises(
        ModelError, match="layer 0: the model caches 2 heads.* its scales are of 3; calibrate"
    ):
        generation.greedy(model, Served(QuantizedCache(FP8_E4M3, Scales(three))), ids, 3, stop=())
