"""A suite as one JSON document and in the terminal. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcal import report
from kvcal.markdown import fidelity_lines

if TYPE_CHECKING:
    from kvcal.continuations import Continuations
    from kvcal.evaluate import Evaluation
    from kvcal.suite import Grid, Row, Suite

Document = dict[str, Any]


def document(
    suite: Suite,
    grid: Grid,
    rows: Sequence[Row],
    areas: Document,
    continued: Continuations | None,
    text: Evaluation | None,
    record: Document,
) -> Document:
    """The document behind ``kvcal/suite.json`` and ``kvcal evaluate --suite --json``.

    ``record`` says what was measured, where and with which versions.
    """
    return {
        "suite": suite.name,
        "seed": suite.seed,
        "needle": asdict(grid) | {"prompts": suite.prompts},
        "tasks": [asdict(row) for row in rows],
        "areas": areas,
        "continuations": asdict(continued) | {"diverged": continued.diverged} if continued else None,
        "text": report.fidelity_document(text) if text else None,
        **record,
    }


def print_suite(console: Console, found: Document) -> None:
    """All of it, within 80 columns."""
    if found["text"]:
        report.print_fidelity(console, found["text"])
        console.print()
    if found["continuations"]:
        _print_continuations(console, found["continuations"])
        console.print()
    needle = found["needle"]
    console.print(
        f"needle found, by tokens of the prompt and depth; prompts per cell: {needle['prompts']}",
        highlight=False,
    )
    for side, title in (("reference", "16-bit cache"), ("quantized", "quantized cache")):
        console.print(title)
        console.print(_heat_map(needle, side))
    console.print()
    _print_tasks(console, found["tasks"])
    if found["areas"]:
        console.print()
        _print_areas(console, found["areas"])


def markdown(found: Document, name: str) -> str:
    """The same for a pull request; ``name`` is the checkpoint's."""
    headings = ("task", "tokens", "prompts", "16-bit", "quantized", "difference, 95 %", "p")
    text, continued = found["text"], found["continuations"]
    lines = [
        f"# Suite {found['suite']} on {name}",
        "",
        *(fidelity_lines(text) if text else ()),
        *([f"On its {_continued(continued)}.", ""] if continued else ()),
        f"| {' | '.join(headings)} |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(_task_cells(row))} |" for row in found["tasks"]),
        "",
        *(f"Cannot do it: {note}." for note in _why_not(found["tasks"])),
        "",
    ]
    return "\n".join(lines)


def _print_continuations(console: Console, found: Document) -> None:
    console.print(_continued(found), highlight=False)
    earliest = min((at for at in found["divergence"] if at is not None), default=None)
    console.print(
        f"text becomes another one in {found['diverged']} of {found['prompts']}"
        + ("" if earliest is None else f", at the earliest with token {earliest + 1}"),
        highlight=False,
    )


def _continued(found: Document) -> str:
    low, high = found["kl_low"], found["kl_high"]
    interval = "" if low is None else f" ({report.nats(low)} to {report.nats(high)})"
    return (
        f"own greedy text, {found['tokens']:,} tokens behind {found['prompts']} prompts:"
        f" KL {report.nats(found['kl_mean'])}{interval},"
        f" top-1 {100 * found['top1_agreement']:.2f} %; the 16-bit cache, run in chunks,"
        f" {100 * found['reference_agreement']:.2f} %"
    )


def _heat_map(needle: Document, side: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("depth", justify="right")
    for length in needle["lengths"]:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for place, depth in enumerate(needle["depths"]):
        cells = [_shaded(scores[place]) for scores in needle[side]]
        table.add_row(f"{100 * depth:.0f} %", *cells)
    return table


def _shaded(score: float) -> Text:
    """A cell from red through yellow to green; its number says the same without colours."""
    style = "black on green" if score >= 0.9 else "black on yellow" if score >= 0.5 else "white on red"
    return Text(f" {score:.2f} ", style=style)


def _print_tasks(console: Console, rows: Sequence[Document]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for place, heading in enumerate(("task", "tokens", "n", "16-bit", "quantized", "difference, 95 %", "p")):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        style = "dim" if not row["able"] else "bold red" if row["high"] < 0 else ""
        table.add_row(*_task_cells(row), style=style)
    console.print(table)
    for note in _why_not(rows):
        console.print(f"cannot do it: {note}", highlight=False)


def _task_cells(row: Document) -> tuple[str, ...]:
    interval, p_value = "cannot do it", ""
    if row["able"]:
        interval = f"{row['low']:+.3f} to {row['high']:+.3f}"
        p_value = f"{row['p_value']:.3f}"
    scores = (f"{row['reference']:.3f}", f"{row['quantized']:.3f}")
    return row["name"], f"{row['length']:,}", str(row["prompts"]), *scores, interval, p_value


def _why_not(rows: Sequence[Document]) -> list[str]:
    """Each reason once."""
    return list(dict.fromkeys(row["note"] for row in rows if not row["able"]))


def _print_areas(console: Console, areas: Document) -> None:
    for name, found in areas.items():
        console.print(
            f"{name}: area under score over length {found['reference']:.3f}, quantized"
            f" {found['quantized']:.3f}",
            highlight=False,
        )
