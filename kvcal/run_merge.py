"""Orchestration of ``kvcal merge``: independent jobs become one calibration without running the model."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from kvcal import __version__, check, manifest, objectives, opening, plan, report, scales
from kvcal.errors import ModelError, PlanRefused, UsageError
from kvcal.export import bundle, targets
from kvcal.opening import Request
from kvcal.progress import Narrator
from kvcal.scales import Scales
from kvcal.statistics import Statistics

RECORD = "merge.json"

# What may differ between runs: the text, and what was only measured with it.
_FREE = {"description", "calibration", "evaluation", "gates"}
# Of a run's manifest, what the merged one says of each.
_OF_RUN = ("kvcal", "created", "compute", "calibration", "versions", "machine", "processes")


@dataclass(frozen=True)
class Run:
    """The records of one checkpoint; ``samples`` are hashes of what its statistics are of."""

    folder: Path
    plan: plan.Plan
    manifest: dict[str, Any]
    samples: list[str]
    statistics: Statistics


@dataclass(frozen=True)
class Merged:
    """What was written.

    Attributes:
        folder: the checkpoint.
        runs: the folders that were merged.
        samples: calibration samples of all.
        tokens: of these.
        granularity: of the scales.
        notices: what the user should know about them.
        before: what has to be done before serving, in words.
        serve: the command that serves it.
    """

    folder: str
    runs: list[str]
    samples: int
    tokens: int
    granularity: str
    notices: list[str]
    before: str | None
    serve: list[str]


def run_merge(folders: Sequence[Path], output: Path | None, narrator: Narrator, *, overwrite: bool) -> Merged:
    """Write the checkpoint that one calibration on the texts of all runs would have written.

    Weights and everything that is not about text come from the first.

    Raises:
        UsageError: fewer than two runs, or one of them twice.
        ModelError: a folder was not written by ``kvcal calibrate``, or its records are broken.
        PlanRefused: the runs do not go together, with every reason.
        CheckFailed: the written files break the engine's contract.
    """
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise UsageError("merge takes two or more different runs")
    with narrator.stage("read"):
        runs = [_read(folder) for folder in folders]
    reasons = [why for run in runs for why in _unmergeable(run)]
    reasons += [why for other in runs[1:] for why in _differences(runs[0], other)]
    reasons += [why for pair in itertools.combinations(runs, 2) for why in _counted_twice(*pair)]
    if reasons:
        raise PlanRefused(reasons)
    first = runs[0]
    with narrator.stage("scales"):
        statistics = reduce(Statistics.merge, (run.statistics for run in runs))
        statistics.require_sound()
        found = scales.compute(statistics, first.plan, value_weights=_value_weights(first, narrator))
    destination = output or first.folder.with_name(f"{first.folder.resolve().name}-merged")
    with (
        bundle.staging(destination, overwrite=overwrite, base=first.folder) as stage,
        bundle.translated_os_errors(destination),
        narrator.stage("export"),
    ):
        base = opening.base_quantization(first.folder)
        written = targets.of(first.plan).to_bundle(found, first.plan, base)
        if written.alone is not None:  # the model itself, as calibrate writes it
            bundle.write(bundle.Bundle({}, None), first.folder, stage.folder)
        bundle.write(written, first.folder, stage.folder, drop_quantization=base is None)
        result = _result(runs, destination)
        check.require(stage.folder, first.plan.engine.name)
        _write_records(runs, statistics, found, result, stage, written)
        stage.commit()
    return result


def _read(folder: Path) -> Run:
    resolved = opening.recorded_plan(folder)
    records = folder / bundle.RECORDS
    try:
        record = json.loads((records / "manifest.json").read_text(encoding="utf-8"))
        samples = json.loads((records / manifest.SAMPLES).read_text(encoding="utf-8"))
        if not isinstance(samples, list) or not all(isinstance(each, str) for each in samples):
            raise ValueError(f"{manifest.SAMPLES} is no list of hashes")
        record["model"]["sha256"], record["calibration"]["tokens"]
        statistics = Statistics.load(records / "statistics.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{folder}: its records cannot be merged: {what}; calibrate again") from None
    return Run(folder, resolved, record, samples, statistics)


def _unmergeable(run: Run) -> list[str]:
    """Why a run cannot be merged with any other."""
    reasons = []
    if run.plan.deliver != "metadata":
        reasons.append(
            f"{run.folder}: delivers its calibration in folded weights, which each run chooses for itself;"
            " calibrate all text in one run (torchrun shares it among processes)"
        )
    if run.plan.recipe.mixed is not None:
        reasons.append(
            f"{run.folder}: its layers in 16 bits were chosen by measuring the model; calibrate all text in"
            " one run with --max-kl or --bits-budget"
        )
    return reasons


def _differences(first: Run, other: Run) -> list[str]:
    """Why two runs are not parts of one calibration."""
    reasons = []
    if first.manifest["model"]["sha256"] != other.manifest["model"]["sha256"]:
        reasons.append(
            f"{first.folder} and {other.folder} are of different models: their weights or config.json differ"
        )
    mine, theirs = first.plan.recipe.model_dump(), other.plan.recipe.model_dump()
    differing = sorted(name for name in mine.keys() - _FREE if mine[name] != theirs[name])
    if differing:
        reasons.append(f"{first.folder} and {other.folder} have different settings: {', '.join(differing)}")
    return reasons


def _counted_twice(one: Run, other: Run) -> list[str]:
    both = (Counter(one.samples) & Counter(other.samples)).total()
    if not both:
        return []
    return [
        f"{one.folder} and {other.folder} have {both} calibration samples in common, which would count twice;"
        " give each run other text, or another calibration.seed"
    ]


def _value_weights(run: Run, narrator: Narrator) -> dict[int, torch.Tensor] | None:
    """What the objective ``attention`` needs of the weights; the model is loaded for it, but not run."""
    if run.plan.recipe.scale.objective != "attention":
        return None
    request = Request(str(run.folder), device="cpu")
    loaded = opening.load(run.folder, run.plan, request.placement, request, narrator)
    return objectives.value_weights(loaded, run.plan.model)


def _result(runs: Sequence[Run], destination: Path) -> Merged:
    resolved = runs[0].plan
    assert resolved.granularity is not None
    notices = ["fidelity and attention error were not measured: kvcal evaluate and kvcal validate do it"]
    for name in ("compute", "versions"):
        each = {json.dumps(part.get(name), sort_keys=True) for run in runs for part in _parts(run)}
        if len(each) > 1:
            notices.append(f"the runs differ in {name}: {' and '.join(sorted(each))}")
    return Merged(
        folder=str(destination),
        runs=[str(run.folder) for run in runs],
        samples=sum(len(run.samples) for run in runs),
        tokens=sum(_tokens(run) for run in runs),
        granularity=resolved.granularity.name,
        notices=notices,
        before=targets.before_serving(str(destination), resolved),
        serve=targets.serve_command(str(destination), resolved),
    )


def _tokens(run: Run) -> int:
    """Tokens that statistics are of: each one's K is in one layer of every kind."""
    kinds = {layer.cross: layer.index for layer in run.plan.layers}
    return sum(int(run.statistics.layers[index]["k"].tokens) for index in kinds.values())


def _parts(run: Run) -> list[dict[str, Any]]:
    """The calibrations behind a run, which may be a merged one itself."""
    parts: list[dict[str, Any]] = run.manifest.get("merged") or [
        {"folder": str(run.folder)} | {name: run.manifest.get(name) for name in _OF_RUN}
    ]
    return parts


def _write_records(
    runs: Sequence[Run],
    statistics: Statistics,
    found: Scales,
    result: Merged,
    stage: bundle.Stage,
    written: bundle.Bundle,
) -> None:
    first, samples = runs[0], sorted(itertools.chain.from_iterable(run.samples for run in runs))
    (stage.records / "recipe.yaml").write_text(first.plan.recipe.to_yaml(), encoding="utf-8")
    statistics.save(stage.records / "statistics.safetensors")
    found.save(stage.records / "scales.safetensors")
    bundle.write_json(stage.records / manifest.SAMPLES, samples)
    bundle.write_json(
        stage.records / "plan.json", report.plan_document(first.plan, first.manifest["model"]["name"])
    )
    content = hashlib.sha256("".join(samples).encode()).hexdigest()
    document = {
        "kvcal": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": first.manifest["model"],
        "architecture": first.manifest.get("architecture"),
        "calibration": {"samples": result.samples, "tokens": result.tokens, "sha256": content},
        "merged": [part for run in runs for part in _parts(run)],
        "sha256": bundle.hashes(stage.folder, written, ()),
    }
    bundle.write_json(stage.records / "manifest.json", document)
    bundle.write_json(stage.records / RECORD, vars(result))
