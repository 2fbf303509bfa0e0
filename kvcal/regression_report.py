"""Two calibrations side by side: in the terminal, as a document and as Markdown. Nothing is computed here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcal.regression import Comparison

_SHOWN = 8  # layers whose scales changed


def document(found: Comparison) -> dict[str, Any]:
    """What ``kvcal diff --json`` prints."""
    return {
        "old": str(found.old.folder),
        "new": str(found.new.folder),
        "verdict": "pass" if found.passed else "fail",
        "incomparable": list(found.incomparable),
        "newly_failed": found.newly_failed,
        "gates": [
            {
                "name": gate.name,
                "old": was,
                "value": gate.value,
                "limit": gate.limit,
                "passed": gate.passed,
                "text": str(gate),
            }
            for was, gate in found.gates
        ],
        "changes": [asdict(change) for change in found.changes],
        "scales": [asdict(change) for change in found.scales],
    }


def print_comparison(console: Console, found: Comparison) -> None:
    """Within 80 columns."""
    for reason in found.incomparable:
        console.print(f"note: not comparable: {reason}", style="yellow", markup=False, highlight=False)
    for heading, rows in _tables(found):
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        for place, name in enumerate(heading):
            table.add_column(name, overflow="fold", justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(*row)
        if rows:
            console.print(table, highlight=False, markup=False)
            console.print()
    for line in _remarks(found):
        console.print(line, highlight=False, markup=False)


def markdown(found: Comparison) -> str:
    """For people and for a pull request."""
    lines = [
        f"# Calibration of {found.new.model} against the last one",
        "",
        f"**Verdict: {'pass' if found.passed else 'fail'}.** {found.old.folder}, then {found.new.folder}.",
        "",
        *(f"Not comparable: {reason}.\n" for reason in found.incomparable),
    ]
    for heading, rows in _tables(found):
        if rows:
            lines.append(f"| {' | '.join(heading)} |")
            lines.append(f"|---|{'---:|' * (len(heading) - 1)}")
            lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows]
            lines.append("")
    return "\n".join([*lines, *(f"{line}\n" for line in _remarks(found))])


def _tables(found: Comparison) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Headings and rows: gates, what else changed, scales."""
    gates: list[tuple[str, ...]] = [
        (gate.name, f"{was:.6g}", f"{gate.value:.6g}", f"{gate.limit:.6g}", "" if gate.passed else "WORSE")
        for was, gate in found.gates
    ]
    changes: list[tuple[str, ...]] = [(change.what, change.old, change.new) for change in found.changes]
    scales: list[tuple[str, ...]] = [
        (f"layer {c.layer}, {c.side.upper()}", f"{c.old:.6g}", f"{c.new:.6g}", f"{c.factor:.3g}")
        for c in found.scales[:_SHOWN]
    ]
    return [
        (("fidelity", "old", "new", "limit", ""), gates),
        (("changed", "old", "new"), changes),
        (("scale", "old", "new", "times"), scales),
    ]


def _remarks(found: Comparison) -> list[str]:
    lines = []
    if len(found.scales) > _SHOWN:
        lines.append(f"{len(found.scales) - _SHOWN} more scales changed, by less")
    if not found.scales:
        lines.append("no scale changed")
    if found.newly_failed:
        lines.append("the new calibration fails a gate or a check of its own, the old one did not")
    return lines


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
