"""What the page is made from: the records of a run, and what else lies beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kvcal import records
from kvcal.errors import ModelError, StatisticsError, UsageError
from kvcal.records import COMPARISON, EXPORT, SUITE, Records
from kvcal.statistics import Statistics
from kvcal.transforms.record import Transforms


@dataclass(frozen=True)
class Run:
    """One calibration.

    Attributes:
        name: what tells it from the others on the page.
        records: its documents.
        config: the checkpoint's ``config.json``; None if there is no checkpoint.
        statistics: None if they were not kept.
        transforms: what is folded into its weights; None if nothing is.
        suite: the record of long-context tasks; None if none was run.
        exported: how the scales came into the form of another engine; None if they are in the first one's.
    """

    name: str
    records: Records
    config: Mapping[str, Any] | None
    statistics: Statistics | None
    transforms: Transforms | None
    suite: Mapping[str, Any] | None
    exported: Mapping[str, Any] | None

    @property
    def report(self) -> dict[str, Any]:
        return self.records.report

    @property
    def passed(self) -> bool:
        return bool(self.report["verdict"] == "pass")

    @property
    def skipped(self) -> frozenset[int]:
        """Layers that stay in 16 bits."""
        return frozenset(self.report["skipped_layers"])


def load(folders: Sequence[Path], names: Sequence[str] | None = None) -> list[Run]:
    """Read the records of each; without ``names`` they are called after their folders.

    Raises:
        UsageError: there is no such folder.
        ModelError: it holds no records, or broken ones.
    """
    return [_load(folder, name) for folder, name in zip(folders, names or _names(folders), strict=True)]


def _load(folder: Path, name: str) -> Run:
    found = records.read(folder)
    place = found.place
    statistics = place / "statistics.safetensors"
    transforms = place / "folds.safetensors"
    config = folder / "config.json"
    return Run(
        name=name,
        records=found,
        config=_json(config) if found.report.get("verdict") == "pass" and config.is_file() else None,
        statistics=_statistics(statistics) if statistics.is_file() else None,
        transforms=Transforms.load(transforms) if transforms.is_file() else None,
        suite=_json(place / SUITE) if (place / SUITE).is_file() else None,
        exported=_json(place / EXPORT) if (place / EXPORT).is_file() else None,
    )


def comparison(run: Run, given: Path | None) -> Mapping[str, Any] | None:
    """The comparison of schemes that was given, or that lies among a run's records.

    Raises:
        UsageError: what was given is not there.
        ModelError: it is no comparison, or is about another model.
    """
    file = run.records.place / COMPARISON
    if given is not None:
        file = given / COMPARISON if given.is_dir() else given
        if not file.is_file():
            raise UsageError(f"--comparison {given}: no such file; kvcal compare --output FOLDER writes one")
    elif not file.is_file():
        return None
    document = _json(file)
    try:
        ours, theirs = (each["architecture"] for each in (run.records.manifest, document["manifest"]))
        differ = [key for key in ("model_type", "hidden_size", "layers") if ours[key] != theirs[key]]
        rows = document["rows"]
    except records.BROKEN as error:
        raise ModelError(f"{file}: is no comparison that kvcal compare wrote: {error!r}") from None
    if differ or not rows:
        what = ", ".join(f"{key} {theirs[key]} instead of {ours[key]}" for key in differ) or "no schemes"
        raise ModelError(f"{file}: is about another model than {run.records.folder}: {what}")
    return document


def _json(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path}: holds no object")
    return document


def _statistics(path: Path) -> Statistics:
    try:
        return Statistics.load(path)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise StatisticsError(f"{path}: holds no statistics that can be read: {error}") from None


def _names(folders: Sequence[Path]) -> list[str]:
    """Last parts of the paths, as many of them as tell the folders apart."""
    resolved = [folder.resolve() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(names)) == len(set(resolved)):
            return names
    return [str(path) for path in resolved]
