from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcal import arch, engines, exactness, formats, granularity, plan
from kvcal.engines import VLLM
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


every_dynamic_format = pytest.mark.parametrize("name", [f.name for f in formats.FORMATS if f.dynamic])


def resolve(changes: dict[str, Any] | None = None, **fields: Any) -> plan.Plan:
    return plan.resolve(Recipe().override(changes or {}), arch.read(LLAMA_3_70B | fields))


def test_llama_3_70b_takes_320_kib_per_token_in_16_bits_and_half_in_8() -> None:
    planned = resolve()
    assert planned.bytes_per_token_reference == 320 * 1024
    assert planned.bytes_per_token_quantized == 160 * 1024


def test_the_recipe_is_resolved_to_the_rows_it_names() -> None:
    planned = resolve({"granularity": "per_head"})
    assert planned.granularity is not None
    assert (planned.format.name, planned.granularity.name, planned.engine.name) == (
        "fp8_e4m3",
        "per_head",
        "vllm",
    )
    assert (planned.scaling, planned.deliver, planned.folds) == ("per_head", "metadata", False)
    assert planned.layers == planned.model.layers
    assert planned.notices == ()


@pytest.mark.parametrize(("granularity", "scales"), [("per_tensor", 80 * 3), ("per_head", 80 * (8 + 8 + 64))])
def test_bits_per_element_includes_scales_spread_over_the_context(granularity: str, scales: int) -> None:
    planned = resolve({"granularity": granularity})
    assert planned.scale_bytes == 4 * scales
    elements = 2 * 80 * 8 * 128 * 8192
    assert planned.bits_per_element == 8 + 32 * scales / elements


# Bytes per vector of 128 channels: its codes, and a float32 scale.
@pytest.mark.parametrize(
    ("name", "per_vector"),
    [("int8_per_token_head", 132), ("fp8_per_token_head", 132), ("int4_per_token_head", 68)],
)
def test_a_dynamic_format_stores_a_scale_with_every_vector(name: str, per_vector: int) -> None:
    planned = resolve({"format": name})
    vectors = 2 * 80 * 8
    assert planned.bytes_per_token_reference == 320 * 1024
    assert planned.bytes_per_token_quantized == vectors * per_vector
    assert planned.bits_per_element == 8 * per_vector / 128
    assert planned.scale_bytes == 0


@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    [
        ("int8_per_token_head", 64, 8.5),
        ("fp8_per_token_head", 64, 8.5),
        ("int4_per_token_head", 64, 4.5),
        ("int8_per_token_head", 128, 8.25),
        ("int4_per_token_head", 256, 4.125),
    ],
)
def test_the_scale_of_a_vector_weighs_less_in_larger_heads(name: str, head_dim: int, bits: float) -> None:
    planned = resolve({"format": name}, head_dim=head_dim)
    assert planned.bits_per_element == bits
    assert planned.bytes_per_token_quantized == 2 * 80 * 8 * head_dim * bits / 8


@every_dynamic_format
def test_a_dynamic_format_is_folded_and_has_no_static_scales(name: str) -> None:
    planned = resolve({"format": name})
    assert (planned.deliver, planned.granularity, planned.folds) == ("fold", None, True)
    assert planned.scaling == "per_token_head"


def test_fp8_can_be_folded_with_and_without_scales() -> None:
    fold, both = resolve({"deliver": "fold"}), resolve({"deliver": "both", "granularity": "per_head"})
    assert (fold.granularity, fold.scaling, fold.folds, fold.scale_bytes) == (None, "scale 1.0", True, 0)
    assert fold.bits_per_element == 8
    assert both.granularity is not None
    assert (both.granularity.name, both.scaling, both.folds) == ("per_head", "per_head", True)
    assert both.scale_bytes == 4 * 80 * (8 + 8 + 64)
    assert fold.bytes_per_token_quantized == both.bytes_per_token_quantized == 160 * 1024


def refused(changes: dict[str, Any], **fields: Any) -> list[str]:
    with pytest.raises(PlanRefused) as caught:
        resolve(changes, **fields)
    return caught.value.reasons


@every_dynamic_format
@pytest.mark.parametrize("granularity", granularity.names())
def test_granularity_of_a_dynamic_format_is_refused(name: str, granularity: str) -> None:
    assert refused({"format": name, "granularity": granularity}) == [
        f"{name} is scaled per token and head by the engine, so --granularity {granularity} has no effect;"
        " leave it out"
    ]


@pytest.mark.parametrize("name", [f.name for f in formats.FORMATS if f.name not in VLLM.cache_dtype])
@pytest.mark.parametrize("granularity", [None, "per_head"])
def test_a_format_without_an_engine_is_refused_for_that_and_nothing_else(
    name: str, granularity: str | None
) -> None:
    (reason,) = refused({"format": name, "granularity": granularity})
    assert f"has no {name} cache; the nearest it has is" in reason


@pytest.mark.parametrize("name", [n for n in granularity.names() if n not in VLLM.granularities])
def test_a_granularity_that_the_engine_does_not_load_is_refused(name: str) -> None:
    (reason,) = refused({"granularity": name})
    assert reason.startswith(f"vllm 0.33 takes no {name} scales")
    assert reason.endswith("; use per_tensor or per_head")


def test_static_granularity_of_scales_that_are_not_written_is_refused() -> None:
    assert refused({"deliver": "fold", "granularity": "per_head"}) == [
        "with --deliver fold the engine scales by 1.0, so --granularity per_head has no effect; leave it out"
    ]


@every_dynamic_format
@pytest.mark.parametrize("deliver", ["metadata", "both"])
def test_metadata_for_a_dynamic_format_is_refused(name: str, deliver: str) -> None:
    (reason,) = refused({"format": name, "deliver": deliver})
    assert f"loads no static scales for {name}" in reason
    assert "only --deliver fold reaches it" in reason


@pytest.mark.parametrize("deliver", ["fold", "both"])
def test_folds_into_a_quantized_base_are_refused(deliver: str) -> None:
    (reason,) = refused({"deliver": deliver}, quantization_config={"quant_method": "compressed-tensors"})
    assert reason.startswith("base weights are quantized already (compressed-tensors)")


def test_a_transform_without_a_fold_is_refused_with_the_mathematics_and_the_engine() -> None:
    wanted = ["key_scale", "key_hadamard", "value_hadamard", "key_offset"]
    reasons = refused({"deliver": "fold", "folds.transforms": wanted})
    why_not = exactness.table(arch.read(LLAMA_3_70B))
    assert reasons == [
        f"folds.transforms: {name} cannot be folded into llama exactly: {why_not[name]};"
        " and vllm ignores what it would have to do online"
        for name in ("key_hadamard", "key_offset")
    ]
    assert "does not commute with RoPE" in reasons[0]


def test_transforms_are_of_no_concern_where_nothing_is_folded() -> None:
    assert not resolve({"folds.transforms": ["key_hadamard"]}).folds


def test_refusals_of_the_dynamic_formats_are_listed_all_at_once() -> None:
    changes = {
        "format": "int4_per_token_head",
        "granularity": "per_head",
        "deliver": "both",
        "folds.transforms": ["key_hadamard"],
    }
    reasons = refused(
        changes,
        head_dim=16,
        max_position_embeddings=4,
        quantization_config={"quant_method": "compressed-tensors"},
    )
    starts = [
        "vllm 0.33 loads no static",
        "base weights are",
        "head size 16",
        "int4_per_token_head is scaled",
    ]
    starts += ["folds.transforms: key_hadamard", "the model's context of 4 tokens"]
    assert len(reasons) == len(starts)
    assert all(reason.startswith(start) for reason, start in zip(reasons, starts, strict=True))


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


@pytest.mark.parametrize(("name", "bits"), [("fp8", 8.0), ("int8_per_token_head", 8.25)])
def test_skipped_layers_count_16_bits(name: str, bits: float) -> None:
    planned = resolve({"format": name, "mixed.max_kl": 0.01})
    assert planned.skipped_layers == ()
    skipping = replace(planned, skipped_layers=tuple(range(0, 80, 4)))
    mean = (60 * bits + 20 * 16) / 80
    assert skipping.bytes_per_token_quantized == 2 * 80 * 8 * 128 * mean / 8
    assert skipping.bytes_per_token_reference == planned.bytes_per_token_reference
    assert skipping.bits_per_element - mean == pytest.approx(planned.bits_per_element - bits, abs=1e-12)


def test_bits_of_some_layers_weigh_each_by_its_elements() -> None:
    first = resolve({}).layers[0]
    layers = [first, replace(first, index=1, head_dim=64), replace(first, index=2, kv_heads=4)]
    int8 = formats.get("int8_per_token_head")
    assert plan.bits_over(layers, int8) == (1024 * 8.25 + 512 * 8.5 + 512 * 8.25) / 2048
    assert plan.bits_over(layers, int8, skipped=(1,)) == (1024 * 8.25 + 512 * 16 + 512 * 8.25) / 2048


@pytest.mark.parametrize("budget", [8.25, 12.0, 15.99])
def test_a_budget_that_the_format_can_keep_is_planned(budget: float) -> None:
    changes = {"format": "int8_per_token_head", "mixed.bits_budget": budget}
    assert resolve(changes).recipe.mixed is not None


def test_a_budget_below_the_format_is_refused_with_what_would_work() -> None:
    assert refused({"format": "int8_per_token_head", "mixed.bits_budget": 8.0}) == [
        "mixed.bits_budget 8 is below the 8.25 bits per element of int8_per_token_head, and vllm can only"
        " leave layers in 16 bits; allow 8.25 or more, or choose another format"
    ]
    assert refused({"format": "fp8", "mixed.bits_budget": 4.25})[0].startswith(
        "mixed.bits_budget 4.25 is below"
    )


def test_a_budget_that_quantizes_nothing_is_refused() -> None:
    (reason,) = refused({"mixed.bits_budget": 16.0})
    assert reason == (
        "mixed.bits_budget 16 leaves the whole cache in 16 bits; give 8 or more and less than 16"
    )


def test_mixed_is_refused_where_the_engine_skips_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ENGINES", (replace(VLLM, skips_layers=False),))
    assert refused({"mixed.max_kl": 0.01}) == ["mixed: vllm keeps one format in all layers; leave mixed out"]
    assert resolve({}).recipe.mixed is None
