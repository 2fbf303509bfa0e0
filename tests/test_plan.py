from __future__ import annotations

from typing import Any

import pytest

from kvcal import arch, plan
from kvcal.errors import PlanRefused
from kvcal.recipe import Recipe

# Geometry of meta-llama/Meta-Llama-3-70B.
LLAMA_3_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def resolve(changes: dict[str, Any] | None = None, **fields: Any) -> plan.Plan:
    return plan.resolve(Recipe().override(changes or {}), arch.read(LLAMA_3_70B | fields))


def test_llama_3_70b_takes_320_kib_per_token_in_16_bits_and_half_in_8() -> None:
    planned = resolve()
    assert planned.bytes_per_token_reference == 320 * 1024
    assert planned.bytes_per_token_quantized == 160 * 1024


def test_the_recipe_is_resolved_to_the_rows_it_names() -> None:
    planned = resolve({"granularity": "per_head"})
    assert (planned.format.name, planned.granularity.name, planned.engine.name) == (
        "fp8_e4m3",
        "per_head",
        "vllm",
    )
    assert planned.layers == planned.model.layers
    assert planned.notices == ()


@pytest.mark.parametrize(("granularity", "scales"), [("per_tensor", 80 * 3), ("per_head", 80 * (8 + 8 + 64))])
def test_bits_per_element_includes_scales_spread_over_the_context(granularity: str, scales: int) -> None:
    planned = resolve({"granularity": granularity})
    assert planned.scale_bytes == 4 * scales
    elements = 2 * 80 * 8 * 128 * 8192
    assert planned.bits_per_element == 8 + 32 * scales / elements


def test_refusals_are_listed_all_at_once() -> None:
    with pytest.raises(PlanRefused) as caught:
        resolve(
            {"granularity": "per_head"}, head_dim=40, quantization_config={"quant_method": "bitsandbytes"}
        )
    assert len(caught.value.reasons) == 2
    assert "head size 40" in str(caught.value)
    assert "'bitsandbytes'" in str(caught.value)


def test_samples_are_cut_to_the_context_and_said_so() -> None:
    planned = resolve({"calibration.seq_len": 512, "evaluation.seq_len": 300}, max_position_embeddings=256)
    assert (planned.seq_len, planned.evaluation_seq_len) == (256, 256)
    assert planned.notices == (
        "calibration: samples are cut from 512 to 256 tokens, the model's context",
        "evaluation: samples are cut from 300 to 256 tokens, the model's context",
    )


def test_samples_as_long_as_the_context_are_left_alone() -> None:
    planned = resolve({"calibration.seq_len": 256, "evaluation.seq_len": 255}, max_position_embeddings=256)
    assert (planned.seq_len, planned.evaluation_seq_len) == (256, 255)
    assert planned.notices == ()
