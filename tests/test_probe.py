"""What kvcal finds in a model's code without weights is what the model does with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING

from kvcal import arch, capture, families, probe, sources
from kvcal.errors import ModelError, PlanRefused
from tests import tiny

NAMED = {"architectures": ["X"]}


def config_of(family: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[family](**tiny.fields(family, **changes))


def table_spec(family: str, **changes: Any) -> arch.ModelSpec:
    return arch.read(tiny.fields(family, **changes) | NAMED | {"model_type": family})


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*tiny.FAMILIES, *tiny.LATENT_FAMILIES)},
    "falcon with KV heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon of one head per query head": ("falcon", {"multi_query": False}),
    "gpt2 with words of its own": ("gpt2", {"n_head": 3, "num_attention_heads": 3}),
    "opt without biases": ("opt", {"enable_bias": False}),
    "phi3 that stretches by length": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3_next of its own pattern": ("qwen3_next", {"layer_types": None, "num_hidden_layers": 5}),
}


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_every_row_of_the_table_is_what_the_code_does(family: str, changes: dict[str, Any]) -> None:
    probe.verify(config_of(family, **changes), table_spec(family, **changes))


def planted(spec: arch.ModelSpec, **changes: Any) -> arch.ModelSpec:
    """The spec with its second layer changed."""
    layers = list(spec.layers)
    layers[1] = dataclasses.replace(layers[1], **changes)
    return dataclasses.replace(spec, layers=tuple(layers))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"kv_heads": 3}, "layer 1: kv_heads is 2 in the code of X, the table of families says 3"),
        ("llama", {"heads": 4}, "layer 1: heads is 6"),
        ("llama", {"head_dim": 8}, "layer 1: head_dim is 16"),
        ("llama", {"module": "model.layers.1.attn"}, "layer 1: module is model.layers.1.self_attn"),
        ("llama", {"shares": 0}, "layer 1: shares is None"),
        ("gemma2", {"window": 24, "kind": "sliding"}, "layer 1: kind is full"),
        ("mistral", {"window": 25}, "layer 1: window is 24"),
        ("phi", {"rotary_dim": 16}, "layer 1: rotary_dim is 8"),
        ("gpt_oss", {"own_tensors": ()}, "layer 1: own_tensors is \\('sinks',\\)"),
    ],
)
def test_wrong_layer_of_the_table_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        probe.verify(config_of(family), planted(table_spec(family), **changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"softcap": None}, "layer 0: softcap is 5.0"),
        ("gpt_oss", {"sinks": False}, "layer 0: sinks is True"),
        ("llama", {"key_bias": True}, "layer 0: key_bias is False"),
        ("qwen3_next", {"output_gate": False}, "layer 0: q_proj.weight is \\(192, 96\\)"),
        ("qwen3", {"qk_norm": "full"}, "layer 0: q_norm.weight is \\(16,\\)"),
        ("llama", {"projections": families.Projections(o="out")}, "layer 0: out.weight is None"),
        (
            "gpt2",
            {"projections": families.Projections("c_attn", "c_attn", "c_attn", "c_proj", "blocks")},
            "layer 0: c_attn.weight is \\(96, 288\\) in the code of X, .* says \\(288, 96\\)",
        ),
    ],
)
def test_wrong_row_of_the_table_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        probe.verify(config_of(family), dataclasses.replace(table_spec(family), **changes))


def test_layers_that_should_attend_or_should_not_are_named() -> None:
    spec = table_spec("qwen3_next")
    with pytest.raises(ModelError, match="layer 1 does not attend"):
        probe.verify(config_of("qwen3_next"), table_spec("qwen3_next", layer_types=["full_attention"] * 3))
    with pytest.raises(ModelError, match="layer 2 attends, and"):
        probe.verify(config_of("qwen3_next"), dataclasses.replace(spec, layers=spec.layers[:1]))


@pytest.mark.parametrize("family", tiny.WITHOUT_ROW)
def test_spec_without_a_row_is_what_the_real_model_has(family: str, tmp_path: Path) -> None:
    model = tiny.build_model(family)
    model.save_pretrained(tmp_path)
    spec = probe.read(sources.read_config(tmp_path))

    calls: dict[int, capture.AttentionCall] = {}
    with capture.intercept(model, lambda call: calls.update({call.layer: call})), torch.no_grad():
        cache = model(torch.arange(9)[None], use_cache=True).past_key_values
    assert [layer.index for layer in spec.layers] == sorted(calls)
    layers = model.config.get_text_config().num_hidden_layers
    assert len(spec.layers) + spec.layers_without_attention == layers
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        written = set(file.keys())
    owned = 0
    for layer in spec.layers:
        call = calls[layer.index]
        assert call.module is model.get_submodule(layer.module)
        assert call.query.shape == (1, layer.heads, 9, layer.head_dim)
        assert call.key.shape == call.value.shape == (1, layer.kv_heads, 9, layer.head_dim)
        assert (call.window, call.softcap, call.sinks) == (layer.window, spec.softcap, None)
        assert f"{layer.in_checkpoint}.q_proj.weight" in written
        if layer.shares is None:
            owned += 1
            assert cache.layers[layer.index].keys.shape == call.key.shape
        else:
            assert torch.equal(call.key, calls[layer.shares].key)
            assert torch.equal(call.value, calls[layer.shares].value)
    attending = [each for each in cache.layers if getattr(each, "keys", None) is not None]
    assert owned == len(attending)
    assert spec.cached_elements_per_token == sum(each.keys[0, :, 0].numel() * 2 for each in attending)


def test_shared_and_differing_heads_are_found() -> None:
    found = probe.read(config_of("gemma3n_text").to_dict() | NAMED)
    assert [layer.shares for layer in found.layers] == [None, None, 0, 1]
    found = probe.read(config_of("gemma4_text").to_dict() | NAMED)
    assert [layer.shares for layer in found.layers] == [None, None, None, 1]
    assert [layer.head_dim for layer in found.layers] == [16, 32, 16, 32]
    assert [layer.kind for layer in found.layers] == ["sliding", "full"] * 2


def test_family_of_the_table_is_read_from_the_table() -> None:
    assert probe.read(tiny.fields("llama") | NAMED | {"model_type": "llama"}) == table_spec("llama")


_SHARED_BLOCK = {
    "layers_block_type": ["mamba", "hybrid"],
    "hybrid_layer_ids": [1],
    "num_hidden_layers": 2,
    "num_mem_blocks": 1,
    "use_mamba_kernels": False,
}
_STARTS = {"decoder_start_token_id": 0, "pad_token_id": 1}
_SMALL = {k: v for k, v in tiny.fields("llama").items() if k not in ("head_dim", "num_key_value_heads")}


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("bloom", {}, "'bloom' computes attention by code of its own"),
        ("codegen", {}, "'codegen' computes attention by code of its own"),
        ("llama4_text", {"head_dim": 16, "num_key_value_heads": 2}, "'llama4_text' attends in chunks"),
        ("diffllama", {}, "'diffllama' attends more than once in layer 0"),
        ("zamba2", _SHARED_BLOCK, "'zamba2' has attention in blocks that several layers use"),
        ("whisper", {}, "'whisper' is an encoder-decoder whose encoder reads no text"),
        ("fsmt", _STARTS, "'fsmt' computes attention by code of its own"),
        ("prophetnet", _STARTS, "'prophetnet' computes attention by code of its own"),
        ("led", _STARTS, "'led' cannot be run without weights"),
        ("umt5", _STARTS, "'umt5' is an encoder-decoder whose decoder layer 0 has two attentions"),
        ("bart", {"decoder_start_token_id": None}, "names no decoder_start_token_id"),
        ("clip", {}, "'clip' is no decoder of text"),
        ("nonsense", {}, "'nonsense' is not a family that transformers has a class for"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(
    model_type: str, fields: dict[str, Any], message: str
) -> None:
    config = _SMALL | fields
    if model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[model_type](**(config if "llama" in model_type else {})).to_dict() | fields
    with pytest.raises(PlanRefused, match=message):
        probe.read(config | NAMED | {"model_type": model_type})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than any model has"),
        ({"hidden_size": "many"}, "config.json: transformers refuses it: "),
        ({"num_attention_heads": 0}, "config.json: transformers"),
        ({"architectures": None}, "architectures must name the model class"),
    ],
)
def test_config_that_cannot_be_meant_is_a_model_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        probe.read(tiny.fields("olmoe") | NAMED | {"model_type": "olmoe"} | fields)


def test_probing_leaves_no_trace() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = config_of("olmoe")
    before, names = config.to_dict(), set(ALL_ATTENTION_FUNCTIONS)
    probe.observe(config)
    assert config.to_dict() == before
    assert set(ALL_ATTENTION_FUNCTIONS) == names
