from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from kvcal import arch, engines, families, formats, granularity
from kvcal.arch import ModelSpec
from kvcal.engine_spec import Deliver, EngineSpec
from kvcal.errors import UsageError
from kvcal.formats import KVFormat

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 263,
    "max_position_embeddings": 256,
}
FP8 = formats.FP8_E4M3
LACKING = [f for f in formats.FORMATS if f.name not in engines.VLLM.cache_dtype]
DYNAMIC = [f for f in formats.FORMATS if f.dynamic]
every_dynamic_format = pytest.mark.parametrize("fmt", DYNAMIC, ids=lambda f: f.name)


def refusals(
    gran: str | None = "per_tensor", fmt: KVFormat = FP8, deliver: Deliver = "metadata", **fields: Any
) -> list[str]:
    model = arch.read(CONFIG | fields)
    found = None if gran is None else granularity.get(gran)
    return engines.VLLM.refusals(model, fmt, found, deliver)


def dynamic_refusals(fmt: KVFormat, **fields: Any) -> list[str]:
    return refusals(None, fmt, "fold", **fields)


def sized(first: int, second: int) -> ModelSpec:
    """A model whose two layers have heads of these sizes, which RoPE would not allow if they are odd."""
    model = arch.read(CONFIG)
    sizes = zip(model.layers, (first, second), strict=True)
    return replace(model, layers=tuple(replace(layer, head_dim=size) for layer, size in sizes))


@pytest.mark.parametrize("gran", engines.VLLM.granularities)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_sizes_of_the_kernels_are_taken(head_dim: int, gran: str) -> None:
    assert refusals(gran, head_dim=head_dim) == []


@pytest.mark.parametrize("gran", engines.VLLM.granularities)
@pytest.mark.parametrize("head_dim", [24, 40])
def test_head_size_that_is_no_multiple_of_16_is_refused(head_dim: int, gran: str) -> None:
    (reason,) = refusals(gran, head_dim=head_dim)
    assert reason.startswith(f"head size {head_dim} is not a multiple of 16")
    assert "keep the 16-bit cache" in reason


def test_large_heads_are_refused_per_head_only() -> None:
    assert refusals("per_tensor", head_dim=320) == []
    (reason,) = refusals("per_head", head_dim=320)
    assert reason.startswith("head size 320 exceeds 256")
    assert reason.endswith("use per_tensor")


@pytest.mark.parametrize("method", ["gptq", "awq", "modelopt"])
def test_base_weights_that_cannot_carry_a_scheme_are_refused(method: str) -> None:
    (reason,) = refusals(quantization_config={"quant_method": method})
    assert f"quant_method '{method}' cannot carry a KV scheme" in reason
    assert "use the unquantized model or compressed-tensors" in reason


def test_fp8_base_is_taken_per_tensor() -> None:
    section = {"quant_method": "fp8"}
    assert refusals(quantization_config=section) == []
    (reason,) = refusals("per_head", quantization_config=section)
    assert reason.startswith("beside weights with quant_method 'fp8' vllm 0.33 reads scales per_tensor alone")


def test_compressed_tensors_base_is_taken() -> None:
    assert refusals(quantization_config={"quant_method": "compressed-tensors"}) == []


@pytest.mark.parametrize("deliver", ["metadata", "fold", "both"])
@pytest.mark.parametrize("fmt", LACKING, ids=lambda f: f.name)
def test_a_format_the_engine_does_not_have_is_refused(fmt: KVFormat, deliver: Deliver) -> None:
    (reason,) = refusals(fmt=fmt, deliver=deliver)
    start, end = reason.split("; others are ")
    nearest = start.removeprefix(f"vllm 0.33 has no {fmt.name} cache; the nearest it has is ")
    assert {nearest, *end.split(", ")} == engines.VLLM.cache_dtype.keys()
    assert nearest not in end


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("fp8_e5m2", "fp8_e4m3"),
        ("int8", "int8_per_token_head"),
        ("int6", "int8_per_token_head"),
        ("int5", "int4_per_token_head"),
        ("int4", "int4_per_token_head"),
        ("int2", "int4_per_token_head"),
        ("nvfp4", "int4_per_token_head"),
    ],
)
def test_a_format_the_engine_does_not_have_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    (reason,) = refusals(fmt=formats.get(name))
    assert f"has no {name} cache; the nearest it has is {nearest}; others" in reason


def test_an_engine_of_one_format_has_no_others() -> None:
    engine = replace(engines.VLLM, cache_dtype={"fp8_e4m3": "fp8"})
    reasons = engine.refusals(arch.read(CONFIG), formats.INT4, None, "metadata")
    assert reasons == ["vllm 0.33 has no int4 cache; the nearest it has is fp8_e4m3"]


def test_a_granularity_the_engine_does_not_load_is_refused() -> None:
    engine = replace(engines.VLLM, granularities=("per_tensor",))
    reasons = engine.refusals(arch.read(CONFIG), FP8, granularity.get("per_head"), "metadata")
    assert reasons == ["vllm 0.33 takes no per_head scales; use per_tensor"]


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("per_channel", "per_channel scales"),
        ("per_token", "per_token scales from a checkpoint, since they come with the tokens"),
        ("per_token_head", "per_token_head scales from a checkpoint, since they come with the tokens"),
    ],
)
def test_granularities_of_no_engine_are_refused(name: str, scales: str) -> None:
    assert refusals(name) == [f"vllm 0.33 takes no {scales}; use per_tensor or per_head"]


def test_all_reasons_are_listed_at_once() -> None:
    engine = replace(engines.VLLM, granularities=("per_tensor",))
    model = arch.read(CONFIG | {"head_dim": 40, "quantization_config": {"quant_method": "gptq"}})
    per_head = granularity.get("per_head")
    assert [len(engine.refusals(model, f, per_head, "metadata")) for f in (FP8, formats.INT4)] == [3, 3]
    few = arch.read(CONFIG | {"head_dim": 24, "quantization_config": {"quant_method": "gptq"}})
    for fmt in DYNAMIC:
        assert len(engine.refusals(few, fmt, per_head, "both")) == 4


# Formats that the engine scales itself


@every_dynamic_format
@pytest.mark.parametrize("head_dim", [32, 34, 64, 80, 96, 128, 256, 320])
def test_head_sizes_of_the_dynamic_kernels_are_taken(head_dim: int, fmt: KVFormat) -> None:
    assert dynamic_refusals(fmt, head_dim=head_dim) == []


@every_dynamic_format
@pytest.mark.parametrize("head_dim", [2, 16, 30])
def test_a_head_size_below_the_smallest_kernel_is_refused(head_dim: int, fmt: KVFormat) -> None:
    assert dynamic_refusals(fmt, head_dim=head_dim) == [
        f"head size {head_dim} is below 32, the smallest of vllm's {fmt.name} kernels; use fp8"
    ]


def test_a_small_head_is_no_obstacle_to_static_scales() -> None:
    assert refusals(head_dim=16) == []


@pytest.mark.parametrize("head_dim", [25, 33])
def test_two_channels_of_int4_share_a_byte_so_an_odd_head_size_is_refused(head_dim: int) -> None:
    (reason,) = engines.VLLM.refusals(sized(head_dim, head_dim), formats.INT4_PER_TOKEN_HEAD, None, "fold")
    assert reason.startswith(f"head size {head_dim} is not a multiple of 2, which vllm's int4_per_token_head")
    assert reason.endswith("keep the 16-bit cache for this model")


@pytest.mark.parametrize(
    "fmt", [formats.INT8_PER_TOKEN_HEAD, formats.FP8_PER_TOKEN_HEAD], ids=lambda f: f.name
)
def test_an_odd_head_size_fits_formats_of_whole_bytes(fmt: KVFormat) -> None:
    assert engines.VLLM.refusals(sized(33, 33), fmt, None, "fold") == []


def test_every_head_size_of_the_model_must_fit() -> None:
    found = engines.VLLM.refusals(sized(24, 16), formats.INT8_PER_TOKEN_HEAD, None, "fold")
    assert [reason[:12] for reason in found] == ["head size 16", "head size 24"]


@every_dynamic_format
@pytest.mark.parametrize("deliver", ["metadata", "both"])
def test_static_scales_never_reach_a_dynamic_format(deliver: Deliver, fmt: KVFormat) -> None:
    (reason,) = refusals(None, fmt, deliver)
    assert reason.startswith(f"vllm 0.33 loads no static scales for {fmt.name}, which it scales itself")
    assert "only --deliver fold reaches it" in reason


def test_ways_of_delivery_are_those_that_the_engine_reads() -> None:
    model = arch.read(CONFIG)
    assert engines.VLLM.deliveries(FP8, model) == ("metadata", "fold", "both")
    assert all(engines.VLLM.deliveries(fmt, model) == ("fold",) for fmt in DYNAMIC)
    for fmt in LACKING:
        ways = ("metadata",) if fmt.block else ("metadata", "fold", "both")
        assert engines.VLLM.deliveries(fmt, model) == ways
    unscaled = replace(engines.VLLM, cache_dtype={"int8": "int8"})
    assert unscaled.deliveries(formats.INT8, model) == ("fold",)
    for deliver in ("fold", "both"):
        assert refusals("per_head" if deliver == "both" else None, FP8, deliver) == []


# Folds and base weights


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "gptq"])
@pytest.mark.parametrize(
    ("fmt", "deliver"),
    [(FP8, "fold"), (FP8, "both"), *((fmt, "fold") for fmt in DYNAMIC)],
    ids=lambda value: getattr(value, "name", value),
)
def test_weights_that_are_quantized_already_are_not_folded(
    fmt: KVFormat, deliver: Deliver, method: str
) -> None:
    gran = "per_tensor" if deliver == "both" else None
    (reason,) = refusals(gran, fmt, deliver, quantization_config={"quant_method": method})
    assert reason.startswith(f"base weights are quantized already ({method}), and folding would round them")
    assert "fold into the unquantized model first" in reason


def test_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown engine 'vlm'; known: vllm, vllm-modelopt, sglang"):
        engines.get("vlm")


@pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda e: e.name)
def test_every_row_speaks_of_formats_and_granularities_that_exist(engine: EngineSpec) -> None:
    assert engine.cache_dtype.keys() <= {f.name for f in formats.FORMATS}
    assert set(engine.loads_scales) <= {f.name for f in formats.FORMATS if not f.dynamic}
    assert set(engine.loads_scales) <= engine.cache_dtype.keys()
    of_formats = (
        *(engine.head_dim_multiple, engine.smallest_head_dim, engine.decode_time),
        *(engine.unread, engine.approximations),
    )
    assert all(each.keys() <= engine.cache_dtype.keys() for each in of_formats)
    assert min([*engine.head_dim_multiple.values(), *engine.smallest_head_dim.values(), 1]) >= 1
    assert min([*engine.decode_time.values(), 1.0]) > 0
    assert set(engine.granularities) <= set(granularity.names())
    static = {f.name for f in formats.FORMATS if not f.dynamic} & engine.cache_dtype.keys()
    dynamic = {"per_token_head"} if engine.cache_dtype.keys() & {f.name for f in DYNAMIC} else set()
    latent = {"latent"} if engine.latent_formats else set()
    known = set(engine.granularities or (["per_tensor"] if static else [])) | dynamic | latent
    assert known == engine.backends.keys()
    assert set(engine.latent_formats) <= engine.cache_dtype.keys()
    assert engine.scale_suffixes.keys() in ({"k", "v", "q"}, {"k", "v"}, set())
    assert bool(engine.scale_suffixes) == bool(engine.loads_scales)
    assert bool(engine.base_quant_methods) == (bool(engine.loads_scales) and not engine.standalone)
    assert not engine.unread.keys() & set(engine.loads_scales)
    assert set(engine.families or ()) <= families.FAMILIES.keys()
    assert engine.source
    assert engine.title
    assert engines.get(engine.name) is engine


def probed(model_type: str) -> ModelSpec:
    """A model that kvcal knows by its code alone."""
    return dataclasses.replace(arch.read(CONFIG), model_type=model_type, projections=None)


def test_folds_are_refused_where_weights_are_not_known() -> None:
    for engine in engines.ENGINES:
        for fmt in map(formats.get, engine.cache_dtype):
            verdict = engine.verdict(probed("olmoe"), fmt, None, "fold")
            assert verdict.outcome in ("refused", "ignored")
            assert "--deliver fold" not in str(verdict.alternative)


def test_names_beside_projections_need_projections_that_are_known() -> None:
    reasons = engines.get("vllm-modelopt").refusals(
        probed("olmoe"), FP8, granularity.get("per_tensor"), "metadata"
    )
    assert any("are not known to be there" in reason for reason in reasons)


def test_a_model_whose_loader_fails_is_refused_by_vllm() -> None:
    verdict = engines.get("vllm").verdict(probed("jamba"), FP8, granularity.get("per_tensor"), "metadata")
    assert verdict.outcome == "ignored"
    assert "jamba: fails with ValueError" in verdict.reasons[0]


def test_vllm_finds_scales_of_a_module_that_is_called_as_its_own() -> None:
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 96,
        "n_layer": 2,
        "n_head": 6,
        "architectures": ["GPT2LMHeadModel"],
    }
    layer = arch.read(gpt2).layers[1]
    assert engines.get("vllm").scale_name(layer, "k") == "transformer.h.1.attn.attn.k_scale"
    assert engines.get("tgi").scale_name(layer, "k") == "transformer.h.1.attn.k_scale"
    stored = dataclasses.replace(layer, stored="h.1.attn")
    assert engines.get("vllm").scale_name(stored, "q") == "h.1.attn.attn.q_scale"


def test_vllm_is_asked_for_modules_by_its_own_names() -> None:
    gpt_oss = arch.read(CONFIG | {"model_type": "gpt_oss"})
    assert engines.get("vllm").module_held(gpt_oss, gpt_oss.layers[1]) == "model.layers.1.attn"
    assert engines.get("vllm").scale_name(gpt_oss.layers[1], "k") == "model.layers.1.self_attn.k_scale"
    llama = arch.read(CONFIG)
    assert engines.get("vllm").module_held(llama, llama.layers[0]) == llama.layers[0].module
