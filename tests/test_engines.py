from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcal import arch, engines, formats, granularity
from kvcal.errors import UsageError

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
UNKNOWN_FORMAT = replace(FP8, name="int4")


def refusals(gran: str = "per_tensor", fmt: formats.KVFormat = FP8, **fields: Any) -> list[str]:
    model = arch.read(CONFIG | fields)
    return engines.VLLM.refusals(model, fmt, granularity.get(gran))


@pytest.mark.parametrize("gran", granularity.names())
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_sizes_of_the_kernels_are_taken(head_dim: int, gran: str) -> None:
    assert refusals(gran, head_dim=head_dim) == []


@pytest.mark.parametrize("gran", granularity.names())
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


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "modelopt"])
def test_base_weights_that_cannot_carry_a_scheme_are_refused(method: str) -> None:
    (reason,) = refusals(quantization_config={"quant_method": method})
    assert f"quant_method '{method}' cannot carry a KV scheme" in reason
    assert "use the unquantized model or compressed-tensors" in reason


def test_compressed_tensors_base_is_taken() -> None:
    assert refusals(quantization_config={"quant_method": "compressed-tensors"}) == []


def test_a_format_the_engine_does_not_load_is_refused() -> None:
    (reason,) = refusals(fmt=UNKNOWN_FORMAT)
    assert reason == "vllm 0.33 loads no static scales for int4; it does for fp8_e4m3"


def test_a_granularity_the_engine_does_not_load_is_refused() -> None:
    engine = replace(engines.VLLM, granularities=("per_tensor",))
    reasons = engine.refusals(arch.read(CONFIG), FP8, granularity.get("per_head"))
    assert reasons == ["vllm 0.33 takes no per_head scales; use per_tensor"]


def test_all_reasons_are_listed_at_once() -> None:
    found = refusals(fmt=UNKNOWN_FORMAT, head_dim=40, quantization_config={"quant_method": "gptq"})
    assert len(found) == 3


def test_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown engine 'vlm'; known: vllm"):
        engines.get("vlm")


@pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda e: e.name)
def test_every_row_speaks_of_formats_and_granularities_that_exist(engine: engines.EngineSpec) -> None:
    assert engine.cache_dtype.keys() <= {f.name for f in formats.FORMATS}
    assert set(engine.granularities) == engine.backends.keys() <= set(granularity.names())
    assert engine.scale_suffixes.keys() == {"k", "v", "q"}
    assert engines.get(engine.name) is engine
