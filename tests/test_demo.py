"""The main job on a real model, SmolLM2-135M-Instruct, through the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcal import folders

pytestmark = pytest.mark.slow


def kvcal_json(*arguments: Any) -> Any:
    command = [sys.executable, "-m", "kvcal", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "smollm2"
    kvcal_json(
        "calibrate", "--model", "demo", "--recipe", "fp8-ci", "--granularity", "per_head", "--output", folder
    )
    return folder


def test_the_demo_model_is_the_real_one(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    config = json.loads((demo / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (30, 3, 64)
    # The base weights are the file from the cache, so the base model is read with its own config.
    plain = shutil.copytree(demo, demo.with_name("plain"))
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=1, do_sample=False)[0])
    assert text == "The capital of France is Paris"


def test_fidelity_is_that_of_fp8(demo: Path) -> None:
    report = json.loads((demo / "kvcal" / "report.json").read_text())
    assert report["verdict"] == "pass"
    assert 0.003 < report["fidelity"]["kl_mean"] < 0.02
    assert report["fidelity"]["kl_mean"] < report["fidelity_fp8_attention"]["kl_mean"] < 0.04
    assert report["fidelity"]["top1_agreement"] > 0.9
    assert report["fidelity"]["perplexity"] == pytest.approx(
        report["fidelity"]["perplexity_reference"], rel=0.05
    )
    assert report["bytes_per_token"] == {"reference": 30 * 2 * 3 * 64 * 2, "quantized": 30 * 2 * 3 * 64}
    assert len(report["layers"]) == 30


def test_scales_cover_what_the_statistics_saw(demo: Path) -> None:
    statistics = load_file(demo / "kvcal" / "statistics.safetensors")
    written = load_file(demo / "kvcal-scales.safetensors")
    manifest = json.loads((demo / "kvcal" / "manifest.json").read_text())
    for index in range(30):
        for side in "kvq":
            low, high = (statistics[f"layers.{index}.{side}.{end}"] for end in ("minimum", "maximum"))
            amax = torch.maximum(high, -low).amax(-1)
            scale = written[f"model.layers.{index}.self_attn.{side}_scale"].flatten()
            assert bool((scale * 448 >= amax * (1 - 1e-6)).all())
            assert int(statistics[f"layers.{index}.{side}.tokens"]) == manifest["calibration"]["tokens"]


def test_evaluate_again_gives_what_the_report_says(demo: Path) -> None:
    report = json.loads((demo / "kvcal" / "report.json").read_text())
    again = kvcal_json("evaluate", demo)
    assert again["fidelity"] == pytest.approx(report["fidelity"], rel=1e-5)


def test_validate_again_gives_what_the_report_says(demo: Path) -> None:
    report = json.loads((demo / "kvcal" / "report.json").read_text())
    again = kvcal_json("validate", demo)
    assert again["mean"] == pytest.approx(report["attention_error"]["mean"], rel=1e-5)


def test_the_running_engine_holds_the_written_scales_and_says_the_same(demo: Path) -> None:
    found = kvcal_json("check", demo, "--engine", "vllm", "--live")
    assert found["ok"]
    assert any(f["rule"].startswith("vllm") for f in found["findings"])


def test_plan_of_a_gguf_reads_the_config_alone(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gguf,) = (folders.cache_folder() / "demo").glob("*.gguf")
    whole = kvcal_json("plan", "--model", "demo", "--granularity", "per_head")
    monkeypatch.setenv("KVCAL_CACHE", str(tmp_path))
    planned = kvcal_json("plan", "--model", gguf, "--granularity", "per_head")
    assert planned | {"model": "demo"} == whole
    assert not list(tmp_path.rglob("*.safetensors"))
