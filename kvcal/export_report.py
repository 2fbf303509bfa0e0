"""The report of a calibration as that of its export: measurements stay, what the engine decides is new."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcal import engine_report, markdown, records, report
from kvcal.check import Finding
from kvcal.export.bundle import Stage, write_json
from kvcal.page import render
from kvcal.page.render import PAGE
from kvcal.plan import Plan
from kvcal.report import Report
from kvcal.scales import Scales


def write(
    folder: Path,
    stage: Stage,
    plan: Plan,
    scales: Scales | None,
    findings: Sequence[Finding],
    exported: Mapping[str, Any],
) -> None:
    """Write ``report.json``, ``report.md`` and the page of an export, the last of its records.

    Args:
        folder: that it was made from.
        stage: where it is written.
        plan: for the new engine.
        scales: as they are written; None if there are none.
        findings: on the written files.
        exported: the document behind ``export.json``.

    Raises:
        ModelError: the records of the calibration are not whole.
    """
    was = records.read(folder)
    name = stage.destination.name
    try:
        document = translated(was.report, plan, scales, findings, exported)
        write_json(stage.records / "report.json", document)
        notes = engine_report.export_notes(name, exported)
        text = markdown.render(document, plan, was.manifest["model"]["name"], notes)
    except records.BROKEN as error:
        raise records.not_whole(folder, error) from None
    (stage.records / "report.md").write_text(text, encoding="utf-8")
    (stage.records / PAGE).write_text(render.render([stage.folder], names=[name]), encoding="utf-8")


def translated(
    was: Report,
    plan: Plan,
    scales: Scales | None,
    findings: Sequence[Finding],
    exported: Mapping[str, Any],
) -> Report:
    """The document with the engine's parts replaced."""
    planned = report.plan_document(plan, "")
    return {
        **was,
        "deliver": planned["deliver"],
        "checks": report.check_rows(findings),
        "engine": planned["engine"],
        "layers": [_scaled(layer, scales) for layer in was["layers"]],
        "before_serving": exported["before"],
        "serve": shlex.join(exported["serve"]),
    }


def _scaled(layer: Report, scales: Scales | None) -> Report:
    sides = {} if scales is None else scales.layers[layer["index"]]
    return layer | {side: layer[side] | {"scale": scale.flatten().tolist()} for side, scale in sides.items()}
