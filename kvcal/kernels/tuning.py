"""How a paged kernel is cut into programs: measured once per card and kind of cache, and remembered."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from kvcal.folders import cache_folder

logger = logging.getLogger(__name__)

# A cache below this is read in a time that launching dominates, and the first candidate serves it.
WORTH_TUNING = 32 * 2**20


@dataclass(frozen=True)
class Tuning:
    """Keys per step, warps of a program, steps loaded ahead, programs that one multiprocessor should hold.

    ``registers`` limits those of a thread, so that more programs fit at once; 0 leaves it to the compiler.
    """

    keys: int
    warps: int
    stages: int
    programs_per_processor: int
    registers: int = 0


@dataclass(frozen=True)
class Key:
    """What a choice depends on: the card, and the constants of the kernel."""

    card: str
    constants: str
    prefill: bool

    @classmethod
    def of(cls, q: torch.Tensor, constants: dict[str, Any]) -> Key:
        name = torch.cuda.get_device_name(q.device) if q.is_cuda else "interpreter"
        return cls(name, json.dumps(constants, sort_keys=True), bool(constants["ROWS"] > 16))


# The fastest on an H200 for some format at some shape; the first serves what is too small to measure.
DECODE = (
    Tuning(32, 1, 3, 8),
    Tuning(32, 2, 3, 4),
    Tuning(32, 2, 3, 6),
    Tuning(64, 1, 3, 4),
    Tuning(64, 1, 3, 8),
    Tuning(64, 2, 3, 4),
    Tuning(64, 4, 3, 4),
    Tuning(32, 1, 3, 12, registers=168),
    Tuning(64, 1, 3, 12, registers=168),
)
PREFILL = (Tuning(64, 4, 2, 2), Tuning(32, 4, 2, 2), Tuning(64, 8, 2, 2))


def choose(key: Key, bytes_read: float, run: Callable[[Tuning], None]) -> Tuning:
    """The fastest candidate for ``key``, from memory where it was measured before.

    Args:
        key: what the choice depends on.
        bytes_read: of this call; a small one takes the first candidate, unmeasured.
        run: the call, to be timed.
    """
    candidates = PREFILL if key.prefill else DECODE
    if key.card == "interpreter" or bytes_read < WORTH_TUNING:
        return candidates[0]
    known = _known()
    name = f"{triton.__version__} {key.card} {key.constants}"
    with contextlib.suppress(KeyError, TypeError):  # a file of another version is measured anew
        return Tuning(**known[name])
    logger.warning("compiling attention for this cache, once: %d ways to cut it", len(candidates))
    times = {}
    for candidate in candidates:
        try:
            # Through a graph: launching from Python takes as long as a kernel.
            times[candidate] = triton.testing.do_bench_cudagraph(
                functools.partial(run, candidate), rep=20, return_mode="median"
            )
        except triton.runtime.errors.OutOfResources:
            continue  # too much shared memory for this card
    best = min(times, key=lambda candidate: (times[candidate], astuple(candidate)))
    try:
        _write({**known, name: asdict(best)})
    except OSError as error:
        logger.warning("the choice is not remembered: %s", error)
    return best


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def path() -> Path:
    """The file of choices."""
    return cache_folder() / "attention-tuning.json"


def _known() -> dict[str, dict[str, int]]:
    """What the file holds; read again only after it changed, for every call of attention asks."""
    try:
        changed = path().stat().st_mtime_ns
    except OSError:
        return {}
    return _read(path(), changed)


@functools.lru_cache(maxsize=1)
def _read(file: Path, changed: int) -> dict[str, dict[str, int]]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(known: dict[str, dict[str, int]]) -> None:
    path().parent.mkdir(parents=True, exist_ok=True)
    temporary = path().with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
    temporary.replace(path())
