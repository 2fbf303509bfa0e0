"""Geometry of well-known models, to plan without having them: ``shapes/*.json``, each with its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcal.errors import UsageError

_FOLDER = Path(__file__).parent / "shapes"


def names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def get(name: str) -> dict[str, Any]:
    """Fields of a ``config.json``, as far as geometry needs them.

    >>> get("llama-3-70b")["num_key_value_heads"]
    8

    Raises:
        UsageError: no such shape is known.
    """
    if name.lower() not in names():
        raise UsageError(
            f"unknown shape {name!r}; known: {', '.join(names())}; of another model, --model takes a folder"
            " with its config.json"
        )
    found: dict[str, Any] = json.loads((_FOLDER / f"{name.lower()}.json").read_text(encoding="utf-8"))[
        "config"
    ]
    return found
