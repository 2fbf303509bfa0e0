"""Encoder-decoders of text: both caches of every decoder layer, held against plain forward passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvcal import calibrate, capture, engines, evaluate, formats, halves, memory, plan, probe, recipe, scales
from kvcal.cache import QuantizedCache
from kvcal.data import TokenSet
from kvcal.errors import ModelError, PlanRefused
from kvcal.kernels import reference
from kvcal.statistics import Statistics
from tests import tiny

# Of different length, so that encoder and decoder are padded, and by different amounts.
_LENGTHS = (37, 21, 30, 12, 23)
_START = 259


def _text() -> TokenSet:
    generator = torch.Generator().manual_seed(3)
    samples = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in _LENGTHS]
    for sample in samples:
        sample[len(sample) // 2] = _START
    return TokenSet(tuple(map(tuple, samples)), halves=True)


def _plan(model: Any, **fields: Any) -> plan.Plan:
    wanted = {"engine": "kernel", "granularity": "per_head", "calibration": {"batch_size": 3}} | fields
    return plan.resolve(recipe.parse(wanted, "tests"), tiny.spec_of(model))


def _projections(model: Any) -> dict[tuple[int, str], torch.nn.Module]:
    """Modules that make K and V of each decoder layer's self- and cross-attention, by name alone."""
    found = {}
    for name, module in model.named_modules():
        path = name.split(".")
        if "decoder" not in path or path[-1] not in ("k_proj", "v_proj", "k", "v"):
            continue
        layer = next(int(part) for part in path if part.isdigit())
        cross = path[-2] in ("encoder_attn", "EncDecAttention")
        found[2 * layer + cross, path[-1][0]] = module
    return found


def _seen_plainly(model: Any, text: TokenSet) -> dict[tuple[int, str], torch.Tensor]:
    """What the projections give, ``(tokens, channels)``: one sample at a time, without padding or kvcal."""
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, key=key: seen.setdefault(key, []).append(out[0]))
        for key, module in _projections(model).items()
    ]
    with torch.inference_mode():
        for sample in text.samples:
            half = len(sample) // 2
            encoder, decoder = torch.tensor([sample[:half]]), torch.tensor([sample[half:]])
            model(input_ids=encoder, decoder_input_ids=decoder, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {key: torch.cat(each) for key, each in seen.items()}


@pytest.mark.parametrize("family", ["bart", "marian", "t5"])
def test_extremes_are_those_of_the_projections(family: str) -> None:
    model, text = tiny.build_model(family), _text()
    found = calibrate.calibrate(model, _plan(model), text)
    expected = _seen_plainly(model, text)
    assert found.layers.keys() == {0, 1, 2, 3, 4, 5}
    assert expected.keys() == {(index, side) for index in range(6) for side in "kv"}
    encoder = sum(n // 2 for n in _LENGTHS)
    for (index, side), rows in expected.items():
        statistics = found.layers[index][side]  # type: ignore[index]
        assert int(statistics.tokens) == len(rows) == (encoder if index % 2 else sum(_LENGTHS) - encoder)
        amax = rows.abs().amax(0).view(6, 16)
        torch.testing.assert_close(statistics.amax, amax, rtol=1e-5, atol=1e-6)
        assert int(found.layers[index]["q"].tokens) == sum(_LENGTHS) - encoder


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_capture_changes_nothing(family: str) -> None:
    model = tiny.build_model(family)
    seen: list[tuple[int, bool, int, int]] = []

    def see(call: capture.AttentionCall) -> None:
        seen.append((call.layer, call.cross, call.query.shape[2], call.key.shape[2]))

    for batch in (*_text().batches(1), *_text().batches(5)):
        inputs = batch.inputs(torch.device("cpu"))
        with torch.inference_mode():
            plain = model(**inputs).logits
            with capture.intercept(model, see):
                captured = model(**inputs).logits
        assert torch.equal(plain, captured)
        queries, keys = batch.input_ids.shape[1], batch.encoder.input_ids.shape[1]  # type: ignore[union-attr]
        expected = [(i, bool(i % 2), queries, keys if i % 2 else queries) for i in range(6)]
        assert seen == expected, "the encoder's own attention is not a cache"
        seen.clear()


class _Rounded(DynamicCache):
    """A cache that stores what a quantized one would give back; ``offset`` 1 of cross-attention."""

    def __init__(self, model: Any, cache: QuantizedCache, offset: int):
        super().__init__(config=model.get_decoder().config)
        self._scales, self._offset = cache.scales, offset

    def update(self, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        assert self._scales is not None
        of = self._scales.layers[2 * layer_idx + self._offset]
        key, value = (
            reference.quantize_dequantize(x, of[side], formats.FP8_E4M3)  # type: ignore[index]
            for x, side in ((key, "k"), (value, "v"))
        )
        return super().update(key, value, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_one_pass_is_decode_token_by_token(family: str) -> None:
    """Self-attention's cache grows by tokens, that of cross-attention is written once, both rounded."""
    model, text = tiny.build_model(family), _text()
    resolved = _plan(model)
    cache = QuantizedCache(
        resolved.format, scales.compute(calibrate.calibrate(model, resolved, text), resolved)
    )
    (batch, *_) = text.batches(1)
    assert batch.encoder is not None
    with torch.inference_mode():
        plain = model(**batch.inputs(model.device)).logits
        with evaluate.through(model, cache):
            at_once = model(**batch.inputs(model.device)).logits
        encoded = model.get_encoder()(input_ids=batch.encoder.input_ids)
        held = EncoderDecoderCache(_Rounded(model, cache, 0), _Rounded(model, cache, 1))
        steps = [
            model(
                encoder_outputs=encoded, decoder_input_ids=token, past_key_values=held, use_cache=True
            ).logits
            for token in batch.input_ids.split(1, dim=1)
        ]
    torch.testing.assert_close(at_once, torch.cat(steps, 1), rtol=1e-4, atol=1e-4)
    assert (at_once - plain).abs().max() > 20 * (at_once - torch.cat(steps, 1)).abs().max()


def test_the_bias_of_positions_is_emulated() -> None:
    model = tiny.build_model("t5")
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:  # large beside what Q and K give
            torch.nn.init.normal_(parameter, 0.0, 9.0)
    errors: dict[int, tuple[float, float]] = {}

    def compare(call: capture.AttentionCall, given: torch.Tensor) -> None:
        q, k, v = call.attended()
        plain = call.geometry | {"bias": None}
        found = (reference.attention(q, k, v, **geometry) for geometry in (call.geometry, plain))
        errors[call.layer] = tuple(float((x - given).norm() / given.norm()) for x in found)  # type: ignore[assignment]

    (batch, *_) = _text().batches(1)
    with torch.inference_mode(), capture.intercept(model, lambda _: None, after=compare):
        model(**batch.inputs(model.device))
    assert max(error for error, _ in errors.values()) < 1e-5
    assert all(without > 0.05 for index, (_, without) in errors.items() if index % 2 == 0)
    calibrate.calibrate(model, _plan(model), _text())  # whose own check of the first batch wants it too


@given(
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    causal=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_over_all_keys_with_a_bias(
    queries: int, keys: int, causal: bool, biased: bool, seed: int
) -> None:
    keys = max(keys, queries) if causal else keys
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, heads, n, 8) for heads, n in ((6, queries), (2, keys), (2, keys)))
    bias = torch.randn(1, 6, queries, keys) if biased else None
    mask = torch.zeros(1, 1, queries, keys)
    if causal:
        mask = mask.masked_fill(torch.ones(queries, keys).triu(keys - queries + 1).bool(), float("-inf"))
    expected = F.scaled_dot_product_attention(
        q.double(),
        k.double().repeat_interleave(3, 1),
        v.double().repeat_interleave(3, 1),
        attn_mask=(mask + (0 if bias is None else bias)).double(),
        scale=0.7,
    )
    found = reference.attention(q, k, v, scaling=0.7, causal=causal, bias=bias)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    one = torch.ones(1)
    quantized = reference.quantized_attention(
        q,
        *(x.to(torch.float8_e4m3fn) for x in (k, v)),
        k_scale=one,
        v_scale=one,
        fmt=formats.FP8_E4M3,
        scaling=0.7,
        causal=causal,
        bias=bias,
    )
    rounded = [x.to(torch.float8_e4m3fn).float() for x in (k, v)]
    again = reference.attention(q, *rounded, scaling=0.7, causal=causal, bias=bias)
    torch.testing.assert_close(quantized, again)


@contextmanager
def _tampered(model: Any, kind: str) -> Iterator[None]:
    """Attention that gives half as much again, in one kind of decoder layer."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        if module.is_decoder and (kind == "cross") == (not module.is_causal):
            value = value * 1.5
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("tampered", attend)
    AttentionMaskInterface.register("tampered", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.config._attn_implementation = "tampered"
        yield
    finally:
        model.config._attn_implementation = "sdpa"
        del AttentionInterface._global_mapping["tampered"], AttentionMaskInterface._global_mapping["tampered"]


@pytest.mark.parametrize(("kind", "message"), [("cross", "layer 1: .*full"), ("self", "layer 0: .*causal")])
def test_attention_that_does_more_is_refused(kind: str, message: str) -> None:
    model = tiny.build_model("bart")
    with _tampered(model, kind), pytest.raises(ModelError, match=message):
        calibrate.calibrate(model, _plan(model), _text())


@given(st.lists(st.integers(0, 255), min_size=8, max_size=60), st.integers(0, 3))
def test_samples_are_halves(sample: list[int], closing: int) -> None:
    found = halves._joined(tuple(sample), (256,) * closing, _START)
    half = len(found) // 2
    encoder, decoder = found[:half], found[half:]
    assert encoder[len(encoder) - closing :] == (256,) * closing
    assert decoder[0] == _START
    assert encoder[: len(encoder) - closing] + decoder[1:] == tuple(sample)
    assert len(encoder) > closing


def test_the_first_tokens_of_a_sample_are_of_both_halves() -> None:
    text = TokenSet((tuple(range(11)), tuple(range(20, 33))), halves=True)
    assert text.first(1, 6).samples == ((0, 1, 2, 5, 6, 7),)
    assert text.first(2, 20).samples == text.samples
    (batch,) = text.first(2, 6).batches(2)
    assert batch.input_ids.tolist() == [[5, 6, 7], [26, 27, 28]]
    assert batch.encoder is not None
    assert batch.encoder.input_ids.tolist() == [[0, 1, 2], [20, 21, 22]]


def test_what_closes_a_text() -> None:
    assert halves.closing_of(tiny.build_tokenizer(closes=True)) == (257,)
    assert halves.closing_of(tiny.build_tokenizer()) == ()


def test_memory_counts_a_whole_decoder_layer_and_the_encoder() -> None:
    model = tiny.build_model("t5")
    spec = tiny.spec_of(model)
    assert memory._decoder_layer(model, spec.layers[3]) is model.decoder.block[1]
    assert set(map(id, model.encoder.block)) <= set(map(id, memory._layers(model, spec)))


@pytest.mark.parametrize("family", tiny.ENCODER_DECODERS)
def test_what_is_seen_without_weights(family: str) -> None:
    model = tiny.build_model(family)
    spec = tiny.spec_of(model)
    projections = {id(module): key for key, module in _projections(model).items()}
    for layer in spec.layers:
        module = model.get_submodule(layer.module)
        key = getattr(module, "k_proj", None) or module.k
        assert projections[id(key)] == (layer.index, "k")
        assert (layer.cross, layer.heads, layer.kv_heads, layer.head_dim) == (bool(layer.index % 2), 6, 6, 16)
    assert [layer.index for layer in spec.layers] == list(range(6))
    assert (spec.decoder_start, spec.layers_without_attention) == (_START, 0)
    assert spec.position_bias == (family in ("t5", "mt5"))
    assert spec.max_context == (512 if family == "mt5" else 64)


@pytest.mark.parametrize("family", tiny.ENCODER_DECODERS)
def test_plan_to_check(
    family: str, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    folder, output = tiny.save(tmp_path / "model", family), tmp_path / "out"
    (tmp_path / "r.yaml").write_text("granularity: per_head\ngates: {kl_mean: null}\nengine: kernel\n")
    options = ("--recipe", tmp_path / "r.yaml", "--json")
    planned = kvcal("plan", "--model", folder, *options, *small)
    assert planned.code == 0, planned.stderr
    size = {"reference": 3 * 2 * 6 * 16 * 2, "quantized": 3 * 2 * 6 * 16}
    assert planned.document["bytes_per_token"] == planned.document["bytes_per_encoder_token"] == size
    assert planned.document["cross_attention_layers"] == [1, 3, 5]
    assert f"behind token {_START}" in " ".join(planned.stderr.split())
    done = kvcal("calibrate", "--model", folder, "--output", output, *options, *small)
    assert done.code == 0, done.stderr
    report = done.document
    assert [layer["index"] for layer in report["layers"]] == list(range(6))
    assert 0 < report["fidelity"]["kl_mean"] < 0.2
    assert 0 < report["attention_error"]["worst"] < 0.2
    assert report["fidelity"]["tokens"] == 2 * 24, "decoder tokens alone"
    written = load_file(output / "kvcal-kernel.safetensors")
    assert sorted(written) == sorted(f"layers.{i}.{side}_scale" for i in range(6) for side in "kvq")
    layout = json.loads((output / "kvcal-kernel.json").read_text())["layers"]
    assert [layer["cross"] for layer in layout.values()] == [False, True] * 3
    statistics = Statistics.load(output / "kvcal" / "statistics.safetensors")
    for index, sides in statistics.layers.items():
        for side in ("k", "v", "q"):
            wanted = sides[side].amax.amax(-1) * 1.25 / 448
            assert (wanted <= written[f"layers.{index}.{side}_scale"] * (1 + 1e-6)).all()
    record = json.loads((output / "kvcal" / "manifest.json").read_text())["calibration"]
    assert (record["tokens"], record["encoder_tokens"]) == (4 * 48, 4 * 24)
    assert "decoder_start_token_id" in record["split"]
    assert kvcal("check", output, "--engine", "kernel").code == 0
    assert "576 quantized per token of the encoder" in (output / "kvcal" / "report.md").read_text()
    page = (output / "kvcal" / "report.html").read_text()
    assert "1,152 → 576 bytes per token of the decoder, 1,152 → 576 of the encoder" in page
    assert "how many fit beside the weights" not in page, "no capacity that means nothing"
    assert "kvcal compare" not in page, "no command that would refuse"
    assert "--suite" not in page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("bart") / "bart", "bart")


def _calibrated(folder: Path, output: Path, kvcal: Callable[..., Any], *more: Any) -> Path:
    done = kvcal("calibrate", "--model", folder, "--engine", "kernel", "--output", output, *more)
    assert done.code == 0, done.stderr
    return output


def test_other_commands_take_it(
    folder: Path, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    first = _calibrated(folder, tmp_path / "one", kvcal, *small, "--device-map", "auto", "--device", "cpu")
    (tmp_path / "seed.yaml").write_text("calibration: {seed: 9}\n")
    other = _calibrated(folder, tmp_path / "two", kvcal, *small, "--recipe", tmp_path / "seed.yaml")
    recorded = json.loads((first / "kvcal" / "report.json").read_text())
    again = kvcal("evaluate", first, "--json")
    assert again.document["fidelity"]["kl_mean"] == pytest.approx(recorded["fidelity"]["kl_mean"], rel=1e-4)
    assert kvcal("validate", first, "--json").code == 0
    merged = kvcal("merge", first, other, "--output", tmp_path / "merged", "--json")
    if merged.code == 0:
        assert merged.document["tokens"] == 2 * 4 * 48
    else:  # the two seeds may have drawn one sample twice
        assert "calibration samples in common" in " ".join(merged.stderr.split())
    exported = kvcal("export", first, "--engine", "kernel", "--output", tmp_path / "scales")
    assert exported.code == 0, exported.stderr
    assert (
        load_file(tmp_path / "scales" / "kvcal-kernel.safetensors").keys()
        == load_file(first / "kvcal-kernel.safetensors").keys()
    )
    suite = kvcal("evaluate", first, "--suite", "quick")
    assert suite.code == 3, suite.stderr
    assert "--suite lets decoders continue" in " ".join(suite.stderr.split())
    streamed = kvcal("evaluate", first, "--device-map", "layerwise")
    assert "streams the layers of one decoder" in " ".join(streamed.stderr.split())
    pytest.importorskip("lm_eval")
    from kvcal.harness import QuantizedCacheLM

    with pytest.raises(PlanRefused, match="the harness is given decoders alone"):
        QuantizedCacheLM(str(first))
    assert streamed.code == 3, streamed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("calibrate",), "vllm 0.33, bart: has model files for one encoder-decoder"),
        (("calibrate", "--engine", "transformers"), "fails with ValueError on a KV scheme"),
        (("calibrate", "--engine", "kernel", "--deliver", "fold"), "is not known, so nothing can be folded"),
        (("calibrate", "--engine", "kernel", "--seq-len", 64, "--chunk", 16), "reads its samples whole, 32"),
        (
            ("calibrate", "--engine", "kernel", "--device-map", "layerwise"),
            "streams the layers of one decoder",
        ),
        (("calibrate", "--engine", "kernel", "--max-kl", 0.1), "keeps one format in all layers"),
        (("calibrate", "--recipe", "objective.yaml"), "objective mse is not measured behind an encoder"),
        (("calibrate", "--recipe", "fp8-weights", "--engine", "kernel"), "llm-compressor is run on decoders"),
        (("compare",), "schemes are compared for decoders alone"),
        (("plan", "--gpu", "h100"), "capacity is planned for decoders alone"),
        (("bench", "capture"), "benchmarks run decoders alone"),
        (("bench", "phase"), "benchmarks run decoders alone"),
        (("bench", "scaling"), "benchmarks run decoders alone"),
        (("bench", "folds"), "benchmarks run decoders alone"),
    ],
)
def test_refused_by_name(
    arguments: tuple[Any, ...], message: str, folder: Path, kvcal: Callable[..., Any]
) -> None:
    Path("objective.yaml").write_text("engine: kernel\nscale: {objective: mse}\n")
    command = [*arguments[:2]] if arguments[0] == "bench" else [arguments[0]]
    outcome = kvcal(*command, "--model", folder, *arguments[len(command) :])
    assert message in " ".join(outcome.stderr.split()), outcome.stderr
    assert outcome.code == 3


def test_every_engine_has_a_verdict(folder: Path, kvcal: Callable[..., Any]) -> None:
    rows = kvcal("plan", "--model", folder, "--engine", "all", "--json").document
    verdicts = {row["engine"]: row for row in rows}
    assert verdicts.keys() == set(engines.names())
    for name, row in verdicts.items():
        assert row["verdict"] == ("consumed" if name == "kernel" else "refused")
        assert row["alternative"] == (None if name == "kernel" else "--engine kernel --format fp8")


def test_transformers_fails_on_a_kv_scheme(folder: Path, tmp_path: Path) -> None:
    """What its row says; the day it passes, the row can go."""
    model = tiny.build_model("bart")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("k_proj.weight")]:
        module = name.removesuffix("k_proj.weight")
        tensors |= {f"{module}{side}_scale": torch.full((1,), 0.05) for side in "kv"}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    tiny.edit_config(tmp_path, quantization_config=section)
    with pytest.raises(ValueError, match="num_key_value_heads"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path)


def test_a_decoder_needs_its_first_token() -> None:
    fields = tiny.build_model("t5").config.to_dict() | {"architectures": ["T5ForConditionalGeneration"]}
    with pytest.raises(PlanRefused, match="names no decoder_start_token_id"):
        probe.read(fields | {"decoder_start_token_id": None})
