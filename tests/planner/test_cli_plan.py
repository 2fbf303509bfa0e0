"""``kvcal plan --gpu``, as it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcal.errors import ModelError, UsageError
from kvcal.planner import measured
from tests import tiny

SHAPE = ("plan", "--shape", "llama-3-8b", "--gpu", "h100")


def test_the_table_fits_80_columns_and_names_what_the_engine_takes(kvcal: Callable[..., Any]) -> None:
    line = ("plan", "--shape", "llama-3.1-70b", "--gpu", "H100", "--tensor-parallel", 4, "--context", 131072)
    outcome = kvcal(*line, "--price-per-hour", 2.5)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    assert "…" not in outcome.stdout  # nothing is cut
    assert "llama-3.1-70b on 4 × NVIDIA H100 SXM 80GB" in outcome.stdout
    (plain,) = (line for line in outcome.stdout.splitlines() if line.startswith("16 bits"))
    assert plain.split()[2:5] == ["327,680", "40.000", "3"]
    assert "fp8_e4m3 *  " in outcome.stdout
    assert "recommended: fp8_e4m3" in outcome.stdout


def test_the_document_says_the_same_in_bytes_and_seconds(kvcal: Callable[..., Any]) -> None:
    found = kvcal(*SHAPE, "--json").document
    plain, fp8 = found["formats"][0], found["formats"][1]
    assert (plain["format"], plain["bytes_per_token"], fp8["bytes_per_token"]) == ("16 bits", 131072, 65536)
    assert found["context"] == 8192
    assert found["gpu"]["name"] == "h100"
    assert found["recommendation"]["format"] == "fp8_e4m3"
    assert plain["tokens_per_second"] == pytest.approx(plain["requests"] / plain["latency"])


def test_every_option_has_its_effect(kvcal: Callable[..., Any]) -> None:
    def document(*options: Any) -> Any:
        return kvcal(*SHAPE, *options, "--json").document

    plain = document()
    assert document("--context", 100, "--page-size", 64)["formats"][0]["request_bytes"] == 128 * 131072
    wide = document("--headroom", 0)
    assert wide["free_bytes_per_gpu"] - plain["free_bytes_per_gpu"] == pytest.approx(81559 * 2**20 * 0.1)
    assert document("--requests", 3)["formats"][0]["requests"] == 3
    assert document("--weights-gib", 1.5)["weights_bytes"] == 1.5 * 2**30
    assert document("--weights-bits", 8)["weights_bytes"] < 0.6 * plain["weights_bytes"]
    assert document("--tensor-parallel", 2)["free_bytes_per_gpu"] > plain["free_bytes_per_gpu"]
    assert document("--price-per-hour", 2)["formats"][0]["price_per_million"] > 0
    taken = [row["format"] for row in document("--engine", "lmdeploy")["formats"] if row["refused"] is None]
    assert taken == ["16 bits", "fp8_e4m3", "int8_per_token_head", "int4_per_token_head"]


def test_a_folder_needs_no_more_than_its_config(kvcal: Callable[..., Any], tmp_path: Path) -> None:
    config = tiny.fields("gemma3_text") | {"model_type": "gemma3_text", "architectures": ["G"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 32}))
    found = kvcal("plan", "--model", tmp_path, "--gpu", "l4", "--json").document
    assert found["context"] == 256  # the model's
    # Two layers hold at most 24 tokens, in three pages of 16.
    assert found["formats"][0]["request_bytes"] == (2 * 48 + 256) * 2 * 2 * 32 * 2


def test_a_hybrid_is_planned_with_its_states(kvcal: Callable[..., Any], tmp_path: Path) -> None:
    config = tiny.fields("granitemoehybrid") | {"model_type": "granitemoehybrid", "architectures": ["G"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"mamba_d_conv": 4, "mamba_expand": 2}))
    line = ("plan", "--model", tmp_path, "--gpu", "h100", "--context", 200)
    refused = kvcal(*line)
    assert (refused.code, "give --weights-gib" in refused.stderr) == (3, True)
    outcome = kvcal(*line, "--weights-gib", 1)
    assert "layers with a recurrence (2) keep" in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    plain, fp8 = kvcal(*line, "--weights-gib", 1, "--json").document["formats"][:2]
    state, token = 2 * (3 * (192 + 2 * 8) + 12 * 16 * 8), 2 * 2 * 16 * 2
    assert state == 4320
    assert (plain["page"], fp8["page"]) == (48, 80)  # 33.75 tokens of 128 bytes, 67.5 of 64
    assert (plain["state_bytes"], fp8["state_bytes"]) == (2 * 48 * token, 2 * 80 * token // 2)
    assert plain["request_bytes"] == 5 * 48 * token + plain["state_bytes"]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("plan --gpu h100", 2, "--gpu needs one of --model and --shape"),
        ("plan --gpu h100 --shape llama-3-8b --model x", 2, "--gpu needs one of --model and --shape"),
        ("plan --gpu h101 --shape llama-3-8b", 2, "unknown GPU 'h101'; known: auto, a100-40gb"),
        ("plan --gpu h100 --shape llama-9", 2, "unknown shape 'llama-9'; known: deepseek-v3"),
        ("plan --gpu h100 --shape llama-3-8b --engine vllmm", 2, "unknown engine 'vllmm'"),
        ("plan --gpu h100 --shape llama-3-8b --engine all", 2, "unknown engine 'all'"),
        ("plan --gpu h100 --shape llama-3-8b --engine transformers", 2, "serves no quantized cache"),
        (
            "plan --gpu h100 --shape llama-3-8b --engine kernel",
            2,
            "--engine takes vllm, vllm-modelopt, sglang",
        ),
        ("plan --gpu h100 --shape llama-3-8b --samples 3", 2, "--samples says nothing about capacity"),
        ("plan --gpu h100 --shape llama-3-8b --recipe fp8", 2, "--recipe says nothing about capacity"),
        ("plan --gpu h100 --shape llama-3-8b --format fp8", 2, "--format says nothing about capacity"),
        ("plan --shape llama-3-8b", 2, "--shape needs --gpu"),
        ("plan --model x --price-per-hour 2", 2, "--price-per-hour needs --gpu"),
        ("plan --model x --tensor-parallel 2", 2, "--tensor-parallel needs --gpu"),
        ("plan --gpu h100 --shape llama-3-8b --context 9000", 2, "longer than the 8192 tokens"),
        ("plan --gpu h100 --shape llama-3-8b --tensor-parallel 3", 2, "cannot be dealt out to 3 GPUs"),
        ("plan --gpu h100 --shape llama-3-8b --revision main", 2, "--revision is that of a --model"),
        ("plan --gpu h100 --shape llama-3-8b --price-per-hour inf", 2, "--price-per-hour must be a number"),
        ("plan --gpu h100 --shape llama-3-8b --weights-gib inf", 2, "--weights-gib must be a number"),
        ("plan --gpu h100 --shape deepseek-v3", 3, "--tensor-parallel 16 would hold them"),
        ("plan --gpu h100 --shape llama-3-8b --measured nowhere", 2, "--measured nowhere: has neither"),
    ],
)
def test_refusals(line: str, code: int, words: str, kvcal: Callable[..., Any]) -> None:
    outcome = kvcal(*line.split())
    assert (outcome.code, outcome.stdout) == (code, "")
    assert words in outcome.stderr


def test_the_planner_waits_for_no_torch() -> None:
    code = """
import sys
from kvcal.cli import main
sys.argv = ["kvcal", "plan", "--shape", "llama-3-8b", "--gpu", "h100"]
try:
    main()
except SystemExit:
    print(*{"torch", "transformers", "numpy"} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "recommended" in done.stdout
    assert done.stderr.strip() == ""


# --- measured losses --------------------------------------------------------------------------------------


def comparison(path: Path, layers: int = 32) -> Path:
    def row(serves: str | None, kl: float) -> dict[str, Any]:
        return {"serves": serves, "fidelity": {"kl_mean": kl}}

    rows = [
        row("fp8", 0.04),
        row("fp8", 0.03),
        row("fp8", 0.05),
        row(None, 0.001),
        row("int4_per_token_head", 0.2),
    ]
    document = {"rows": rows, "manifest": {"architecture": {"layers": layers}}}
    (path / "compare.json").write_text(json.dumps(document))
    return path


def test_losses_of_a_comparison(kvcal: Callable[..., Any], tmp_path: Path) -> None:
    wanted = {"fp8_e4m3": 0.03, "int4_per_token_head": 0.2}
    assert measured.read(comparison(tmp_path), 32) == wanted
    assert measured.read(tmp_path / "compare.json", 32) == wanted
    found = kvcal(*SHAPE, "--measured", tmp_path, "--json").document["recommendation"]
    assert "measured KL 0.03" in found["reasons"]
    assert "not int4_per_token_head: its measured KL of 0.2 exceeds 0.1" in found["reasons"]
    strict = kvcal(*SHAPE, "--measured", tmp_path, "--max-kl", 0.01, "--json").document["recommendation"]
    assert "not fp8_e4m3: its measured KL of 0.03 exceeds 0.01" in strict["reasons"]
    nothing = kvcal(*SHAPE, "--measured", tmp_path, "--max-kl", 0, "--json").document["recommendation"]
    assert "not fp8_e4m3: its measured KL of 0.03 exceeds 0" in nothing["reasons"]


def test_losses_of_a_calibration_are_those_with_q_rounded(exported: Path) -> None:
    report = json.loads((exported / "kvcal" / "report.json").read_text())
    kl = report["fidelity_fp8_attention"]["kl_mean"]
    assert kl != report["fidelity"]["kl_mean"]
    for path in (exported, exported / "kvcal", exported / "kvcal" / "report.json"):
        assert measured.read(path, 3) == {"fp8_e4m3": kl}


def test_losses_of_a_dynamic_format_have_no_rounded_q(folded: Path) -> None:
    report = json.loads((folded / "kvcal" / "report.json").read_text())
    assert measured.read(folded, 3) == {"int8_per_token_head": report["fidelity"]["kl_mean"]}


def test_losses_of_another_model_are_refused(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="about a model of 3 layers, this one has 32"):
        measured.read(exported, 32)
    with pytest.raises(ModelError, match="about a model of 2 layers, this one has 32"):
        measured.read(comparison(tmp_path, layers=2), 32)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', '{"rows": [{}]}', "nonsense"])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ModelError, match="is not a report of kvcal"):
        measured.read(tmp_path, 32)
    with pytest.raises(UsageError, match="has neither"):
        measured.read(tmp_path / "elsewhere", 32)


# --- the README's table -----------------------------------------------------------------------------------

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = [line.split()[1:] for line in README.splitlines() if line.startswith("    kvcal plan --shape")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c[2]}-{c[4]}")
def test_the_table_of_the_readme_is_what_its_commands_say(
    command: list[str], kvcal: Callable[..., Any]
) -> None:
    found = kvcal(*command, "--json").document
    gpus = f"{found['tensor_parallel']} × {found['gpu']['name'].removesuffix('-80gb')}"
    printed = [line for line in README.splitlines() if line.startswith(f"| {found['model']} | {gpus} |")]
    assert len(printed) >= 2
    rows = {row["format"]: row for row in found["formats"]}
    for line in printed:
        name, per_token, gib, requests, ms = (cell.strip() for cell in line.split("|")[3:8])
        row = rows[name]
        assert per_token == f"{row['bytes_per_token']:,}"
        assert gib == f"{row['request_bytes'] / 2**30:.3f}"
        assert requests == str(row["fitting"])
        assert ms == f"{1e3 * row['latency']:.1f}"


def test_the_readme_shows_four_shapes_on_two_gpus() -> None:
    assert len(COMMANDS) == 8
    assert len([line for line in README.splitlines() if line.startswith("| deepseek-v3 | 16 × ")]) == 4
