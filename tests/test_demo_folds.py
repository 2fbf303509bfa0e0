"""What folds are worth on a real model, SmolLM2-135M-Instruct, and that a real engine serves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvcal import arch, check_live, data, evaluate, formats, live_engine, models, recipe, scales, sources
from kvcal import plan as plans
from kvcal.cache import QuantizedCache
from kvcal.check import scales_of
from tests import planted
from tests.test_demo import kvcal_json

pytestmark = pytest.mark.slow

LITTLE = ("--samples", "12", "--evaluation-samples", "4", "--seq-len", "256")
EVALUATION = recipe.Evaluation(samples=4, seq_len=256)
# Format, and how the engine's own quantizer is reached without scales.
TARGETS = ("int8_per_token_head", "int4_per_token_head", "fp8")


@pytest.fixture(scope="module")
def base() -> Path:
    return sources.locate("demo", None, weights=True, say=lambda _: None).folder


@pytest.fixture(scope="module")
def unplanted(base: Path) -> dict[str, evaluate.Evaluation]:
    """Fidelity of the model as it is, over each engine's own cache, on the text that the runs below use."""
    spec = arch.read(sources.read_config(base))
    model = models.load(base, spec, torch.device("cpu"), models.TRUST_NOTHING)
    tokenizer = models.load_tokenizer(base, models.TRUST_NOTHING)
    text = data.load(EVALUATION, tokenizer, "evaluation", 256, seed=0)
    unit = scales.unit(plans.resolve(recipe.Recipe(deliver="fold"), spec))
    caches = {}
    for name in TARGETS:
        fmt = formats.get(name)
        caches[name] = (QuantizedCache(fmt, None if fmt.dynamic else unit), evaluate.nullcontext)
    return evaluate.evaluations(model, caches, 1, text)


@pytest.fixture(scope="module")
def planted_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.plant(base, tmp_path_factory.mktemp("planted") / "smollm2")


@pytest.fixture(scope="module")
def folded(planted_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The planted model, delivered through the weights for each target."""
    root, found = tmp_path_factory.mktemp("folded"), {}
    for name in TARGETS:
        options = ("--format", name, "--deliver", "fold", "--output", root / name, *LITTLE)
        found[name] = (root / name, kvcal_json("calibrate", "--model", planted_base, *options))
    return found


def test_planting_changes_no_logit(base: Path, planted_base: Path) -> None:
    ids = torch.arange(100, 140)[None]
    with torch.inference_mode():
        pair = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (base, planted_base)]
        a, b = (model(ids).logits for model in pair)
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", TARGETS)
def test_planted_outliers_are_folded_away(
    name: str, folded: dict[str, tuple[Path, Any]], unplanted: dict[str, evaluate.Evaluation]
) -> None:
    _, report = folded[name]
    before, clean = report["folds"]["before"], unplanted[name]
    assert report["fidelity"]["tokens"] == clean.cache.tokens
    assert report["fidelity"]["kl_mean"] <= 1.1 * clean.cache.kl_mean
    assert before["fidelity"]["kl_mean"] > 2 * clean.cache.kl_mean
    if clean.attention is not None:
        assert report["fidelity_fp8_attention"]["kl_mean"] <= 1.1 * clean.attention.kl_mean


def test_unfolding_gives_the_planted_weights_again(
    planted_base: Path, folded: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, _ = folded["int4_per_token_head"]
    done = kvcal_json("unfold", folder, "--output", tmp_path / "again")
    assert done["rounded"] == []
    again, original = (load_file(f / "model.safetensors") for f in (tmp_path / "again", planted_base))
    assert again.keys() == original.keys()
    assert all(torch.equal(again[n].view(torch.uint8), original[n].view(torch.uint8)) for n in original)


def test_int4_gains_from_folds_and_int8_loses_nothing(tmp_path: Path) -> None:
    reports = {}
    for name, samples in (("int4-fold", 24), ("int8-fold", 12)):
        options = ("--recipe", name, "--samples", samples, "--evaluation-samples", 4)
        reports[name] = kvcal_json("calibrate", "--model", "demo", *options, "--output", tmp_path / name)
    int4, int8 = reports["int4-fold"], reports["int8-fold"]
    assert "key_turn" in int4["folds"]["kept"]
    assert int4["folds"]["judging"]["kl_after"] < 0.97 * int4["folds"]["judging"]["kl_before"]
    # So few tokens know a KL to several percent only; README has the figures over many.
    assert int4["fidelity"]["kl_mean"] <= 1.1 * int4["folds"]["before"]["fidelity"]["kl_mean"]
    assert int8["fidelity"]["kl_mean"] <= 1.02 * int8["folds"]["before"]["fidelity"]["kl_mean"]


def test_the_running_engine_continues_a_folded_checkpoint_as_the_original(
    planted_base: Path, folded: dict[str, tuple[Path, Any]]
) -> None:
    folder, _ = folded["int4_per_token_head"]
    spec, ones, announced = scales_of(folder, "vllm")
    assert not announced
    prompts = ("The capital of France is", "Water boils at a temperature of")
    modules = {layer.index: layer.module for layer in spec.layers}
    python = live_engine.engine_python(None)
    found = check_live.check_live(folder, ones, modules, python, prompts, 16, announced=False)
    assert found.ok, found.problems
    assert found.cache_dtype == "bfloat16"
    model = models.load(planted_base, spec, torch.device("cpu"), models.TRUST_NOTHING)
    for text in found.texts:
        ids = torch.tensor([text.prompt])
        with torch.inference_mode():
            original = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=-1)
        assert tuple(original[0, ids.shape[1] :].tolist()) == text.reference_tokens
    assert "Paris" in (found.texts[0].engine_text or "")
