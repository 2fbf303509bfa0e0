"""What a report of an earlier run says a format costs this model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcal.engines import VLLM
from kvcal.errors import ModelError, UsageError

# Where a folder keeps its report: a checkpoint, its records alone, a comparison.
_PLACES = ("kvcal/report.json", "report.json", "compare.json")


def read(path: Path, layers: int) -> dict[str, float]:
    """Format -> KL mean, in nats; of formats that a comparison stores in several ways, the smallest.

    Args:
        path: ``report.json`` of ``kvcal calibrate``, ``compare.json`` of ``kvcal compare``, or a folder with
            one of them.
        layers: of the model that it should be about.

    Raises:
        UsageError: there is no such file.
        ModelError: it is no report, or one of another model.
    """
    file = path
    if path.is_dir():
        file = next((path / place for place in _PLACES if (path / place).is_file()), path / _PLACES[0])
    if not file.is_file():
        raise UsageError(f"--measured {path}: has neither {' nor '.join(_PLACES)}")
    try:
        document = _load(file)
        comparison = "rows" in document
        found = _of_comparison(document) if comparison else _of_calibration(document, file)
        other = (
            document["manifest"]["architecture"]["layers"]
            if comparison
            else _load(file.with_name("plan.json"))["layers"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"--measured {file}: is not a report of kvcal: {error!r}") from None
    if other != layers:
        raise ModelError(f"--measured {file}: is about a model of {other} layers, this one has {layers}")
    return found


def _load(file: Path) -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def _of_calibration(report: Mapping[str, Any], file: Path) -> dict[str, float]:
    """With Q rounded where kernels round it; the plan beside the report names the format."""
    fidelity = report["fidelity_fp8_attention"] or report["fidelity"]
    return {_load(file.with_name("plan.json"))["format"]: float(fidelity["kl_mean"])}


def _of_comparison(document: Mapping[str, Any]) -> dict[str, float]:
    formats = {flag: name for name, flag in VLLM.cache_dtype.items()}
    found: dict[str, float] = {}
    for row in document["rows"]:
        if row["serves"] in formats:
            name, kl = formats[row["serves"]], float(row["fidelity"]["kl_mean"])
            found[name] = min(kl, found.get(name, kl))
    return found
