"""``kvcal merge``: independent jobs give what one job on all of their text gives, or are refused."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from kvcal import data, recipe, run
from kvcal.progress import Narrator
from tests import tiny

Kvcal = Callable[..., Any]
_SUMS = ("total", "squares", "moments", "weighted_moments", "weight")


def calibrated(model: Path, output: Path, rows: list[str], **fields: Any) -> Path:
    """A checkpoint from samples that are calibrated one by one, so that forward shapes always agree."""
    text = output.with_suffix(".jsonl")
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    sections = {
        "calibration": {"dataset": str(text), "seq_len": 64, "batch_size": 1},
        "evaluation": {"samples": 1, "seq_len": 32},
        "scale": {"objective": "mse"},
        "granularity": "per_head",
    }
    request = run.Request(str(model), output=output)
    found = run.run_calibrate(
        request, recipe.parse(sections | fields, "tests"), Narrator(Console(stderr=True, quiet=True))
    )
    assert found is not None
    return found[1]


def rows_of(part: int) -> list[str]:
    """Seven rows of several lengths that calibration may see."""
    every = [
        f"{paragraph[part * 8 : part * 8 + 30 + 4 * index]} {part}"
        for index, paragraph in enumerate(tiny.text(40).split("\n\n"))
    ]
    return [row for row in every if data.belongs_to(row) == "calibration"][:7]


@pytest.fixture(scope="module")
def runs(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three jobs on three texts, and one on all of it."""
    folder = tmp_path_factory.mktemp("runs")
    texts = {name: rows_of(part) for part, name in enumerate("abc")}
    texts["abc"] = [row for rows in texts.values() for row in rows]
    return {name: calibrated(llama_folder, folder / name, rows) for name, rows in texts.items()}


def require_same_calibration(merged: Path, one: Path) -> None:
    a, b = (load_file(folder / "kvcal/statistics.safetensors") for folder in (merged, one))
    assert a.keys() == b.keys()
    for key in a:
        if key.split(".")[-1] in _SUMS:
            torch.testing.assert_close(a[key], b[key], rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(a[key], b[key]), key
    written, expected = (load_file(folder / "kvcal-scales.safetensors") for folder in (merged, one))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in written)
    assert json.loads((merged / "config.json").read_text()) == json.loads((one / "config.json").read_text())


@pytest.mark.parametrize("order", list(itertools.permutations("abc"))[::2], ids="".join)
def test_merged_jobs_are_one_job(order: tuple[str, ...], runs: dict[str, Path], kvcal: Kvcal) -> None:
    left = kvcal("merge", *(runs[name] for name in order), "--output", "merged", "--json")
    assert left.code == 0, left.stderr
    assert left.document["samples"] == 21
    require_same_calibration(Path("merged"), runs["abc"])
    assert kvcal("check", "merged").code == 0


def test_a_merged_job_merges_again(runs: dict[str, Path], kvcal: Kvcal) -> None:
    assert kvcal("merge", runs["c"], runs["b"], "--output", "cb").code == 0
    left = kvcal("merge", "cb", runs["a"], "--output", "all")
    assert left.code == 0, left.stderr
    assert "2 runs merged: per_head scales from 21 samples" in left.stdout
    assert "fidelity and attention error were not measured" in " ".join(left.stdout.split())
    require_same_calibration(Path("all"), runs["abc"])
    parts = json.loads(Path("all/kvcal/manifest.json").read_text())["merged"]
    assert [part["folder"] for part in parts] == [str(runs[name]) for name in "cba"]
    left = kvcal("merge", "all", runs["b"], "--output", "again")
    assert left.code == 3
    assert "have 7 calibration samples in common" in left.stderr


def test_a_merged_checkpoint_is_one_like_any_other(
    runs: dict[str, Path], kvcal: Kvcal, tmp_path: Path
) -> None:
    copy = shutil.copytree(runs["a"], tmp_path / "a")
    assert kvcal("merge", copy, runs["b"]).code == 0
    merged = tmp_path / "a-merged"
    found = kvcal("evaluate", merged, "--samples", "1", "--seq-len", "32", "--json")
    assert found.code == 0, found.stderr
    assert 0 < found.document["fidelity"]["kl_mean"] < 0.5
    assert kvcal("export", merged, "--engine", "sglang", "--output", "sglang").code == 0
    assert kvcal("check", "sglang", "--engine", "sglang").code == 0


def test_the_attention_objective_reads_the_weights(llama_folder: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    wanted = {"scale": {"objective": "attention"}}
    for name, rows in {"a": rows_of(0), "b": rows_of(1), "ab": rows_of(0) + rows_of(1)}.items():
        calibrated(llama_folder, tmp_path / name, rows, **wanted)
    assert kvcal("merge", "a", "b", "--output", "merged").code == 0
    require_same_calibration(Path("merged"), tmp_path / "ab")


def test_vectors_for_kernels_merge_too(llama_folder: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    for name, rows in {"a": rows_of(0), "b": rows_of(1), "ab": rows_of(0) + rows_of(1)}.items():
        calibrated(llama_folder, tmp_path / name, rows, engine="kernel")
    left = kvcal("merge", "a", "b", "--output", "merged")
    assert left.code == 0, left.stderr
    for path in (tmp_path / "ab").glob("*.safetensors"):
        expected, found = load_file(path), load_file(Path("merged") / path.name)
        assert all(torch.equal(expected[key], found[key]) for key in expected.keys() | found.keys())
    assert kvcal("check", "merged", "--engine", "kernel").code == 0


def edited(folder: Path, to: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """A copy of a run with one of its JSON records changed."""
    shutil.copytree(folder, to)
    path = to / "kvcal" / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return to


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"granularity": "per_tensor"}, "different settings: granularity"),
        ({"scale": {"objective": "amax"}}, "different settings: scale"),
        ({"deliver": "fold", "granularity": None}, "folded weights"),
        ({"deliver": "both"}, "folded weights"),
        ({"mixed": {"max_kl": 1.0}}, "chosen by measuring"),
    ],
    ids=["granularity", "rule", "fold", "both", "mixed"],
)
def test_runs_that_are_no_parts_of_one_are_refused(
    fields: dict[str, Any], what: str, runs: dict[str, Path], kvcal: Kvcal, llama_folder: Path, tmp_path: Path
) -> None:
    other = calibrated(llama_folder, tmp_path / "other", rows_of(1), **fields)
    left = kvcal("merge", runs["a"], other, "--output", "merged")
    assert left.code == 3
    assert what in left.stderr
    assert not Path("merged").exists()


def test_another_model_of_the_same_shape_is_refused(
    runs: dict[str, Path], kvcal: Kvcal, tmp_path: Path
) -> None:
    other = calibrated(tiny.save(tmp_path / "model", seed=1), tmp_path / "other", rows_of(1))
    left = kvcal("merge", runs["a"], other, "--output", "merged")
    assert left.code == 3
    assert "are of different models" in left.stderr


def test_one_sample_in_common_is_refused(
    runs: dict[str, Path], kvcal: Kvcal, llama_folder: Path, tmp_path: Path
) -> None:
    other = calibrated(llama_folder, tmp_path / "other", [*rows_of(1), rows_of(0)[3]])
    left = kvcal("merge", runs["a"], other, "--output", "merged")
    assert left.code == 3
    assert "have 1 calibration samples in common" in left.stderr


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_alone_or_twice_is_refused(count: int, runs: dict[str, Path], kvcal: Kvcal) -> None:
    left = kvcal("merge", *[runs["a"]] * count)
    assert left.code == 2
    assert "two or more different runs" in left.stderr


@pytest.mark.parametrize("name", ["samples.json", "manifest.json", "statistics.safetensors"])
@pytest.mark.parametrize("how", ["gone", "broken"])
def test_broken_records_are_named(
    name: str, how: str, runs: dict[str, Path], kvcal: Kvcal, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(runs["b"], tmp_path / "b"))
    path = folder / "kvcal" / name
    path.unlink() if how == "gone" else path.write_text("{}")
    left = kvcal("merge", runs["a"], folder)
    assert left.code == 4
    assert "cannot be merged" in left.stderr


def test_records_of_an_older_kvcal_are_named(runs: dict[str, Path], kvcal: Kvcal, tmp_path: Path) -> None:
    def without_hash(record: Any) -> Any:
        del record["model"]["sha256"]
        return record

    folder = edited(runs["b"], tmp_path / "b", "manifest.json", without_hash)
    left = kvcal("merge", runs["a"], folder)
    assert left.code == 4
    assert "lacks 'sha256'" in left.stderr


def test_runs_from_different_machines_merge_with_a_notice(
    runs: dict[str, Path], kvcal: Kvcal, tmp_path: Path
) -> None:
    other = edited(
        runs["b"], tmp_path / "b", "manifest.json", lambda record: record | {"compute": {"dtype": "bfloat16"}}
    )
    left = kvcal("merge", runs["a"], other, "--output", "merged", "--json")
    assert left.code == 0
    assert any("differ in compute" in notice for notice in left.document["notices"])
