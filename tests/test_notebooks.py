"""Every notebook runs from top to bottom on a tiny model or its checkpoint, and is stored without outputs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What each must have said in the end; every notebook must be here.
SAYS = {
    "anatomy": ("K: widest channel over the median", "V: amax over rms of a channel"),
    "quickstart": ("verdict: pass", "vllm serve", "report.html"),
    "statistics": ("standard deviations",),
    "which-format": ("vllm-int4-per-token-head", "bytes per token", "recommended: "),
}


def cells(path: Path) -> list[str]:
    found = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in found)
    return ["".join(cell["source"]) for cell in found]


Run = Callable[[str, Path], str]


@pytest.fixture
def executed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], planted_folder: Path, tmp_path: Path
) -> Run:
    """Execute a notebook of this name over a checkpoint; what it printed."""

    def run(name: str, checkpoint: Path) -> str:
        monkeypatch.setenv("KVCAL_CHECKPOINT", str(checkpoint))
        monkeypatch.setenv("KVCAL_MODEL", str(planted_folder))
        monkeypatch.setenv("KVCAL_OUTPUT", str(tmp_path))
        monkeypatch.setenv("MPLBACKEND", "Agg")
        monkeypatch.setenv("COLUMNS", "100")
        scope: dict[str, object] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")
            for cell in cells(FOLDER / f"{name}.ipynb"):
                exec(compile(cell, name, "exec"), scope)
        plt.close("all")
        return capsys.readouterr().out

    return run


def test_every_notebook_is_tested() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(SAYS)


@pytest.mark.parametrize("checkpoint", ["exported", "folded"])
@pytest.mark.parametrize("name", ["anatomy", "statistics"])
def test_looks_at_a_checkpoint(
    name: str, checkpoint: str, executed: Run, request: pytest.FixtureRequest
) -> None:
    printed = executed(name, request.getfixturevalue(checkpoint))
    assert all(text in printed for text in SAYS[name])
    if name == "statistics":
        assert ("widest ratio between heads" in printed) == (checkpoint == "exported")


@pytest.mark.parametrize("name", ["quickstart", "which-format"])
def test_works_on_a_model(name: str, executed: Run, tmp_path: Path) -> None:
    printed = executed(name, tmp_path / "nowhere")
    assert all(text in printed for text in SAYS[name])
    assert (tmp_path / "quickstart" / "kvcal" / "report.html").is_file() == (name == "quickstart")
