from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from kvcal import arch, capture, sources
from kvcal.errors import KvcalError, ModelError, PlanRefused
from tests import tiny

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 263,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_spec_is_what_the_real_model_has(family: str, tmp_path: Path) -> None:
    model = tiny.build_model(family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    spec = arch.read(sources.read_config(tmp_path))

    calls: dict[int, capture.AttentionCall] = {}
    with capture.intercept(model, lambda call: calls.update({call.layer: call})), torch.no_grad():
        model(torch.arange(9)[None])
    modules = dict(model.named_modules())
    assert [layer.index for layer in spec.layers] == sorted(calls)
    for layer in spec.layers:
        call = calls[layer.index]
        assert modules[layer.module].layer_idx == layer.index
        assert call.query.shape == (1, layer.heads, 9, layer.head_dim)
        assert call.key.shape == call.value.shape == (1, layer.kv_heads, 9, layer.head_dim)
        assert call.window == (spec.sliding_window if layer.kind == "sliding" else None)
        assert call.softcap == spec.softcap
    assert spec.architecture == type(model).__name__
    assert (spec.model_type, spec.dtype) == (family, "float32")
    assert (spec.hidden_size, spec.vocab_size) == (96, 263)
    assert (spec.max_context, spec.quant_method) == (256, None)
    assert spec.cached_elements_per_token == sum(c.key.numel() + c.value.numel() for c in calls.values()) // 9


# What hub configs leave out or say in the words of an earlier transformers.
SPARSE: dict[str, dict[str, Any]] = {
    "gemma2 without layer_types": {"model_type": "gemma2", "sliding_window": 24},
    "gemma3_text with a pattern": {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "sliding_window_pattern": 3,
    },
    "gemma3_text without a pattern": {"model_type": "gemma3_text", "sliding_window": 24},
    "qwen2 with a window it does not use": {"model_type": "qwen2", "sliding_window": 24},
    "qwen2 sliding from a layer on": {
        "model_type": "qwen2",
        "sliding_window": 24,
        "use_sliding_window": True,
        "max_window_layers": 5,
    },
    "qwen3 sliding from a layer on": {
        "model_type": "qwen3",
        "sliding_window": 24,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    **{f"{family} with defaults": {"model_type": family} for family in arch.FAMILIES},
}


@pytest.mark.parametrize("fields", SPARSE.values(), ids=SPARSE)
def test_sparse_config_means_what_transformers_takes_it_for(fields: dict[str, Any]) -> None:
    given = {"hidden_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 32, **fields}
    model_type = given.pop("model_type")
    config = CONFIG_MAPPING[model_type](**given)
    named = {"vocab_size": 263, "max_position_embeddings": 256, "architectures": ["X"]}
    spec = arch.read(given | named | {"model_type": model_type})

    sliding = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"] * 7
    assert [f"{layer.kind}_attention" for layer in spec.layers] == kinds
    assert {layer.kv_heads for layer in spec.layers} == {config.num_key_value_heads}
    assert {layer.head_dim for layer in spec.layers} == {getattr(config, "head_dim", None) or 1024 // 32}


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("deepseek_v3", "caches a latent"),
        ("gpt2", "vLLM drops scales"),
        ("mamba", "has no attention layer"),
        ("qwen3_next", "hybrid"),
        ("t5", "encoder-decoder"),
        ("perceptron", "is not a family kvcal knows"),
    ],
)
def test_family_is_refused_by_name(model_type: str, why: str) -> None:
    with pytest.raises(PlanRefused, match=rf"model_type '{model_type}' {why}.*; handled: .*llama"):
        arch.read(CONFIG | {"model_type": model_type})


def test_no_family_is_both_handled_and_refused() -> None:
    assert not arch.FAMILIES.keys() & arch._REFUSED_FAMILIES.keys()


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention", "mamba"])
def test_layers_without_a_plain_cache_are_refused(kind: str) -> None:
    with pytest.raises(PlanRefused, match=f"layers of kind {kind} keep no plain KV cache"):
        arch.read(CONFIG | {"layer_types": ["full_attention", kind, "full_attention"]})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", None, "has no model_type"),
        ("model_type", 7, "has no model_type"),
        ("architectures", [], "architectures must name the model class"),
        ("architectures", None, "architectures must name the model class"),
        ("hidden_size", None, "hidden_size must be a positive integer, found None"),
        ("hidden_size", "96", "hidden_size must be a positive integer, found '96'"),
        ("num_hidden_layers", 0, "num_hidden_layers must be a positive integer, found 0"),
        ("num_hidden_layers", True, "num_hidden_layers must be a positive integer, found True"),
        ("num_attention_heads", -6, "num_attention_heads must be a positive integer, found -6"),
        ("num_key_value_heads", 4, "6 attention heads do not divide into 4 KV heads"),
        ("num_key_value_heads", [2, 2, 2], "num_key_value_heads must be a positive integer"),
        ("head_dim", 24.0, "head_dim must be a positive integer, found 24.0"),
        ("vocab_size", None, "vocab_size must be a positive integer"),
        ("max_position_embeddings", None, "max_position_embeddings must be a positive integer"),
        ("sliding_window", 0, "sliding_window must be a positive integer, found 0"),
        ("attn_logit_softcapping", -1.0, "attn_logit_softcapping must be a positive number, found -1.0"),
        ("attn_logit_softcapping", float("nan"), "attn_logit_softcapping must be a positive number"),
        ("layer_types", ["full_attention"], "layer_types must list 3 layers"),
        ("layer_types", "full_attention", "layer_types must list 3 layers"),
        ("quantization_config", {}, "quantization_config names no quant_method"),
        ("quantization_config", "fp8", "quantization_config names no quant_method"),
    ],
)
def test_malformed_field_is_named_with_its_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        arch.read(CONFIG | {field: value})
    assert message in str(caught.value)


def test_head_size_must_come_out_whole() -> None:
    with pytest.raises(ModelError, match="hidden_size 96 does not divide into 5 heads"):
        arch.read(CONFIG | {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5})


def test_quant_method_of_the_base_is_kept() -> None:
    spec = arch.read(CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    assert spec.quant_method == "fp8"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2000) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [*CONFIG, "layer_types", "sliding_window", "use_sliding_window", "sliding_window_pattern"]
FIELDS += ["attn_logit_softcapping", "quantization_config", "max_window_layers"]


@settings(deadline=None)
@given(st.sampled_from(sorted(arch.FAMILIES)), st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_json_gives_a_spec_or_a_kvcal_error(family: str, fields: dict[str, Any]) -> None:
    try:
        spec = arch.read(CONFIG | {"model_type": family} | fields)
    except KvcalError:
        return
    assert spec.cached_elements_per_token > 0
