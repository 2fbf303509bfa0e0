"""A run that goes on from an interrupted one ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvcal import calibrate, manifest, resume
from kvcal.launch import ALONE, Place
from kvcal.statistics import Collector, Statistics
from tests import tiny
from tests.test_calibrate import plan_for, token_set

Kvcal = Callable[..., Any]
STATE = Path(".out.kvcal-state")
SIZES = ("--samples", "6", "--evaluation-samples", "2", "--seq-len", "48", "--batch-size", "2")


@contextlib.contextmanager
def interrupted(batches: int, error: BaseException | None = None) -> Iterator[list[int]]:
    """Ctrl-C within the batch after so many; yields how many were ended."""
    end_batch, ended = Collector.end_batch, [0]

    def planted(self: Collector) -> None:
        if ended[0] == batches:
            raise error or KeyboardInterrupt
        ended[0] += 1
        end_batch(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "end_batch", planted)
        yield ended


def equal(a: Statistics, b: Statistics) -> bool:
    return all(
        torch.equal(tensor, b.layers[index][side].tensors()[name])
        for index, sides in a.layers.items()
        for side, seen in sides.items()
        for name, tensor in seen.tensors().items()
    )


MODEL = tiny.build_model(num_hidden_layers=2)
TEXT = token_set([40, 9, 31, 40, 23, 17, 12, 28, 35])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@settings(max_examples=20)
@given(
    cut=st.lists(st.integers(0, 5), max_size=4),
    collect=st.sampled_from(["extremes", "summary", "distribution"]),
)
def test_any_interruptions_leave_no_trace(folder: Path, cut: list[int], collect: Any) -> None:
    plan = plan_for(MODEL, calibration={"batch_size": 2})
    state = resume.State(folder / "out", ALONE, {"model": "one"}, every=0.0)
    state.start_anew()
    for batches in cut:
        with interrupted(batches), contextlib.suppress(KeyboardInterrupt):
            calibrate.calibrate(MODEL, plan, TEXT, collect=collect, state=state.checkpoint("calibrate", "w"))
    last = state.checkpoint("calibrate", "w")
    assert last.parts == min(sum(cut), 5)
    with interrupted(99) as ended:
        found = calibrate.calibrate(MODEL, plan, TEXT, collect=collect, state=last)
    assert ended == [5 - min(sum(cut), 5)]
    assert equal(found, calibrate.calibrate(MODEL, plan, TEXT, collect=collect))


def run(kvcal: Kvcal, model: Path, *more: str) -> Any:
    return kvcal("calibrate", "--model", model, *SIZES, "--save-every", "0", "--output", "out", *more)


def test_the_command_goes_on_where_it_was(kvcal: Kvcal, llama_folder: Path) -> None:
    whole = kvcal("calibrate", "--model", llama_folder, *SIZES, "--output", "whole", "--json").document
    with interrupted(2):
        left = run(kvcal, llama_folder)
    assert left.code == 130
    assert f"goes on from {STATE.absolute()}" in left.stderr
    assert not Path("out").exists()
    with interrupted(99) as ended:
        left = run(kvcal, llama_folder, "--resume", "--json")
    assert left.code == 0
    assert "calibrate: going on after 2 batches" in left.stderr
    assert ended == [1]
    differing = {key for key in whole if whole[key] != left.document[key]}
    assert differing <= {"serve", "folder", "memory", "stages"}
    one, other = (load_file(f"{folder}/kvcal/statistics.safetensors") for folder in ("whole", "out"))
    assert all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())
    assert not STATE.exists()


def test_folded_statistics_are_gone_on_from_too(kvcal: Kvcal, planted_folder: Path) -> None:
    wanted = ("--format", "int8_per_token_head", "--json")
    with interrupted(99) as ended:
        whole = run(kvcal, planted_folder, *wanted).document
    shutil.move("out", "whole")
    with interrupted(ended[0] - 1):
        assert run(kvcal, planted_folder, *wanted).code == 130
    assert len(list(STATE.glob("calibrate-*.safetensors"))) == 2
    with interrupted(99) as rest:
        left = run(kvcal, planted_folder, *wanted, "--resume")
    assert rest == [1]
    assert {key for key in whole if whole[key] != left.document[key]} <= {
        "serve",
        "folder",
        "memory",
        "stages",
    }
    assert not STATE.exists()


def test_a_finished_calibration_is_not_done_again(
    kvcal: Kvcal, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvcal.evaluate.evaluations", stop)
        left = kvcal(
            "calibrate", "--model", llama_folder, *SIZES, "--output", "out"
        )  # saved at the end alone
    assert left.code == 130
    with interrupted(0):  # no batch is left to end
        assert run(kvcal, llama_folder, "--resume").code == 0


def other_model(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "more", "what"),
    [
        (other_model, (), "another model"),
        (lambda f: tiny.edit_config(f, rms_norm_eps=1e-3), (), "another model"),
        (None, ("--seed", "1"), "another calibration text and recipe"),
        (None, ("--evaluation-samples", "1"), "another held-out text and recipe"),
        (None, ("--granularity", "per_head"), "another recipe"),
    ],
    ids=["weights", "config", "text", "held-out text", "settings"],
)
def test_another_run_is_not_gone_on_from(
    change: Any, more: tuple[str, ...], what: str, kvcal: Kvcal, copied: Path
) -> None:
    with interrupted(2):
        run(kvcal, copied)
    if change is not None:
        change(copied)
    left = run(kvcal, copied, *more, "--resume")
    assert left.code == 2
    assert f"the interrupted run had {what} (" in left.stderr
    assert len(list(STATE.glob("*"))) == 1  # and is not lost


def test_another_version_is_not_gone_on_from(
    kvcal: Kvcal, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupted(2):
        run(kvcal, llama_folder)
    monkeypatch.setattr(manifest, "versions", lambda: {"torch": "9.9", "transformers": "9.9", "python": "9"})
    left = run(kvcal, llama_folder, "--resume")
    assert left.code == 2
    assert "another version of kvcal, torch or transformers" in left.stderr


def test_another_number_of_processes_does_not_go_on(tmp_path: Path) -> None:
    plan = plan_for(MODEL, calibration={"batch_size": 2})
    two = resume.State(tmp_path / "out", ALONE, {"number of processes": "2"}, every=0.0)
    calibrate.calibrate(MODEL, plan, TEXT, state=two.checkpoint("calibrate", "w"))
    one = resume.State(tmp_path / "out", ALONE, {"number of processes": "1"}, every=0.0)
    with pytest.raises(resume.UsageError, match="another number of processes"):
        one.go_on()


def test_without_resume_a_run_starts_anew_and_says_so(kvcal: Kvcal, llama_folder: Path) -> None:
    with interrupted(2):
        run(kvcal, llama_folder)
    with interrupted(99) as ended:
        left = run(kvcal, llama_folder)
    assert ended == [3]
    assert "starting anew" in left.stderr
    assert not STATE.exists()


def test_resume_without_a_state_starts_at_the_beginning_and_says_so(kvcal: Kvcal, llama_folder: Path) -> None:
    left = run(kvcal, llama_folder, "--resume")
    assert left.code == 0
    assert "nothing is saved" in left.stderr


def test_an_interruption_before_anything_was_saved_says_so(kvcal: Kvcal, llama_folder: Path) -> None:
    with interrupted(0):
        left = run(kvcal, llama_folder)
    assert left.code == 130
    assert "nothing was left behind" in left.stderr
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("stage", ["save", "replace"])
def test_a_run_that_dies_while_it_saves_leaves_the_last_whole_file(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(MODEL, calibration={"batch_size": 2})
    state = resume.State(tmp_path / "out", ALONE, {"model": "one"}, every=0.0)
    plain, calls = (Statistics.save if stage == "save" else os.replace), [0]

    def dies(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            if stage == "save":
                arguments[1].write_bytes(b"half")
            raise KeyboardInterrupt
        plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*((Statistics, "save") if stage == "save" else (os, "replace")), dies)
        with pytest.raises(KeyboardInterrupt):
            calibrate.calibrate(MODEL, plan, TEXT, state=state.checkpoint("calibrate", "w"))
    last = state.checkpoint("calibrate", "w")
    assert last.parts == 2
    found = calibrate.calibrate(MODEL, plan, TEXT, state=last)
    assert equal(found, calibrate.calibrate(MODEL, plan, TEXT))
    state.remove()
    assert not state.folder.exists()


def test_a_state_that_cannot_be_read_is_refused(kvcal: Kvcal, llama_folder: Path) -> None:
    with interrupted(2):
        run(kvcal, llama_folder)
    (path,) = STATE.glob("*")
    path.write_bytes(path.read_bytes()[:20])
    left = run(kvcal, llama_folder, "--resume")
    assert left.code == 4
    assert "holds no statistics to resume from" in left.stderr


def test_a_full_disk_ends_the_run(kvcal: Kvcal, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Statistics, "save", full)
    left = run(kvcal, llama_folder)
    assert left.code == 7
    assert "the disk is full" in left.stderr
    assert list(Path().iterdir()) == []


def test_nothing_is_written_before_it_is_time(tmp_path: Path) -> None:
    plan = plan_for(MODEL, calibration={"batch_size": 2})
    state = resume.State(tmp_path / "out", ALONE, {"model": "one"}, every=3600.0)
    with interrupted(4), pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(MODEL, plan, TEXT, state=state.checkpoint("calibrate", "w"))
    assert not state.folder.exists()


def test_a_folder_that_rank_0_removes_first_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks end at the same time; whatever one asks of the folder, it may be gone by then."""
    state = resume.State(tmp_path / "out", Place(1, 2, 1), {}, every=0.0)
    state.folder.mkdir()
    for name in ("listdir", "scandir"):
        ask = getattr(os, name)

        def asked(path: Any, ask: Callable[[Any], Any] = ask) -> Any:
            if Path(path) == state.folder and state.folder.exists():
                state.folder.rename(tmp_path / "gone")
            return ask(path)

        monkeypatch.setattr(os, name, asked)
    state.remove()
    assert not state.folder.exists()
