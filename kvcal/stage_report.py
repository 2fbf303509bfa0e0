"""What the stages of a run took, as rows and in words. Nothing is computed here but their sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADINGS = ("stage", "seconds", "host, peak", "GPU, peak", "expected")
TOGETHER = "together"


def rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of each stage the cells of ``HEADINGS``; the last row is all of them together.

    ``expected`` is what :func:`kvcal.memory.estimate` said of a pass, and of which device.
    """
    found = []
    for name, each in report["stages"].items():
        expected = report["memory"]["passes"].get(name)
        told = "" if expected is None else f"{_gib(expected['expected_bytes'])} of {expected['device']}"
        peaks = (_gib(each[f"peak_{where}_bytes"]) for where in ("host", "device"))
        found.append((name, f"{each['seconds']:.2f}", *peaks, told))
    seconds = sum(each["seconds"] for each in report["stages"].values())
    return [*found, (TOGETHER, f"{seconds:.2f}", "", "", "")]


def note(report: Mapping[str, Any]) -> str:
    """What the peaks are of."""
    so_far = any(each["host_peak_since"] == "process" for each in report["stages"].values())
    host = "has held so far (the mark cannot be set back here)" if so_far else "held in the stage"
    return (
        f"Memory of the host is the most that the process {host}, libraries included; that of a GPU is what"
        " tensors held in the stage, on the one that held most."
    )


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f} GiB"
