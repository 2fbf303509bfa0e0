"""What a calibration leaves behind, read back. Loads no tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvcal.errors import ModelError, UsageError

# Beside those that every calibration leaves.
SUITE = "suite.json"
EXPORT = "export.json"
COMPARISON = "compare.json"


@dataclass(frozen=True)
class Records:
    """The folder of a calibration, the place in it where records lie, and the documents there."""

    folder: Path
    place: Path
    report: dict[str, Any]
    plan: dict[str, Any]
    manifest: dict[str, Any]
    recipe: Mapping[str, Any]

    @property
    def model(self) -> str:
        """The model's name without the folder it was in."""
        return Path(self.manifest["model"]["name"]).name


# What makes a record unreadable, whoever reads it.
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError)


def read(folder: Path) -> Records:
    """The records of a checkpoint, or of a run that failed.

    Raises:
        UsageError: there is no such folder.
        ModelError: it holds no records, or broken ones.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    places = [place for place in (folder / "kvcal", folder) if (place / "report.json").is_file()]
    if not places:
        raise ModelError(f"{folder}: holds no kvcal records; it was not written by kvcal calibrate")
    place = places[0]
    try:
        report, plan, manifest = (
            json.loads((place / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("report", "plan", "manifest")
        )
        recipe = yaml.safe_load((place / "recipe.yaml").read_text(encoding="utf-8"))
        if not all(isinstance(document, dict) for document in (report, plan, manifest, recipe)):
            raise TypeError("a document is no object")
    except BROKEN as error:
        raise not_whole(folder, error) from None
    return Records(folder, place, report, plan, manifest, recipe)


def not_whole(folder: Path, error: Exception) -> ModelError:
    """The refusal of records that lack what is asked of them."""
    return ModelError(f"{folder}: its records are not whole: {error!r}")
