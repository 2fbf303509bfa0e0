"""A long sample in chunks over a cache: what is measured is that of the whole sample."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcal import calibrate, data, evaluate, forward, models, scales
from kvcal.cache import QuantizedCache
from kvcal.calibrate import View
from kvcal.errors import ModelError
from kvcal.evaluate import Variant
from kvcal.formats import FP8_E4M3, INT8_PER_TOKEN_HEAD, KVFormat
from kvcal.recipe import SIDES, Calibration
from kvcal.statistics import Statistics
from tests import tiny
from tests.test_calibrate import plan_for, token_set
from tests.test_evaluate import RoundedCache, prepared
from tests.test_layerwise import SEVERAL, both, require_equal

# Longer and shorter than a chunk, than the window of 24, and than both; not a multiple of the chunk.
LENGTHS = [61, 60, 40, 12, 33]
CHUNK = 17


def require_close(found: Statistics, expected: Statistics) -> None:
    assert found.layers.keys() == expected.layers.keys()
    for index, sides in expected.layers.items():
        for side in SIDES:
            for name, value in sides[side].tensors().items():
                other = found.layers[index][side].tensors()[name]
                if name == "tokens":
                    assert int(other) == int(value) == sum(LENGTHS)
                elif name == "histogram":  # rounding may carry a value into the next bin
                    assert int(other.sum()) == int(value.sum())
                    assert int((other - value).abs().sum()) < 2e-3 * int(value.sum())
                elif name in ("minimum", "maximum"):
                    torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-6)
                else:
                    torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "batch_size"), [("llama", 1), ("gemma2", 1), *((family, 3) for family in tiny.FAMILIES)]
)
def test_statistics_are_those_of_whole_samples(family: str, batch_size: int) -> None:
    """Weights by attention too, which later chunks add to earlier tokens."""
    model, tokens = tiny.build_model(family), token_set(LENGTHS)
    resolved, wanted = plan_for(model), (View(), View(skip=4))
    whole, chunked = (
        calibrate.views(model, resolved.layers, batch_size, each, wanted, collect="distribution")
        for each in (tokens, replace(tokens, chunk=CHUNK))
    )
    require_close(chunked[View()], whole[View()])
    for index, sides in whole[View(skip=4)].layers.items():
        for side in SIDES:
            found = chunked[View(skip=4)].layers[index][side]
            assert int(found.tokens) == int(sides[side].tokens)
            torch.testing.assert_close(found.amax, sides[side].amax, rtol=1e-5, atol=1e-6)
        weight, other = sides["v"].weight, chunked[View(skip=4)].layers[index]["v"].weight
        assert weight is not None
        assert other is not None
        torch.testing.assert_close(other, weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 16, 59, 60, 61, 64])
def test_any_chunk_will_do(chunk: int) -> None:
    model, tokens = tiny.build_model("gemma3_text"), token_set(LENGTHS)
    layers = plan_for(model).layers
    whole, chunked = (
        calibrate.views(model, layers, 2, each, (View(),), collect="distribution")[View()]
        for each in (tokens, replace(tokens, chunk=chunk))
    )
    require_close(chunked, whole)


def test_no_layer_sees_more_queries_than_a_chunk_has() -> None:
    model, tokens = tiny.build_model("mistral"), replace(token_set([61]), chunk=CHUNK)
    seen: list[tuple[int, ...]] = []

    def note(module: Any, args: Any, named: Any) -> None:
        seen.append(tuple(named["hidden_states"].shape) if not args else tuple(args[0].shape))

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    with torch.inference_mode():
        for part in forward.parts(model, tokens.batches(1)):
            for step in forward.steps(model, part):
                step.run()
    assert [shape[1] for shape in seen] == [n for n in (17, 17, 17, 10) for _ in range(3)]


def test_states_of_linear_layers_are_not_known_layer_by_layer_in_chunks(tmp_path: Path) -> None:
    _, streamed, spec = both(tiny.save(tmp_path / "model", "qwen3_next"))
    tokens = replace(token_set(LENGTHS), chunk=CHUNK)
    with pytest.raises(ModelError, match="layer 1 keeps a state instead of K and V"):
        calibrate.views(streamed, spec.layers, 3, tokens, (View(),))


@pytest.mark.parametrize("family", SEVERAL)
def test_layer_by_layer_and_in_chunks_at_once(family: str, tmp_path: Path) -> None:
    whole, streamed, spec = both(tiny.save(tmp_path / "model", family))
    tokens = replace(token_set(LENGTHS), chunk=CHUNK)
    plain, found = (
        calibrate.views(model, spec.layers, 3, tokens, (View(),), collect="distribution")[View()]
        for model in (whole, streamed)
    )
    require_equal(found, plain)
    cache = QuantizedCache(FP8_E4M3, scales.compute(plain, plan_for(whole)))
    variants = {"k, v": Variant(cache), "k, v, q": Variant(cache, with_query=True)}
    assert evaluate.fidelities(streamed, variants, 3, tokens) == evaluate.fidelities(
        whole, variants, 3, tokens
    )


FIELDS = ("kl_mean", "kl_p99", "top1_agreement", "perplexity", "perplexity_reference", "tokens")


@pytest.mark.parametrize("fmt", [FP8_E4M3, INT8_PER_TOKEN_HEAD], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("family", ["gemma3_text", "gemma2"])
def test_fidelity_is_that_of_whole_samples(family: str, fmt: KVFormat) -> None:
    """Labels of a chunk's last token stand in the next one."""
    tokens = token_set(LENGTHS)
    model, _, cache, _ = prepared(family, tokens, fmt)
    model = model.double()  # no two roundings fall on different sides of a tie
    variants = {"k, v": Variant(cache)}
    whole, chunked = (
        evaluate.fidelities(model, variants, 2, each)["k, v"]
        for each in (tokens, replace(tokens, chunk=CHUNK))
    )
    for field in FIELDS:
        assert getattr(chunked, field) == pytest.approx(getattr(whole, field), rel=1e-5), field
    assert whole.kl_mean > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_chunks_over_a_quantized_cache_equal_token_by_token_decode(family: str) -> None:
    tokens = token_set([41])
    model, _, cache, rounding = prepared(family, tokens)
    model = model.double()
    ids = torch.tensor(tokens.samples)
    held = RoundedCache(rounding)
    with torch.inference_mode():
        decode = torch.cat(
            [model(ids[:, i : i + 1], past_key_values=held, use_cache=True).logits for i in range(41)], 1
        )
        (part,) = forward.parts(model, replace(tokens, chunk=7).batches(1))
        pieces = forward.logits(model, part, [lambda: evaluate.through(model, cache)])
        chunked = torch.cat([logits for _, _, _, logits in pieces], 1)
    assert (chunked - decode).norm() / decode.norm() < 1e-6


def test_a_job_in_chunks_says_what_it_validates(
    llama_folder: Path, tmp_path: Path, kvcal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcal.measure.VALIDATION_TOKENS", 20)
    options = ("--model", llama_folder, "--samples", "3", "--evaluation-samples", "2", "--seq-len", "64")
    done, whole = (
        kvcal("calibrate", *options, "--output", tmp_path / name, "--json", *chunk)
        for name, chunk in (("chunked", ("--chunk", "16")), ("whole", ()))
    )
    assert done.code == whole.code == 0, done.stderr
    assert "attention error is that of the first 20 tokens of a sample" in done.stderr
    assert done.document["attention_error"]["tokens"] == 40
    for key in ("kl_mean", "perplexity"):
        assert done.document["fidelity"][key] == pytest.approx(whole.document["fidelity"][key], rel=1e-3)
    again = kvcal("evaluate", tmp_path / "chunked", "--chunk", "32", "--json")
    assert again.document["fidelity"]["kl_mean"] == pytest.approx(
        done.document["fidelity"]["kl_mean"], rel=1e-3
    )


@pytest.mark.slow
def test_128k_tokens_take_no_scores(tmp_path: Path) -> None:
    """Scores would be 64 GiB, a chunk's 2 beside its mask; Q, K and V are those of each token alone."""
    context = 131_072
    folder = tiny.save(
        tmp_path / "model",
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=context,
    )
    (tmp_path / "text.txt").write_text(tiny.text(360))
    output = tmp_path / "out"
    options = ["--dataset", tmp_path / "text.txt", "--samples", "1", "--seq-len", context, "--output", output]
    command = [sys.executable, "-m", "kvcal", "calibrate", "--model", folder, *options, "--device", "cpu"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((output / "kvcal" / "manifest.json").read_text())
    assert manifest["calibration"]["tokens"] == context
    assert manifest["evaluation"]["tokens"] > Calibration().chunk
    assert max(each["peak_bytes"] for each in manifest["memory"].values()) < 3.6 * 2**30
    found = Statistics.load(output / "kvcal" / "statistics.safetensors").layers[0]
    wanted = Calibration(dataset=str(tmp_path / "text.txt"), samples=1)
    tokenizer = models.load_tokenizer(folder, models.TRUST_NOTHING)
    (sample,) = data.load(wanted, tokenizer, "calibration", context, wanted.seed).samples
    q, k, v = projected(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), sample)
    assert int(found["k"].tokens) == context
    torch.testing.assert_close(found["q"].amax, q.abs().amax(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["k"].amax, k.abs().amax(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["v"].amax, v.abs().amax(1), rtol=1e-5, atol=1e-6)


def projected(model: Any, sample: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Q, K and V of the first layer, ``(heads, tokens, head_dim)``, without any attention."""
    layer = model.model.layers[0]
    with torch.inference_mode():
        hidden = model.model.embed_tokens(torch.tensor([sample]))
        rope = model.model.rotary_emb(hidden, torch.arange(len(sample))[None])
        normed, attention = layer.input_layernorm(hidden), layer.self_attn
        names = ("q_proj", "k_proj", "v_proj")
        q, k, v = (
            getattr(attention, name)(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for name in names
        )
        q, k = apply_rotary_pos_emb(q, k, *rope)
    return q[0], k[0], v[0]
