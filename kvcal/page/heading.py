"""What stands first on the page: verdict, serve line, and the numbers that people ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcal.page.source import Run
from kvcal.page.tables import Table
from kvcal.report import DELIVERED, nats

_DEMO = "SmolLM2-135M-Instruct"  # what `--model demo` is


@dataclass(frozen=True)
class Heading:
    """What stands first of each run."""

    name: str
    model: str
    passed: bool
    cache: str
    delivered: str
    serve: str | None
    before_serving: str | None
    failures: Sequence[str]
    tiles: Sequence[tuple[str, str, str]]


def heading(run: Run) -> Heading:
    """Verdict, serve line, and five numbers."""
    report, plan = run.report, run.records.plan
    engine = report["engine"]
    scaling = "" if plan["format"].endswith(plan["scaling"]) else f", {plan['scaling']}"
    failures = [gate["text"] for gate in report["gates"] if not gate["passed"]]
    if not report["engine"]["consumed"]:
        failures += report["engine"]["reasons"]
    return Heading(
        name=run.name,
        model=_DEMO if run.records.manifest["model"]["kind"] == "demo" else run.records.model,
        passed=run.passed,
        cache=f"{plan['format']}{scaling}, for {engine['name']} {engine['version']}",
        delivered=f"delivered by {DELIVERED[plan['deliver']]}",
        serve=(report["serve"] or None) if run.passed else None,
        before_serving=report["before_serving"] if run.passed else None,
        failures=failures,
        tiles=_tiles(report),
    )


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and a remark of each."""
    cache, error, size = report["fidelity"], report["attention_error"], report["bytes_per_token"]
    with_query = report["fidelity_fp8_attention"]
    return [
        (
            "KL to the 16-bit cache",
            nats(cache["kl_mean"]),
            f"{nats(with_query['kl_mean'])} with Q in FP8" if with_query else "nats per token",
        ),
        ("top-1 agreement", f"{100 * cache['top1_agreement']:.2f} %", f"{cache['tokens']:,} held-out tokens"),
        (
            "perplexity",
            f"{cache['perplexity']:.3f}",
            f"{cache['perplexity_reference']:.3f} in 16 bits",
        ),
        (
            "attention error",
            f"{error['mean']:.4f}",
            f"worst {error['worst']:.4f}, layer {error['worst_layer']}",
        ),
        (
            "bits per element",
            f"{report['bits_per_element']:.3f}",
            f"{size['reference']:,.0f} → {size['quantized']:,.0f} bytes per token{_of_decoder(report)}",
        ),
    ]


def _of_decoder(report: Mapping[str, Any]) -> str:
    encoder = report.get("bytes_per_encoder_token")  # records of earlier versions have none
    if encoder is None:
        return ""
    return f" of the decoder, {encoder['reference']:,.0f} → {encoder['quantized']:,.0f} of the encoder"


def side_by_side(runs: Sequence[Run]) -> Table:
    """Verdict and numbers of several runs, a column each."""
    columns = [_column(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return Table(
        ("run", *(run.name for run in runs)),
        [(name, *(column.get(name, "") for column in columns)) for name in names],
        text=frozenset(range(len(runs) + 1)),
        marks={(0, x): "good" if run.passed else "bad" for x, run in enumerate(runs, 1)},
    )


def _column(run: Run) -> dict[str, str]:
    found, report = heading(run), run.report
    with_query, error, size = (
        report["fidelity_fp8_attention"],
        report["attention_error"],
        report["bytes_per_token"],
    )
    values = {name: value for name, value, _ in found.tiles}
    return {
        "verdict": "pass" if run.passed else "fail",
        "model": found.model,
        "cache": found.cache,
        **values,
        "KL with Q in FP8": nats(with_query["kl_mean"]) if with_query else "",
        "perplexity, 16 bits": f"{report['fidelity']['perplexity_reference']:.3f}",
        "attention error, worst": f"{error['worst']:.4f}, layer {error['worst_layer']}",
        "bytes per token": f"{size['quantized']:,.0f} of {size['reference']:,.0f}{_of_decoder(report)}",
        "layers in 16 bits": ", ".join(map(str, report["skipped_layers"])) or "none",
    }
