"""What engines load, and what becomes of a calibration in each, in the terminal and as documents."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcal.engine_spec import EngineSpec
from kvcal.plan import EngineVerdict

_STYLE = {"consumed": "green", "folded": "green", "ignored": "red", "refused": "red"}


def engine_document(engine: EngineSpec) -> dict[str, Any]:
    """One row of ``kvcal engines --json``."""
    return {
        "name": engine.name,
        "title": engine.title,
        "version": engine.version,
        "cache_dtype": dict(engine.cache_dtype),
        "static_scales": {
            "formats": list(engine.loads_scales),
            "granularities": list(engine.granularities),
            "names": [f"<attention module>.{suffix}" for suffix in engine.scale_suffixes.values()],
            "model_types": None if engine.families is None else list(engine.families),
        },
        "ignored": dict(engine.unread),
        "approximations": dict(engine.approximations),
        "notes": list(engine.notes),
        "source": engine.source,
    }


def print_engines(console: Console, engines: Sequence[EngineSpec]) -> None:
    table = Table(title="what engines load", title_justify="left")
    for column in ("engine", "caches", "static scales", "kvcal delivers"):
        table.add_column(column, overflow="fold", no_wrap=column == "caches")
    for engine in engines:
        table.add_row(
            f"{engine.name}\n{engine.version}",
            "\n".join(engine.cache_dtype),
            _scales(engine),
            "scales, folds, or both" if engine.loads_scales else "folded weights",
            end_section=True,
        )
    console.print(table, highlight=False)
    for engine in engines:
        lines = [*(f"{fmt}: it {why}" for fmt, why in engine.unread.items()), *engine.notes]
        lines += [f"{fmt}: {how}" for fmt, how in engine.approximations.items()]
        console.print(f"[bold]{engine.title}[/] {engine.version}", highlight=False)
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False)
        console.print(f"  source: {engine.source}", markup=False, highlight=False, style="dim")


def _scales(engine: EngineSpec) -> str:
    if not engine.loads_scales:
        return "none"
    lines = [", ".join(engine.granularities), *engine.scale_suffixes.values()]
    if engine.families is not None:
        lines.append(f"models: {', '.join(engine.families)}")
    return "\n".join(lines)


def print_shares(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Scales of every rank, over the layers."""
    table = Table(title="scales by rank, smallest to largest over the layers", title_justify="left")
    sides = list(rows[0]["scales"])
    for column in ("rank", "KV heads", *sides):
        table.add_column(column)
    for rank in sorted({row["rank"] for row in rows}):
        mine = [row for row in rows if row["rank"] == rank]
        heads = sorted({(row["first_head"], row["stop_head"] - 1) for row in mine})
        values = {side: [x for row in mine for x in row["scales"][side]] for side in sides}
        table.add_row(
            str(rank),
            ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in heads),
            *(f"{min(each):.3g} to {max(each):.3g}" for each in values.values()),
        )
    console.print(table, highlight=False)


def verdict_document(found: EngineVerdict) -> dict[str, Any]:
    """One row of ``kvcal plan --engine all --json``."""
    return {
        "engine": found.engine.name,
        "version": found.engine.version,
        "deliver": found.deliver,
        "verdict": found.verdict.outcome,
        "reasons": list(found.verdict.reasons),
        "alternative": found.verdict.alternative,
    }


def print_verdicts(console: Console, found: Sequence[EngineVerdict], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("engine", "verdict", "why", "what would reach it"):
        table.add_column(column, overflow="fold")
    for each in found:
        verdict = each.verdict
        table.add_row(
            f"{each.engine.name}\n{each.engine.version}",
            f"[{_STYLE[verdict.outcome]}]{verdict.outcome}[/]",
            "\n".join(verdict.reasons),
            verdict.alternative or ("" if verdict.outcome in ("consumed", "folded") else "nothing"),
            end_section=True,
        )
    console.print(table, highlight=False)


def print_exported(console: Console, exported: dict[str, Any]) -> None:
    granularity = exported["granularity"]
    console.print(
        f"{exported['outcome']} by {exported['engine']}"
        + (f": {granularity} scales" if granularity else ": no scales beside the weights"),
        highlight=False,
    )
    if exported["reduced_from"]:
        console.print(
            f"{exported['reduced_from']} scales became {granularity}: a head's scale grew up to"
            f" {exported['largest_reduction']:.3g} times; `kvcal bench reduction` tells the cost in KL",
            highlight=False,
        )
    _print_written(console, exported)


def export_notes(name: str, exported: Mapping[str, Any] | None) -> list[str]:
    """What an export has not been measured with, from its ``export.json``."""
    if exported is None:
        return []
    reduced = exported["reduced_from"]
    how = f"; its scales were {reduced} then and are {exported['granularity']} now" if reduced else ""
    first = f"{name} was written for {exported['engine']} from a calibration for {exported['from']}"
    return [
        f"{first}, which was measured{how}.",
        *(f"{notice[0].upper()}{notice[1:]}." for notice in exported["notices"]),
    ]


def print_merged(console: Console, merged: dict[str, Any]) -> None:
    console.print(
        f"{len(merged['runs'])} runs merged: {merged['granularity']} scales from"
        f" {merged['samples']:,} samples, {merged['tokens']:,} tokens",
        highlight=False,
    )
    _print_written(console, merged)


def _print_written(console: Console, written: dict[str, Any]) -> None:
    """What is left to know and to do."""
    for notice in written["notices"]:
        console.print(f"note: {notice}", style="yellow", markup=False, highlight=False)
    if written["before"]:
        console.print(f"first {written['before']}", markup=False, highlight=False, soft_wrap=True)
    if written["serve"]:
        console.print("serve with", highlight=False)
        console.print(f"  {shlex.join(written['serve'])}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"written to {written['folder']}", highlight=False, soft_wrap=True)
