"""The real vLLM over every form that kvcal writes for it, in three families of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvcal import arch, check, check_live, engines, live_engine, recipe, run, run_export, sources
from kvcal.errors import UsageError
from kvcal.progress import Narrator
from tests import tiny

pytestmark = pytest.mark.slow

PROMPT = (3, 14, 15, 92, 65, 35)


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    try:
        return live_engine.engine_python(None)
    except UsageError as error:
        pytest.skip(str(error))


def calibrated(family: str, folder: Path, granularity: str, rule: str) -> Path:
    """A tiny checkpoint of a family, its heads large enough for vLLM's kernels."""
    base = tiny.save(folder / "base", family, hidden_size=192, head_dim=32)
    fields = {"samples": 4, "seq_len": 48}
    wanted = recipe.parse(
        {
            "granularity": granularity,
            "scale": {"rule": rule},
            "calibration": fields,
            "evaluation": fields | {"samples": 2},
        },
        "tests",
    )
    narrator = Narrator(Console(stderr=True, quiet=True))
    _, written = run.run_calibrate(run.Request(str(base), output=folder / "vllm"), wanted, narrator)
    return written


def ask(folder: Path, engine: str, python: Path) -> check_live.LiveResult:
    model = arch.read(sources.read_config(folder))
    _, written, announced = check.scales_of(folder, engine)
    assert announced
    over = "fp8" if engines.get(engine).forgets_over_16_bits else None
    modules = {layer.index: layer.module for layer in model.layers}
    return check_live.check_live(folder, written, modules, python, (PROMPT,), 4, scales_over=over)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("engine", "granularity", "rule"),
    [
        ("vllm", "per_tensor", "amax"),
        ("vllm", "per_head", "amax"),
        # Rounded to BF16 as it is loaded, so powers of two arrive as they were written.
        ("vllm-modelopt", "per_tensor", "power_of_two"),
    ],
)
def test_vllm_holds_what_was_written(
    family: str, engine: str, granularity: str, rule: str, tmp_path: Path, vllm_python: Any
) -> None:
    folder = calibrated(family, tmp_path, granularity, rule)
    if engine != "vllm":
        run_export.run_export(folder, engine, tmp_path / "exported", Narrator.silent(), overwrite=False)
        folder = tmp_path / "exported"
    result = ask(folder, engine, vllm_python)
    assert result.problems == ()
    layers = len(arch.read(sources.read_config(folder)).layers)
    assert len(result.scales) == 3 * layers
    values = [value for finding in result.scales for value in finding.held or ()]
    assert len(values) == (3 * layers if granularity == "per_tensor" else 3 * layers * 2)
    assert 1.0 not in values
    assert len(set(values)) > (1 if rule == "power_of_two" else len(values) // 2)
