"""Counts against what transformers builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvcal import families
from kvcal.errors import PlanRefused
from kvcal.planner import known_shapes, parameters
from tests import tiny

_COUNTED = {*parameters._FAMILIES, *parameters._LATENT_FAMILIES}


def built(config: dict[str, Any]) -> Any:
    """The model on the meta device: all of its shapes and none of its memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**config))


def size(config: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in built(config).parameters())


@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if f in parameters._FAMILIES])
def test_every_family_is_counted_as_transformers_builds_it(family: str) -> None:
    config = CONFIG_MAPPING[family](**tiny.fields(family)).to_dict()
    config |= {"model_type": family, "architectures": ["ForCausalLM"]}
    assert parameters.count(config).total == size(config)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("starcoder2", {"use_bias": False}),
        ("stablelm", {"use_qkv_bias": False}),
    ],
)
def test_optional_parts_are_counted(family: str, changes: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[family](**tiny.fields(family, **changes)).to_dict()
    config |= {"model_type": family, "architectures": ["ForCausalLM"]}
    assert parameters.count(config).total == size(config)


@pytest.mark.parametrize("name", known_shapes.names())
def test_shipped_shapes_are_counted_as_transformers_builds_them(name: str) -> None:
    config = known_shapes.get(name)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    assert parameters.count(config).total == size(plain)


# Model cards: 70.6 billion, 8.03, 6.74, 7.62, and 671 with 37 active (DeepSeek-V3, arXiv 2412.19437).
@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-70b", 70.55), ("llama-3-8b", 8.03), ("llama-2-7b", 6.74), ("qwen2.5-7b", 7.62)],
)
def test_published_sizes(name: str, billions: float) -> None:
    assert round(parameters.count(known_shapes.get(name)).total / 1e9, 2) == billions


def test_of_deepseek_v3_a_token_reads_37_billion() -> None:
    found = parameters.count(known_shapes.get("deepseek-v3"))
    assert round(found.total / 1e9) == 671
    assert round(found.active / 1e9) == 37


def test_a_step_reads_every_expert_once_many_tokens_choose() -> None:
    found = parameters.count(known_shapes.get("deepseek-v3"))
    one, many = found.bytes_read(8, 1), found.bytes_read(8, 10_000)
    assert one == pytest.approx(2 * (found.head + found.vectors) + found.matrices + 8 * found.expert)
    assert many == pytest.approx(2 * (found.head + found.vectors) + found.matrices + 256 * found.expert)
    # Two tokens that choose 8 of 256 evenly meet in a quarter of an expert.
    touched = (found.bytes_read(8, 2) - one) / found.expert
    assert touched == pytest.approx(8 - 8 * 8 / 256)


def test_weights_of_a_dense_model_are_read_whole_but_for_the_embedding() -> None:
    found = parameters.count(known_shapes.get("llama-3-8b"))
    assert found.bytes(16) == 2 * found.total
    assert found.bytes_read(16, 1) == found.bytes_read(16, 99) == 2 * (found.total - 128256 * 4096)
    assert found.bytes(8) == pytest.approx(found.total + 2 * 128256 * 4096, rel=1e-4)


@pytest.mark.parametrize("family", sorted({*families.FAMILIES, "mamba"} - _COUNTED))
def test_other_families_are_refused_with_what_would_work(family: str) -> None:
    with pytest.raises(PlanRefused, match="give --weights-gib"):
        parameters.count({"model_type": family})


def test_models_with_experts_in_some_layers_are_refused() -> None:
    config = tiny.fields("qwen3_moe") | {"model_type": "qwen3_moe", "architectures": ["X"]}
    with pytest.raises(PlanRefused, match="experts in part"):
        parameters.count(config | {"mlp_only_layers": [1]})
