"""``kvcal report``: the page about a run, or about several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal import terminal
from kvcal.options import Json


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Checkpoints that kvcal wrote, or DIR.failed.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="File to write; by default report.html among the records of one DIR.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    comparison: Annotated[
        Path | None, typer.Option(help="What kvcal compare wrote: its folder, or compare.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the HTML page about runs from their records; several stand side by side.

    Example: kvcal report model-fp8kv model-int8kv --output runs.html
    """
    from kvcal import run_report

    written = run_report.run_report(folders, output, overwrite=overwrite, comparison=comparison)
    if as_json:
        terminal.print_json({"output": str(written), "bytes": written.stat().st_size})
    else:
        terminal.console().print(f"written to {written}", highlight=False, soft_wrap=True, markup=False)
