"""What a run tells machines: JSON objects, one a line, with the fields of :class:`Line`."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt

from kvcal.errors import OutputError

Event = Literal["stage_started", "progress", "stage_ended", "message", "notice", "warning", "result", "error"]
_LEVELS = {"notice": "warning", "warning": "warning", "error": "error"}
STDERR = "-"


class Line(BaseModel):
    """One line. Fields that say nothing about an event are left out of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    time: AwareDatetime
    """ISO 8601, in UTC."""
    level: Literal["info", "warning", "error"]
    event: Event
    """The last line of a run is a result or an error."""
    command: str
    """``calibrate``, ``bench`` ..."""
    rank: NonNegativeInt | None = None
    """Of this process, where a launcher started several."""
    stage: str | None = None
    done: NonNegativeFloat | None = None
    """Of ``total``, in ``unit``."""
    total: NonNegativeFloat | None = None
    """None where it is not known beforehand."""
    unit: str | None = None
    """``tokens``, mostly."""
    seconds: NonNegativeFloat | None = None
    """Since the stage began; of a result and an error, since the command began."""
    eta_seconds: NonNegativeFloat | None = None
    """Left for the rest of the stage, at the speed of the last 30 seconds."""
    peak_host_bytes: NonNegativeInt | None = None
    """Most resident memory of the process."""
    host_peak_since: Literal["stage", "process"] | None = None
    """What that is of: the stage, or the process so far, where its mark cannot be set back."""
    peak_device_bytes: NonNegativeInt | None = None
    """Most memory of tensors on one GPU in this stage; left out where no GPU is in use."""
    exit_code: NonNegativeInt | None = None
    message: str | None = None


class Log:
    """Where lines go: to the end of a file, or to stderr."""

    def __init__(self, target: str, command: str, rank: int | None):
        """``target`` is a file's name, or ``-`` for stderr.

        Raises:
            OutputError: the file cannot be written to.
        """
        self.on_stderr = target == STDERR
        self._path = Path(target).absolute()
        self._command, self._rank = command, rank
        self._broken = False
        if not self.on_stderr:
            try:
                self._append("")
            except (OSError, ValueError) as error:
                raise OutputError(f"--log-json {target}: cannot be written: {error}") from None

    def write(self, event: Event, message: str | None = None, **fields: Any) -> None:
        """Add one line.

        A file that refuses it, on a full disk for example, is told of on stderr once, and gets no more: the
        work is worth more than its log.
        """
        if self._broken:
            return
        line = Line(
            time=datetime.now(UTC),
            level=_LEVELS.get(event, "info"),  # type: ignore[arg-type]
            event=event,
            command=_valid(self._command),
            rank=self._rank,
            message=None if message is None else _valid(message),
            **fields,
        )
        try:
            self._append(line.model_dump_json(exclude_none=True) + "\n")
        except OSError as error:
            self._broken = True
            if not self.on_stderr:
                sys.stderr.write(f"warning: {self._path}: ends here: {error.strerror}\n")

    def _append(self, text: str) -> None:
        """Whole, as several ranks may write to one file."""
        if self.on_stderr:
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        with self._path.open("ab", buffering=0) as file:
            file.write(text.encode())


def _valid(text: str) -> str:
    """Without halves of surrogate pairs, which names of files may hold and JSON may not."""
    return text.encode("utf-8", "backslashreplace").decode()
