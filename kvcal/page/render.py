"""One self-contained page about one run or several: no script, no font, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvcal import __version__, records
from kvcal.errors import ModelError
from kvcal.page import heading, sections, source
from kvcal.records import COMPARISON

PAGE = "report.html"
_HERE = Path(__file__).parent


def render(
    folders: Sequence[Path], *, names: Sequence[str] | None = None, comparison: Path | None = None
) -> str:
    """The page as HTML.

    Args:
        folders: of runs, finished or failed.
        names: what to call them; by default as their folders are called.
        comparison: what ``kvcal compare`` wrote, a folder or its ``compare.json``; by default the one among
            the records of the first run, if there is one.

    Raises:
        UsageError: a folder or the comparison is not there.
        ModelError: records are missing, broken or of an older form.
    """
    runs = source.load(folders, names)
    compared = source.comparison(runs[0], comparison)
    for run in runs:
        try:
            heading.heading(run)
            sections.sections([run], None)
        except records.BROKEN as error:
            raise records.not_whole(run.records.folder, error) from None
    try:
        found = sections.sections(runs, compared)
    except records.BROKEN as error:  # each run is whole
        raise ModelError(f"{comparison or COMPARISON}: lacks what is asked of it: {error!r}") from None
    loader = FileSystemLoader(_HERE)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        version=__version__,
        headings=[heading.heading(run) for run in runs],
        side_by_side=heading.side_by_side(runs) if len(runs) > 1 else None,
        sections=found,
    )
