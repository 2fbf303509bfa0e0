"""The page as data: sections of tables and figures, from the records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcal import engine_report, stage_report
from kvcal.page import channel_figures, figures, serving
from kvcal.page.source import Run
from kvcal.page.tables import Section, Table, number
from kvcal.recipe import SIDES
from kvcal.report import any_of, fidelity_rows, mixed_summary, nats


def sections(runs: Sequence[Run], comparison: Mapping[str, Any] | None) -> list[Section]:
    """Those that have something to show, in the order of the page."""
    found = [
        _fidelity(runs),
        _limits(runs),
        _bits(runs, comparison),
        _layers(runs),
        _sensitivity(runs),
        _folds(runs),
        _channels(runs),
        _long_context(runs),
        _capacity(runs),
        _facts(runs),
        _missing(runs, comparison),
    ]
    return [section for section in found if section is not None]


def _fidelity(runs: Sequence[Run]) -> Section:
    rows = [
        (run.name, label, *cells)
        for run in runs
        for label, cells in fidelity_rows(run.report, (run.report["folds"] or {}).get("before"))
    ]
    tokens = sorted({f"{run.report['fidelity']['tokens']:,}" for run in runs})
    texts = {run.records.manifest["evaluation"]["sha256"] for run in runs}
    other = [
        "The runs were judged by different text or different amounts of it: their numbers cannot be set"
        " against each other."
    ]
    return Section(
        "fidelity",
        "Fidelity",
        "The whole model over the quantized cache, against the same model over 16 bits, on"
        f" {' and '.join(tokens)} held-out tokens. Every token is read as the cache would give it back.",
        tables=[
            _per_run(
                runs,
                Table(
                    ("run", "quantized", "KL mean", "KL p99", "top-1", "perplexity"),
                    rows,
                    text=frozenset({0, 1}),
                ),
            )
        ],
        notes=[
            *(other if len(texts) > 1 else ()),
            *(note for run in runs for note in engine_report.export_notes(run.name, run.exported)),
        ],
    )


def _limits(runs: Sequence[Run]) -> Section | None:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        for gate in run.report["gates"]:
            limit = f"{number(gate['limit'])}"
            rows.append(
                (
                    run.name,
                    gate["name"],
                    number(gate["value"]),
                    limit,
                    "passed" if gate["passed"] else "failed",
                )
            )
        checks = run.report.get("checks", ())
        rows += [(run.name, c["rule"], c["message"], "", "failed") for c in checks if not c["ok"]]
        kept, contract = sum(c["ok"] for c in checks), f"loader contract of {run.report['engine']['name']}"
        if checks:
            outcome = "passed" if kept == len(checks) else "failed"
            rows.append((run.name, contract, f"{kept} of {len(checks)} rules hold", "", outcome))
    if not rows:
        return None
    marks = {(y, 4): "good" if row[4] == "passed" else "bad" for y, row in enumerate(rows)}
    table = Table(
        ("run", "gate or rule", "value", "limit", ""), rows, text=frozenset({0, 1, 2, 4}), marks=marks
    )
    return Section(
        "gates",
        "Gates and checks",
        "Limits of the recipe, and rules of the engine's loader contract.",
        [_per_run(runs, table)],
    )


def _bits(runs: Sequence[Run], comparison: Mapping[str, Any] | None) -> Section | None:
    figure = figures.against_bits(runs, comparison)
    if figure is None:
        return None
    notes = []
    if comparison is not None:
        theirs = comparison["manifest"]["evaluation"]
        others = [
            run.name for run in runs if run.records.manifest["evaluation"]["sha256"] != theirs["sha256"]
        ]
        if others:
            notes.append(
                f"The schemes were judged by other text ({theirs['tokens']:,} tokens of {theirs['dataset']})"
                f" than {', '.join(others)}: compare their order, not their values."
            )
    return Section(
        "bits",
        "KL against bits",
        "Lower and further left is better; scales and tokens in 16 bits are counted.",
        figures=[figure],
        notes=notes,
    )


def _layers(runs: Sequence[Run]) -> Section:
    flags = [
        (
            run.name,
            str(layer["index"]),
            side.upper(),
            flag,
            f"{100 * layer[side]['saturated']:.2g} %",
            f"{100 * layer[side]['zeroed']:.2g} %",
        )
        for run in runs
        for layer in run.report["layers"]
        for side in SIDES
        for flag in layer.get(side, {}).get("flags", ())
    ]
    headings = ("run", "layer", "side", "flag", "clipped at 1.0", "stored as 0 at 1.0")
    table = _per_run(runs, Table(headings, flags, text=frozenset({0, 2, 3})))
    return Section(
        "layers",
        "Layers and heads",
        "Blue is magnitude, on one logarithmic scale for K, V and Q; orange is error, from zero.",
        tables=[table] if flags else (),
        figures=[*figures.attention_errors(runs), *figures.magnitudes(runs)],
    )


def _sensitivity(runs: Sequence[Run]) -> Section | None:
    found = figures.sensitivities(runs)
    lines = [mixed_summary(run.report["mixed"]) for run in runs if run.report["mixed"] is not None]
    return (
        Section(
            "sensitivity",
            "Layers in 16 bits",
            "What each layer costs alone, and which of them stay as they are.",
            figures=found,
            notes=[f"{line[0].upper()}{line[1:]}." for line in lines],
        )
        if found
        else None
    )


def _folds(runs: Sequence[Run]) -> Section | None:
    rows, notes, strong = [], [], set()
    for run in runs:
        folds = run.report["folds"]
        if folds is None:
            continue
        rows.append((run.name, "none", nats(folds["judging"]["kl_before"]), ""))
        for each in folds["candidates"]:
            kl = "nothing to do" if each["kl_mean"] is None else nats(each["kl_mean"])
            strong |= {len(rows)} if each["kept"] else set()
            rows.append((run.name, each["name"], kl, "kept" if each["kept"] else ""))
        notes.append(f"{'' if len(runs) == 1 else f'{run.name}: '}{_proof(folds)}")
    if not rows:
        return None
    table = Table(("run", "fold", "KL mean", ""), rows, frozenset({0, 1, 3}), frozenset(strong))
    return Section(
        "folds",
        "Folds",
        "Transforms of the weights that change nothing but what the engine's own quantizer sees. Each was"
        " tried on calibration text that did not shape it.",
        [_per_run(runs, table)],
        notes=notes,
    )


def _proof(folds: Mapping[str, Any]) -> str:
    proof = folds["proof"]
    back = " kvcal unfold restores the weights bit for bit." if folds["reversible"] else ""
    return (
        f"{folds['tensors']} tensors were changed. A folded attention block errs by at most"
        f" {proof['block_error']:.1g} in float64; the written checkpoint is {proof['kl']:.2g} nats from the"
        f" original with nothing quantized ({proof['allowed_kl']:.2g} would be rounding).{back}"
    )


def _channels(runs: Sequence[Run]) -> Section | None:
    found = [figure for run in runs for figure in channel_figures.channel_figures(run, runs)]
    mixed = [run.name for run in runs if channel_figures.value_is_mixed(run)]
    return (
        Section(
            "channels",
            "Channels",
            "A vertical streak is a channel that stands out in every layer. RoPE pairs channel i with i +"
            " half of the head in most models.",
            figures=found,
            notes=[
                f"{name}: a fold mixes channels of V, which extremes cannot take back; V is shown as cached."
                for name in mixed
            ],
        )
        if found
        else None
    )


def _long_context(runs: Sequence[Run]) -> Section | None:
    measured = [(run, run.suite) for run in runs if run.suite is not None]
    if not measured:
        return None
    rows = [(run.name, *_task(task)) for run, suite in measured for task in suite["tasks"]]
    headings = ("run", "task", "tokens", "prompts", "16 bits", "quantized", "difference, 95 %", "p", "")
    table = _per_run(runs, Table(headings, rows, text=frozenset({0, 1, 8})))
    return Section(
        "long-context",
        "Long context",
        "The same prompts over the 16-bit and the quantized cache.",
        tables=[table] if rows else (),
        figures=[figure for run in runs for figure in figures.needles(run, runs)],
        notes=[_continued(run, suite) for run, suite in measured if suite["continuations"]],
    )


def _task(task: Mapping[str, Any]) -> tuple[str, ...]:
    interval = f"{task['low']:+.3f} to {task['high']:+.3f}" if task["able"] else ""
    return (
        task["name"],
        f"{task['length']:,}",
        str(task["prompts"]),
        f"{task['reference']:.3f}",
        f"{task['quantized']:.3f}",
        interval,
        f"{task['p_value']:.3f}" if task["able"] else "",
        task["note"] if task["able"] else f"cannot do it: {task['note']}",
    )


def _continued(run: Run, suite: Mapping[str, Any]) -> str:
    found = suite["continuations"]
    return (
        f"{run.name}, on the model's own greedy text, {found['tokens']:,} tokens behind {found['prompts']}"
        f" prompts: KL {nats(found['kl_mean'])}, top-1 {100 * found['top1_agreement']:.2f} %; it becomes"
        f" another text in {found['diverged']} of {found['prompts']}."
    )


def _capacity(runs: Sequence[Run]) -> Section | None:
    per_request, why = serving.requests_table(runs)
    per_gpu, why_not = serving.gpu_table(runs)
    tables = [_per_run(runs, per_request)] if per_request is not None else []
    tables += [per_gpu] if per_gpu is not None else []
    if not tables:
        return None
    return Section(
        "capacity",
        "Capacity",
        "One request in pages of 16 tokens, and how many fit beside the weights with 10 % of a GPU's memory"
        " left free. Counted, not measured; kvcal plan --gpu says what a step costs.",
        tables,
        notes=[*why, *why_not],
    )


def _facts(runs: Sequence[Run]) -> Section:
    columns = [_facts_of(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name, fact in column.items() if fact))
    facts = Table(
        ("", *(run.name for run in runs)) if len(runs) > 1 else ("fact", ""),
        [(name, *(column.get(name, "") for column in columns)) for name in names],
        text=frozenset(range(len(runs) + 1)),
    )
    rows = [(run.name, *row) for run in runs for row in stage_report.rows(run.report)]
    stages = Table(
        ("run", *stage_report.HEADINGS),
        rows,
        text=frozenset({0, 1}),
        strong=frozenset(y for y, row in enumerate(rows) if row[1] == stage_report.TOGETHER),
    )
    return Section(
        "facts",
        "The run",
        tables=[facts, _per_run(runs, stages)],
        notes=list(dict.fromkeys(stage_report.note(run.report) for run in runs)),
    )


def _facts_of(run: Run) -> dict[str, str]:
    found, plan = run.records.manifest, run.records.plan
    machine, compute = found["machine"], found["compute"]
    text, held_out = found["calibration"], found["evaluation"]
    return {
        "model": found["model"]["name"],
        "revision": found["model"]["revision"] or "",
        "architecture": f"{plan['architecture']}: {plan['layers']} layers, {any_of(plan['kv_heads'])} KV"
        f" heads of {any_of(plan['head_dim'])} for {any_of(plan['heads'])} query heads",
        "created": found["created"],
        "calibrated on": f"{text['tokens']:,} tokens of {text['dataset']}, seed {text['seed']}",
        "judged on": f"{held_out['tokens']:,} tokens of {held_out['dataset']}",
        "attention error by": run.report["attention_error"]["implementation"],
        "computed on": f"{compute['device']}, {compute['dtype']}",
        "machine": f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {machine['system']}",
        "versions": ", ".join(
            f"{name} {version}" for name, version in ({"kvcal": found["kvcal"]} | found["versions"]).items()
        ),
        "held-out text, SHA-256": held_out["sha256"],
    }


def _missing(runs: Sequence[Run], comparison: Mapping[str, Any] | None) -> Section | None:
    """What the records do not hold, and what would."""
    # What reads with an encoder is refused there.
    alone = any(run.report.get("bytes_per_encoder_token") is None for run in runs)
    absent = {
        "Other schemes at other bits: kvcal compare --output FOLDER, kvcal report --comparison FOLDER.": (
            alone and comparison is None
        ),
        "What each layer costs alone: kvcal calibrate --max-kl or --bits-budget.": (
            alone and all(run.report["mixed"] is None for run in runs)
        ),
        "Long-context tasks: kvcal evaluate --suite.": alone and all(run.suite is None for run in runs),
        "Channels: statistics.safetensors is not among the records.": all(
            run.statistics is None for run in runs
        ),
    }
    notes = [line for line, is_absent in absent.items() if is_absent]
    return Section("not-here", "Not measured", notes=notes) if notes else None


def _per_run(runs: Sequence[Run], table: Table) -> Table:
    """Without its first column, the run, where there is only one."""
    if len(runs) > 1:
        return table
    return Table(
        table.headings[1:],
        [row[1:] for row in table.rows],
        frozenset(column - 1 for column in table.text if column),
        table.strong,
        {(y, x - 1): mark for (y, x), mark in table.marks.items()},
    )
