"""A run as one JSON document and in the terminal. Nothing is computed here."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from kvcal import exactness
from kvcal.plan import Plan, advice
from kvcal.recipe import SIDES, Side

if TYPE_CHECKING:  # rows are only read here; `kvcal plan` need not wait for torch
    from kvcal.check import Finding
    from kvcal.evaluate import Evaluation
    from kvcal.gates import GateResult
    from kvcal.measure import Folds, Outcome
    from kvcal.mixed import Mixture
    from kvcal.scales import SideSummary
    from kvcal.validate import Validation

Report = dict[str, Any]

_SHOWN = 12  # groups of layers in the terminal

DELIVERED = {
    "metadata": "static scales beside the weights",
    "fold": "the weights themselves; no scales and no quantization config are written",
    "both": "folded weights, and static scales for them",
}


# By whether the model caches latents.
SIDE_NAMES: dict[bool, dict[Side, str]] = {
    False: {"k": "K", "v": "V", "q": "Q"},
    True: {"k": "latent", "v": "rotary key", "q": "absorbed Q"},
}


def build(
    plan: Plan,
    outcome: Outcome,
    folds: Folds | None,
    gates: Sequence[GateResult],
    findings: Sequence[Finding],
    serve: Sequence[str],
    before_serving: str | None,
) -> Report:
    """The document behind ``report.json``; README lists its keys."""
    passed = all(f.ok for f in findings) and all(g.passed for g in gates)
    validation = outcome.validation
    return {
        "verdict": "pass" if passed else "fail",
        "gates": [
            {"name": g.name, "limit": g.limit, "value": g.value, "passed": g.passed, "text": str(g)}
            for g in gates
        ],
        "checks": check_rows(findings),
        "deliver": plan.deliver,
        **fidelity_document(outcome.evaluation),
        "folds": _folds(folds, outcome),
        "weights": plan.recipe.weights.scheme if plan.recipe.weights else None,
        "attention_error": {
            "mean": validation.mean,
            "worst_layer": validation.worst[0],
            "worst": validation.worst[1],
            "tokens": validation.tokens,
            "implementation": validation.implementation,
        },
        **_size(plan),
        "skipped_layers": list(plan.skipped_layers),
        "mixed": _mixed(plan, outcome.mixed),
        "latent": plan.model.latent is not None,
        "layers": [
            _layer(index, sides, validation) for index, sides in sorted(outcome.summaries(plan).items())
        ],
        "engine": _engine(plan, [f"{f.rule}: {f.message}" for f in findings if not f.ok]),
        "before_serving": before_serving,
        "serve": shlex.join(serve),
    }


def check_rows(findings: Sequence[Finding]) -> list[Report]:
    """Rules of a loader contract."""
    return [{"rule": f.rule, "ok": f.ok, "message": f.message} for f in findings]


def _folds(folds: Folds | None, outcome: Outcome) -> Report | None:
    if folds is None:
        return None
    choice = folds.choice
    return {
        "kept": [c.name for c in choice.candidates if c.kept],
        "candidates": [asdict(c) for c in choice.candidates],
        "judging": {"kl_before": choice.kl_before, "kl_after": choice.kl_after, "tokens": choice.tokens},
        "before": fidelity_document(outcome.before) if outcome.before else None,
        "proof": asdict(folds.proof) | {"allowed_kl": folds.proof.allowed_kl},
        "reversible": folds.folding.reversible,
        "tensors": len(folds.folding.tensors),
    }


def _mixed(plan: Plan, found: Mixture | None) -> Report | None:
    """Also the record that evaluation of the written checkpoint reads."""
    wanted = plan.recipe.mixed
    if wanted is None or found is None:
        return None
    limits = {"max_kl": wanted.max_kl, "bits_budget": wanted.bits_budget}
    return {**limits, "skipped_layers": list(plan.skipped_layers), **asdict(found)}


def plan_document(plan: Plan, source_name: str) -> Report:
    """The document behind ``kvcal plan --json``."""
    latent = plan.model.latent
    return {
        "model": source_name,
        "architecture": plan.model.architecture,
        "layers": len(plan.layers),
        "sliding_layers": sum(layer.kind == "sliding" for layer in plan.layers),
        "cross_attention_layers": [layer.index for layer in plan.layers if layer.cross],
        "layers_with_own_cache": sum(layer.shares is None for layer in plan.layers),
        "layers_without_attention": plan.model.layers_without_attention,
        "heads": _one_or_all(layer.heads for layer in plan.layers),
        "kv_heads": _one_or_all(layer.kv_heads for layer in plan.layers),
        "head_dim": _one_or_all(layer.head_dim for layer in plan.layers),
        "latent": {"rank": latent.rank, "rotary": latent.rotary} if latent else None,
        "max_context": plan.model.max_context,
        "format": plan.format.name,
        "scaling": plan.scaling,
        "deliver": plan.deliver,
        **_size(plan),
        "scale_bytes": plan.scale_bytes,
        "engine": _engine(plan, broken=[]),
        "mixed": plan.recipe.mixed.model_dump() if plan.recipe.mixed else None,
        "folds": exactness.table(plan.model) if plan.folds else None,
        "advice": advice(plan),
        "calibration_tokens_at_most": plan.recipe.calibration.samples * plan.seq_len,
        "notices": list(plan.notices),
    }


def _one_or_all(each: Iterable[int]) -> int | list[int]:
    """The number that all layers share, or those that there are."""
    found = sorted(set(each))
    return found[0] if len(found) == 1 else found


def _size(plan: Plan) -> Report:
    return {
        "bits_per_element": plan.bits_per_element,
        "bytes_per_token": {
            "reference": plan.bytes_per_token_reference,
            "quantized": plan.bytes_per_token_quantized,
        },
        "bytes_per_encoder_token": _bytes(plan.bytes_per_encoder_token)
        if plan.model.encoder_decoder
        else None,
        "bytes_at_full_context": _bytes(plan.bytes_at_full_context),
    }


def _bytes(found: tuple[float, float]) -> dict[str, float]:
    return dict(zip(("reference", "quantized"), found, strict=True))


def _engine(plan: Plan, broken: list[str]) -> Report:
    """``broken`` lists the rules of the engine's contract that the files break."""
    backends = plan.engine.backends_of(plan.model, plan.format, plan.granularity)
    return {
        "name": plan.engine.name,
        "version": plan.engine.version,
        "consumed": not broken,
        "reasons": broken or [f"served by {plan.engine.backends[backends]}"],
    }


def print_plan(console: Console, document: Report) -> None:
    engine, encoder = document["engine"], document["bytes_per_encoder_token"]
    at_full_context = document["bytes_at_full_context"]
    layers, own = document["layers"], document["layers_with_own_cache"]
    notes = [f"{document['sliding_layers']} of them sliding"] * bool(document["sliding_layers"])
    if document["cross_attention_layers"]:
        notes.append(f"{len(document['cross_attention_layers'])} of them cross-attention")
    if own < layers:
        notes.append(f"{layers - own} read the cache of another")
    if document["layers_without_attention"]:
        notes.append(f"{document['layers_without_attention']} more without attention")
    kv_heads, head_dim, heads = (any_of(document[name]) for name in ("kv_heads", "head_dim", "heads"))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("model", f"{document['model']} ({document['architecture']})")
    held = f"{kv_heads} KV heads of {head_dim}"
    if document["latent"] is not None:
        held = "a latent of {rank} and a rotary key of {rotary}".format(**document["latent"])
    table.add_row("cache", f"{', '.join([f'{layers} layers', *notes])}; {held} for {heads} query heads")
    table.add_row("format", f"{document['format']}, {document['scaling']}")
    table.add_row("delivered by", DELIVERED[document["deliver"]])
    table.add_row(
        "per token" if encoder is None else "per decoder token", _saved(document["bytes_per_token"])
    )
    if encoder is not None:
        table.add_row("per encoder token", _saved(encoder))
    table.add_row(
        "per sequence",
        f"{at_full_context['reference'] / 2**20:,.1f} MiB in 16 bits,"
        f" {at_full_context['quantized'] / 2**20:,.1f} MiB quantized, at {document['max_context']:,} tokens"
        + ("" if encoder is None else " each of encoder and decoder"),
    )
    if document["mixed"] is not None:
        table.add_row("16-bit layers", _limit(document["mixed"]))
    table.add_row("engine", f"{engine['name']} {engine['version']} consumes it: {engine['reasons'][0]}")
    if document["folds"] is not None:
        exact = [name for name, why_not in document["folds"].items() if why_not is None]
        table.add_row("exact folds", ", ".join(exact))
    console.print(table, highlight=False)


def _saved(size: Mapping[str, float]) -> str:
    ratio = size["reference"] / size["quantized"]
    return (
        f"{size['reference']:,.0f} bytes in 16 bits, {size['quantized']:,.0f} quantized ({ratio:.2f}x less)"
    )


def any_of(value: int | list[int]) -> str:
    """A number, or those that layers differ in."""
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def _limit(mixed: Report) -> str:
    if mixed["max_kl"] is not None:
        return f"as few as keep KL within {mixed['max_kl']:g} nats; none is counted above"
    return f"the best ones that {mixed['bits_budget']:g} bits per element allow; none is counted above"


def print_advice(console: Console, document: Report) -> None:
    console.print("formats worth a look", style="bold")
    for line in document["advice"]:
        console.print(Padding(f"- {line}", (0, 0, 0, 2)), highlight=False)


def print_report(console: Console, report: Report) -> None:
    _print_verdict(console, report)
    print_fidelity(console, report, report["folds"] and report["folds"]["before"])
    print_folds(console, report["folds"])
    print_mixed(console, report["mixed"])
    error = report["attention_error"]
    console.print(
        f"attention error {error['mean']:.4f} mean, {error['worst']:.4f} worst (layer"
        f" {error['worst_layer']});"
        f" {error['implementation']}, {error['tokens']} tokens",
        highlight=False,
    )
    flagged = _flagged(report)
    for line in flagged[:8]:
        console.print(line, style="yellow", highlight=False)
    if len(flagged) > 8:
        console.print(f"and {len(flagged) - 8} more flags in report.json", style="yellow", highlight=False)
    if report["verdict"] == "pass":
        if report["before_serving"]:
            console.print(f"first {report['before_serving']}", highlight=False, soft_wrap=True, markup=False)
        if report["serve"]:
            console.print("serve with", style="bold")
            console.print(f"  {report['serve']}", highlight=False, soft_wrap=True)


def print_fidelity(console: Console, after: Report, before: Report | None = None) -> None:
    """``before`` is the same cache in front of unfolded weights."""
    cache = after["fidelity"]
    table = Table(title=f"fidelity over {cache['tokens']:,} held-out tokens", title_justify="left")
    for heading, justify in (
        ("quantized", "left"),
        ("KL mean", "right"),
        ("KL p99", "right"),
        ("top-1", "right"),
        ("perplexity", "right"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for label, cells in fidelity_rows(after, before):
        table.add_row(label, *cells)
    console.print(table)


def fidelity_rows(after: Report, before: Report | None) -> list[tuple[str, list[str]]]:
    """Label and cells of each line of the table of fidelities."""
    rows = [("nothing", ["", "", "", f"{after['fidelity']['perplexity_reference']:.3f}"])]
    for key, label in (("fidelity", "K and V"), ("fidelity_fp8_attention", "K, V and Q (FP8 kernels)")):
        if after[key] is None:
            continue
        if before is not None:
            rows.append((f"{label}, unfolded", _fidelity_cells(before[key])))
        rows.append((label if before is None else f"{label}, folded", _fidelity_cells(after[key])))
    return rows


def print_folds(console: Console, folds: Report | None) -> None:
    if folds is None:
        return
    kept = ", ".join(folds["kept"]) or "nothing: no fold lowers KL here; the weights stay as they are"
    console.print(f"folded: {kept}", highlight=False)
    if folds["kept"]:
        proof = folds["proof"]
        back = "kvcal unfold restores the weights bit for bit" if folds["reversible"] else "not reversible"
        console.print(
            f"{folds['tensors']} tensors; with nothing quantized, the checkpoint is {proof['kl']:.1g} nats"
            f" from the original (rounding: {proof['rounding_kl']:.1g}); {back}",
            highlight=False,
        )


def print_mixed(console: Console, mixed: Report | None) -> None:
    """The layers that cost most, and which of them stay in 16 bits."""
    if mixed is None:
        return
    console.print(mixed_summary(mixed), highlight=False)
    table = Table()
    for heading in ("layers", "KL alone", "cache"):
        table.add_column(heading)
    rows = mixed_rows(mixed)
    for row in rows[:_SHOWN]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > _SHOWN:
        console.print(f"and {len(rows) - _SHOWN} more that cost less, in report.json", highlight=False)


def mixed_summary(mixed: Report) -> str:
    """What was chosen and measured, in a sentence."""
    skipped = ", ".join(map(str, mixed["skipped_layers"])) or "none"
    chosen, alone, every = (nats(mixed[key]) for key in ("kl_mean", "kl_sum", "kl_mean_all"))
    return (
        f"layers in 16 bits: {skipped}; over {mixed['tokens']:,} calibration tokens KL {chosen} (sum of the"
        f" layers {alone}), {every} with every layer quantized"
    )


def mixed_rows(mixed: Report) -> list[tuple[str, str, str]]:
    """Layers, KL and decision of each group, the costliest first."""
    groups = sorted(mixed["groups"], key=lambda group: -group["kl_mean"])
    return [
        (", ".join(map(str, g["layers"])), nats(g["kl_mean"]), "16 bits" if g["skipped"] else "quantized")
        for g in groups
    ]


def print_validation(console: Console, validation: Validation) -> None:
    table = Table(
        title=f"attention error over {validation.tokens:,} held-out tokens ({validation.implementation})"
    )
    for heading in ("layer", "K and V, mean", "worst head", "with Q and P, mean", "logit SNR dB, worst"):
        table.add_column(heading, justify="right")
    for index, layer in validation.layers.items():
        table.add_row(
            str(index),
            f"{sum(layer.cache) / len(layer.cache):.4f}",
            f"{max(layer.cache):.4f}",
            f"{sum(layer.attention) / len(layer.attention):.4f}" if layer.attention else "",
            _worst_snr(layer.logit_snr_db),
        )
    console.print(table)


def _worst_snr(each: Sequence[float | None]) -> str:
    found = [snr for snr in each if snr is not None]
    return f"{min(found):.1f}" if found else "no error"


def print_rows(console: Console, rows: Sequence[Any]) -> None:
    """Rows of one dataclass as a table; its fields are the headings."""
    table = Table()
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in asdict(row).values()))
    console.print(table)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        mark, style = ("ok  ", "green") if finding.ok else ("FAIL", "bold red")
        console.print(f"[{style}]{mark}[/] {finding.rule}", highlight=False)
        if finding.message:
            console.print(
                f"     {finding.message}", style="dim" if finding.ok else "", markup=False, highlight=False
            )


def _print_verdict(console: Console, report: Report) -> None:
    style = "bold green" if report["verdict"] == "pass" else "bold red"
    console.print(f"verdict: {report['verdict']}", style=style)
    for gate in report["gates"]:
        mark, colour = ("ok  ", "green") if gate["passed"] else ("FAIL", "bold red")
        console.print(f"[{colour}]{mark}[/] {gate['text']}", highlight=False)
    if report["engine"]["consumed"]:
        name = f"{report['engine']['name']} {report['engine']['version']}"
        console.print(f"[green]ok  [/] written files keep the loader contract of {name}", highlight=False)
    else:
        for reason in report["engine"]["reasons"]:
            console.print("[bold red]FAIL[/] ", end="")
            console.print(reason, markup=False, highlight=False)


def nats(value: float) -> str:
    """Four decimals, or two digits where those would say nothing."""
    return f"{value:.4f}" if value == 0 or value >= 0.001 else f"{value:.2g}"


def _fidelity_cells(row: Mapping[str, float]) -> list[str]:
    return [
        nats(row["kl_mean"]),
        nats(row["kl_p99"]),
        f"{100 * row['top1_agreement']:.2f} %",
        f"{row['perplexity']:.3f}",
    ]


def _layer(index: int, sides: Mapping[Side, SideSummary], validation: Validation) -> Report:
    row: Report = {"index": index, "attention_error": asdict(validation.layers[index])}
    row.update({side: asdict(sides[side]) for side in SIDES})
    return row


def _flagged(report: Report) -> list[str]:
    return [
        f"layer {layer['index']}: {SIDE_NAMES[report['latent']][side]} {flag}"
        f" ({100 * layer[side]['saturated']:.2g} % clipped,"
        f" {100 * layer[side]['zeroed']:.2g} % stored as 0 there)"
        for layer in report["layers"]
        for side in SIDES
        for flag in layer[side]["flags"]
    ]


def fidelity_document(evaluation: Evaluation) -> Report:
    """The document behind ``kvcal evaluate --json``."""
    return {
        "fidelity": asdict(evaluation.cache),
        "fidelity_fp8_attention": asdict(evaluation.attention) if evaluation.attention else None,
    }


def validation_document(validation: Validation) -> Report:
    """The document behind ``kvcal validate --json``."""
    return {
        "implementation": validation.implementation,
        "tokens": validation.tokens,
        "mean": validation.mean,
        "worst_layer": validation.worst[0],
        "worst": validation.worst[1],
        "layers": [{"index": index} | asdict(layer) for index, layer in validation.layers.items()],
    }
