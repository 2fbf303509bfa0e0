"""Processes of one run as a launcher starts them, without the seconds that each new interpreter takes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcal.cli import main as kvcal_main
from kvcal.statistics import Collector

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["kvcal.run", "kvcal.cli", "transformers.models.llama", "tests.ranks"])
_LIMIT = 60.0  # seconds for a run; a hang is a failure, never a wait


@dataclass(frozen=True)
class Left:
    """What one rank left behind; a negative code is the signal that ended it."""

    code: int
    stdout: str
    stderr: str


def run(
    target: Callable[..., None],
    size: int,
    folder: Path,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    absent: int | None = None,
) -> list[Left]:
    """``target(rank, *arguments)`` on every rank in ``folder``; ``absent`` never starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    shared |= {"HF_HUB_OFFLINE": "1", "KVCAL_TRACEBACK": "0", **(environment or {})}
    started = {}
    for rank in range(size):
        if rank != absent:
            given = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started[rank] = _CONTEXT.Process(target=_enter, args=(given, folder, rank, target, arguments))
            started[rank].start()
    try:
        for process in started.values():
            process.join(_LIMIT)
        hanging = [rank for rank, process in started.items() if process.is_alive()]
        assert not hanging, f"ranks {hanging} hang: {[_read(folder, rank, 'err') for rank in started]}"
    finally:
        for process in started.values():
            process.kill()
    return [
        Left(process.exitcode or 0, _read(folder, rank, "out"), _read(folder, rank, "err"))
        for rank, process in started.items()
    ]


def command(rank: int, *arguments: str) -> None:
    """``kvcal`` with these arguments; ``{rank}`` in one becomes the rank."""
    sys.argv = ["kvcal", *(argument.replace("{rank}", str(rank)) for argument in arguments)]
    kvcal_main()


def command_on_own_host(rank: int, *arguments: str) -> None:
    """The same on a host that this rank is alone on."""
    os.environ["LOCAL_RANK"] = "0"
    command(rank, *arguments)


def dying(rank: int, dies: int, batches: int, *arguments: str) -> None:
    """The same, but rank ``dies`` is killed within the batch after so many."""
    if rank == dies:
        at_batch(batches, lambda: os.kill(os.getpid(), signal.SIGKILL))
    command(rank, *arguments)


def failing(rank: int, fails: int, *arguments: str) -> None:
    """The same, but rank ``fails`` meets an error in its first batch."""

    def fail() -> None:
        raise torch.OutOfMemoryError("out of memory, as planted")

    if rank == fails:
        at_batch(0, fail)
    command(rank, *arguments)


def at_batch(batches: int, act: Callable[[], None]) -> None:
    """Do something at the end of the batch after so many, before its extremes count."""
    end_batch, ended = Collector.end_batch, [0]

    def planted(self: Collector) -> None:
        if ended[0] == batches:
            act()
        ended[0] += 1
        end_batch(self)

    Collector.end_batch = planted  # type: ignore[method-assign]


def _enter(
    environment: Mapping[str, str],
    folder: Path,
    rank: int,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(_log(folder, rank, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    code: Any = 0
    try:
        target(rank, *arguments)
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)  # no handlers of the process that this one was copied from


def _log(folder: Path, rank: int, name: str) -> Path:
    return folder / f"rank-{rank}.{name}"


def _read(folder: Path, rank: int, name: str) -> str:
    path = _log(folder, rank, name)
    return path.read_text() if path.exists() else ""
