"""The most memory that a part of a run takes, of the host and of each GPU.

Linux lets a process set back its own high-water mark of resident memory, and torch that of each GPU's
allocator; both marks are set back where a part begins, and what they had reached counts for the parts around
it. Where the host's cannot be set back (no Linux, or a ``/proc`` that is read only), it is that since the
process began, and says so.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_CLEAR = Path("/proc/self/clear_refs")
_HIGH_WATER_MARK = "5"  # of VmHWM, proc_pid_clear_refs(5); getrusage reads the same mark


@dataclass
class Peaks:
    """Of one part.

    Attributes:
        host_bytes: resident memory of the process.
        host_since: what the host's peak is of: the part, or the process so far.
        device_bytes: tensors on the GPU that held most; None where no GPU is in use.
    """

    host_bytes: int = 0
    host_since: Literal["stage", "process"] = "stage"
    device_bytes: int | None = None


_open: list[Peaks] = []


@contextmanager
def measured() -> Iterator[Peaks]:
    """Context whose peaks stand in what it yields, once it is left; they may lie in each other."""
    found = Peaks(host_since="stage" if restart() else "process")
    _open.append(found)
    try:
        yield found
    finally:
        _note()
        _open[:] = [each for each in _open if each is not found]


def restart() -> bool:
    """Set the marks back, without a loss to the parts that are open; whether the host's could be."""
    _note()
    for index in _gpus():
        sys.modules["torch"].cuda.reset_peak_memory_stats(index)
    try:
        _CLEAR.write_text(_HIGH_WATER_MARK)
    except OSError:
        return False
    return True


def host() -> int:
    """Bytes since the mark was last set back."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _note() -> None:
    most = max((_allocated(index) for index in _gpus()), default=None)
    for each in _open:
        each.host_bytes = max(each.host_bytes, host())
        if most is not None:
            each.device_bytes = max(each.device_bytes or 0, most)


def _gpus() -> range:
    """Those that torch has begun to use; it is not loaded for this."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return range(0)
    return range(torch.cuda.device_count())


def _allocated(index: int) -> int:
    return int(sys.modules["torch"].cuda.max_memory_allocated(index))
