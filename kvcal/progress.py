"""What is told of a run while it works: to a person on stderr, or as JSON lines.

A person sees messages and bars, or nothing but errors. Stages are the parts of a run: each is told when it
begins and ends, and leaves its time and its peaks of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from kvcal import peaks
from kvcal.log_lines import Log

EVERY = 1.0  # seconds between two lines of progress, at least


class _Speed(ProgressColumn):
    """Tokens per second, or how many of the few things there are."""

    def __init__(self, unit: str):
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        if self._unit != "tokens":
            return Text(f"{task.completed:,.0f} of {task.total or 0:,.0f} {self._unit}", style="cyan")
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} tokens/s", style="cyan")


class _Left(ProgressColumn):
    """Time that the rest will take."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = seconds_left(task)
        if left is None:
            return Text("")
        minutes, seconds = divmod(round(left), 60)
        return Text(f"left {minutes // 60}:{minutes % 60:02}:{seconds:02}", style="cyan")


def seconds_left(task: Task) -> float | None:
    """At the speed of the last 30 seconds, or of the whole stage until that can be said; None at first."""
    if task.time_remaining is not None or not task.completed:
        return task.time_remaining
    return (task.elapsed or 0.0) * (task.remaining or 0.0) / task.completed


class Narrator:
    """Says what is going on; one console for messages and bars keeps them from mixing.

    Attributes:
        console: of a person, for tables too; quiet if nobody looks.
        stages: what each took that has ended, under its name; of those of one name the sum and the largest.
    """

    def __init__(self, console: Console | None = None, log: Log | None = None):
        self.console = console or Console(stderr=True)
        self.stages: dict[str, dict[str, Any]] = {}
        self._log = log

    @classmethod
    def silent(cls) -> Narrator:
        """One who says nothing."""
        return cls(Console(quiet=True))

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False)
        if self._log is not None:
            self._log.write("message", message)

    def notice(self, message: str) -> None:
        """Something the user did not ask for and should know."""
        self.console.print(f"note: {message}", style="yellow", markup=False, highlight=False)
        if self._log is not None:
            self._log.write("notice", message)

    def warn(self, message: str) -> None:
        """What a library has to say."""
        self.console.print(f"warning: {message}", style="yellow", markup=False, highlight=False)
        if self._log is not None:
            self._log.write("warning", message)

    @contextmanager
    def stage(
        self, name: str, total: float | None = None, unit: str = "tokens"
    ) -> Iterator[Callable[[float], None]]:
        """A part of the run, with a bar over ``total``, or a moving one if that is not known.

        Call what it yields with the tokens of each finished batch, or a share; never without a total. A stage
        that fails has no end: the error tells of it.
        """
        what = {"stage": name} | ({} if total is None else {"total": total, "unit": unit})
        self._tell("stage_started", **what)
        progress = Progress(
            *_columns(total, unit),
            console=self.console,
            transient=total is None,
            disable=self.console.quiet or (total is None and not self.console.is_terminal),
        )
        began = told = time.perf_counter()
        with peaks.measured() as peak, progress:
            progress.add_task(name, total=total)
            (task,) = progress.tasks

            def advance(done: float) -> None:
                nonlocal told
                progress.advance(task.id, done)
                now = time.perf_counter()
                if now - told >= EVERY:
                    told = now
                    spent, left = round(now - began, 2), seconds_left(task)
                    self._tell("progress", **what, done=task.completed, seconds=spent, eta_seconds=left)

            yield advance
        seconds = time.perf_counter() - began
        cost = {
            "seconds": round(seconds, 2),
            "peak_host_bytes": peak.host_bytes,
            "host_peak_since": peak.host_since,
            "peak_device_bytes": peak.device_bytes,
        }
        done = {} if total is None else {"done": task.completed}
        self._tell("stage_ended", **what, **done, **cost)
        self.stages[name] = _together(self.stages[name], cost) if name in self.stages else cost

    def _tell(self, event: Any, **fields: Any) -> None:
        if self._log is not None:
            self._log.write(event, **fields)


def _columns(total: float | None, unit: str) -> tuple[ProgressColumn, ...]:
    name = TextColumn("{task.description:<16}")
    if total is None:
        return name, BarColumn(20), TimeElapsedColumn()
    return name, BarColumn(20), TextColumn("{task.percentage:>3.0f}%"), _Speed(unit), _Left()


def _together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What two stages of one name took."""
    devices = [each["peak_device_bytes"] for each in (one, other) if each["peak_device_bytes"] is not None]
    return {
        "seconds": round(one["seconds"] + other["seconds"], 2),
        "peak_host_bytes": max(one["peak_host_bytes"], other["peak_host_bytes"]),
        "host_peak_since": other["host_peak_since"],
        "peak_device_bytes": max(devices, default=None),
    }
