"""What layers keep, against numbers worked out by hand and caches that transformers fills."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from kvcal import arch, formats, probe
from kvcal.errors import ModelError, PlanRefused, UsageError
from kvcal.planner import known_shapes, layer_cache, served_model
from kvcal.planner.layer_cache import LayerCache
from kvcal.planner.served_model import Kept
from tests import tiny

FP8, INT4 = formats.get("fp8"), formats.get("int4_per_token_head")
TOKENS = 40  # more than any window of tests.tiny
every_format = pytest.mark.parametrize("fmt", [None, *formats.FORMATS], ids=lambda f: f.name if f else "16")


def kept(family: str, **changes: Any) -> Kept:
    config = CONFIG_MAPPING[family](**tiny.fields(family, **changes)).to_dict()
    return served_model.kept(config | {"model_type": family, "architectures": ["A"]}, probe.read)


def filled(family: str) -> Any:
    """The cache that transformers makes of :data:`TOKENS` tokens."""
    with torch.no_grad():
        return tiny.build_model(family)(torch.arange(TOKENS)[None], use_cache=True).past_key_values


def per_token(name: str, fmt: formats.KVFormat | None = None, ranks: int = 1) -> int:
    caches = served_model.kept(known_shapes.get(name)).caches
    return sum(cache.bytes_per_token(fmt, ranks) for cache in caches)


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("llama-3-70b", 2 * 80 * 8 * 128 * 2),  # 320 KiB
        ("llama-3-8b", 2 * 32 * 8 * 128 * 2),  # 128 KiB
        ("llama-2-7b", 2 * 32 * 32 * 128 * 2),  # 512 KiB: a KV head for every query head
        ("qwen2.5-7b", 2 * 28 * 4 * 128 * 2),  # 56 KiB
        ("deepseek-v3", 61 * (512 + 64) * 2),  # one latent and one rotary key
    ],
)
def test_bytes_per_token_in_16_bits(name: str, by_hand: int) -> None:
    assert per_token(name) == by_hand
    assert per_token(name, FP8) == by_hand // 2


def test_llama_3_70b_is_320_kib_and_deepseek_v3_is_70_272_bytes() -> None:
    assert per_token("llama-3-70b") == 320 * 1024
    assert per_token("deepseek-v3") == 70_272


# Codes, then what comes with them: a float32 scale per vector, or a byte for each 16 or 32 elements.
@pytest.mark.parametrize(
    ("name", "width", "size"),
    [
        ("int8_per_token_head", 128, 128 + 4),
        ("fp8_per_token_head", 96, 96 + 4),
        ("int4_per_token_head", 128, 64 + 4),
        ("int4_per_token_head", 65, 33 + 4),
        ("nvfp4", 128, 64 + 8),
        ("nvfp4", 40, 20 + 3),
        ("mxfp4", 128, 64 + 4),
        ("int3", 10, 4),
        ("fp8", 7, 7),
    ],
)
def test_scales_are_counted(name: str, width: int, size: int) -> None:
    assert layer_cache.bytes_per_vector(formats.get(name), width) == size


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "gemma3n_text", "gemma4_text", "gemma3", "llava"])
def test_every_family_keeps_what_transformers_caches(family: str) -> None:
    """Bytes of the caches that a forward pass fills, shared ones once, heads of each layer's own size."""
    caches, held = kept(family).caches, filled(family).layers
    owners = [cache for cache in caches if not cache.shared]
    tokens = [layer.keys.shape[2] for layer in held if getattr(layer, "keys", None) is not None]
    found = [
        layer.keys.numel() + layer.values.numel()
        for layer in held
        if getattr(layer, "keys", None) is not None
    ]
    assert found == [cache.elements * n for cache, n in zip(owners, tokens, strict=True)]
    # transformers keeps one token less, whose place the next one takes.
    assert tokens == [min(cache.tokens_read(TOKENS), (cache.window or 99) - 1) for cache in owners]


def test_a_shared_cache_is_held_once_and_read_by_each() -> None:
    caches = kept("gemma3n_text").caches
    assert [cache.shared for cache in caches] == [False, False, True, True]
    each = 2 * 2 * 16 * 2
    assert [cache.bytes_added(None) for cache in caches] == [each, each, 0, 0]
    assert [cache.bytes_per_token(None) for cache in caches] == [each] * 4
    assert [cache.tokens_held(40, 16) for cache in caches] == [48, 48, 0, 0]
    assert [cache.tokens_read(40) for cache in caches] == [24, 40, 24, 40]


def test_heads_may_differ_by_layer() -> None:
    caches = kept("gemma4_text").caches
    assert [cache.vectors for cache in caches] == [(16, 16), (32, 32)] * 2
    assert [cache.bytes_per_token(INT4) for cache in caches] == [2 * 2 * (8 + 4), 2 * 2 * (16 + 4)] * 2


def test_a_latent_in_fp8_has_its_rotary_key_in_16_bits() -> None:
    """DeepSeek-V3: 512 codes and 64 BF16 numbers; fp8_ds_mla's 656 bytes have four float32 scales more."""
    (layer, *_) = served_model.kept(known_shapes.get("deepseek-v3")).caches
    assert layer.bytes_per_token(formats.get("fp8_latent_bf16_rope")) == 512 + 2 * 64 == 656 - 4 * 4
    assert layer.bytes_per_token(FP8) == 576


@pytest.mark.parametrize("family", tiny.LATENT_FAMILIES)
def test_a_latent_is_what_transformers_caches(family: str) -> None:
    caches, held = kept(family).caches, filled(family).layers
    found = [layer.keys.numel() + layer.values.numel() for layer in held]
    assert found == [cache.elements * TOKENS for cache in caches]
    assert caches[0].vectors == (held[0].keys.shape[3], held[0].values.shape[3])


def test_a_latent_of_another_kind_is_refused() -> None:
    config = known_shapes.get("deepseek-v3") | {"model_type": "minicpm3"}
    with pytest.raises(PlanRefused, match="'minicpm3'"):
        served_model.kept(config)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_keeps_what_its_spec_announces(family: str) -> None:
    config = CONFIG_MAPPING[family](**tiny.fields(family)).to_dict() | {"model_type": family}
    config["architectures"] = ["ForCausalLM"]
    spec, caches = arch.read(config), served_model.kept(config).caches
    assert sum(cache.elements for cache in caches) == spec.cached_elements_per_token
    windows = [cache.window for cache in caches]
    assert windows == [spec.sliding_window if layer.kind == "sliding" else None for layer in spec.layers]


def test_a_window_caps_what_is_held_and_read() -> None:
    config: dict[str, Any] = CONFIG_MAPPING["gemma3_text"](**tiny.fields("gemma3_text")).to_dict()
    sliding, _, full = served_model.kept(config | {"architectures": ["G"]}).caches
    assert (sliding.window, full.window) == (24, None)
    assert (sliding.tokens_read(10), sliding.tokens_read(24), sliding.tokens_read(200)) == (10, 24, 24)
    assert full.tokens_read(200) == 200
    # 24 tokens that begin in the last slot of a page of 16 end in the third.
    assert (sliding.tokens_held(10, 16), sliding.tokens_held(200, 16), full.tokens_held(200, 16)) == (
        16,
        48,
        208,
    )


PLAIN = LayerCache(query_heads=8, kv_heads=2, vectors=(64, 64), contracted=128)


@pytest.mark.parametrize(
    ("context", "page", "held"),
    [
        (1, 16, 16),
        (16, 16, 16),
        (17, 16, 32),
        (8192, 16, 8192),
        (8191, 16, 8192),
        (100, 1, 100),
        (3, 128, 128),
    ],
)
def test_pages_are_whole(context: int, page: int, held: int) -> None:
    assert PLAIN.tokens_held(context, page) == held


sizes = st.integers(1, 500)


@given(window=sizes, context=sizes, page=st.integers(1, 70), start=st.integers(0, 500))
def test_a_window_fits_into_its_pages_wherever_it_begins(
    window: int, context: int, page: int, start: int
) -> None:
    layer = LayerCache(1, 1, (64,), 64, window=window)
    held = layer.tokens_held(context, page)
    kept = min(window, context)
    first = min(start, context - kept)  # pages are counted from the sequence's first token
    touched = {token // page for token in range(first, first + kept)}
    assert len(touched) * page <= held
    assert held <= LayerCache(1, 1, (64,), 64).tokens_held(context, page)


@given(window=sizes, page=st.integers(1, 70))
def test_no_page_is_held_for_nothing(window: int, page: int) -> None:
    held = LayerCache(1, 1, (64,), 64, window=window).tokens_held(10_000, page)
    most = max(
        len({token // page for token in range(start, start + window)}) for start in range(page)
    )  # over every alignment
    assert held == most * page


@every_format
@given(width=st.integers(1, 300), more=st.integers(1, 100))
def test_bytes_grow_with_the_vector(fmt: formats.KVFormat | None, width: int, more: int) -> None:
    assert layer_cache.bytes_per_vector(fmt, width) <= layer_cache.bytes_per_vector(fmt, width + more)


@given(st.sampled_from([8, 16, 32, 64, 128, 256]))
def test_fewer_bits_are_fewer_bytes(width: int) -> None:
    found = [layer_cache.bytes_per_vector(formats.get(f"int{bits}"), width) for bits in (2, 3, 4, 5, 6, 8)]
    assert found == sorted(found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (64, 1)])
def test_kv_heads_are_dealt_out_or_copied(ranks: int, heads: int) -> None:
    layer = served_model.kept(known_shapes.get("llama-3-70b")).caches[0]
    assert layer.heads_on(ranks) == heads
    assert layer.bytes_per_token(None, ranks) == heads * 2 * 128 * 2


@pytest.mark.parametrize("ranks", [1, 2, 16, 128])
def test_every_rank_holds_the_whole_latent(ranks: int) -> None:
    assert per_token("deepseek-v3", ranks=ranks) == 70_272


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    layer = served_model.kept(known_shapes.get("qwen2.5-7b")).caches[0]  # 28 query heads, 4 KV heads
    with pytest.raises(UsageError, match="28 attention heads cannot be dealt out to 8 GPUs"):
        layer.heads_on(8)
    with pytest.raises(UsageError, match="4 KV heads cannot be dealt out to 7 GPUs"):
        layer.heads_on(7)


def test_what_a_head_multiplies() -> None:
    """Two products of 128 channels; for a latent 576 for the logits and 512 for the output."""
    assert served_model.kept(known_shapes.get("llama-3-70b")).caches[0].contracted == 256
    assert served_model.kept(known_shapes.get("deepseek-v3")).caches[0].contracted == 576 + 512


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(PlanRefused, match="'bart' is an encoder-decoder, whose two caches"):
        served_model.kept({"model_type": "bart", "is_encoder_decoder": True}, probe.read)


def test_unusable_configs_are_refused() -> None:
    with pytest.raises(ModelError, match="qk_rope_head_dim must be a positive integer"):
        served_model.kept(known_shapes.get("deepseek-v3") | {"qk_rope_head_dim": None})
    with pytest.raises(PlanRefused, match="mamba"):
        served_model.kept({"model_type": "mamba"})
