"""``kvcal bench``: the commands behind figures and defaults."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcal import terminal
from kvcal.options import (
    CALIBRATION_FIELDS,
    BatchSize,
    Device,
    Format,
    GranularityName,
    Json,
    Model,
    Samples,
    SeqLen,
    changes,
    recipe_named,
    request_of,
)

app = typer.Typer(
    help="Measure what kvcal itself costs, and how its choices compare.",
    rich_markup_mode=None,
)


@app.command("capture")
def bench_capture(
    ctx: typer.Context,
    model: Model = "demo",
    samples: Samples = 4,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    pairs: Annotated[int, typer.Option(min=2, help="Paired runs per mode.")] = 10,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time a forward pass with and without collecting statistics, in paired runs.

    Example: kvcal bench capture --model demo --pairs 10
    """
    from kvcal import run

    recipe = recipe_named(None, changes(ctx, CALIBRATION_FIELDS))
    terminal.print_rows(
        run.run_bench_capture(request_of(model, device=device), recipe, pairs, terminal.narrator()), as_json
    )


@app.command("rules")
def bench_rules(
    ctx: typer.Context,
    model: Model = "demo",
    granularity: GranularityName = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare scale rules: half of the calibration text sets the scales, the other half judges them.

    Example: kvcal bench rules --model demo --granularity per_head
    """
    from kvcal import run

    recipe = recipe_named(None, changes(ctx, CALIBRATION_FIELDS))
    terminal.print_rows(
        run.run_bench_rules(request_of(model, device=device), recipe, terminal.narrator()), as_json
    )


@app.command("folds")
def bench_folds(
    ctx: typer.Context,
    model: Model = "demo",
    format: Format = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare transforms of Q, K and V on an engine's own quantizer, on calibration text alone.

    Example: kvcal bench folds --model demo --format int4_per_token_head
    """
    from kvcal import run

    recipe = recipe_named(None, changes(ctx, CALIBRATION_FIELDS) | {"deliver": "fold"})
    terminal.print_rows(
        run.run_bench_folds(request_of(model, device=device), recipe, terminal.narrator()), as_json
    )


@app.command("objectives")
def bench_objectives(
    ctx: typer.Context,
    model: Model = "demo",
    formats: Annotated[str, typer.Option(help="Static formats, with commas between.")] = "int8,int4",
    samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare ways to choose a static range, on calibration text alone.

    Example: kvcal bench objectives --model demo --formats int8,int4,int3
    """
    from kvcal import run

    recipe = recipe_named(None, changes(ctx, CALIBRATION_FIELDS))
    terminal.print_rows(
        run.run_bench_objectives(
            request_of(model, device=device), recipe, formats.split(","), terminal.narrator()
        ),
        as_json,
    )
