"""The planner's arithmetic against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcal import engines, formats
from kvcal.errors import PlanRefused, UsageError
from kvcal.planner import capacity, gpus, known_shapes, recommendation, served_model
from kvcal.planner.capacity import PLAIN, Capacity, Deployment, Row
from kvcal.planner.layer_cache import LayerCache
from kvcal.planner.served_model import ServedModel

GIB = 2**30
MODELS = {name: served_model.of(known_shapes.get(name), name) for name in known_shapes.names()}
H100, A100, B200 = (gpus.get(name) for name in ("h100", "a100", "b200"))


def planned(name: str = "llama-3-8b", gpu: gpus.Gpu = H100, **fields: Any) -> Capacity:
    fields = {"engine": engines.VLLM, "context": 4096} | fields
    return capacity.plan(MODELS[name], Deployment(gpu, **fields))


def rows(found: Capacity) -> dict[str, Row]:
    return {row.format: row for row in found.rows}


def test_llama_3_70b_on_four_h100() -> None:
    found = planned("llama-3-70b", context=8192, ranks=4)
    weights = 2 * 70_553_706_496
    free = 81559 * 2**20 * 0.9 - weights / 4
    assert found.free_bytes == pytest.approx(free)
    plain, fp8 = rows(found)[PLAIN], rows(found)["fp8_e4m3"]
    request = 8192 * 320 * 1024
    assert (plain.request_bytes, fp8.request_bytes) == (request, request // 2)
    assert plain.fitting == int(free * 4 // request) == 62
    assert fp8.fitting == int((free - 80 * 12) * 4 // (request // 2)) == 124
    # A step reads all weights but the embedding table, and 62 caches.
    step = weights - 2 * 128256 * 8192 + 62 * request
    assert plain.step_bytes == pytest.approx(step)
    assert plain.latency == pytest.approx(step / 4 / 3.35e12)
    assert plain.limit == "memory"


def test_deepseek_v3_on_sixteen_h100() -> None:
    found = planned("deepseek-v3", context=8192, ranks=16)
    plain = rows(found)[PLAIN]
    assert plain.bytes_per_token == 576 * 61 * 2
    # Sixteen GPUs hold the latent sixteen times: what fits is what fits on one.
    assert plain.fitting == int(found.free_bytes // (8192 * 576 * 61 * 2))
    weights = MODELS["deepseek-v3"].weights_read(plain.fitting)
    assert plain.step_bytes == pytest.approx(weights + 16 * plain.fitting * 8192 * 576 * 61 * 2)
    assert found.notices == (
        "the latent is held 16 times by 16 GPUs",
        "tokens are taken to choose experts evenly",
    )


def test_only_what_stores_a_latent_is_listed_for_one() -> None:
    found = rows(planned("deepseek-v3", ranks=16))
    assert set(found) == {PLAIN, "fp8_e4m3", "fp8_latent_bf16_rope"}
    assert found["fp8_e4m3"].served_by == ("vllm", "sglang", "trtllm")


def test_what_vllm_has_instead_of_a_latent_in_fp8_is_told_apart() -> None:
    row = rows(planned("deepseek-v3", ranks=16))["fp8_latent_bf16_rope"]
    assert (row.bytes_per_token, row.served_by) == (61 * 640, ())
    assert row.refused is not None
    assert row.refused.startswith("vLLM has no such cache; vLLM's fp8_ds_mla")
    assert row.refused.endswith("656 bytes per token and layer, not 640")


def test_every_format_that_an_engine_serves_is_listed() -> None:
    found = rows(planned())
    served = {name for e in engines.ENGINES if not e.standalone for name in e.cache_dtype}
    assert set(found) == served | {PLAIN}
    assert found["nvfp4"].refused == "vLLM has no such cache"
    assert found["nvfp4"].served_by == ("trtllm",)
    assert found["int8_per_token_head"].served_by == ("vllm", "lmdeploy", "llamacpp")
    assert {name for name, row in found.items() if row.native} == {PLAIN, "fp8_e4m3"}


def test_weights_that_do_not_fit_are_refused_with_what_would() -> None:
    with pytest.raises(PlanRefused) as caught:
        planned("llama-3-70b")
    (reason,) = caught.value.reasons
    assert reason.startswith("131.4 GiB of weights do not fit into the 71.7 GiB")
    assert reason.endswith("--tensor-parallel 2 or --weights-bits 8 would hold them")
    assert planned("llama-3-70b", ranks=2).rows[0].fitting
    with pytest.raises(PlanRefused, match="--tensor-parallel 16 would hold them"):
        planned("deepseek-v3", ranks=2)


def test_a_request_that_does_not_fit_is_refused() -> None:
    tight = replace(MODELS["llama-3-8b"], weights_bytes=81559 * 2**20 * 0.9 - 2**20)
    with pytest.raises(PlanRefused, match="no request of 4096 tokens fits into the 0.0 GiB"):
        capacity.plan(tight, Deployment(H100, engines.VLLM, 4096))


def test_a_format_may_hold_requests_where_16_bits_hold_none() -> None:
    request = 4096 * 128 * 1024
    tight = replace(MODELS["llama-3-8b"], weights_bytes=81559 * 2**20 * 0.9 - 0.75 * request)
    found = capacity.plan(tight, Deployment(H100, engines.VLLM, 4096, price_per_hour=2.0))
    plain, fp8 = rows(found)[PLAIN], rows(found)["fp8_e4m3"]
    assert (plain.fitting, plain.latency, plain.price_per_million, plain.rate) == (0, None, None, 0)
    assert fp8.fitting == 1
    assert recommendation.choose(found, {}, 0.1).format == "fp8_e4m3"


@pytest.mark.parametrize(("spare", "fitting"), [(12 * 32 - 1, 0), (12 * 32, 1)])
def test_static_scales_take_their_bytes(spare: int, fitting: int) -> None:
    """Three float32 numbers for each of 32 layers, beside one request of 64 KiB per token."""
    room = 4096 * 64 * 1024 + spare
    tight = replace(MODELS["llama-3-8b"], weights_bytes=81559 * 2**20 * 0.5 - room)
    found = rows(capacity.plan(tight, Deployment(H100, engines.VLLM, 4096, headroom=0.5)))
    assert found["fp8_e4m3"].fitting == fitting
    assert found["int4_per_token_head"].fitting == 1


def test_contexts_beyond_the_model_are_refused() -> None:
    with pytest.raises(UsageError, match="longer than the 8192 tokens"):
        planned("llama-3-8b", context=8193)


def test_price() -> None:
    row = rows(planned("llama-3-8b", ranks=2, price_per_hour=3.0))["fp8_e4m3"]
    assert row.latency is not None
    tokens_per_hour = row.requests / row.latency * 3600
    assert row.price_per_million == pytest.approx(2 * 3.0 / tokens_per_hour * 1e6)
    assert rows(planned())["fp8_e4m3"].price_per_million is None


def test_requests_that_are_asked_for() -> None:
    found = rows(planned(requests=100))
    assert found[PLAIN].fitting < 200 < found["fp8_e4m3"].fitting
    assert found[PLAIN].requests == found["fp8_e4m3"].requests == 100
    # At equal batch FP8 reads half as much cache.
    difference = found[PLAIN].step_bytes - found["fp8_e4m3"].step_bytes
    assert difference == pytest.approx(100 * 4096 * 64 * 1024)
    found = rows(planned(requests=200))
    assert (found[PLAIN].requests, found[PLAIN].latency) == (0, None)
    assert found["fp8_e4m3"].requests == 200


def test_arithmetic_bounds_a_step_of_short_requests() -> None:
    """At 64 tokens thousands of requests fit: 2 operations per parameter and request outlast the weights."""
    found = rows(planned(context=64, page=64))
    row = found[PLAIN]
    assert row.limit == "compute"
    active = MODELS["llama-3-8b"].parameters.active  # type: ignore[union-attr]
    linear = 2 * active * row.requests / 989.4e12
    cache = row.requests * 64 * 128 * 1024 / 3.35e12
    assert row.latency == pytest.approx(linear + cache)


def test_eight_bit_weights_count_twice_the_arithmetic_where_the_gpu_has_it() -> None:
    config = known_shapes.get("llama-3-8b")
    model = served_model.of(config, "m", weights_bits=8)
    for gpu, factor in ((H100, 2), (A100, 1)):
        (row, *_) = capacity.plan(model, Deployment(gpu, engines.VLLM, 64, page=64)).rows
        linear = 2 * model.parameters.active * row.requests / (gpu.flops * factor)  # type: ignore[union-attr]
        assert row.latency == pytest.approx(linear + row.requests * 64 * 128 * 1024 / gpu.bandwidth)


def test_a_latent_makes_attention_arithmetic() -> None:
    """128 heads share a vector of 576 bytes: 128 * 2 * 1088 / 576 operations for each byte in 8 bits."""
    model = replace(MODELS["deepseek-v3"], weights_bytes=1e9, parameters=None)
    deployment = Deployment(replace(A100, flops=100e12), engines.VLLM, 8192, requests=8)
    row = rows(capacity.plan(model, deployment))["fp8_e4m3"]
    assert row.limit == "compute"
    assert row.latency == pytest.approx(1e9 / 2039e9 + 8 * 61 * 2 * 128 * 1088 * 8192 / 100e12)


def test_kernels_that_were_measured_slow_are_counted_as_such() -> None:
    found = rows(planned(requests=10))
    row = found["int8_per_token_head"]
    plain = 10 * 4096 * 128 * 1024 / 3.35e12
    weights = MODELS["llama-3-8b"].weights_read(10) / 3.35e12
    assert row.kernel_latency == pytest.approx(weights + 8.5 * plain)
    assert row.rate == pytest.approx(10 / row.kernel_latency)  # type: ignore[operator]
    assert found["nvfp4"].kernel_latency is None


def test_hardware_that_an_engine_needs() -> None:
    assert rows(planned(gpu=A100))["fp8_per_token_head"].refused == (
        "vLLM needs FP8 units for it, Ampere has none"
    )
    assert rows(planned(gpu=A100))["fp8_e4m3"].refused is None
    trt = engines.get("trtllm")
    assert "needs FP4 units" in str(rows(planned(engine=trt))["nvfp4"].refused)
    assert rows(planned(engine=trt, gpu=B200))["nvfp4"].refused is None
    alone = rows(planned(engine=trt, gpu=gpus.get("mi300x")))["fp8_e4m3"].refused
    assert alone == "TensorRT-LLM runs on NVIDIA GPUs alone"


def test_heads_that_an_engine_does_not_take() -> None:
    odd = replace(MODELS["llama-3-8b"], caches=(LayerCache(8, 8, (40, 40), 80),))
    found = rows(capacity.plan(odd, Deployment(H100, engines.VLLM, 4096)))
    assert found["fp8_e4m3"].refused == "vLLM takes heads of 1 and more, in multiples of 16, not 40"
    small = replace(MODELS["llama-3-8b"], caches=(LayerCache(8, 8, (16, 16), 32),))
    found = rows(capacity.plan(small, Deployment(H100, engines.VLLM, 4096)))
    assert (
        found["int8_per_token_head"].refused == "vLLM takes heads of 32 and more, in multiples of 1, not 16"
    )


def test_copies_of_kv_heads_are_told() -> None:
    assert "each KV head is held 2 times by 16 GPUs" in planned("llama-3-70b", ranks=16).notices
    assert planned("llama-3-70b", ranks=8).notices == ()


# --- properties -------------------------------------------------------------------------------------------

_LAYERS = st.builds(
    lambda group, kv, dim, window: LayerCache(group * kv, kv, (dim, dim), 2 * dim, window),
    group=st.sampled_from([1, 4]),
    kv=st.sampled_from([1, 2, 8]),
    dim=st.sampled_from([32, 64, 128]),
    window=st.sampled_from([None, 100, 1000]),
)
_CACHES = st.lists(_LAYERS, min_size=1, max_size=4).map(lambda each: tuple(each * 8))


def fitting(caches: tuple[LayerCache, ...], **fields: Any) -> dict[str, int]:
    model = ServedModel("m", caches, 16e9, 16, None, 10**6)
    fields = {"context": 4096, "page": 16} | fields
    found = capacity.plan(model, Deployment(H100, engines.VLLM, **fields))
    return {row.format: row.fitting for row in found.rows}


@given(_CACHES, st.integers(1, 5000), st.integers(0, 5000))
def test_longer_contexts_hold_no_more_requests(
    caches: tuple[LayerCache, ...], context: int, more: int
) -> None:
    short, long = (fitting(caches, context=n) for n in (context, context + more))
    assert all(long[name] <= short[name] for name in short)


@given(_CACHES, st.integers(1, 5000))
def test_more_heads_hold_no_more_requests(caches: tuple[LayerCache, ...], context: int) -> None:
    doubled = tuple(replace(c, kv_heads=2 * c.kv_heads, query_heads=2 * c.query_heads) for c in caches)
    few, many = fitting(caches, context=context), fitting(doubled, context=context)
    assert all(many[name] <= few[name] <= 2 * many[name] + 1 for name in few)


@given(_CACHES, st.integers(1, 5000), st.sampled_from([1, 16, 64]))
def test_half_the_bits_hold_at_most_twice_the_requests(
    caches: tuple[LayerCache, ...], context: int, page: int
) -> None:
    found = fitting(caches, context=context, page=page)
    assert found[PLAIN] <= found["fp8_e4m3"] <= 2 * found[PLAIN] + 1
    assert found["int8_per_token_head"] <= found["fp8_e4m3"]
    assert found["int8_per_token_head"] <= found["int4_per_token_head"]


@given(_CACHES, st.integers(1, 4000), st.sampled_from([1, 2, 16, 32, 256]))
def test_requests_that_fit_do_and_one_more_does_not(
    caches: tuple[LayerCache, ...], context: int, page: int
) -> None:
    model = ServedModel("m", caches, 16e9, 16, None, 10**6)
    found = capacity.plan(model, Deployment(H100, engines.VLLM, context, page=page))
    for row in found.rows:
        assert row.fitting * row.request_bytes <= found.free_bytes
        assert (row.fitting + 1) * row.request_bytes > found.free_bytes - 12 * len(caches)


@given(st.sampled_from(["llama-3-8b", "llama-2-7b"]), st.sampled_from([1, 2, 4, 8]))
def test_more_gpus_hold_more_and_answer_sooner(name: str, ranks: int) -> None:
    one, more = (rows(planned(name, ranks=n, requests=8)) for n in (ranks, 2 * ranks))
    for label, row in one.items():
        assert more[label].fitting >= row.fitting
        assert more[label].latency <= row.latency  # type: ignore[operator]


@given(st.floats(0, 0.7), st.floats(0, 0.1))
def test_more_headroom_holds_no_more_requests(headroom: float, more: float) -> None:
    small, large = (planned(headroom=h).rows for h in (headroom, headroom + more))
    assert all(b.fitting <= a.fitting for a, b in zip(small, large, strict=True))


# --- recommendations --------------------------------------------------------------------------------------


def chosen(found: Capacity, measured: dict[str, float] | None = None, max_kl: float = 0.1) -> Any:
    return recommendation.choose(found, measured or {}, max_kl)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("h100", "Hopper computes attention in it natively"),
        ("l40s", "Ada computes attention in it natively"),
        ("b200", "Blackwell computes attention in it natively"),
        ("a100", "Ampere has no FP8 units: codes are dequantized on load"),
    ],
)
def test_fp8_is_recommended_with_the_gpus_reason(gpu: str, words: str) -> None:
    found = chosen(planned(gpu=gpus.get(gpu)))
    assert found.format == "fp8_e4m3"
    assert any(words in reason for reason in found.reasons)


def test_int4_needs_a_measurement_within_the_limit() -> None:
    engine = replace(engines.VLLM, decode_time={})  # as if its INT4 kernel were as fast as memory
    found = planned(engine=engine)
    assert chosen(found).format == "fp8_e4m3"
    assert any(r.startswith("not int4_per_token_head: below 8 bits") for r in chosen(found).reasons)
    assert chosen(found, {"int4_per_token_head": 0.05}).format == "int4_per_token_head"
    refused = chosen(found, {"int4_per_token_head": 0.05}, max_kl=0.02)
    assert refused.format == "fp8_e4m3"
    assert "not int4_per_token_head: its measured KL of 0.05 exceeds 0.02" in refused.reasons


def test_a_slow_kernel_speaks_against_int4_whatever_it_loses() -> None:
    found = chosen(planned(), {"int4_per_token_head": 0.001})
    assert found.format == "fp8_e4m3"
    assert any("kernel took up to 9.2 times the attention time" in reason for reason in found.reasons)


def test_formats_that_lose_too_much_are_left() -> None:
    losses = dict.fromkeys((f.name for f in formats.FORMATS), 0.5)
    found = chosen(planned(), losses)
    assert found.format == PLAIN
    assert "not fp8_e4m3: its measured KL of 0.5 exceeds 0.1" in found.reasons


def test_nvfp4_where_it_is_served_and_measured() -> None:
    found = planned(gpu=B200, engine=engines.get("trtllm"))
    assert chosen(found).format == "fp8_e4m3"
    assert chosen(found, {"nvfp4": 0.01}).format == "nvfp4"


def test_nothing_to_recommend_is_refused() -> None:
    with pytest.raises(PlanRefused, match="holds so many requests"):
        chosen(planned(requests=100_000))


# --- weights ----------------------------------------------------------------------------------------------


def test_weights_are_counted_given_or_refused() -> None:
    config = known_shapes.get("llama-3-8b")
    assert served_model.of(config, "m").weights_bytes == 2 * 8_030_261_248
    assert served_model.of(config, "m", weights_gib=5.5).weights_bytes == 5.5 * GIB
    awq = config | {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(PlanRefused, match="quant_method 'awq'.*give --weights-gib"):
        served_model.of(awq, "m")
    assert served_model.of(awq, "m", weights_gib=5.5).weights_bytes == 5.5 * GIB
    assert served_model.of(awq, "m", weights_bits=4).weight_bits == 4
    with pytest.raises(UsageError, match="say the same"):
        served_model.of(config, "m", weights_gib=5.5, weights_bits=4)


def test_weights_of_given_size_are_read_in_the_same_share() -> None:
    config = known_shapes.get("llama-3-8b")
    counted, given_size = served_model.of(config, "m"), served_model.of(config, "m", weights_gib=8)
    assert counted.weights_read(1) == pytest.approx(counted.weights_bytes - 2 * 128256 * 4096)
    share = counted.weights_read(1) / counted.weights_bytes
    assert given_size.weights_read(1) == pytest.approx(8 * GIB * share)


def test_weights_that_cannot_be_counted_are_read_whole_and_that_is_told() -> None:
    config = {k: v for k, v in known_shapes.get("llama-3-8b").items() if k != "intermediate_size"}
    model = served_model.of(config, "m", weights_gib=15)
    assert model.parameters is None
    assert model.weights_read(1) == 15 * GIB
    found = capacity.plan(model, Deployment(H100, engines.VLLM, 4096))
    assert found.notices[0].startswith("all weights count as read by every step")


def test_a_checkpoint_in_float32_is_served_in_16_bits() -> None:
    config = known_shapes.get("llama-3-8b") | {"dtype": "float32"}
    assert served_model.of(config, "m").weights_bytes == 2 * 8_030_261_248
