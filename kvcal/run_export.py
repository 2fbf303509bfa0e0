"""Orchestration of ``kvcal export``: a written calibration for another engine, without running the model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcal import check, engines, export_report, manifest, mixed, models, opening, plan, report, scales
from kvcal.engine_spec import EngineSpec
from kvcal.errors import ModelError, PlanRefused
from kvcal.export import bundle, modelopt, targets
from kvcal.progress import Narrator
from kvcal.records import EXPORT

# Records of the calibration itself; the rest is about the engine and is written anew.
_KEPT = (
    "statistics.safetensors",
    "manifest.json",
    manifest.SAMPLES,
    mixed.RECORD,
    "folds.json",
    "folds.safetensors",
    "originals.safetensors",
)


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: the checkpoint.
        engine: name and version.
        outcome: ``consumed`` or ``folded``.
        granularity: of the scales; None if there are none.
        reduced_from: the finer granularity that they were calibrated in; None if it is the same.
        largest_reduction: how many times its own scale a head at most has now; 1.0 without a reduction.
        before: what has to be done before serving, in words.
        serve: the command that serves it.
        notices: what of the numbers in the report does not carry over.
    """

    folder: str
    engine: str
    outcome: str
    granularity: str | None
    reduced_from: str | None
    largest_reduction: float
    before: str | None
    serve: list[str]
    notices: list[str]


def run_export(
    folder: Path,
    engine_name: str,
    output: Path | None,
    narrator: Narrator,
    *,
    overwrite: bool,
    base: Path | None = None,
) -> Exported:
    """Write what ``folder`` holds in the form of another engine.

    ``base`` is a checkpoint of the same model with other weights, quantized ones as a rule: the scales go
    beside its weights instead of those of ``folder``.

    Raises:
        ModelError: the folder was not written by ``kvcal calibrate``, or the base is no checkpoint.
        PlanRefused: the engine would not consume it, with what would reach it, or the base is another model.
        CheckFailed: the written files break the engine's contract.
    """
    engine = engines.get(engine_name)
    was = opening.recorded_plan(folder)
    if base is not None:
        _require_same_model(was, base)
    weights = base or folder
    resolved, found = _for_engine(folder, weights, was, engine)
    kept = was.granularity.name if was.granularity and resolved.granularity else None
    reduced_from = kept if resolved.granularity and kept != resolved.granularity.name else None
    largest = 1.0
    if found is not None and reduced_from is not None:
        fine, found = found, scales.reduced(found, "per_tensor")
        largest = _largest_ratio(fine, found, engine)
    if found is not None:
        # The same absolute maximum by the other engine's convention.
        factor = was.engine.reach(was.format) / engine.reach(was.format)
        found = scales.times(found, factor)
    destination = output or folder.with_name(f"{folder.resolve().name}-{engine.name}")
    with (
        bundle.staging(destination, overwrite=overwrite, base=weights) as stage,
        bundle.translated_os_errors(destination),
        narrator.stage("export"),
    ):
        section = opening.base_quantization(weights)
        written = targets.of(resolved).to_bundle(found, resolved, section)
        bundle.write(written, weights, stage.folder, drop_quantization=section is None)
        if (stage.folder / modelopt.OWN_CONFIG).is_file():
            modelopt.announce(stage.folder / modelopt.OWN_CONFIG, resolved)
        _write_records(folder, stage.records, resolved, found)
        result = Exported(
            folder=str(destination),
            engine=f"{engine.name} {engine.version}",
            outcome="folded" if resolved.deliver == "fold" else "consumed",
            granularity=resolved.granularity.name if resolved.granularity else None,
            reduced_from=reduced_from,
            largest_reduction=largest,
            before=targets.before_serving(str(destination), resolved),
            serve=targets.serve_command(str(destination), resolved),
            notices=_notices(engine, resolved, base),
        )
        findings = check.require(stage.folder, engine.name)
        record = vars(result) | {"from": was.engine.name}
        bundle.write_json(stage.records / EXPORT, record)
        if (folder / bundle.RECORDS / "report.json").is_file():  # a merged calibration has none
            export_report.write(folder, stage, resolved, found, findings, record)
        stage.commit()
    return result


def _require_same_model(was: plan.Plan, base: Path) -> None:
    """Weights may differ, what is cached may not."""
    if not (base / "config.json").is_file():
        raise ModelError(f"{base}: is no checkpoint (no config.json)")
    if was.deliver != "metadata":
        raise PlanRefused(
            [
                "the calibration is folded into its weights; another base takes scales alone"
                " (--deliver metadata)"
            ]
        )
    model = models.described(base)
    if len(model.layers) != len(was.layers):
        raise PlanRefused(
            [f"{base} has {len(model.layers)} attention layers, the calibration {len(was.layers)}"]
        )
    for mine, theirs in zip(was.layers, model.layers, strict=True):
        if mine != theirs:
            raise PlanRefused([f"{base}: layer {theirs.index} is {theirs}, the calibration is of {mine}"])


def _for_engine(
    folder: Path, weights: Path, was: plan.Plan, engine: EngineSpec
) -> tuple[plan.Plan, scales.Scales | None]:
    """The same calibration planned for ``engine`` and these weights, and its scales as they were recorded."""
    # Scales alone are those of the weights they were calibrated for, folded or not.
    wanted: dict[str, Any] = {"engine": engine.name, "deliver": was.deliver}
    if engine.standalone and was.deliver == "both":
        wanted["deliver"] = "metadata"
    if was.granularity is not None:
        fits = was.granularity.name in engine.granularities
        wanted["granularity"] = was.granularity.name if fits or not engine.granularities else "per_tensor"
        for why in engine.ignores(was.model, was.format, was.deliver):
            how = "" if was.format.block else f": calibrate again with --engine {engine.name} --deliver fold"
            raise PlanRefused([why + how])
    section = opening.base_quantization(weights)
    method = section.get("quant_method") if section else None
    readable = (*engine.base_quant_methods, *engine.scalar_quant_methods)
    if method is not None and method not in readable:
        able = [e.name for e in engines.ENGINES if method in (*e.base_quant_methods, *e.scalar_quant_methods)]
        others = f"; {' and '.join(able)} read it" if able else ""
        raise PlanRefused(
            [
                f"base weights with quant_method {method!r} cannot carry a KV scheme for"
                f" {engine.name}{others}; or take the unquantized model"
            ]
        )
    if method in engine.scalar_quant_methods and was.granularity is not None:
        wanted["granularity"] = "per_tensor"
    resolved = plan.resolve(was.recipe.override(wanted), was.model)
    resolved = replace(resolved, skipped_layers=was.skipped_layers)
    if resolved.granularity is None:
        return resolved, None
    return resolved, opening.recorded_scales(folder)


def _largest_ratio(fine: scales.Scales, coarse: scales.Scales, engine: EngineSpec) -> float:
    ratios = [
        float(coarse.layers[index][side].max() / scale.min())
        for index, sides in fine.layers.items()
        for side, scale in sides.items()
        if side in engine.scale_suffixes
    ]
    return max(ratios)


def _write_records(folder: Path, records: Path, resolved: plan.Plan, found: scales.Scales | None) -> None:
    for name in _KEPT:
        if (folder / bundle.RECORDS / name).is_file():
            shutil.copyfile(folder / bundle.RECORDS / name, records / name)
    (records / "recipe.yaml").write_text(resolved.recipe.to_yaml(), encoding="utf-8")
    bundle.write_json(records / "plan.json", report.plan_document(resolved, str(folder)))
    if found is not None:
        found.save(records / "scales.safetensors")


def _notices(engine: EngineSpec, resolved: plan.Plan, base: Path | None) -> list[str]:
    notices = []
    if base is not None:
        notices.append(f"fidelity was measured with the weights that were calibrated, not those of {base}")
    if resolved.format.name in engine.approximations:
        notices.append(f"{engine.title}: {engine.approximations[resolved.format.name]}")
    if resolved.granularity is not None and "q" not in engine.scale_suffixes:
        notices.append(f"{engine.title} takes no scale of Q: kernels that round Q use 1.0 for it")
    return notices
