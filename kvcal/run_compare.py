"""Orchestration of ``kvcal compare``: schemes and a model to a table, a document and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcal import (
    comparison,
    comparison_report,
    folding,
    gates,
    manifest,
    models,
    opening,
    preflight,
    scheme,
    sources,
    trial,
)
from kvcal.comparison import Comparison, Row
from kvcal.errors import OutputError
from kvcal.export import bundle
from kvcal.opening import Request
from kvcal.progress import Narrator
from kvcal.recipe import Recipe
from kvcal.records import COMPARISON


def run_compare(
    request: Request, recipe: Recipe, names: Sequence[str], narrator: Narrator
) -> tuple[comparison_report.Document, list[Row]]:
    """Measure every scheme; with an output folder also write ``compare.json``, ``.md`` and ``.png``.

    ``names``: shipped schemes or files; none means all that are shipped and that the model can take, but for
    mixed ones, each of which takes as many passes as all others together.
    """
    opening.quiet_libraries()
    if request.output is not None and request.output.exists() and not request.overwrite:
        raise OutputError(f"{request.output} exists; give --overwrite to replace what compare wrote there")
    where = request.placement
    wanted = {scheme.name_of(name): scheme.load(name) for name in names or scheme.shipped()}
    if not names:
        wanted = {name: each for name, each in wanted.items() if each.mixed is None}
    source = sources.locate(request.model, request.revision, weights=False, say=narrator.say)
    candidates = {name: scheme.load(name) for s in wanted.values() for name in s.candidates}
    tried = trial.resolve(recipe, preflight.spec(source.config()), wanted, candidates, skip=not names)
    for notice in tried.notices:
        narrator.notice(notice)
    with narrator.stage("load"):
        source = sources.locate(request.model, request.revision, weights=True, say=narrator.say)
        tokenizer = models.load_tokenizer(source.folder, request.trust)
        processor = opening.processor_of(source.folder, request)
        text = opening.calibration_text(tried, tokenizer, processor, narrator)
        held_out = opening.held_out_text(tried, tokenizer, processor, narrator)
        # Windows in 16 bits and K before RoPE are known for whole samples only.
        text, held_out = replace(text, chunk=None), replace(held_out, chunk=None)
        model = opening.load(source.folder, tried, where, request, narrator)
    mixed = [s.mixed.samples for s in wanted.values() if s.mixed is not None]
    setting, judging = folding.split(text, max(mixed)) if mixed else (text, text)
    rows = comparison.compare(Comparison(tried, model, setting, judging, held_out, narrator))
    record = manifest.build(source, tried, manifest.compute_of(model), text, held_out, narrator.stages)
    document = comparison_report.document(tried, rows, _gates(recipe, rows), record)
    if request.output is not None:
        _write(request.output, rows, document)
    return document, rows


def _gates(recipe: Recipe, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every scheme against every gate of the recipe."""
    return [
        {"scheme": row.scheme, "name": g.name, "passed": g.passed, "text": f"{row.scheme}: {g}"}
        for row in rows
        for g in gates.apply(recipe.gates, row.fidelity, row.worst_error)
    ]


def _write(folder: Path, rows: Sequence[Row], document: comparison_report.Document) -> None:
    from kvcal import chart  # matplotlib takes a second to import, and only a picture needs it

    with bundle.translated_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        bundle.write_json(folder / COMPARISON, document)
        (folder / "compare.md").write_text(comparison_report.markdown(rows, document), encoding="utf-8")
        title = f"{document['model']}, {document['tokens']:,} tokens in samples of {document['context']}"
        chart.draw(rows, title, folder / "compare.png")
