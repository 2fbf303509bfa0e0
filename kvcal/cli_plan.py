"""``kvcal plan``: what a calibration would do, and with ``--gpu`` what a GPU would hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal import terminal
from kvcal.errors import UsageError
from kvcal.options import (
    CALIBRATION_FIELDS,
    BatchSize,
    BitsBudget,
    Chunk,
    Column,
    Dataset,
    Deliver,
    Engine,
    EvaluationSamples,
    Format,
    GranularityName,
    Json,
    MaxKL,
    RecipeName,
    Revision,
    Samples,
    Seed,
    SeqLen,
    Split,
    changes,
    recipe_named,
)

_DEFAULT_CONTEXT = 8192
# Options of the capacity planner alone, and those of a calibration that it takes too.
_CAPACITY_ONLY = (
    "shape",
    "context",
    "headroom",
    "tensor_parallel",
    "page_size",
    "requests",
    "price_per_hour",
    "weights_gib",
    "weights_bits",
    "measured",
)
_SHARED = ("engine", "max_kl")


def plan(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Hub id, local folder, .gguf file, or 'demo'; with --gpu a config.json is enough."),
    ] = None,
    recipe: RecipeName = None,
    format: Format = None,
    granularity: GranularityName = None,
    engine: Engine = None,
    deliver: Deliver = None,
    max_kl: MaxKL = None,
    bits_budget: BitsBudget = None,
    dataset: Dataset = None,
    dataset_split: Split = None,
    dataset_column: Column = None,
    samples: Samples = None,
    evaluation_samples: EvaluationSamples = None,
    seq_len: SeqLen = None,
    chunk: Chunk = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Plan capacity on this GPU (h100, a100-80gb, …); auto takes the local one."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a model: the geometry of a known one, as llama-3-70b.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a request; by default 8192, or the model's context.")
    ] = None,
    headroom: Annotated[
        float | None, typer.Option(min=0, max=99, help="Percent of memory to leave free; by default 10.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="GPUs that share one copy of the model.")
    ] = None,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a page; by default 16.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at once; by default all that fit.")
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="Of one GPU, in any currency.")] = None,
    weights_gib: Annotated[
        float | None, typer.Option(min=0, help="Size of the weights; by default counted from the geometry.")
    ] = None,
    weights_bits: Annotated[
        float | None, typer.Option(min=1, max=32, help="Bits per weight of linear layers.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Report of a calibration or comparison of this model, or its folder.")
    ] = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Say what calibrate would do, or why it would refuse. Loads no weights.

    With --engine all: what every engine would make of it. With --gpu: how many
    requests fit beside the weights in each format, and what a decode step costs;
    --max-kl is then the loss that is acceptable.

    Example: kvcal plan --shape llama-3-70b --gpu h100 --tensor-parallel 4
    """
    _refuse_options(ctx, capacity=gpu is not None)
    if gpu is not None:
        _plan_capacity(ctx.params)
        return
    if model is None:
        raise UsageError("Missing option '--model'")
    if engine == "all":
        _plan_for_all(ctx, model, revision, recipe, as_json)
        return
    _plan_calibration(ctx, model, revision, recipe, as_json)


def _refuse_options(ctx: typer.Context, *, capacity: bool) -> None:
    """Those that would have no effect."""
    given = {name for name, value in ctx.params.items() if value is not None}
    if capacity:
        useless, why = {*CALIBRATION_FIELDS, "recipe"} - set(_SHARED), "says nothing about capacity"
    else:
        useless, why = set(_CAPACITY_ONLY), "needs --gpu"
    found = sorted(given & useless)
    if found:
        raise UsageError(f"--{found[0].replace('_', '-')} {why}")
    if capacity and {"shape", "revision"} <= given:
        raise UsageError("--revision is that of a --model; a --shape has none")
    for name in sorted(given):
        value = ctx.params[name]
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} must be a number, found {value}")


def _plan_calibration(
    ctx: typer.Context, model: str, revision: str | None, recipe: str | None, as_json: bool
) -> None:
    from kvcal import preflight, report

    wanted = recipe_named(recipe, changes(ctx, CALIBRATION_FIELDS))
    resolved, source = preflight.resolve(model, revision, wanted, terminal.narrator())
    document = report.plan_document(resolved, source.name)
    if as_json:
        terminal.print_json(document)
    else:
        report.print_plan(terminal.console(), document)
        report.print_advice(terminal.console(), document)


def _plan_for_all(
    ctx: typer.Context, model: str, revision: str | None, recipe: str | None, as_json: bool
) -> None:
    from kvcal import engine_report, preflight

    fields = {option: paths for option, paths in CALIBRATION_FIELDS.items() if option != "engine"}
    wanted = recipe_named(recipe, changes(ctx, fields))
    found, source = preflight.verdicts(model, revision, wanted, terminal.narrator())
    if as_json:
        terminal.print_json([engine_report.verdict_document(each) for each in found])
    else:
        engine_report.print_verdicts(terminal.console(), found, f"{wanted.format} for {source.name}")


def _plan_capacity(options: dict[str, Any]) -> None:
    from kvcal import engines, preflight
    from kvcal.planner import capacity, gpus, local_gpu, measured, recommendation, report
    from kvcal.recipe import Recipe

    engine = engines.get(options["engine"] or engines.VLLM.name)
    gpu = local_gpu.detect() if options["gpu"] == "auto" else gpus.get(options["gpu"])
    model = preflight.served_model_named(
        options["model"],
        options["shape"],
        options["revision"],
        options["weights_gib"],
        options["weights_bits"],
        terminal.narrator(),
    )
    deployment = capacity.Deployment(
        gpu=gpu,
        engine=engine,
        context=options["context"] or min(_DEFAULT_CONTEXT, model.max_context),
        headroom=(10 if options["headroom"] is None else options["headroom"]) / 100,
        ranks=options["tensor_parallel"] or 1,
        page=options["page_size"] or 16,
        requests=options["requests"],
        price_per_hour=options["price_per_hour"],
    )
    found = capacity.plan(model, deployment)
    of_model = options["measured"]
    losses = measured.read(of_model, len(model.caches)) if of_model else {}
    limit: float = (Recipe().gates.kl_mean or 0.0) if options["max_kl"] is None else options["max_kl"]
    chosen = recommendation.choose(found, losses, limit)
    if options["as_json"]:
        terminal.print_json(report.document(found, chosen))
    else:
        report.print_capacity(terminal.console(), found, chosen)
