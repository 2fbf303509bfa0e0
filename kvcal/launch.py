"""What a launcher (torchrun, accelerate) tells each process of a run through its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvcal.errors import UsageError

_NAMES = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """Where this process stands among those of a run: its rank, their number, its number on this host."""

    rank: int
    size: int
    local_rank: int

    @property
    def leads(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.rank == 0


ALONE = Place(0, 1, 0)


def place() -> Place:
    """This process among those of its launcher; alone without one.

    Raises:
        UsageError: the environment holds ranks that cannot be meant.
    """
    if not all(name in os.environ for name in _NAMES):
        return ALONE
    values = {"LOCAL_RANK": os.environ.get("LOCAL_RANK", os.environ["RANK"])}
    values |= {name: os.environ[name] for name in _NAMES}
    try:
        rank, size, local_rank = (int(values[name]) for name in (*_NAMES, "LOCAL_RANK"))
    except ValueError:
        rank, size, local_rank = -1, 0, -1
    if not (0 <= rank < size and local_rank >= 0):
        shown = ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
        raise UsageError(f"the environment says {shown}, which is no place in a run; start it by torchrun")
    return Place(rank, size, local_rank)


def place_if_any() -> Place:
    """This process for messages; alone without a launcher, or with one that makes no sense."""
    try:
        return place()
    except UsageError:
        return ALONE


def refuse_several(command: str) -> None:
    """Refuse to run a command once per process.

    Raises:
        UsageError: a launcher started several processes.
    """
    if place().size > 1:
        raise UsageError(
            f"{command} runs in one process, a launcher started {place().size}; only calibrate shares its"
            " work among several"
        )
