"""Layers that stay in 16 bits: found, written down, served, and found again."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from kvcal import recipe, run
from kvcal.progress import Narrator
from kvcal.statistics import Statistics
from tests import tiny

Kvcal = Callable[..., Any]
SMALL = ("--samples", "6", "--evaluation-samples", "2", "--seq-len", "48", "--batch-size", "2")
LAYERS, SENSITIVE = 5, 3
MAX_KL = {"fp8_e4m3": 3e-4, "int4_per_token_head": 1e-3}


@pytest.fixture(scope="module")
def sensitive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What attention says in one layer counts 20 times what it says in the others."""
    model = tiny.build_model("llama", head_dim=32, num_hidden_layers=LAYERS)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 10  # or the first layer alone would decide
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight *= 1 if index == SENSITIVE else 0.05
            layer.self_attn.k_proj.weight *= 4
    folder = tmp_path_factory.mktemp("models") / "sensitive"
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


def calibrated(model: Path, output: Path, **fields: Any) -> Path:
    text = {"samples": 6, "seq_len": 48}
    given = {"calibration": text, "evaluation": text | {"samples": 2}, "gates": {}} | fields
    request = run.Request(str(model), output=output)
    _, folder = run.run_calibrate(
        request, recipe.parse(given, "tests"), Narrator(Console(stderr=True, quiet=True))
    )
    return folder


def report_of(folder: Path) -> Any:
    return json.loads((folder / "kvcal" / "report.json").read_text())


@pytest.fixture(scope="module")
def fp8(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with scales that one layer does not use. Tests that change files copy it first."""
    limit = {"max_kl": MAX_KL["fp8_e4m3"]}
    return calibrated(sensitive, tmp_path_factory.mktemp("fp8") / "tiny", granularity="per_head", mixed=limit)


@pytest.fixture(scope="module")
def int4(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a format that the engine scales, behind folds."""
    name = "int4_per_token_head"
    limit = {"max_kl": MAX_KL[name]}
    return calibrated(sensitive, tmp_path_factory.mktemp("int4") / "tiny", format=name, mixed=limit)


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_exactly_the_sensitive_layer_is_skipped(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    report = report_of(folder)
    found = report["mixed"]
    assert report["skipped_layers"] == found["skipped_layers"] == [SENSITIVE]
    assert [g["layers"] for g in found["groups"]] == [[i] for i in range(LAYERS)]
    assert [g["skipped"] for g in found["groups"]] == [i == SENSITIVE for i in range(LAYERS)]
    kls = [g["kl_mean"] for g in found["groups"]]
    assert max(kls) == kls[SENSITIVE] > found["max_kl"]
    assert found["kl_sum"] == pytest.approx(sum(kls) - kls[SENSITIVE])
    assert found["kl_mean"] <= found["max_kl"] < found["kl_mean_all"]
    assert found["kl_mean"] == pytest.approx(found["kl_sum"], rel=0.2)
    assert found["tokens"] == 2 * 48
    assert json.loads((folder / "kvcal" / "mixed.json").read_text()) == found


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_the_engine_is_told_to_skip_it(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    serve = report_of(folder)["serve"]
    *_, flag, layer = shlex.split(serve)
    assert (flag, layer) == ("--kv-cache-dtype-skip-layers", str(SENSITIVE))
    assert serve in (folder / "kvcal" / "report.md").read_text()


def test_a_skipped_layer_counts_16_bits_and_has_no_error(fp8: Path, int4: Path) -> None:
    report = report_of(fp8)
    assert report["bytes_per_token"] == {"reference": 5 * 256.0, "quantized": 4 * 128.0 + 256.0}
    assert report["bits_per_element"] == pytest.approx(9.6 + 8 * 4 * 5 * 10 / (5 * 128 * 256))
    assert report_of(int4)["bits_per_element"] == pytest.approx((4 * 5 + 16) / 5)
    for each in (report, report_of(int4)):
        errors = {layer["index"]: layer["attention_error"] for layer in each["layers"]}
        assert errors[SENSITIVE]["cache"] == [0.0] * 6
        assert errors[SENSITIVE]["attention"] in (None, [0.0] * 6)
        assert errors[SENSITIVE]["logit_snr_db"] == [None] * 6
        assert all(min(errors[i]["cache"]) > 0 for i in range(LAYERS) if i != SENSITIVE)


def test_its_scales_are_written_all_the_same(fp8: Path, kvcal: Kvcal) -> None:
    names = load_file(fp8 / "kvcal-scales.safetensors").keys()
    assert {f"model.layers.{SENSITIVE}.self_attn.{side}_scale" for side in "kvq"} <= names
    assert kvcal("check", fp8).code == 0


def test_text_that_judges_sets_no_scale(fp8: Path) -> None:
    statistics = Statistics.load(fp8 / "kvcal" / "statistics.safetensors")
    assert {int(sides["k"].tokens) for sides in statistics.layers.values()} == {4 * 48}


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_evaluate_and_validate_remember_it(name: str, request: pytest.FixtureRequest, kvcal: Kvcal) -> None:
    folder = request.getfixturevalue(name)
    report = report_of(folder)
    again = kvcal("evaluate", folder, "--json").document
    rounds_q = {"fp8": True, "int4": False}[name]
    for key in ("fidelity", "fidelity_fp8_attention")[: 1 + rounds_q]:
        assert again[key] == pytest.approx(report[key], rel=1e-3)
    assert (again["fidelity_fp8_attention"] is not None) == rounds_q
    validated = kvcal("validate", folder, "--json").document
    assert validated["mean"] == pytest.approx(report["attention_error"]["mean"], rel=1e-5)


def test_skipping_it_pays_on_held_out_text(sensitive: Path, fp8: Path, tmp_path: Path) -> None:
    everything = report_of(calibrated(sensitive, tmp_path / "out", granularity="per_head"))
    assert everything["skipped_layers"] == []
    assert everything["mixed"] is None
    for key in ("fidelity", "fidelity_fp8_attention"):
        assert report_of(fp8)[key]["kl_mean"] < 0.5 * everything[key]["kl_mean"]


@pytest.mark.parametrize(("budget", "skipped"), [(9.6, [SENSITIVE]), (9.5, []), (12.0, [SENSITIVE, None])])
def test_a_budget_is_spent_where_it_is_worth_most(
    budget: float, skipped: list[Any], sensitive: Path, tmp_path: Path, kvcal: Kvcal
) -> None:
    out = tmp_path / "out"
    done = kvcal(
        "calibrate", "--model", sensitive, "--bits-budget", budget, "--output", out, *SMALL, "--json"
    )
    assert done.code == 0, done.stderr
    found = done.document["mixed"]
    assert len(found["skipped_layers"]) == len(skipped)
    assert set(skipped) - {None} <= set(found["skipped_layers"])
    assert 8 + 8 * len(found["skipped_layers"]) / LAYERS <= budget


def test_too_few_passes_skip_layers_together(sensitive: Path, tmp_path: Path) -> None:
    limit = {"max_kl": MAX_KL["fp8_e4m3"], "passes": 2}
    found = report_of(calibrated(sensitive, tmp_path / "out", mixed=limit))
    assert [g["layers"] for g in found["mixed"]["groups"]] == [[0, 1], [2, 3, 4]]
    assert found["skipped_layers"] == [2, 3, 4]


@pytest.mark.parametrize("deliver", ["fold", "both"])
def test_static_formats_are_folded_and_skipped(deliver: str, sensitive: Path, tmp_path: Path) -> None:
    limit = {"max_kl": MAX_KL["fp8_e4m3"]}
    report = report_of(calibrated(sensitive, tmp_path / "out", deliver=deliver, mixed=limit))
    assert report["skipped_layers"] == [SENSITIVE]
    assert report["folds"]["before"]["fidelity"]["kl_mean"] < 2 * report["fidelity"]["kl_mean"]


@pytest.mark.parametrize(
    "content",
    [None, "{", "[]", '{"skipped_layers": 3}', '{"skipped_layers": [5]}', '{"skipped_layers": [[1]]}'],
)
def test_a_record_that_cannot_be_read_is_no_record(
    content: str | None, fp8: Path, tmp_path: Path, kvcal: Kvcal
) -> None:
    folder = Path(shutil.copytree(fp8, tmp_path / "copy"))
    record = folder / "kvcal" / "mixed.json"
    record.unlink()
    if content is not None:
        record.write_text(content)
    done = kvcal("evaluate", folder)
    assert done.code == 4
    assert "mixed.json: holds no skipped layers that can be read" in done.stderr


def test_the_plan_says_what_is_asked_for(sensitive: Path, kvcal: Kvcal) -> None:
    planned = kvcal("plan", "--model", sensitive, "--max-kl", "0.01", "--json").document
    assert planned["mixed"] == {"bits_budget": None, "max_kl": 0.01, "passes": 128, "samples": 2}
    assert "KL within 0.01 nats" in kvcal("plan", "--model", sensitive, "--max-kl", "0.01").stdout
    assert kvcal("plan", "--model", sensitive, "--json").document["mixed"] is None
    refused = kvcal("plan", "--model", sensitive, "--bits-budget", "4.25")
    assert refused.code == 3
    assert "mixed.bits_budget 4.25 is below the 8 bits per element of fp8_e4m3" in refused.stderr
    both = kvcal("plan", "--model", sensitive, "--bits-budget", "9", "--max-kl", "0.1")
    assert both.code == 2
    assert "needs one of bits_budget and max_kl" in both.stderr


def test_the_terminal_and_the_markdown_list_the_layers(
    sensitive: Path, fp8: Path, tmp_path: Path, kvcal: Kvcal
) -> None:
    out = tmp_path / "out"
    done = kvcal("calibrate", "--model", sensitive, "--max-kl", "3e-4", "--output", out, *SMALL)
    assert done.code == 0, done.stderr
    assert "sensitivity" in done.stderr
    assert f"layers in 16 bits: {SENSITIVE}; over 96 calibration tokens KL" in done.stdout
    assert "16 bits" in done.stdout
    assert f"--kv-cache-dtype-skip-layers {SENSITIVE}" in done.stdout
    markdown = (fp8 / "kvcal" / "report.md").read_text()
    assert f"Layers in 16 bits: {SENSITIVE}; over 96 calibration tokens" in markdown
    assert f"| {SENSITIVE} | 0.0" in markdown.split("| layers | KL alone | cache |")[1]
