"""What a person sees while a run works: short messages and bars, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _TokensPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} tokens/s", style="cyan")


class Narrator:
    """Says what is going on; one console for messages and bars keeps them from mixing."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True)

    @classmethod
    def silent(cls) -> Narrator:
        """One who says nothing."""
        return cls(Console(quiet=True))

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False)

    def notice(self, message: str) -> None:
        """Something the user did not ask for and should know."""
        self.console.print(f"note: {message}", style="yellow", markup=False, highlight=False)

    @contextmanager
    def bar(self, what: str, tokens: int) -> Iterator[Callable[[float], None]]:
        """A bar over ``tokens``; call what it yields with the tokens of each finished batch, or a share."""
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            _TokensPerSecond(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(what, total=tokens)
            yield lambda done: progress.advance(task, done)
