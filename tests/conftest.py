"""Fixtures shared by all tests. Nothing here needs a network, a GPU or a model hub."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    # Triton decides at import whether it interprets; transformers may import it before any kernel test.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The models are tiny: threads of several workers would only wait for each other.
torch.set_num_threads(1)

import hypothesis
import pytest
from rich.console import Console

from kvcal import recipe, run
from kvcal.cli import main as kvcal_main
from kvcal.progress import Narrator
from tests import planted, tiny

# For the interpreter that has vLLM; doctests are looked for in every file.
collect_ignore = ["vllm_online_probe.py"]

# A loaded machine must not fail a test, and a failure must come again.
hypothesis.settings.register_profile("kvcal", deadline=None, derandomize=True)
hypothesis.settings.load_profile("kvcal")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint. Tests that change files copy it first."""
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def copied(llama_folder: Path, tmp_path: Path) -> Path:
    """A tiny Llama checkpoint to break."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The JSON document on stdout."""
        return json.loads(self.stdout)


@pytest.fixture
def kvcal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    """Run the command line in this process, in a folder of its own: ``kvcal("plan", "--model", folder)``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: Any) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["kvcal", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            kvcal_main()
        streams = capfd.readouterr()
        code = left.value.code
        return Outcome(code if isinstance(code, int) else 1, streams.out, streams.err)

    return run


@pytest.fixture
def small() -> tuple[str, ...]:
    """Flags that keep a run on a tiny model under a second or two."""
    return ("--samples", "4", "--evaluation-samples", "2", "--seq-len", "48", "--batch-size", "2")


@pytest.fixture(scope="session")
def exported(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A per-head checkpoint written by kvcal. Tests that change files copy it first."""
    fields = {"samples": 4, "seq_len": 48}
    wanted = recipe.parse(
        {"granularity": "per_head", "calibration": fields, "evaluation": fields | {"samples": 2}}, "tests"
    )
    request = run.Request(str(llama_folder), output=tmp_path_factory.mktemp("exported") / "tiny")
    _, folder = run.run_calibrate(request, wanted, Narrator(Console(stderr=True, quiet=True)))
    return folder


@pytest.fixture(scope="session")
def planted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint whose heads are large enough for every format, with outliers for folds."""
    folder = tmp_path_factory.mktemp("planted")
    return planted.plant(tiny.save(folder / "plain", head_dim=32), folder / "outliers")


@pytest.fixture(scope="session")
def folded(planted_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with folds and without scales written by kvcal. Tests that change files copy it first."""
    fields = {"samples": 4, "seq_len": 48}
    wanted = recipe.parse(
        {"format": "int8_per_token_head", "calibration": fields, "evaluation": fields | {"samples": 2}},
        "tests",
    )
    request = run.Request(str(planted_folder), output=tmp_path_factory.mktemp("folded") / "tiny")
    _, folder = run.run_calibrate(request, wanted, Narrator(Console(stderr=True, quiet=True)))
    return folder


@pytest.fixture
def folded_copy(folded: Path, tmp_path: Path) -> Path:
    """A folded checkpoint to break."""
    return Path(shutil.copytree(folded, tmp_path / "folded"))


@pytest.fixture
def exported_copy(exported: Path, tmp_path: Path) -> Path:
    """A per-head checkpoint to break."""
    return Path(shutil.copytree(exported, tmp_path / "checkpoint"))
