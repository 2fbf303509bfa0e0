"""Several processes, one run: batches are dealt out, and what each found becomes what all of them know.

Rank ``r`` of ``n`` takes batches ``r``, ``r + n``, ... of a text, so each batch goes through the model in the
shape that one process would give it. What decisions rest on is afterwards the same on every rank, bit for
bit, so every rank decides for itself and alike; what is not dealt out, each rank does in full. Rank 0 alone
speaks and writes.

All waiting is done at meetings: each rank leaves a note in the launcher's store and looks for the others',
and meanwhile for ranks that failed or fell silent. Collectives start behind a meeting, when all are there to
take part. They move a few megabytes on the CPU once per stage, so gloo serves GPUs as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from kvcal import launch
from kvcal.data import Batch, TokenSet
from kvcal.errors import Interrupted, KvcalError, RankFailed, UsageError
from kvcal.launch import ALONE, Place
from kvcal.placement import Placement
from kvcal.recipe import SIDES
from kvcal.statistics import MERGED, SideStatistics, Statistics

T = TypeVar("T")

_LIMIT_NAME = "KVCAL_RANK_TIMEOUT"
_LIMIT = 180.0  # seconds without a sign of life; longer than a library holds Python's lock while it loads
_COLLECTIVE = timedelta(minutes=10)  # a broken connection ends one at once; this is for a dead network
_POLL_FIRST, _POLL_LAST = 0.0005, 0.02  # seconds between two looks, growing: most meetings are short
_GRACE = 2.0  # seconds in which ranks that fail together hear of each other
_INTERRUPTED = "interrupted"

_world: _World | None = None


@contextmanager
def joined() -> Iterator[Place]:
    """Context in which this process is one of its launcher's; alone without one.

    An exception inside becomes known to the other ranks, whose next meeting fails. Ranks that fail along with
    rank 0 leave the word to it.

    Raises:
        RankFailed: another rank failed, fell silent for ``KVCAL_RANK_TIMEOUT`` seconds, or never came.
    """
    global _world
    place = launch.place()
    if place.size == 1:
        yield place
        return
    _world = world = _World(place)
    try:
        world.meet("start")
        with _as_failed_rank():
            store = dist.PrefixStore("gloo", world.store)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
        yield place
        world.meet("end")
    except (Exception, KeyboardInterrupt) as error:
        raised: BaseException = error
        if isinstance(error, KeyboardInterrupt | Interrupted):
            failed = world.failed(besides=_INTERRUPTED)  # a launcher ends every rank when one has failed
            raised = error if failed is None else RankFailed(failed)
        world.tell(_told(raised))
        if not place.leads and world.leader_speaks():
            sys.exit(_exit_code(raised))
        if raised is error:
            raise
        raise raised from None
    finally:
        _world = None
        world.close()


def place() -> Place:
    """This process among those that share the work in hand."""
    return ALONE if _world is None else _world.place


def placed(where: Placement) -> Placement:
    """The same placement on a GPU of this rank's own.

    Raises:
        UsageError: there are fewer GPUs than ranks, or all ranks were given the same ones.
    """
    here = place()
    if here.size == 1:
        return where
    if where.device_map == "auto":
        raise UsageError(
            "--device-map auto spreads one model over everything; several processes take one or layerwise"
        )
    if where.device.type == "cpu":
        return where
    if str(where.device) != "cuda":
        raise UsageError(f"--device {where.device} would put every rank on one GPU; use auto or cuda")
    if here.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {here.local_rank} has no GPU, torch sees {torch.cuda.device_count()} here; start"
            " as many processes as there are GPUs, or pass --device cpu"
        )
    torch.cuda.set_device(here.local_rank)
    return dataclasses.replace(where, device=torch.device("cuda", here.local_rank))


def meet(what: str) -> None:
    """Wait until every rank is here.

    Raises:
        RankFailed: one of them will never be.
    """
    if _world is not None:
        _world.meet(what)


def gathered(what: str, value: T) -> list[T]:
    """What every rank has, in the order of ranks. Tensors must be on the CPU."""
    if _world is None:
        return [value]
    _world.meet(what)
    found: list[Any] = [None] * _world.place.size
    with _as_failed_rank():
        dist.all_gather_object(found, value)
    return found


def require_same(facts: Mapping[str, str]) -> None:
    """Refuse ranks that would do different work.

    Raises:
        UsageError: on every rank, with what differs where.
    """
    first, *others = gathered("facts", dict(facts))
    for rank, theirs in enumerate(others, 1):
        differing = [name for name in first if theirs.get(name) != first[name]]
        if differing:
            raise UsageError(
                f"rank {rank} has another {' and '.join(differing)} than rank 0; give every process the same"
            )


def dealt(tokens: TokenSet, batch_size: int) -> tuple[Iterator[Batch], float]:
    """This rank's batches, and for a progress bar the tokens of all ranks behind one of its own."""
    here = place()
    each = [sum(len(tokens.samples[i]) for i in group) for group in tokens.groups(batch_size)]
    mine = sum(each[here.rank :: here.size])
    batches = itertools.islice(tokens.batches(batch_size), here.rank, None, here.size)
    return batches, tokens.tokens / mine if mine else 0.0


def in_order(what: str, mine: Sequence[T]) -> list[T]:
    """What came of every batch, in the order of batches, from what came of this rank's."""
    each = gathered(what, list(mine))
    dealt = itertools.zip_longest(*([(item,) for item in found] for found in each), fillvalue=())
    return [item for round_ in dealt for of_rank in round_ for item in of_rank]


def merged(statistics: Statistics) -> Statistics:
    """Statistics of every rank's batches together, the same on every rank.

    Extremes and counts are those of one process bit for bit. Sums are added in the order of ranks, so they
    may differ from one process' in the last bits of float64.
    """
    if _world is None:
        return statistics
    _world.meet("merge")
    places = [(index, side) for index in sorted(statistics.layers) for side in SIDES]
    found: dict[tuple[int, Any], dict[str, torch.Tensor]] = {each: {} for each in places}
    fields = dict.fromkeys(
        name for index, side in places for name in statistics.layers[index][side].tensors()
    )
    for name in fields:
        # Histograms are int32 for K and V and int64 for Q; nothing else has two dtypes.
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
            parts = {
                (index, side): tensor
                for index, side in places
                if (tensor := statistics.layers[index][side].tensors().get(name)) is not None
                and tensor.dtype == dtype
            }
            if parts:
                total = _reduced(name, torch.cat([part.flatten() for part in parts.values()]))
                pieces = torch.split(total, [part.numel() for part in parts.values()])
                for (each, part), piece in zip(parts.items(), pieces, strict=True):
                    found[each][name] = piece.view(part.shape)
    layers: dict[int, dict[Any, SideStatistics]] = {}
    for (index, side), tensors in found.items():
        layers.setdefault(index, {})[side] = SideStatistics(**tensors)
    return Statistics(layers)


def _reduced(name: str, mine: torch.Tensor) -> torch.Tensor:
    """One field over all ranks, ``(elements,)``."""
    assert _world is not None
    with _as_failed_rank():
        if not mine.is_floating_point():
            dist.all_reduce(mine)
            return mine
        # Not by all_reduce: gloo's minimum may lose NaN, and its sum has no order that it promises.
        each = [torch.empty_like(mine) for _ in range(_world.place.size)]
        dist.all_gather(each, mine)
    total, *others = each
    for other in others:
        total = MERGED.get(name, torch.add)(total, other)
    return total


class _World:
    """The launcher's store, and what is known of the other ranks through it."""

    def __init__(self, place: Place):
        self.place = place
        self._limit = _limit()
        self._meetings = itertools.count()
        self._ending = threading.Event()
        waiting = timedelta(seconds=self._limit)
        try:
            self.store, *_ = next(rendezvous("env://", timeout=waiting))
            self.store.set_timeout(waiting)
        except (ValueError, TypeError) as error:
            raise UsageError(f"the launcher's environment is not whole: {error}; start by torchrun") from None
        except RuntimeError:
            raise RankFailed(
                f"not all {place.size} ranks came within {self._limit:g} s, or rank 0's address is wrong"
            ) from None
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._heart.start()

    def meet(self, what: str) -> None:
        """Leave a note and wait for everybody's."""
        name = f"kvcal/meeting/{next(self._meetings)}"
        everybody = range(self.place.size)
        with _as_failed_rank():
            self.store.set(f"{name}/{self.place.rank}", what)
            watch, pauses = _Watch(self.store, self._limit), _pauses()
            while not self.store.check([f"{name}/{rank}" for rank in everybody]):
                failed = self.failed()
                if failed is not None:
                    raise RankFailed(failed)
                watch.look({rank: f"{name}/{rank}" for rank in everybody})
                time.sleep(next(pauses))
            notes = {self.store.get(f"{name}/{rank}").decode() for rank in everybody}
        if notes != {what}:
            raise RankFailed(
                f"ranks went different ways: {' and '.join(sorted(notes))}; this is a bug in kvcal"
            )

    def tell(self, message: str) -> None:
        """Let the other ranks know that this one failed."""
        with suppress(RuntimeError):
            self.store.set(f"kvcal/failed/{self.place.rank}", message)

    def failed(self, besides: str | None = None) -> str | None:
        """What another rank failed of, the lowest one; None while none has."""
        for rank in range(self.place.size):
            key = f"kvcal/failed/{rank}"
            with suppress(RuntimeError):
                if rank != self.place.rank and self.store.check([key]):
                    message = self.store.get(key).decode()
                    if message != besides:
                        return f"rank {rank} failed: {message}"
        return None

    def leader_speaks(self) -> bool:
        """Whether rank 0 fails too, and so has said what there is to say."""
        with suppress(RuntimeError):
            return _within(_GRACE, lambda: self.store.check(["kvcal/failed/0"]))
        return False

    def close(self) -> None:
        """End what was begun. Rank 0 goes last, as the store may be its own."""
        self._ending.set()
        self._heart.join(_GRACE)
        with suppress(RuntimeError):
            if self.place.leads:
                _within(_GRACE, lambda: self.store.add("kvcal/left", 0) >= self.place.size - 1)
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
        with suppress(RuntimeError):
            if not self.place.leads:
                self.store.add("kvcal/left", 1)

    def _beat(self) -> None:
        """Count up while this process lives, whatever its main thread is busy with."""
        with suppress(RuntimeError):  # the store is gone; the main thread will find out
            while not self._ending.wait(min(1.0, self._limit / 4)):
                self.store.add(_pulse(self.place.rank), 1)


class _Watch:
    """Ranks that are being waited for, by the pulse that they show."""

    def __init__(self, store: Any, limit: float):
        self._store = store
        self._limit = limit
        self._seen: dict[int, tuple[int, float]] = {}
        self._next = 0.0

    def look(self, notes: Mapping[int, str]) -> None:
        """Raise once a rank whose note is missing has shown no pulse for the limit."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + min(0.5, self._limit / 8)
        for rank in (rank for rank, note in notes.items() if not self._store.check([note])):
            pulse = self._store.add(_pulse(rank), 0)
            before, since = self._seen.get(rank, (-1, now))
            self._seen[rank] = (pulse, now if pulse != before else since)
            if now - self._seen[rank][1] > self._limit:
                raise RankFailed(
                    f"rank {rank} gave no sign of life for {self._limit:g} s; its process or host is dead"
                )


def _told(error: BaseException) -> str:
    """What the other ranks hear of an error."""
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return _INTERRUPTED
    return str(error) if isinstance(error, KvcalError) else f"{type(error).__name__}: {error}"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, KvcalError) else 1


def _pulse(rank: int) -> str:
    return f"kvcal/pulse/{rank}"


def _limit() -> float:
    text = os.environ.get(_LIMIT_NAME)
    try:
        limit = _LIMIT if text is None else float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise UsageError(f"{_LIMIT_NAME}={text} must be seconds above zero")
    return limit


def _within(seconds: float, ready: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_LAST)
    return True


def _pauses() -> Iterator[float]:
    pause = _POLL_FIRST
    while True:
        yield pause
        pause = min(1.1 * pause, _POLL_LAST)


@contextmanager
def _as_failed_rank() -> Iterator[None]:
    """Errors of the store and of collectives mean that a peer is gone."""
    try:
        yield
    except RuntimeError as error:
        failed = None if _world is None else _world.failed()
        first_line = str(error).split("\n", 1)[0]
        raise RankFailed(failed or f"the connection to another rank is lost: {first_line}") from None
