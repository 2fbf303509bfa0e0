"""Times on a GPU through CUDA graphs, and what describes the card that they were taken on."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

_READ_BYTES = 2 << 30


def l2_bytes() -> int:
    """Of the current card."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def graph(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """All calls in a row, captured after each ran once: the first one of a kernel compiles it."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in calls:
            call()
    captured.replay()
    torch.cuda.synchronize()
    return captured


def replay(captured: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # All is queued while the GPU waits: it would idle after ``begin`` while the CPU launches the graph.
    torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
    begin.record()
    captured.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def read_peak() -> float:
    """Bytes per second that a sum over 2 GiB of float32 reads, median of 20."""
    x = torch.randn(_READ_BYTES // 4, device="cuda")
    captured = graph([x.sum] * 5)
    return 5 * _READ_BYTES / median(replay(captured) for _ in range(20))


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Of the card, where nvidia-smi tells."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)
