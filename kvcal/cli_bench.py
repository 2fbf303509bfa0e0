"""``kvcal bench``: the commands behind figures and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal import terminal
from kvcal.options import (
    CALIBRATION_FIELDS,
    BatchSize,
    Device,
    Engine,
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


@app.command("scaling")
def bench_scaling(
    ctx: typer.Context,
    model: Model = "demo",
    processes: Annotated[str, typer.Option(help="Numbers of processes, with commas between.")] = "1,2",
    samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    passes: Annotated[int, typer.Option(min=1, help="Timed passes over the text per start.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each number of processes, in turn.")] = 2,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time calibration by several processes, and see that they find the same statistics.

    Starts torchrun itself. Forward passes, collection and the merge are timed, after a warm-up.

    Example: kvcal bench scaling --model ./model --processes 1,2 --samples 128 --seq-len 2048
    """
    from kvcal import scaling

    counts = [int(each) if each.strip().isdigit() else 0 for each in processes.split(",")]
    recipe = recipe_named(None, changes(ctx, CALIBRATION_FIELDS))
    rows = scaling.run_bench_scaling(
        request_of(model, device=device), recipe, counts, passes, repeats, terminal.narrator()
    )
    terminal.print_rows(rows, as_json)


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


@app.command("reduction")
def bench_reduction(
    ctx: typer.Context,
    model: Model = "demo",
    samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare FP8 scales per head with the coarser ones that some engines take, on calibration text alone.

    Per tensor: the largest of the heads, for K, V and Q each. One per layer: the larger of K and V for both.
    Scale 1.0 is what engines serve that ignore scales.

    Example: kvcal bench reduction --model demo --samples 16
    """
    from kvcal import run

    recipe = recipe_named(None, changes(ctx, CALIBRATION_FIELDS) | {"granularity": "per_head"})
    terminal.print_rows(
        run.run_bench_reduction(request_of(model, device=device), recipe, terminal.narrator()), as_json
    )


@app.command("phase")
def bench_phase(
    ctx: typer.Context,
    model: Model = "demo",
    format: Format = None,
    granularity: GranularityName = None,
    engine: Engine = None,
    bands: Annotated[int, typer.Option(min=1, help="Bands of RoPE pairs, by frequency.")] = 8,
    samples: Samples = 8,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Say which frequency bands of RoPE make the logit error of cached K, by distance.

    Half of the calibration text sets the scales, the other half is measured. Tells whether a band would pay
    its 16 bits. Distances reach as far as a sample is long.

    Example: kvcal bench phase --model demo --format fp8 --seq-len 2048
    """
    from kvcal import phase_report, run

    recipe = recipe_named(None, changes(ctx, CALIBRATION_FIELDS))
    request = request_of(model, device=device)
    found, resolved = run.run_bench_phase(request, recipe, bands, terminal.narrator())
    if as_json:
        terminal.print_json(phase_report.document(found, resolved.format.name))
    else:
        phase_report.show(terminal.console(), found, resolved.format.name)


@app.command("attention")
def bench_attention(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="BATCH,HEADS,KV_HEADS,LENGTH,HEAD_DIM; repeat it. Default: five shapes."),
    ] = None,
    fmt: Annotated[
        list[str] | None, typer.Option("--format", help="Format to time; repeat it. Default: all.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Replays of each graph.")] = 30,
    output: Annotated[Path | None, typer.Option(help="Folder for JSON, Markdown and a PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Time decode attention over a paged cache on a GPU, beside other kernels.

    Each implementation is first checked against float64. Percentages are of what a plain read reaches in
    the same run.

    Example: kvcal bench attention --format fp8_e4m3 --shape 8,32,8,16384,128
    """
    from kvcal import run
    from kvcal.attention_bench import report

    found = run.run_bench_attention(shape or [], fmt or [], repeats, output, terminal.narrator())
    if as_json:
        terminal.print_json(found.document)
    else:
        report.show(terminal.console(), found)
