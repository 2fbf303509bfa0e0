"""Several processes find what one finds, and none of them waits for a dead one."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvcal import calibrate, distributed, evaluate, scales
from kvcal.cache import QuantizedCache
from kvcal.evaluate import Variant
from kvcal.launch import Place
from kvcal.recipe import SIDES
from kvcal.statistics import SideStatistics, Statistics
from tests import ranks, tiny
from tests.test_calibrate import plan_for, token_set

Kvcal = Callable[..., Any]

# More batches than ranks, as many, fewer; a last round that is not full; batches with padding.
TEXTS = {
    "one batch": [33, 21],
    "two": [40, 40, 12],
    "five": [40, 9, 31, 40, 23, 17, 12, 28, 35],
    "eight": [32] * 16,
}
_SUMS = ("total", "squares", "moments", "weighted_moments", "weight")


def measure(folder: Path, note: str) -> None:
    """Statistics and fidelity of a small model on every text, written to files named after ``note``."""
    model = tiny.build_model(
        "gemma2", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    resolved = plan_for(model, granularity="per_head", calibration={"batch_size": 2})
    cache = QuantizedCache(resolved.format, scales.unit(resolved))
    for name, lengths in TEXTS.items():
        told: list[float] = []
        found = calibrate.calibrate(
            model, resolved, token_set(lengths), collect="distribution", on_tokens=told.append
        )
        found.save(folder / f"{name}-{note}.safetensors")
        fidelity = evaluate.fidelities(
            model, {"fp8": Variant(cache)}, 2, token_set(lengths, seed=1), on_tokens=told.append
        )
        document = asdict(fidelity["fp8"]) | {"told": sum(told)}
        (folder / f"{name}-{note}.json").write_text(json.dumps(document))


def measure_as_rank(rank: int, folder: Path) -> None:
    with distributed.joined():
        measure(folder, f"rank-{rank}")


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_finds_what_one_process_finds(size: int, tmp_path: Path) -> None:
    measure(tmp_path, "alone")
    for left in ranks.run(measure_as_rank, size, tmp_path, tmp_path):
        assert left.code == 0, left.stderr
    for name in TEXTS:
        alone = json.loads((tmp_path / f"{name}-alone.json").read_text())
        for rank in range(size):
            found = json.loads((tmp_path / f"{name}-rank-{rank}.json").read_text())
            if rank:  # which shows no bar, and may have no batch to tell of
                found["told"] = alone["told"]
            assert found.pop("told") == pytest.approx(alone["told"])  # shares are rounded
            assert found == {key: value for key, value in alone.items() if key != "told"}
        first, last, one = (
            load_file(tmp_path / f"{name}-{note}.safetensors")
            for note in ("rank-0", f"rank-{size - 1}", "alone")
        )
        assert first.keys() == last.keys() == one.keys()
        for key, tensor in one.items():
            assert torch.equal(first[key], last[key]), key
            if key.split(".")[-1] in _SUMS:
                torch.testing.assert_close(first[key], tensor, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(first[key], tensor), key


# Each is decided by measurements that ranks share: which folds pay, and which layers stay in 16 bits.
@pytest.mark.parametrize(
    "wanted",
    [
        ("--format", "int8_per_token_head"),
        ("--format", "fp8", "--granularity", "per_head", "--max-kl", "1e-3"),
        ("--format", "fp8", "--device-map", "layerwise"),
    ],
    ids=["folds", "mixed", "layerwise"],
)
def test_two_ranks_write_the_checkpoint_of_one(
    wanted: tuple[str, ...], kvcal: Kvcal, planted_folder: Path, tmp_path: Path
) -> None:
    options = ("--samples", "9", "--evaluation-samples", "3", "--seq-len", "48", "--batch-size", "2")
    arguments = ("calibrate", "--model", str(planted_folder), *wanted, *options, "--json", "--output")
    alone = kvcal(*arguments, "one")
    assert alone.code == 0, alone.stderr
    first, second = ranks.run(ranks.command, 2, tmp_path, *arguments, "two")
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert (second.stdout, second.stderr) == ("", "")
    document = json.loads(first.stdout)
    differing = {key for key in document if document[key] != alone.document[key]}
    assert differing <= {"folder", "serve", "memory", "stages"}
    for path in sorted((tmp_path / "one").rglob("*.safetensors")):
        tensors, others = load_file(path), load_file(tmp_path / "two" / path.relative_to(tmp_path / "one"))
        assert all(torch.equal(tensors[key], others[key]) for key in tensors.keys() | others.keys()), path
    assert json.loads((tmp_path / "two/kvcal/manifest.json").read_text())["processes"] == 2
    assert not list(tmp_path.glob(".two*"))


def options_of(folder: Path, *more: str) -> tuple[str, ...]:
    sizes = ("--samples", "12", "--evaluation-samples", "2", "--seq-len", "48", "--batch-size", "2")
    return ("calibrate", "--model", str(folder), "--format", "fp8", *sizes, "--save-every", "0", *more)


def same_statistics(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "kvcal/statistics.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def uninterrupted(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    options = options_of(llama_folder, "--output", "out", "--log-json", "-")
    first, second = ranks.run(ranks.command, 2, folder, *options)
    assert (first.code, second.code, second.stderr) == (0, 0, "")
    assert {json.loads(line)["rank"] for line in first.stderr.splitlines()} == {0}
    return folder / "out"


@pytest.mark.parametrize("dies", [0, 1])
def test_a_killed_rank_ends_the_run_and_leaves_a_state_to_go_on_from(
    dies: int, uninterrupted: Path, llama_folder: Path, tmp_path: Path
) -> None:
    arguments = options_of(llama_folder, "--output", "out")
    limit = {"KVCAL_RANK_TIMEOUT": "1.5"}
    left = ranks.run(ranks.dying, 2, tmp_path, dies, 2, *arguments, environment=limit)
    assert left[dies].code == -signal.SIGKILL
    other = left[1 - dies]
    assert other.code == 8
    assert ("rank 1 gave no sign of life for 1.5 s" if dies else "connection to another rank") in other.stderr
    assert "--resume" in other.stderr
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / ".out.kvcal-state").glob("*.safetensors"))) == 2
    again = ranks.run(ranks.command, 2, tmp_path, *arguments, "--resume")
    assert [each.code for each in again] == [0, 0], again[0].stderr + again[1].stderr
    assert "going on after" in again[0].stderr
    assert same_statistics(uninterrupted, tmp_path / "out")
    assert not list(tmp_path.glob(".out*"))


def test_an_error_of_one_rank_is_told_by_it_and_by_rank_0(llama_folder: Path, tmp_path: Path) -> None:
    first, second, third = ranks.run(ranks.failing, 3, tmp_path, 1, *options_of(llama_folder, "--json"))
    assert (first.code, second.code, third.code) == (8, 1, 8)
    assert "error: rank 1 failed: OutOfMemoryError: out of memory, as planted" in first.stderr
    assert json.loads(first.stdout)["error"]["exit_code"] == 8
    assert second.stdout == third.stdout == third.stderr == ""


def test_a_rank_that_never_comes_is_missed(llama_folder: Path, tmp_path: Path) -> None:
    (alone,) = ranks.run(
        ranks.command,
        2,
        tmp_path,
        *options_of(llama_folder),
        environment={"KVCAL_RANK_TIMEOUT": "1"},
        absent=1,
    )
    assert alone.code == 8
    assert "not all 2 ranks came within 1 s" in alone.stderr


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--seed", "{rank}"), "another calibration text and recipe"),
        (("--evaluation-samples", "{rank}1"), "another held-out text and recipe"),
        (("--model", "model-{rank}"), "another model"),
    ],
    ids=["text", "held-out text", "model"],
)
def test_ranks_with_different_work_are_refused(
    more: tuple[str, ...], what: str, llama_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama_folder, tmp_path / "model-0")
    tiny.save(tmp_path / "model-1", seed=1)
    # Each rank is a host of its own, so that each reads its own files.
    first, second = ranks.run(
        ranks.command_on_own_host, 2, tmp_path, *options_of(llama_folder, *more, "--output", "out")
    )
    assert (first.code, second.code) == (2, 2)
    assert f"rank 1 has {what} than rank 0" in first.stderr
    assert second.stderr == ""
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_what_rank_0_refuses_is_said_once(llama_folder: Path, tmp_path: Path) -> None:
    first, second = ranks.run(ranks.command, 2, tmp_path, *options_of(llama_folder, "--engine", "llamacpp"))
    assert first.code == 3
    assert "error: " in first.stderr
    assert second.code == 8
    assert second.stderr == ""


def test_weights_are_quantized_in_one_process(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("weights: {scheme: FP8_DYNAMIC}\n")
    first, _ = ranks.run(ranks.command, 2, tmp_path, *options_of(llama_folder, "--recipe", "r.yaml"))
    assert first.code == 3
    assert "llm-compressor quantizes in one process" in first.stderr


@pytest.mark.parametrize("command", [("recipes", "list"), ("plan", "--model", "x"), ("bench", "capture")])
def test_other_commands_run_in_one_process(
    command: tuple[str, ...], kvcal: Kvcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    left = kvcal(*command)
    assert left.code == 2
    assert f"error: rank 1: {command[0]} runs in one process" in left.stderr


@pytest.mark.parametrize("rank", ["2", "-1", "one"])
def test_an_environment_without_sense_is_refused(
    rank: str, kvcal: Kvcal, monkeypatch: pytest.MonkeyPatch, llama_folder: Path
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    left = kvcal("calibrate", "--model", llama_folder)
    assert left.code == 2
    assert f"RANK={rank}" in left.stderr


def test_nan_of_one_rank_survives_the_merge(tmp_path: Path) -> None:
    for left in ranks.run(merge_nan, 3, tmp_path):
        assert left.code == 0, left.stderr


def merge_nan(rank: int) -> None:
    def side() -> SideStatistics:
        value = torch.full((2, 3), float("nan") if rank == 1 else float(rank))
        count = torch.tensor(1)
        return SideStatistics(
            count, value, value, value.double(), value.double(), count.repeat(2), count.repeat(2)
        )

    with distributed.joined():
        found = distributed.merged(Statistics({4: {name: side() for name in SIDES}}))
    for name in SIDES:
        assert bool(found.layers[4][name].minimum.isnan().all())
        assert bool(found.layers[4][name].maximum.isnan().all())
        assert int(found.layers[4][name].tokens) == 3


def test_every_batch_is_dealt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = token_set([30, 20, 20, 9, 9, 9, 9])
    plain = [batch.input_ids.tolist() for batch in tokens.batches(2)]
    for size in (1, 2, 3, 4, 7):
        found: list[Any] = [None] * len(plain)
        for rank in range(size):
            monkeypatch.setattr(distributed, "place", lambda r=rank, n=size: Place(r, n, r))
            batches, share = distributed.dealt(tokens, 2)
            mine = list(batches)
            found[rank::size] = [batch.input_ids.tolist() for batch in mine]
            assert sum(batch.tokens * share for batch in mine) == pytest.approx(tokens.tokens if mine else 0)
        assert found == plain


def test_a_model_spread_over_everything_is_not_for_several(llama_folder: Path, tmp_path: Path) -> None:
    first, _ = ranks.run(ranks.command, 2, tmp_path, *options_of(llama_folder, "--device-map", "auto"))
    assert first.code == 2
    assert "--device-map auto spreads one model" in first.stderr
