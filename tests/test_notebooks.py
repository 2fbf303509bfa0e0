"""Every notebook runs from top to bottom on a checkpoint that kvcal wrote, and is stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("checkpoint", ["exported", "folded"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_and_holds_no_outputs(
    path: Path,
    checkpoint: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVCAL_CHECKPOINT", str(request.getfixturevalue(checkpoint)))
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    scope: dict[str, object] = {}
    for cell in cells:
        assert cell["outputs"] == []
        exec(compile("".join(cell["source"]), path.name, "exec"), scope)
    printed = capsys.readouterr().out
    assert "standard deviations" in printed
    assert ("widest ratio between heads" in printed) == (checkpoint == "exported")
