"""``kvcal diff``: a new calibration against the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal import terminal
from kvcal.errors import GateFailed, ModelError
from kvcal.options import Json, Junit, Summary


def diff(
    old: Annotated[Path, typer.Argument(help="Checkpoint of the last calibration, or its records.")],
    new: Annotated[Path, typer.Argument(help="Checkpoint of the new one, or its records.")],
    max_kl_increase: Annotated[
        str, typer.Option(help="Share, or nats, by which the mean KL may grow.")
    ] = "10%",
    max_perplexity_increase: Annotated[
        str, typer.Option(help="Share by which perplexity relative to 16 bits may grow.")
    ] = "1%",
    max_top1_decrease: Annotated[
        str, typer.Option(help="Share, or points of 1, by which top-1 agreement may fall.")
    ] = "1%",
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare other models or other held-out text all the same.")
    ] = False,
    junit: Junit = None,
    summary: Summary = None,
    as_json: Json = False,
) -> None:
    """Fail if a new calibration is worse than the last by more than a margin.

    Example: kvcal diff last/model-fp8kv model-fp8kv --max-kl-increase 5%
    """
    from kvcal import ci_report, regression, regression_report

    with ci_report.reporting("diff", junit, summary) as outcome:
        margins = regression.Margins(
            kl=regression.margin(max_kl_increase, "--max-kl-increase"),
            perplexity=regression.margin(max_perplexity_increase, "--max-perplexity-increase"),
            top1=regression.margin(max_top1_decrease, "--max-top1-decrease"),
        )
        found = regression.compare(regression.read(old), regression.read(new), margins)
        if found.incomparable and not anyway:
            raise ModelError(
                f"not comparable: {'; '.join(found.incomparable)}; --anyway compares them all the same"
            )
        document = regression_report.document(found)
        verdict = f"verdict of the old calibration {found.old.report['verdict']}, of the new"
        verdict += f" {found.new.report['verdict']}"
        outcome.cases = ci_report.gate_cases(document["gates"])
        outcome.cases.append(ci_report.Case("gates", "verdict", not found.newly_failed, verdict))
        outcome.markdown = regression_report.markdown(found)
    if as_json:
        terminal.print_json(document)
    else:
        regression_report.print_comparison(terminal.console(), found)
    worse = [gate["text"] for gate in document["gates"] if not gate["passed"]]
    if found.newly_failed:
        worse.append(f"{new} fails a gate or a check of its own, {old} did not")
    if worse:
        terminal.fail(GateFailed("; ".join(worse)))
