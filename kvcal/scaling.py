"""Tokens per second of a shared calibration: torchrun is started for each number of processes in turn.

``python -m kvcal.scaling`` is the rank that it starts: it loads the model, warms up, and times passes over
the calibration text, the forward passes and the merge of their statistics, from a meeting of all ranks to
the last one's end. Loading counts nowhere.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvcal import calibrate, distributed, models, opening, preflight, scales, sources
from kvcal import recipe as recipes
from kvcal.errors import CheckFailed, KvcalError, RankFailed, UsageError
from kvcal.opening import Request
from kvcal.progress import Narrator
from kvcal.statistics import Statistics

_SPEC = "KVCAL_SCALING"  # environment variable: what a rank is to do, JSON
_SUMS = ("total", "squares", "moments", "weighted_moments", "weight")


@dataclass(frozen=True)
class ScalingRow:
    """Calibration by so many processes.

    Attributes:
        processes: ranks, one GPU each where there are GPUs.
        tokens_per_second: of all together, the median over passes.
        low: slowest pass.
        high: fastest pass.
        ratio: to the first row.
        device: kind of device.
        statistics: against the first row: ``bit-equal``, or ``extremes bit-equal, sums to`` the largest
            relative difference of a sum in float64.
    """

    processes: int
    tokens_per_second: int
    low: int
    high: int
    ratio: float
    device: str
    statistics: str


def run_bench_scaling(
    request: Request,
    recipe: recipes.Recipe,
    processes: Sequence[int],
    passes: int,
    repeats: int,
    narrator: Narrator,
) -> list[ScalingRow]:
    """Time each number of processes, ``repeats`` starts of ``passes`` passes, in turn.

    Raises:
        CheckFailed: extremes or counts of two numbers of processes differ.
        RankFailed: a start failed.
        UsageError: numbers of processes that are no use, or more than there are GPUs.
    """
    if len(set(processes)) < max(1, len(processes)) or min(processes) < 1:
        raise UsageError("--processes takes different numbers above zero, such as 1,2")
    preflight.refuse_encoder(request.model, request.revision, narrator)
    preflight.resolve(request.model, request.revision, recipe, narrator)
    sources.locate(request.model, request.revision, weights=True, say=narrator.say)  # once, not by each rank
    if models.device_named(request.device).type == "cuda" and max(processes) > torch.cuda.device_count():
        raise UsageError(
            f"torch sees {torch.cuda.device_count()} GPUs, fewer than {max(processes)} processes"
        )
    seconds: dict[int, list[float]] = {count: [] for count in processes}
    found: dict[int, Any] = {}
    with (
        narrator.stage("bench scaling", repeats * len(processes), "starts") as on_starts,
        tempfile.TemporaryDirectory(prefix="kvcal-scaling-") as scratch,
    ):
        for repeat in range(repeats):
            for count in processes:
                folder = Path(scratch) / str(count)
                found[count] = _start(request, recipe, count, passes, folder)
                seconds[count] += found[count]["seconds"]
                each = ", ".join(f"{found[count]['tokens'] / s:,.0f}" for s in found[count]["seconds"])
                narrator.say(
                    f"{count} process{'es' if count > 1 else ''}, start {repeat + 1} of {repeats}: {each}"
                    " tokens/s"
                )
                on_starts(1)
        statistics = {count: Statistics.load(Path(scratch) / f"{count}.safetensors") for count in processes}
    first = processes[0]
    speeds = {count: [found[count]["tokens"] / each for each in seconds[count]] for count in processes}
    return [
        ScalingRow(
            processes=count,
            tokens_per_second=round(median(speeds[count])),
            low=round(min(speeds[count])),
            high=round(max(speeds[count])),
            ratio=round(median(speeds[count]) / median(speeds[first]), 3),
            device=found[count]["device"],
            statistics=compared(statistics[first], statistics[count]),
        )
        for count in processes
    ]


def compared(one: Statistics, other: Statistics) -> str:
    """How equal statistics of the same text are.

    Raises:
        CheckFailed: an extreme or a count differs.
    """
    apart = 0.0
    for index, sides in one.layers.items():
        for side, seen in sides.items():
            theirs = other.layers[index][side].tensors()
            for name, tensor in seen.tensors().items():
                if torch.equal(tensor, theirs[name]):
                    continue
                if name not in _SUMS:
                    raise CheckFailed(
                        f"layer {index}: {name} of {side.upper()} depends on the number of processes"
                    )
                relative = (tensor - theirs[name]).abs() / tensor.abs().clamp(min=1e-300)
                apart = max(apart, float(relative.max()))
    return "bit-equal" if apart == 0 else f"extremes bit-equal, sums to {apart:.1e}"


def _start(request: Request, recipe: recipes.Recipe, count: int, passes: int, folder: Path) -> Any:
    """One torchrun; what its rank 0 found. Statistics go to ``<folder>.safetensors``."""
    document = {
        "model": request.model,
        "device": request.device,
        "recipe": recipe.to_yaml(),
        "passes": passes,
        "output": str(folder),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]  # a host's own name may not resolve
    done = subprocess.run(
        [*command, "-m", "kvcal.scaling"],
        env=os.environ | {_SPEC: json.dumps(document), "OMP_NUM_THREADS": _threads(count)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise RankFailed(f"{count} processes failed: {_why(done.stdout)}")
    return json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))


def _why(said: str) -> str:
    """What ranks called an error, or else the last that was said; torchrun adds words of its own."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "; ".join(dict.fromkeys(errors)) or (lines[-1] if lines else "they said nothing")


def _threads(count: int) -> str:
    """Threads for each of ``count`` processes: as many as asked for, else an equal share of the cores."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // count))


def _rank() -> None:
    """What one rank does."""
    wanted = json.loads(os.environ[_SPEC])
    request = Request(wanted["model"], device=wanted["device"])
    opening.quiet_libraries()
    with distributed.joined() as here:
        where = distributed.placed(request.placement)
        recipe = recipes.parse_text(wanted["recipe"], "the benchmark")
        resolved, source = preflight.resolve(request.model, None, recipe, Narrator.silent())
        tokenizer = models.load_tokenizer(source.folder, request.trust)
        processor = opening.processor_of(source.folder, request)
        text = opening.calibration_text(resolved, tokenizer, processor, Narrator.silent())
        model = opening.load(source.folder, resolved, where, request, Narrator.silent())

        def once() -> tuple[float, Statistics]:
            distributed.meet("a pass begins")
            start = time.perf_counter()
            found = calibrate.calibrate(model, resolved, text, collect=scales.collect(resolved))
            return time.perf_counter() - start, found

        once()
        seconds = []
        for _ in range(wanted["passes"]):
            mine, found = once()
            seconds.append(max(distributed.gathered("seconds", mine)))
        if here.leads:
            output = Path(wanted["output"])
            found.save(output.with_suffix(".safetensors"))
            kind = torch.cuda.get_device_name(where.device) if where.device.type == "cuda" else "cpu"
            document = {"seconds": seconds, "tokens": text.tokens, "device": kind}
            output.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    try:
        _rank()
    except KvcalError as error:
        sys.exit(f"error: {error}")
