"""Statistics of an unfinished run on disk, from which ``--resume`` goes on.

One file per stage and rank lies beside the output and is replaced as a whole: a run that dies at any moment
leaves the last one that was finished. A collector that goes on from it adds the same numbers in the same
order as one that was never interrupted, so nothing differs, not in the last bit.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvcal.errors import InputError, Interrupted, OutputError, StatisticsError, UsageError
from kvcal.launch import Place
from kvcal.statistics import Collector, Statistics

_PARTS, _FACTS = "kvcal_parts", "kvcal_facts"


@dataclass
class Checkpoint:
    """The file of one stage and rank.

    Attributes:
        path: where it is, or will be.
        facts: what a run must have in common with the one that goes on from it.
        every: seconds between two writes.
        parts: those of :func:`kvcal.forward.parts`, of this rank, that its statistics hold; 0 without a file.
    """

    path: Path
    facts: Mapping[str, str]
    every: float
    parts: int = 0
    _last: float = field(default_factory=time.monotonic)

    def restore(self, collector: Collector) -> int:
        """Put what was saved into a new collector; how many parts that is."""
        if self.parts:
            collector.restore(Statistics.load(self.path))
        return self.parts

    def offer(self, parts: int, collector: Collector, *, finished: bool = False) -> None:
        """Write what was collected after so many parts, if it is time or the last chance.

        Raises:
            OSError, SafetensorError: it cannot be written.
        """
        if parts == self.parts or not (finished or time.monotonic() - self._last >= self.every):
            return
        document = {_PARTS: str(parts), _FACTS: json.dumps(dict(self.facts), sort_keys=True)}
        partial = self.path.with_suffix(".partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            collector.statistics().save(partial, document)
            _flush(partial)
            os.replace(partial, self.path)
        except BaseException:
            partial.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds what was saved before
                self.path.parent.rmdir()
            raise
        _flush(self.path.parent)
        self.parts, self._last = parts, time.monotonic()


class State:
    """What one process of a run keeps until the run has succeeded."""

    def __init__(self, destination: Path, place: Place, facts: Mapping[str, str], every: float):
        """``destination`` is the output; ``facts`` names all that decides what statistics a run collects."""
        self.folder = folder_of(destination)
        self._place = place
        self._facts = dict(facts)
        self._every = every

    def go_on(self) -> bool:
        """Whether there is something to go on from.

        Raises:
            UsageError: it belongs to a run with another model, text, settings, versions or processes.
        """
        for path in self._files("*"):
            found, _ = _header(path)
            differing = [name for name, value in self._facts.items() if found.get(name) != value]
            if differing:
                raise UsageError(
                    f"--resume: the interrupted run had another {' and '.join(differing)} ({path}); repeat"
                    " its command, or start anew without --resume"
                )
        return bool(self._files(f"*.{self._place.rank}"))

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Context whose interruption tells how to go on, if there is something to go on from.

        What an input is to blame for would fail again, and a full disk has no room: those leave nothing.
        """
        try:
            yield
        except (InputError, OutputError):
            self.remove()
            raise
        except KeyboardInterrupt:
            if not self._files("*"):
                raise
            why = "interrupted"
            if self._place.size > 1:
                why = "interrupted, or ended by the launcher because another process died"
            raise Interrupted(f"{why}; the same command with --resume goes on from {self.folder}") from None

    def start_anew(self) -> bool:
        """Remove what an interrupted run left; whether it left anything."""
        left = self._files("*")
        self.remove()
        return bool(left)

    def remove(self) -> None:
        """Remove this rank's files; rank 0, the last to come and go, removes all."""
        if self._place.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for path in self._files(f"*.{self._place.rank}"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there may be other ranks'
            self.folder.rmdir()

    def checkpoint(self, stage: str, weights: str) -> Checkpoint:
        """The file of a stage. ``weights``: a digest of those that the model has in it."""
        path = self.folder / f"{stage.replace(' ', '-')}-{weights[:12]}.{self._place.rank}.safetensors"
        parts = _header(path)[1] if path.is_file() else 0
        return Checkpoint(path, self._facts, self._every, parts)

    def _files(self, name: str) -> list[Path]:
        try:
            present = os.listdir(self.folder)
        except FileNotFoundError:  # nothing was saved, or another rank has just removed it
            return []
        return sorted(self.folder / each for each in fnmatch.filter(present, f"{name}.safetensors"))


def folder_of(destination: Path) -> Path:
    """Where a run that writes to ``destination`` keeps its state."""
    destination = destination.absolute()
    return destination.with_name(f".{destination.name}.kvcal-state")


def _header(path: Path) -> tuple[dict[str, str], int]:
    """Facts and parts of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return json.loads(metadata[_FACTS]), int(metadata[_PARTS])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StatisticsError(
            f"{path}: holds no statistics to resume from: {error}; remove it, or start anew without --resume"
        ) from None


def _flush(path: Path) -> None:
    """See that it is on the disk, or a power cut could leave the new name with the old bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
