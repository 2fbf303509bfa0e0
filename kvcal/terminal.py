"""How a command speaks: documents on stdout, messages on stderr, one line and a code at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from kvcal import launch
from kvcal.errors import KvcalError

if TYPE_CHECKING:
    from rich.console import Console

    from kvcal.progress import Narrator


def leave(message: str, code: int) -> NoReturn:
    """End the process with one line on stderr, and under ``--json`` a document on stdout if it is rank 0."""
    one_line = " ".join(message.split())
    rank = launch.rank_if_any()
    typer.echo(f"error: rank {rank}: {one_line}" if rank else f"error: {one_line}", err=True)
    if "--json" in sys.argv[1:] and not rank:
        print_json({"error": {"message": one_line, "exit_code": code}})
    sys.exit(code)


def fail(error: KvcalError) -> NoReturn:
    """Leave with an error whose document is already on stdout."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(error.exit_code)


def print_json(value: Any) -> None:
    """The one document of a command; NaN and infinity are refused."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_rows(rows: Sequence[Any], as_json: bool) -> None:
    """Rows of one dataclass, as a document or as a table."""
    from kvcal import report

    if as_json:
        print_json([vars(row) for row in rows])
    else:
        report.print_rows(console(), rows)


def console() -> Console:
    """Where results are printed."""
    from rich.console import Console

    return Console()


def narrator() -> Narrator:
    """Who tells of progress on stderr."""
    from kvcal.progress import Narrator

    return Narrator()
