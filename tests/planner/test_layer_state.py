"""What layers without K and V keep, against what transformers' caches hold and numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from kvcal import engines, formats, probe
from kvcal.errors import ModelError, PlanRefused, UsageError
from kvcal.planner import capacity, gpus, served_model
from kvcal.planner.capacity import PLAIN, Deployment
from kvcal.planner.layer_cache import LayerCache
from kvcal.planner.layer_state import LayerState
from kvcal.planner.served_model import Kept, ServedModel
from tests import tiny

_MAMBA_2 = {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_n_heads": 12}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 7,
        "mamba_d_conv": 5,
        "mamba_dt_rank": 6,
        "use_mamba_kernels": False,
    },
    "bamba": _MAMBA_2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": tiny.WITHOUT_ROW["granitemoehybrid"],
    "falcon_h1": _MAMBA_2 | {"mamba_d_ssm": 96, "mamba_d_head": 8},
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_headdim": 16,
        "n_mamba_heads": 12,
        "mamba_ngroups": 2,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
        "num_hidden_layers": 5,
        "num_mem_blocks": 2,
        "adapter_rank": 4,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-",
        "ssm_state_size": 8,
        "mamba_num_heads": 12,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "conv_kernel": 3,
        "use_mamba_kernels": False,
    },
    "qwen3_next": tiny.FAMILIES["qwen3_next"],
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "lfm2": tiny.WITHOUT_ROW["lfm2"],
    "lfm2_moe": tiny.MOE | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
}


def config_of(family: str) -> Any:
    return CONFIG_MAPPING[family](**tiny._COMMON | HYBRIDS[family])


def kept(family: str, **changes: Any) -> Kept:
    config = config_of(family).to_dict() | {"model_type": family, "architectures": ["A"]}
    return served_model.kept(config | changes, probe.read)


def states_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The convolution's inputs and the recurrence that a layer of transformers' cache holds."""
    convolved = getattr(layer, "conv_states", {0: None})[0]
    return None if convolved is None else (convolved, layer.recurrent_states[0])


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_keeps_what_transformers_caches(family: str) -> None:
    model = probe.auto_class(config_of(family)).from_config(config_of(family)).eval()
    with torch.no_grad():
        held = model(torch.arange(9)[None], use_cache=True).past_key_values.layers
    found = kept(family)
    states = [state for layer in held if (state := states_of(layer)) is not None]
    assert len(found.states) == len(states) > 0
    for ours, (convolved, recurrent) in zip(found.states, states, strict=True):
        wide = convolved.shape[-1]  # ours has one input less
        elements = convolved.numel() // wide * (wide - 1)
        if recurrent is not None:
            elements += ours.recurrent_bytes // 2 * recurrent.numel()
        assert ours.bytes_on() == 2 * elements
    keys = [layer.keys for layer in held if getattr(layer, "keys", None) is not None]
    assert [2 * k.numel() for k in keys] == [cache.elements * 9 for cache in found.caches]


def test_qwen3_next_80b_by_hand() -> None:
    """config.json of Qwen3-Next-80B-A3B: 36 of 48 layers are delta networks."""
    config = {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
    }
    found = served_model.kept(config)
    convolved = 2 * 16 * 128 + 32 * 128
    assert sum(state.bytes_on() for state in found.states) == 36 * 2 * (3 * convolved + 32 * 128 * 128)
    assert sum(cache.bytes_added(None) for cache in found.caches) == 12 * 2 * 2 * 256 * 2


def test_jamba_as_its_paper_has_it() -> None:
    """arXiv 2403.19887, table 1: 4 GB of KV cache at 256K tokens in 16 bits. Experts are left out here."""
    config = {
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 64,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_dt_rank": 256,
        "vocab_size": 65536,
        "max_position_embeddings": 262144,
        "use_mamba_kernels": False,
    }
    found = served_model.kept(config, probe.read)
    assert sum(cache.bytes_added(None) for cache in found.caches) * 2**18 == 4 * 2**30
    assert [state.bytes_on() for state in found.states] == [2 * 8192 * (3 + 16)] * 28


def test_the_recurrence_is_as_wide_as_the_config_asks_where_the_engine_heeds_it() -> None:
    narrow, wide = kept("qwen3_5_text").states[0], kept("qwen3_5_text", mamba_ssm_dtype="float32").states[0]
    assert wide.bytes_on() - narrow.bytes_on() == 2 * 4 * 8 * 12
    assert kept("qwen3_next", mamba_ssm_dtype="float32") == kept("qwen3_next")
    wide = kept("nemotron_h").states[0]  # by default
    narrow = kept("nemotron_h", mamba_ssm_cache_dtype="bfloat16").states[0]
    assert wide.bytes_on() - narrow.bytes_on() == 2 * 12 * 24 * 8
    with pytest.raises(ModelError, match="mamba_ssm_cache_dtype must be one of float32"):
        kept("nemotron_h", mamba_ssm_cache_dtype="int8")


def test_letters_and_lists_name_the_same_layers() -> None:
    """The hub's configs have letters, those that transformers writes a list."""
    listed = kept("nemotron_h")
    lettered = kept("nemotron_h", layers_block_type=None, hybrid_override_pattern="M*-")
    assert (len(listed.states), lettered) == (1, listed)


def test_what_is_not_known_is_refused_by_name() -> None:
    changes = {"layer_types": _DELTA["layer_types"], "num_local_experts": 4, "num_experts_per_tok": 2}
    config = CONFIG_MAPPING["minimax"](**tiny._COMMON | changes).to_dict()
    config |= {"model_type": "minimax", "architectures": ["A"]}
    with pytest.raises(PlanRefused, match="2 layers without attention of model_type 'minimax' keep is not"):
        served_model.kept(config, probe.read)
    with pytest.raises(ModelError, match="linear_conv_kernel_dim must be a positive integer"):
        kept("qwen3_next", linear_conv_kernel_dim=None)
    with pytest.raises(ModelError, match="5 heads of V do not divide into 2 of K"):
        kept("qwen3_next", linear_num_value_heads=5)
    with pytest.raises(ModelError, match="layers_block_type must list hybrid layers"):
        kept("zamba2", layers_block_type=["mamba"] * 5)


MAMBA_2 = LayerState(taps=3, channels=4096, heads=64, head_elements=64 * 128, groups=8, group_channels=256)


@pytest.mark.parametrize(
    ("ranks", "convolved"), [(1, 4096 + 8 * 256), (8, 512 + 256), (16, 256 + 256), (64, 64 + 256)]
)
def test_heads_are_dealt_out_and_groups_copied(ranks: int, convolved: int) -> None:
    """vLLM's extra_groups_for_head_shards: a rank without a whole group has one all the same."""
    assert MAMBA_2.bytes_on(ranks) == 2 * (3 * convolved + 64 // ranks * 64 * 128)


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(UsageError, match="64 heads of a recurrent state cannot be dealt out to 3 GPUs"):
        MAMBA_2.bytes_on(3)


# --- in the plan ------------------------------------------------------------------------------------------

FULL = LayerCache(query_heads=16, kv_heads=2, vectors=(256, 256), contracted=512)
STATE = LayerState(taps=3, channels=8192, heads=16, head_elements=2 * 128 * 128)
HYBRID = ServedModel("m", (FULL,) * 12, 16e9, 16, None, 10**6, (STATE,) * 36)
H100 = gpus.get("h100")


def planned(engine: str = "vllm", **fields: Any) -> dict[str, capacity.Row]:
    found = capacity.plan(HYBRID, Deployment(H100, engines.get(engine), **{"context": 8192} | fields))
    return {row.format: row for row in found.rows}


def test_states_are_held_in_pages_as_long_as_they_need() -> None:
    """1,097,728 bytes of state: 536 tokens of 2,048 bytes, and vLLM's pages are multiples of 16."""
    row, fp8 = planned()[PLAIN], planned()["fp8_e4m3"]
    assert (row.page, fp8.page) == (544, 1072)
    assert row.state_bytes == 36 * 544 * 2048
    assert row.bytes_per_token == 12 * 2048
    assert row.request_bytes == 12 * 2048 * 16 * 544 + 36 * 544 * 2048
    assert fp8.request_bytes == 12 * 1024 * 8 * 1072 + 36 * 1072 * 1024
    assert planned(page=1024)[PLAIN].page == 1024


def test_an_engine_with_a_pool_for_states_pads_nothing() -> None:
    row = planned("sglang")[PLAIN]
    assert (row.page, row.state_bytes) == (16, 36 * STATE.bytes_on())
    assert row.request_bytes == 12 * 2048 * 8192 + 36 * STATE.bytes_on()


def test_a_step_reads_states_and_writes_them() -> None:
    row = planned(requests=10)[PLAIN]
    moved = 16e9 + 10 * (12 * 2048 * 8192 + 2 * 36 * STATE.bytes_on())
    assert row.step_bytes == moved
    assert row.latency == pytest.approx(moved / 3.35e12)
    slow = planned(requests=10)["int8_per_token_head"].kernel_latency
    read = 10 * 12 * 2048 * 8192 * 8.5 + 10 * 2 * 36 * STATE.bytes_on()
    assert slow == pytest.approx((16e9 + read) / 3.35e12)


def test_states_are_told() -> None:
    notices = capacity.plan(HYBRID, Deployment(H100, engines.VLLM, 8192)).notices
    (told,) = [notice for notice in notices if "recurrence" in notice]
    assert told.startswith("layers with a recurrence (36) keep 37.7 MiB of a request at any length")
    assert told.endswith("vLLM holds each in a page, which has 544 tokens in 16 bits")


@given(ranks=st.sampled_from([1, 2, 4]), context=st.integers(1, 10**5), page=st.sampled_from([1, 16, 64]))
def test_a_page_holds_a_state_and_no_shorter_one_would(ranks: int, context: int, page: int) -> None:
    where = Deployment(H100, engines.VLLM, context, ranks=ranks, page=page)
    for fmt in (None, formats.get("fp8"), formats.get("int4_per_token_head")):
        found, token = capacity.page_of(HYBRID, where, fmt), FULL.bytes_per_token(fmt, ranks)
        assert found % page == 0
        assert (found - page) * token < STATE.bytes_on(ranks) <= found * token
