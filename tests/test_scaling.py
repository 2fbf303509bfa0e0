"""The benchmark of several processes, and real launchers around the main job."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcal import calibrate, scaling
from kvcal.errors import CheckFailed
from tests import tiny
from tests.test_calibrate import plan_for, token_set
from tests.test_distributed import options_of, same_statistics

Kvcal = Callable[..., Any]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LIMIT = 240  # seconds; a launcher that hangs is a failure


def test_statistics_are_compared_by_kind() -> None:
    model = tiny.build_model(num_hidden_layers=2)
    plan = plan_for(model)
    one, other = (calibrate.calibrate(model, plan, token_set([20, 9])) for _ in range(2))
    assert scaling.compared(one, other) == "bit-equal"
    seen = other.layers[1]["v"]
    other.layers[1]["v"] = dataclasses.replace(seen, squares=seen.squares * (1 + 1e-15))
    assert re.fullmatch(r"extremes bit-equal, sums to \d\.\de-1[56]", scaling.compared(one, other))
    other.layers[1]["v"] = dataclasses.replace(seen, maximum=seen.maximum + 1e-6)
    with pytest.raises(CheckFailed, match="layer 1: maximum of V depends on the number of processes"):
        scaling.compared(one, other)


@pytest.mark.parametrize("processes", ["0,1", "1,1", "two", "1,,2"])
def test_numbers_of_processes_must_make_sense(processes: str, kvcal: Kvcal, llama_folder: Path) -> None:
    left = kvcal("bench", "scaling", "--model", llama_folder, "--processes", processes)
    assert left.code == 2
    assert "different numbers above zero" in left.stderr


@pytest.mark.slow
def test_bench_scaling_starts_its_own_processes(kvcal: Kvcal, llama_folder: Path) -> None:
    options = ("--samples", "6", "--seq-len", "48", "--batch-size", "1", "--passes", "2", "--repeats", "1")
    left = kvcal("bench", "scaling", "--model", llama_folder, *options, "--device", "cpu", "--json")
    assert left.code == 0, left.stderr
    assert [row["processes"] for row in left.document] == [1, 2]
    assert left.document[0]["ratio"] == 1.0
    assert all(row["low"] <= row["tokens_per_second"] <= row["high"] for row in left.document)
    assert all(row["statistics"] != "" and row["device"] == "cpu" for row in left.document)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_launchers_share_a_run(launcher: list[str], kvcal: Kvcal, llama_folder: Path, tmp_path: Path) -> None:
    alone = kvcal(*options_of(llama_folder, "--output", "alone", "--json"))
    done = launched(
        launcher, tmp_path, *options_of(llama_folder, "--device", "cpu", "--output", "two", "--json")
    )
    assert done.wait(LIMIT) == 0
    document = json.loads((tmp_path / "stdout").read_text())  # of rank 0 alone
    assert document["fidelity"] == alone.document["fidelity"]
    assert json.loads((tmp_path / "two/kvcal/manifest.json").read_text())["processes"] == 2
    assert same_statistics(tmp_path / "alone", tmp_path / "two")


@pytest.mark.slow
def test_torchrun_ends_a_run_whose_rank_dies_and_a_new_one_goes_on(
    llama_folder: Path, tmp_path: Path
) -> None:
    sizes = ("--samples", "200", "--seq-len", "120", "--dataset", "builtin")
    arguments = options_of(llama_folder, *sizes, "--device", "cpu", "--output", "out")
    run = launched(TORCHRUN, tmp_path, *arguments)
    state = tmp_path / ".out.kvcal-state"
    wait_for(lambda: len(list(state.glob("*.safetensors"))) == 2, run)
    os.kill(child_of_rank(run.pid, 1), signal.SIGKILL)
    assert run.wait(LIMIT) != 0
    said = (tmp_path / "stderr").read_text()
    assert "ended by the launcher because another process died" in said
    assert "--resume goes on from" in said
    assert not (tmp_path / "out").exists()
    assert launched(TORCHRUN, tmp_path, *arguments, "--resume").wait(LIMIT) == 0
    assert "going on after" in (tmp_path / "stderr").read_text()
    whole = (*arguments[:-1], "whole")
    assert launched(TORCHRUN, tmp_path, *whole).wait(LIMIT) == 0
    assert same_statistics(tmp_path / "whole", tmp_path / "out")
    assert not state.exists()


def launched(launcher: list[str], folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        return subprocess.Popen(
            [*launcher, "-m", "kvcal", *arguments], cwd=folder, env=environment, stdout=out, stderr=err
        )


def wait_for(ready: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT
    while not ready():
        assert run.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


def child_of_rank(launcher: int, rank: int) -> int:
    """The process that a launcher started as a rank."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # gone by now, or somebody else's
            continue
        if parent == launcher and f"RANK={rank}".encode() in variables:
            return int(path.parent.name)
    raise AssertionError(f"rank {rank} does not run")
