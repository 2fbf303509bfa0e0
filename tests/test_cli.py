from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import load_file

from kvcal import __version__, cli, errors, recipe
from tests import tiny

SMALL = ("--samples", "3", "--evaluation-samples", "1", "--seq-len", "40", "--batch-size", "2")


def commands(parent: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command, groups included: ``()``, ``("plan",)``, ``("recipes", "list")`` …"""
    yield path
    for name, command in getattr(parent, "commands", {}).items():
        yield from commands(command, (*path, name))


ROOT = typer.main.get_command(cli.app)
ALL = list(commands(ROOT))
LEAVES = [path for path in ALL if not any(other[:-1] == path for other in ALL if other)]
spaced = " ".join


def test_every_command_of_the_readme_is_there() -> None:
    assert {("calibrate",), ("plan",), ("check",), ("validate",), ("evaluate",)} < set(LEAVES)
    assert ("unfold",) in LEAVES
    assert {("recipes", "list"), ("recipes", "show"), ("recipes", "validate")} < set(LEAVES)


@pytest.mark.parametrize("path", ALL, ids=lambda p: spaced(p) or "kvcal")
def test_help_fits_80_columns(path: tuple[str, ...], kvcal: Callable[..., Any]) -> None:
    outcome = kvcal(*path, "--help")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert max(map(len, outcome.stdout.splitlines())) <= 80


@pytest.mark.parametrize("path", LEAVES, ids=spaced)
def test_help_shows_an_example_that_parses(path: tuple[str, ...], kvcal: Callable[..., Any]) -> None:
    (example,) = (
        line.split("Example: ")[1]
        for line in kvcal(*path, "--help").stdout.splitlines()
        if "Example:" in line
    )
    program, *arguments = shlex.split(example)
    assert program == "kvcal"
    assert tuple(arguments[: len(path)]) == path
    command: Any = ROOT
    for name in path:
        command = command.commands[name]
    command.make_context(spaced(path), arguments[len(path) :])


def test_help_lists_the_exit_codes(kvcal: Callable[..., Any]) -> None:
    told = " ".join(kvcal("--help").stdout.split())
    assert all(f"{code} {meaning}" in told for code, meaning in errors.EXIT_CODES)


HEAVY = ("torch", "transformers", "pydantic", "numpy", "datasets")


def heavy_modules_after(*arguments: str) -> set[str]:
    """Runs the command line in a fresh interpreter; which heavy modules it left loaded."""
    code = f"""
import sys
from kvcal.cli import main
sys.argv = ["kvcal", *{arguments!r}]
try:
    main()
except SystemExit as left:
    print(left.code, *(m for m in {HEAVY!r} if m in sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exit_code, *found = done.stderr.splitlines()[-1].split()
    assert exit_code == "0", done.stderr
    return set(found)


def test_help_waits_for_no_heavy_import() -> None:
    assert heavy_modules_after("--help") == set()
    assert heavy_modules_after("calibrate", "--help") <= {"pydantic"}  # typer's own, to describe options


def test_plan_waits_for_no_torch(llama_folder: Path) -> None:
    assert heavy_modules_after("plan", "--model", str(llama_folder)) == {"pydantic"}


def test_plan_of_folds_waits_for_no_torch_either(planted_folder: Path) -> None:
    line = ("plan", "--model", str(planted_folder), "--format", "int4_per_token_head")
    assert heavy_modules_after(*line) == {"pydantic"}


def test_version(kvcal: Callable[..., Any]) -> None:
    assert kvcal("--version").stdout == f"kvcal {__version__}\n"


def test_no_command_is_bad_usage(kvcal: Callable[..., Any]) -> None:
    assert kvcal().code == kvcal("recipes").code == kvcal("bench").code == 2
    assert kvcal().stdout == kvcal("--help").stdout
    assert kvcal("recipes").stderr == "error: Missing command.\n"


@pytest.fixture
def unfit(copied: Path) -> Path:
    tiny.edit_config(copied, head_dim=40)
    return copied


@pytest.fixture
def broken(exported_copy: Path) -> Path:
    tiny.edit_config(exported_copy, quantization_config=None)
    return exported_copy


@pytest.fixture
def broken_fold(folded_copy: Path) -> Path:
    (folded_copy / "kvcal" / "recipe.yaml").unlink()
    return folded_copy


@pytest.fixture
def strict_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "strict.yaml"
    path.write_text("gates: {kl_mean: 0.0, top1_agreement: 0.0}")
    return path


@pytest.fixture
def faulty_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "faulty.yaml"
    path.write_text("format: fp9\nsampels: 3")
    return path


# Words in braces are fixtures.
FAILURES: dict[str, tuple[int, str, str]] = {
    "no model": (2, "plan", "Missing option '--model'"),
    "unknown command": (2, "calibrat", "No such command 'calibrat'"),
    "unknown option": (2, "plan --model {llama_folder} --sampels 3", "No such option"),
    "option of another type": (
        2,
        "plan --model {llama_folder} --samples many",
        "Invalid value for '--samples'",
    ),
    "unknown format": (2, "plan --model {llama_folder} --format fp9", "command line: format: found 'fp9'"),
    "no sample": (2, "calibrate --model {llama_folder} --samples 0", "calibration.samples: found 0"),
    "unknown recipe": (2, "plan --model {llama_folder} --recipe fp9", "no recipe named 'fp9'"),
    "faulty recipe": (2, "plan --model {llama_folder} --recipe {faulty_recipe}", "format: found 'fp9'"),
    "recipe to show": (2, "recipes show fp9", "no recipe named 'fp9'"),
    "recipe to validate": (2, "recipes validate {faulty_recipe}", "faulty.yaml: 2 faults"),
    "no folder to check": (2, "check nowhere", "nowhere: no such folder"),
    "a name no folder can have": (2, f"check {'a' * 300}", "no such folder"),
    "no folder to validate": (2, "validate nowhere", "nowhere: no such folder"),
    "no folder to evaluate": (2, "evaluate nowhere", "nowhere: no such folder"),
    "unknown engine": (2, "check {exported} --engine sglong", "unknown engine 'sglong'; known: vllm"),
    "unknown device": (2, "evaluate {exported} --device tpu9", "unknown device 'tpu9'"),
    "refused plan": (3, "plan --model {unfit}", "head size 40 is not a multiple of 16"),
    "refused calibration": (3, "calibrate --model {unfit}", "head size 40 is not a multiple of 16"),
    "unknown delivery": (2, "plan --model {llama_folder} --deliver weights", "deliver: found 'weights'"),
    "no folder to unfold": (2, "unfold nowhere --output out", "nowhere: no such folder"),
    "heads too small for the format": (
        3,
        "plan --model {llama_folder} --format int4_per_token_head",
        "head size 16 is below 32",
    ),
    "scales for a format that the engine scales": (
        3,
        "plan --model {planted_folder} --format int8_per_token_head --deliver metadata",
        "only --deliver fold reaches it",
    ),
    "format that the engine does not have": (
        3,
        "plan --model {llama_folder} --format int4",
        "the nearest it has is int4_per_token_head",
    ),
    "granularity that the engine does not load": (
        3,
        "plan --model {llama_folder} --granularity per_channel",
        "takes no per_channel scales; use per_tensor or per_head",
    ),
    "group without a size": (
        2,
        "plan --model {llama_folder} --granularity per_group",
        "per_group needs the size of a group",
    ),
    "granularity of a format that the engine scales": (
        3,
        "calibrate --model {planted_folder} --format int8_per_token_head --granularity per_head",
        "--granularity per_head has no effect; leave it out",
    ),
    "granularity of scales that are not written": (
        3,
        "plan --model {llama_folder} --deliver fold --granularity per_tensor",
        "--granularity per_tensor has no effect; leave it out",
    ),
    "no such model": (4, "plan --model nowhere", "nowhere: not a model folder"),
    "no such dataset": (4, "calibrate --model {llama_folder} --dataset no.txt", "no.txt: no such file"),
    "a name no file can have": (
        4,
        f"calibrate --model {{llama_folder}} --dataset {'a' * 300}.txt",
        "no such file",
    ),
    "nothing to validate": (4, "validate {llama_folder}", "holds no kvcal records"),
    "nothing to evaluate": (4, "evaluate {llama_folder}", "holds no kvcal records"),
    "nothing to unfold": (4, "unfold {exported} --output out", "holds no record of folds"),
    "gate": (
        5,
        f"calibrate --model {{llama_folder}} --recipe {{strict_recipe}} --output out {' '.join(SMALL)}",
        "must be at most 0; no checkpoint was written, records are in",
    ),
    "contract": (6, "check {broken}", "1 of 8 rules are broken"),
    "contract of a folded checkpoint": (6, "check {broken_fold}", "1 of 5 rules are broken"),
    "unfolded into what is there": (
        7,
        "unfold {folded} --output {exported}",
        "exists; choose another --output",
    ),
    "unfolded onto itself": (
        7,
        "unfold {folded} --output {folded} --overwrite",
        "holds the model itself; choose another --output",
    ),
    "output in use": (
        7,
        "calibrate --model {llama_folder} --output {exported}",
        "exists; choose another --output",
    ),
}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(("code", "line", "message"), FAILURES.values(), ids=FAILURES)
def test_failure_is_one_line_and_its_exit_code(
    code: int,
    line: str,
    message: str,
    as_json: bool,
    kvcal: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    arguments = [
        request.getfixturevalue(word[1:-1]) if word.startswith("{") else word for word in line.split()
    ]
    outcome = kvcal(*arguments, *(["--json"] if as_json else []))
    assert outcome.code == code, outcome.stderr
    (error,) = (found for found in outcome.stderr.splitlines() if found.startswith("error: "))
    assert outcome.stderr.endswith(error + "\n")
    assert message in error
    if as_json and "error" in outcome.document:
        assert outcome.document == {"error": {"message": error.removeprefix("error: "), "exit_code": code}}
    elif as_json:
        assert code in (2, 5, 6)
    assert "Traceback" not in outcome.stderr


def test_every_promised_exit_code_is_reached() -> None:
    promised = {code for code, _ in errors.EXIT_CODES}
    # 8 takes two processes: tests/test_distributed.py
    assert {code for code, _, _ in FAILURES.values()} == promised - {0, 1, 8, 130}


def test_an_interrupt_leaves_with_130(kvcal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "shipped", interrupted)
    outcome = kvcal("recipes", "list", "--json")
    assert outcome.code == 130
    assert outcome.document["error"]["exit_code"] == 130


def test_a_bug_is_called_one(kvcal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "shipped", lambda: 1 / 0)
    outcome = kvcal("recipes", "list")
    assert outcome.code == 1
    assert outcome.stderr.startswith("error: a bug in kvcal: ZeroDivisionError: division by zero")


def test_calibrate_writes_report_and_resolved_recipe(
    llama_folder: Path, tmp_path: Path, kvcal: Callable[..., Any]
) -> None:
    (tmp_path / "notes.txt").write_text(tiny.text(200))
    flags: dict[str, Any] = {
        "granularity": "per_tensor",
        "deliver": "both",
        "dataset": "notes.txt",
        "dataset-split": "test",
        "dataset-column": "body",
        "samples": 3,
        "evaluation-samples": 2,
        "seq-len": 40,
        "batch-size": 2,
        "seed": 7,
    }
    options = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = ("calibrate", "--model", llama_folder, "--recipe", "fp8-per-head", "--output", "out")
    outcome = kvcal(*command, *options, "--json")
    assert outcome.code == 0, outcome.stderr

    text = {"dataset": "notes.txt", "split": "test", "column": "body", "seq_len": 40}
    expected = recipe.load("fp8-per-head").override(
        {
            "granularity": "per_tensor",
            "deliver": "both",
            **{f"{part}.{field}": v for part in ("calibration", "evaluation") for field, v in text.items()},
            "calibration.samples": 3,
            "evaluation.samples": 2,
            "calibration.batch_size": 2,
            "calibration.seed": 7,
        }
    )
    records = tmp_path / "out" / "kvcal"
    assert recipe.load(str(records / "recipe.yaml")) == expected
    assert outcome.document == json.loads((records / "report.json").read_text()) | {"folder": "out"}
    assert outcome.document["fidelity"]["tokens"] == 2 * 40


def test_report_keeps_its_documented_keys(exported: Path) -> None:
    report = json.loads((exported / "kvcal" / "report.json").read_text())
    assert report.keys() >= {"verdict", "gates", "fidelity", "bits_per_element", "bytes_per_token"}
    assert report.keys() >= {"layers", "engine", "serve"}
    assert report["verdict"] == "pass"
    assert set(report["fidelity"]) == {
        "kl_mean",
        "kl_p99",
        "top1_agreement",
        "perplexity",
        "perplexity_reference",
        "tokens",
    }
    assert report["bytes_per_token"] == {"reference": 384, "quantized": 192}
    assert 8 < report["bits_per_element"] < 8.1
    assert report["engine"].keys() == {"name", "version", "consumed", "reasons"}
    assert report["engine"]["consumed"] is True
    assert report["serve"] == f"vllm serve {exported} --kv-cache-dtype fp8"
    written = load_file(exported / "kvcal-scales.safetensors")
    for index, layer in enumerate(report["layers"]):
        assert layer["index"] == index
        for side in "kvq":
            assert layer[side].keys() >= {"amax", "scale", "flags"}
            tensor = written[f"model.layers.{index}.self_attn.{side}_scale"]
            assert layer[side]["scale"] == tensor.flatten().tolist()


def test_report_of_a_folded_checkpoint_keeps_its_keys(folded: Path) -> None:
    report = json.loads((folded / "kvcal" / "report.json").read_text())
    assert (report["verdict"], report["deliver"]) == ("pass", "fold")
    assert report["fidelity_fp8_attention"] is None
    assert report["bytes_per_token"] == {"reference": 3 * 2 * 2 * 64, "quantized": 3 * 2 * 2 * (32 + 4)}
    assert report["bits_per_element"] == 9.0
    assert report["engine"] == {
        "name": "vllm",
        "version": "0.33",
        "consumed": True,
        "reasons": ["served by Triton only"],
    }
    assert report["serve"] == f"vllm serve {folded} --kv-cache-dtype int8_per_token_head"
    for layer in report["layers"]:
        assert layer["attention_error"]["attention"] is None
        assert all(layer[side]["scale"] == layer[side]["flags"] == [] for side in "kvq")
    folds = report["folds"]
    assert folds.keys() >= {"kept", "candidates", "judging", "before", "proof", "reversible", "tensors"}
    assert folds["before"]["fidelity"].keys() == report["fidelity"].keys()
    assert folds["before"]["fidelity_fp8_attention"] is None
    assert folds["before"]["fidelity"]["kl_mean"] > 4 * report["fidelity"]["kl_mean"]  # of planted outliers
    assert folds["kept"] == [c["name"] for c in folds["candidates"] if c["kept"]]
    assert folds["proof"]["kl"] <= folds["proof"]["allowed_kl"]


def test_report_without_folds_says_that_there_are_none(exported: Path) -> None:
    report = json.loads((exported / "kvcal" / "report.json").read_text())
    assert (report["deliver"], report["folds"]) == ("metadata", None)
    assert report["fidelity_fp8_attention"]["kl_mean"] > report["fidelity"]["kl_mean"]


def test_a_failed_gate_says_so_in_the_document(
    llama_folder: Path, strict_recipe: Path, kvcal: Callable[..., Any]
) -> None:
    command = ("calibrate", "--model", llama_folder, "--recipe", strict_recipe, "--output", "out", *SMALL)
    outcome = kvcal(*command, "--json")
    assert outcome.document["verdict"] == "fail"
    assert {g["name"]: g["passed"] for g in outcome.document["gates"]} == {
        "kl_mean": False,
        "top1_agreement": True,
    }


SUCCESSES = {
    "plan": "plan --model {llama_folder}",
    "plan of folds": "plan --model {planted_folder} --format int4_per_token_head",
    "calibrate": f"calibrate --model {{llama_folder}} --output out {' '.join(SMALL)}",
    "calibrate folds": "calibrate --model {planted_folder} --output out --format int8_per_token_head "
    + " ".join(SMALL),
    "calibrate folds and scales": "calibrate --model {planted_folder} --output out --deliver both "
    + " ".join(SMALL),
    "check": "check {exported}",
    "check folds": "check {folded}",
    "validate": "validate {exported} --seq-len 24",
    "validate folds": "validate {folded} --seq-len 24",
    "evaluate": "evaluate {exported} --seq-len 24 --samples 1",
    "evaluate folds": "evaluate {folded} --seq-len 24 --samples 1",
    "unfold": "unfold {folded} --output again",
    "bench capture": "bench capture --model {llama_folder} --samples 2 --seq-len 24 --pairs 2",
    "bench rules": "bench rules --model {llama_folder} --samples 4 --seq-len 24",
    "bench reduction": "bench reduction --model {llama_folder} --samples 4 --seq-len 24",
    "bench folds": "bench folds --model {planted_folder} --samples 4 --seq-len 24"
    " --format int8_per_token_head",
    "bench folds of fp8": "bench folds --model {planted_folder} --samples 4 --seq-len 24",
    "bench phase": "bench phase --model {llama_folder} --samples 4 --seq-len 40",
    "recipes list": "recipes list",
    "recipes show": "recipes show fp8",
    "recipes validate": "recipes validate fp8",
}


def run_line(line: str, kvcal: Callable[..., Any], request: pytest.FixtureRequest, *more: str) -> Any:
    words = line.split()
    return kvcal(*(request.getfixturevalue(w[1:-1]) if w.startswith("{") else w for w in words), *more)


@pytest.mark.parametrize("line", SUCCESSES.values(), ids=SUCCESSES)
def test_json_is_one_document_and_logs_go_to_stderr(
    line: str, kvcal: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    outcome = run_line(line, kvcal, request, "--json")
    assert outcome.code == 0, outcome.stderr
    assert outcome.document
    assert "error" not in outcome.document


@pytest.mark.parametrize("line", SUCCESSES.values(), ids=SUCCESSES)
def test_terminal_output_fits_80_columns(
    line: str, kvcal: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    outcome = run_line(line, kvcal, request)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout
    for printed in (*outcome.stdout.splitlines(), *outcome.stderr.splitlines()):
        whole = "vllm serve" in printed or "written to" in printed  # to be copied, so never broken
        assert whole or len(printed) <= 80, printed


def test_evaluate_takes_its_own_text(exported: Path, tmp_path: Path, kvcal: Callable[..., Any]) -> None:
    (tmp_path / "notes.txt").write_text(tiny.text(200))
    options = ("--dataset", "notes.txt", "--samples", "2", "--seq-len", "24", "--json")
    found = kvcal("evaluate", exported, *options).document
    assert found["fidelity"]["tokens"] == found["fidelity_fp8_attention"]["tokens"] == 2 * 24


@pytest.mark.parametrize("checkpoint", ["exported", "folded"])
def test_evaluate_repeats_what_calibrate_measured(
    checkpoint: str, request: pytest.FixtureRequest, kvcal: Callable[..., Any]
) -> None:
    folder = request.getfixturevalue(checkpoint)
    report = json.loads((folder / "kvcal" / "report.json").read_text())
    found = kvcal("evaluate", folder, "--json").document
    assert found.keys() == {"fidelity", "fidelity_fp8_attention"}
    for key, fidelity in found.items():
        assert fidelity == (report[key] and pytest.approx(report[key], rel=1e-4, abs=1e-8))


@pytest.mark.parametrize("checkpoint", ["exported", "folded"])
def test_validate_repeats_what_calibrate_measured(
    checkpoint: str, request: pytest.FixtureRequest, kvcal: Callable[..., Any]
) -> None:
    folder = request.getfixturevalue(checkpoint)
    written = json.loads((folder / "kvcal" / "report.json").read_text())["attention_error"]
    found = kvcal("validate", folder, "--json").document
    assert found["implementation"] == written.pop("implementation")
    assert {key: found[key] for key in written} == pytest.approx(written, rel=1e-4)
    assert all((layer["attention"] is None) == (checkpoint == "folded") for layer in found["layers"])


def test_plan_says_what_the_cache_costs(llama_folder: Path, kvcal: Callable[..., Any]) -> None:
    outcome = kvcal(
        "plan", "--model", llama_folder, "--granularity", "per_head", "--seq-len", "999", "--json"
    )
    assert outcome.document["bytes_per_token"] == {"reference": 384, "quantized": 192}
    assert (outcome.document["scaling"], outcome.document["deliver"]) == ("per_head", "metadata")
    assert outcome.document["scale_bytes"] == 4 * 3 * (2 + 2 + 6)
    assert outcome.document["folds"] is None
    assert outcome.document["engine"]["consumed"] is True
    assert outcome.document["notices"] == [
        f"{part}: samples are cut from 999 to 256 tokens, the model's context"
        for part in ("calibration", "evaluation")
    ]
    assert "note: calibration: samples are cut" in " ".join(outcome.stderr.split())


@pytest.mark.parametrize(
    ("flags", "scaling", "quantized", "served"),
    [
        ("--format int8_per_token_head", "per_token_head", 12 * (32 + 4), "Triton only"),
        ("--format int4_per_token_head", "per_token_head", 12 * (16 + 4), "Triton only"),
        ("--deliver fold", "scale 1.0", 12 * 32, "FlashAttention-3/4, FlashInfer, Triton"),
    ],
)
def test_plan_of_folds_says_what_the_cache_costs_and_what_can_be_folded(
    flags: str, scaling: str, quantized: int, served: str, planted_folder: Path, kvcal: Callable[..., Any]
) -> None:
    found = kvcal("plan", "--model", planted_folder, *flags.split(), "--json").document
    assert (found["scaling"], found["deliver"], found["scale_bytes"]) == (scaling, "fold", 0)
    assert found["bytes_per_token"] == {"reference": 12 * 64, "quantized": quantized}
    assert found["bits_per_element"] == quantized / 12 / 32 * 8
    assert found["engine"]["reasons"][0].startswith(f"served by {served}")
    assert found["folds"]["key_scale"] is None
    assert "RoPE" in found["folds"]["key_hadamard"]
    told = " ".join(kvcal("plan", "--model", planted_folder, *flags.split()).stdout.split())
    assert f"{found['format']}, {scaling}" in told
    assert "delivered by the weights themselves" in told


def test_recipes_list_names_all_with_their_description(kvcal: Callable[..., Any]) -> None:
    found = kvcal("recipes", "list", "--json").document
    assert found == {name: recipe.load(name).description for name in recipe.shipped()}
    told = " ".join(kvcal("recipes", "list").stdout.split())
    assert all(f"{name} {description}" in told for name, description in found.items())


def test_recipes_show_prints_a_recipe_with_every_default(kvcal: Callable[..., Any]) -> None:
    shown = kvcal("recipes", "show", "fp8-per-head").stdout
    assert recipe.parse_text(shown, "x") == recipe.load("fp8-per-head")
    assert "batch_size: 1" in shown
    assert kvcal("recipes", "show", "fp8-per-head", "--json").document["evaluation"]["batch_size"] == 1


def test_recipes_validate_lists_every_fault(faulty_recipe: Path, kvcal: Callable[..., Any]) -> None:
    outcome = kvcal("recipes", "validate", faulty_recipe)
    assert outcome.code == 2
    assert len(outcome.stdout.splitlines()) == 2
    assert kvcal("recipes", "validate", faulty_recipe, "--json").document == {
        "ok": False,
        "faults": outcome.stdout.splitlines(),
    }
    assert kvcal("recipes", "validate", "fp8", "--json").document == {"ok": True, "faults": []}
