"""How a command speaks: documents on stdout, messages on stderr, one line and a code at the end.

What is told on stderr, to a person, to nobody or in JSON lines, is asked of the program and not of a command:
the options stand before the command or behind it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from kvcal import launch
from kvcal.errors import EXIT_CODES, KvcalError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kvcal.log_lines import Log
    from kvcal.progress import Narrator

QUIET, LOG_JSON = "--quiet", "--log-json"


@dataclass
class _Asked:
    """Who is told what, of the command that runs."""

    quiet: bool = False
    log: Log | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def for_people(self) -> bool:
        """Whether stderr is for people."""
        return self.log is None or not self.log.on_stderr


_asked = _Asked()


def of_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of a command line, the options of the program, wherever they stand, and the rest.

    >>> of_program(["check", "out", "--log-json", "-", "--json", "--", "--quiet"])
    (['--log-json', '-'], ['check', 'out', '--json', '--', '--quiet'])
    """
    first: list[str] = []
    rest: list[str] = []
    left = iter(arguments)
    for each in left:
        if each == QUIET or each.startswith(f"{LOG_JSON}="):
            first.append(each)
        elif each == LOG_JSON:
            first += [each, *(value for value in [next(left, None)] if value is not None)]
        elif each == "--":
            rest += [each, *left]
        else:
            rest.append(each)
    return first, rest


def listen(command: str, *, quiet: bool, log_json: str | None) -> None:
    """Begin a command: what it says goes where it is wanted.

    Raises:
        UsageError: stderr is to hold JSON lines and nothing.
        OutputError: the file for JSON lines cannot be written.
    """
    global _asked
    _asked = _Asked(quiet)
    if quiet or log_json is not None:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of downloads; it is not imported yet
    if log_json is None:
        return
    from kvcal.log_lines import STDERR, Log

    if quiet and log_json == STDERR:
        raise UsageError(f"{QUIET} and {LOG_JSON} {STDERR} both say what stderr holds; leave one out")
    here = launch.place_if_any()
    _asked.log = Log(log_json, command, here.rank if here.size > 1 else None)


class _Libraries(logging.Handler):
    """What libraries log reaches whom the command's own words reach."""

    def emit(self, record: logging.LogRecord) -> None:
        narrator().warn(f"{record.name}: {record.getMessage()}")


def hear_libraries() -> None:
    """Take over what libraries would print of their warnings; what they log below that is dropped."""
    root = logging.getLogger()
    if not any(isinstance(each, _Libraries) for each in root.handlers):
        root.addHandler(_Libraries(logging.WARNING))


def leave(message: str, code: int) -> NoReturn:
    """End the process with one line on stderr, and under ``--json`` a document on stdout if it is rank 0."""
    one_line = " ".join(message.split())
    _tell_error(one_line, code)
    if "--json" in sys.argv[1:] and not launch.place_if_any().rank:
        print_json({"error": {"message": one_line, "exit_code": code}})
    sys.exit(code)


def fail(error: KvcalError) -> NoReturn:
    """Leave with an error whose document is already on stdout."""
    _tell_error(str(error), error.exit_code)
    raise typer.Exit(error.exit_code)


def succeed() -> None:
    """Tell the end of a command that did what it was asked."""
    if _asked.log is not None and not launch.place_if_any().rank:
        _asked.log.write("result", EXIT_CODES[0][1], exit_code=0, seconds=_since())


def _tell_error(one_line: str, code: int) -> None:
    if _asked.log is not None:
        _asked.log.write("error", one_line, exit_code=code, seconds=_since())
    if _asked.for_people:
        rank = launch.place_if_any().rank
        typer.echo(f"error: rank {rank}: {one_line}" if rank else f"error: {one_line}", err=True)


def _since() -> float:
    return round(time.perf_counter() - _asked.began, 2)


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
    """Who tells of progress, as it was asked for."""
    from rich.console import Console

    from kvcal.progress import Narrator

    return Narrator(Console(stderr=True, quiet=_asked.quiet or not _asked.for_people), _asked.log)
