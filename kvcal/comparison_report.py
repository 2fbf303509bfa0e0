"""A comparison as one JSON document, as Markdown and in the terminal. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvcal.trial import Trial

if TYPE_CHECKING:
    from kvcal.comparison import Row

Document = dict[str, Any]

_HEADINGS = ("scheme", "bits", "KL", "p99", "top-1", "ppl", "worst layer")

# Budgets that formats suggest; the best scheme within each is named.
_BUDGETS = (16.0, 8.5, 4.5, 4.25, 3.25, 2.5)


def document(trial: Trial, rows: Sequence[Row], gates: Sequence[Document], manifest: Document) -> Document:
    """The document behind ``compare.json`` and ``kvcal compare --json``."""
    return {
        "model": manifest["model"]["name"],
        "verdict": "pass" if all(gate["passed"] for gate in gates) else "fail",
        "gates": list(gates),
        "context": trial.evaluation_seq_len,
        "full_context": trial.model.max_context,
        "perplexity_reference": rows[0].fidelity.perplexity_reference,
        "tokens": rows[0].fidelity.tokens,
        "rows": [asdict(row) for row in rows],
        "best": best_within_budgets(rows),
        "manifest": manifest,
    }


def best_within_budgets(rows: Sequence[Row]) -> list[Document]:
    """For each budget that some scheme fits, the one of the least KL, and the least that an engine serves."""
    found = []
    for budget in _BUDGETS:
        fitting = [row for row in rows if row.bits_per_element <= budget]
        served = [row for row in fitting if row.serves is not None]
        if not fitting:
            continue
        best = min(fitting, key=lambda row: row.fidelity.kl_mean)
        ready = min(served, key=lambda row: row.fidelity.kl_mean, default=None)
        found.append(
            {
                "bits": budget,
                "scheme": best.scheme,
                "kl_mean": best.fidelity.kl_mean,
                "served": ready and ready.scheme,
                "served_kl_mean": ready and ready.fidelity.kl_mean,
            }
        )
    return found


def print_comparison(console: Console, rows: Sequence[Row], found: Document) -> None:
    """The table, within 80 columns, and what is best within each budget."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for place, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row), style="bold" if row.efficient else "")
    console.print(table)
    console.print(
        f"bold: no other scheme has fewer bits and less KL. Bits at {found['context']} tokens, those kept in"
        f" 16 bits included. Perplexity over the 16-bit cache: {found['perplexity_reference']:.3f}."
        f" {found['tokens']:,} tokens judge.",
        highlight=False,
    )
    budgets = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("within bits", "best scheme", "KL", "best that vLLM serves", "KL"):
        budgets.add_column(heading, no_wrap=True)
    for best in found["best"]:
        budgets.add_row(
            f"{best['bits']:g}",
            best["scheme"],
            _nats(best["kl_mean"]),
            best["served"] or "none",
            "" if best["served"] is None else _nats(best["served_kl_mean"]),
        )
    console.print()
    console.print(budgets)


def markdown(rows: Sequence[Row], found: Document, *, picture: bool = True) -> str:
    """The report that lies beside ``compare.json``, and beside ``compare.png`` if it shows it."""
    manifest = found["manifest"]
    calibration, evaluation = manifest["calibration"], manifest["evaluation"]
    seconds = sum(each["seconds"] for stage, each in manifest["stages"].items() if stage != "load")
    lines = [
        f"# Schemes compared on {found['model']}",
        "",
        f"{evaluation['tokens']:,} tokens of `{evaluation['dataset']}` judge, in samples of at most"
        f" {found['context']}; {calibration['tokens']:,} tokens of `{calibration['dataset']}` calibrated"
        f" (seed {calibration['seed']}).",
        "",
        f"Perplexity over the 16-bit cache: {found['perplexity_reference']:.3f}."
        f" {seconds:.0f} s after loading, on {_machine(manifest)}.",
        "",
        f"Bits are per element in a sequence of {found['context']} tokens, tokens in 16 bits included, and in"
        f" one of {found['full_context']:,}. Rows in bold: no other has fewer bits and less KL.",
        "",
        *(["![KL against bits](compare.png)", ""] if picture else ()),
        *table_lines(rows, found),
        "",
        *_gate_lines(found["gates"]),
        "| within bits | best scheme | KL | best that vLLM serves | KL |",
        "|---:|---|---:|---|---:|",
        *(
            f"| {b['bits']:g} | {b['scheme']} | {_nats(b['kl_mean'])} | {b['served'] or 'none'} |"
            f" {'' if b['served'] is None else _nats(b['served_kl_mean'])} |"
            for b in found["best"]
        ),
        "",
        "## What each is",
        "",
        *(f"- **{row.scheme}**: {row.description}. Source: {row.source}." for row in rows),
        "",
    ]
    return "\n".join(lines)


def _gate_lines(gates: Sequence[Document]) -> list[str]:
    if not gates:
        return []
    rows = (f"| {g['text']} | {'passed' if g['passed'] else '**failed**'} |" for g in gates)
    return ["| gate | |", "|---|---|", *rows, ""]


def table_lines(rows: Sequence[Row], found: Document) -> list[str]:
    """The table of schemes."""
    return [
        f"| scheme | bits at {found['context']} | at {found['full_context']:,} | KL mean | KL p99 | top-1 |"
        " perplexity | worst layer (error) | vLLM |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
        *(
            f"| {f'**{name}**' if row.efficient else name} | {bits} | {row.bits_at_full_context:.3f} | {kl} |"
            f" {p99} | {top1} | {ppl} | {worst} | {f'`{row.serves}`' if row.serves else ''} |"
            for row in rows
            for name, bits, kl, p99, top1, ppl, worst in [_cells(row)]
        ),
    ]


def _cells(row: Row) -> tuple[str, ...]:
    fidelity = row.fidelity
    return (
        row.scheme,
        f"{row.bits_per_element:.3f}",
        _nats(fidelity.kl_mean),
        _nats(fidelity.kl_p99),
        f"{100 * fidelity.top1_agreement:.1f} %",
        f"{fidelity.perplexity:.2f}" if fidelity.perplexity < 1e4 else f"{fidelity.perplexity:.1e}",
        f"{row.worst_layer} ({row.worst_error:.3f})",
    )


def _nats(value: float) -> str:
    return f"{value:.4f}" if value < 10 else f"{value:.1f}"


def _machine(manifest: Document) -> str:
    machine, compute, versions = manifest["machine"], manifest["compute"], manifest["versions"]
    where = machine["gpu"] if compute["device"] != "cpu" else f"{machine['cores']} cores of {machine['cpu']}"
    return f"{where}, {compute['dtype']}, torch {versions['torch']}, transformers {versions['transformers']}"
