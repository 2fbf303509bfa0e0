"""Orchestration of ``kvcal report``: records to a page, without a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvcal import records
from kvcal.errors import OutputError, UsageError
from kvcal.export import bundle
from kvcal.page import render
from kvcal.page.render import PAGE


def run_report(
    folders: Sequence[Path], output: Path | None, *, overwrite: bool, comparison: Path | None
) -> Path:
    """Write the page and return where; one run's own page among its records is replaced without a word.

    Raises:
        UsageError: several runs and no output.
        OutputError: the output exists, or cannot be written.
    """
    if output is None:
        if len(folders) > 1:
            raise UsageError("several runs have no folder in common; say where with --output FILE")
        output = records.read(folders[0]).place / PAGE
    elif output.is_dir():
        raise OutputError(f"{output} is a folder; choose a file for --output")
    elif os.path.lexists(output) and not overwrite:
        raise OutputError(f"{output} exists; choose another --output or pass --overwrite")
    page = render.render(folders, comparison=comparison)
    with bundle.translated_os_errors(output):
        _replace(output, page)
    return output


def _replace(output: Path, page: str) -> None:
    """Whole or not at all: a reader may have the old one open."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}.kvcal-partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
