"""The report of a run as Markdown. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcal import stage_report
from kvcal.plan import Plan
from kvcal.recipe import SIDES, Side
from kvcal.report import (
    DELIVERED,
    SIDE_NAMES,
    Report,
    fidelity_rows,
    mixed_rows,
    mixed_summary,
    nats,
)


def render(report: Report, plan: Plan, source_name: str, notes: Sequence[str] = ()) -> str:
    """The report as Markdown, for people and for a pull request; ``notes`` say what it is not about."""
    cache, folds = report["fidelity"], report["folds"]
    per_token, names = report["bytes_per_token"], SIDE_NAMES[report["latent"]]
    encoder = report["bytes_per_encoder_token"]
    of = "" if encoder is None else " of the decoder"
    also = "" if encoder is None else f"; {encoder['quantized']:,.0f} quantized per token of the encoder"
    lines = [
        f"# KV-cache calibration of {source_name}",
        "",
        f"**Verdict: {report['verdict']}.** {plan.format.name}, {plan.scaling}, for"
        f" {plan.engine.name} {plan.engine.version}, delivered by {DELIVERED[plan.deliver]}.",
        "",
        *(["```", report["serve"], "```", ""] if report["serve"] else []),
        *(f"{note}\n" for note in notes),
        *fidelity_lines(report, folds and folds["before"]),
        f"{cache['tokens']:,} held-out tokens. {per_token['reference']:,.0f} bytes per token{of} in 16 bits,"
        f" {per_token['quantized']:,.0f} quantized ({report['bits_per_element']:.3f} bits per element)"
        f"{also}.",
        "",
        *_folds_lines(folds),
        *_mixed_lines(report["mixed"]),
        "| gate | value | limit | |",
        "|---|---:|---:|---|",
        *(
            f"| {g['name']} | {g['value']:.6g} | {g['limit']:g} |"
            f" {'passed' if g['passed'] else '**failed**'} |"
            for g in report["gates"]
        ),
        "",
        "<details><summary>Layers</summary>",
        "",
        f"| layer | {' | '.join(f'{names[side]} amax' for side in SIDES)} | attention error | flags |",
        "|---:|---:|---:|---:|---:|---|",
        *(_layer_line(layer, names) for layer in report["layers"]),
        "",
        "</details>",
        "",
        *_stage_lines(report),
    ]
    return "\n".join(lines)


def fidelity_lines(after: Report, before: Report | None = None) -> list[str]:
    """The table of fidelities; ``before`` is the same cache in front of unfolded weights."""
    return [
        "| quantized | KL mean | KL p99 | top-1 | perplexity |",
        "|---|---:|---:|---:|---:|",
        *(f"| {label} | {' | '.join(cells)} |" for label, cells in fidelity_rows(after, before)),
        "",
    ]


def evaluation(found: Report, name: str) -> str:
    """What ``kvcal evaluate`` measured on a checkpoint."""
    tokens = f"{found['fidelity']['tokens']:,} held-out tokens."
    return "\n".join([f"# Fidelity of {name}", "", *fidelity_lines(found), tokens, ""])


def _stage_lines(report: Report) -> list[str]:
    return [
        f"| {' | '.join(stage_report.HEADINGS)} |",
        "|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in stage_report.rows(report)),
        "",
        f"{stage_report.note(report)} Device map: {report['memory']['device_map']}.",
        "",
    ]


def _folds_lines(folds: Report | None) -> list[str]:
    if folds is None:
        return []
    proof = folds["proof"]
    return [
        f"| fold tried ({folds['judging']['tokens']:,} calibration tokens) | KL mean | |",
        "|---|---:|---|",
        f"| none | {nats(folds['judging']['kl_before'])} | |",
        *(
            f"| {c['name']} | {'nothing to do' if c['kl_mean'] is None else nats(c['kl_mean'])} |"
            f" {'kept' if c['kept'] else ''} |"
            for c in folds["candidates"]
        ),
        "",
        f"{folds['tensors']} tensors were changed. Float64 error of a folded attention block: at most"
        f" {proof['block_error']:.1g}; KL of the written checkpoint to the original, nothing quantized:"
        f" {proof['kl']:.2g} nats ({proof['allowed_kl']:.2g} would be rounding)."
        + (" `kvcal unfold` restores them bit for bit." if folds["reversible"] else ""),
        "",
    ]


def _mixed_lines(mixed: Report | None) -> list[str]:
    if mixed is None:
        return []
    summary = mixed_summary(mixed)
    return [
        f"{summary[0].upper()}{summary[1:]}.",
        "",
        "| layers | KL alone | cache |",
        "|---|---:|---|",
        *(f"| {' | '.join(row)} |" for row in mixed_rows(mixed)),
        "",
    ]


def _layer_line(layer: Report, names: Mapping[Side, str]) -> str:
    flags = "; ".join(f"{names[side]} {flag}" for side in SIDES for flag in layer[side]["flags"])
    worst = max(layer["attention_error"]["cache"])
    amax = " | ".join(f"{layer[side]['amax']:.4g}" for side in SIDES)
    return f"| {layer['index']} | {amax} | {worst:.4f} | {flags} |"
