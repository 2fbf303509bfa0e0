"""The command line. It parses, hands over to ``run``, prints, and sets the exit code.

Heavy imports happen inside the commands: ``kvcal --help`` must not wait for torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcal import __version__, terminal
from kvcal.errors import EXIT_CODES, CheckFailed, GateFailed, KvcalError, UsageError
from kvcal.options import (
    CALIBRATION_FIELDS,
    EVALUATION_FIELDS,
    AllowPickle,
    BatchSize,
    Column,
    Dataset,
    Deliver,
    Device,
    Engine,
    EvaluationSamples,
    Folder,
    Format,
    GranularityName,
    Json,
    Model,
    RecipeName,
    Revision,
    Samples,
    Seed,
    SeqLen,
    Split,
    TrustRemoteCode,
    changes,
)

if TYPE_CHECKING:
    from kvcal.recipe import Recipe
    from kvcal.run import Request

app = typer.Typer(
    name="kvcal",
    help="Calibrate the quantized KV cache of a language model and write a checkpoint that engines load.",
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES) + ".",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(help="List, show and validate recipes.", rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")
bench_app = typer.Typer(
    help="Measure what kvcal itself costs, and how its choices compare.",
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")

_INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"kvcal {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(UsageError.exit_code)


@app.command()
def calibrate(
    ctx: typer.Context,
    model: Model,
    recipe: RecipeName = None,
    format: Format = None,
    granularity: GranularityName = None,
    engine: Engine = None,
    deliver: Deliver = None,
    dataset: Dataset = None,
    dataset_split: Split = None,
    dataset_column: Column = None,
    samples: Samples = None,
    evaluation_samples: EvaluationSamples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    output: Annotated[Path | None, typer.Option(help="Checkpoint folder to write.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output after success.")] = False,
    revision: Revision = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Calibrate, validate, evaluate, export and check, in one run.

    Example: kvcal calibrate --model demo --format fp8 --granularity per_head
    """
    from kvcal import report, run

    wanted = changes(ctx, CALIBRATION_FIELDS)
    request = _request(model, revision, device, trust_remote_code, allow_pickle, output, overwrite)
    document, folder = run.run_calibrate(request, _recipe(recipe, wanted), terminal.narrator())
    if as_json:
        terminal.print_json(document | {"folder": str(folder)})
    else:
        report.print_report(terminal.console(), document)
        if document["verdict"] == "pass":
            terminal.console().print(f"written to {folder}", highlight=False, soft_wrap=True)
    failed = [g["text"] for g in document["gates"] if not g["passed"]]
    if not document["engine"]["consumed"]:
        terminal.fail(CheckFailed("; ".join(document["engine"]["reasons"]) + f"; records in {folder}"))
    if failed:
        terminal.fail(GateFailed("; ".join(failed) + f"; no checkpoint was written, records are in {folder}"))


@app.command()
def plan(
    ctx: typer.Context,
    model: Model,
    recipe: RecipeName = None,
    format: Format = None,
    granularity: GranularityName = None,
    engine: Engine = None,
    deliver: Deliver = None,
    dataset: Dataset = None,
    dataset_split: Split = None,
    dataset_column: Column = None,
    samples: Samples = None,
    evaluation_samples: EvaluationSamples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Say what calibrate would do, or why it would refuse. Loads no weights.

    Example: kvcal plan --model demo --format fp8 --granularity per_head
    """
    from kvcal import preflight, report

    wanted = _recipe(recipe, changes(ctx, CALIBRATION_FIELDS))
    resolved, source = preflight.resolve(model, revision, wanted, terminal.narrator())
    document = report.plan_document(resolved, source.name)
    if as_json:
        terminal.print_json(document)
    else:
        report.print_plan(terminal.console(), document)


@app.command()
def unfold(
    folder: Folder,
    output: Annotated[Path, typer.Option(help="Checkpoint folder to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output after success.")] = False,
    rounded: Annotated[
        bool, typer.Option("--rounded", help="Also write tensors that are only close to the original.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Restore the weights that a folded checkpoint was made from.

    Example: kvcal unfold model-int8_per_token_head-folded --output model-again
    """
    from kvcal import run

    found = run.run_unfold(folder, output, overwrite=overwrite, rounded=rounded)
    if as_json:
        terminal.print_json(vars(found) | {"folder": str(output)})
    else:
        console = terminal.console()
        console.print(f"{len(found.restored)} tensors restored bit for bit", highlight=False)
        if found.rounded:
            console.print(f"{len(found.rounded)} tensors only close to the original", style="yellow")
        console.print(f"written to {output}", highlight=False, soft_wrap=True)


@app.command()
def check(
    folder: Folder,
    engine: Annotated[str, typer.Option(help="Serving engine: vllm.")] = "vllm",
    live: Annotated[
        bool, typer.Option("--live", help="Also load it in the real engine and compare.")
    ] = False,
    engine_python: Annotated[
        str | None, typer.Option(help="Python interpreter that has the engine, for --live.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Hold the written files against the engine's loader contract.

    Example: kvcal check SmolLM2-135M-Instruct-fp8_e4m3-per_head --engine vllm
    """
    from kvcal import report, run

    findings = run.run_check(
        folder, engine, live=live, engine_python=engine_python, narrator=terminal.narrator()
    )
    failed = [f for f in findings if not f.ok]
    if as_json:
        terminal.print_json({"ok": not failed, "findings": [vars(f) for f in findings]})
    else:
        report.print_findings(terminal.console(), findings)
    if failed:
        terminal.fail(CheckFailed(f"{folder}: {len(failed)} of {len(findings)} rules are broken"))


@app.command()
def validate(
    ctx: typer.Context,
    folder: Folder,
    dataset: Dataset = None,
    dataset_split: Split = None,
    dataset_column: Column = None,
    seq_len: SeqLen = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Compare quantized attention with full precision, layer by layer, on held-out text.

    Example: kvcal validate SmolLM2-135M-Instruct-fp8_e4m3-per_head
    """
    from kvcal import report, run

    wanted = changes(ctx, EVALUATION_FIELDS)
    request = _request(str(folder), device=device, trust_remote_code=trust_remote_code)
    found = run.run_validate(folder, request, wanted, terminal.narrator())
    if as_json:
        terminal.print_json(report.validation_document(found))
    else:
        report.print_validation(terminal.console(), found)


@app.command()
def evaluate(
    ctx: typer.Context,
    folder: Folder,
    dataset: Dataset = None,
    dataset_split: Split = None,
    dataset_column: Column = None,
    samples: Annotated[int | None, typer.Option(help="Held-out samples.")] = None,
    seq_len: SeqLen = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Measure KL, agreement and perplexity over the quantized cache, on held-out text.

    Example: kvcal evaluate out/demo --dataset notes.txt --samples 4
    """
    from kvcal import report, run

    wanted = changes(ctx, EVALUATION_FIELDS)
    request = _request(str(folder), device=device, trust_remote_code=trust_remote_code)
    found = run.run_evaluate(folder, request, wanted, terminal.narrator())
    document = report.fidelity_document(found)
    if as_json:
        terminal.print_json(document)
    else:
        report.print_fidelity(terminal.console(), document)


@bench_app.command("capture")
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

    recipe = _recipe(None, changes(ctx, CALIBRATION_FIELDS))
    terminal.print_rows(
        run.run_bench_capture(_request(model, device=device), recipe, pairs, terminal.narrator()), as_json
    )


@bench_app.command("rules")
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

    recipe = _recipe(None, changes(ctx, CALIBRATION_FIELDS))
    terminal.print_rows(
        run.run_bench_rules(_request(model, device=device), recipe, terminal.narrator()), as_json
    )


@recipes_app.command("list")
def recipes_list(as_json: Json = False) -> None:
    """List the recipes that kvcal ships.

    Example: kvcal recipes list
    """
    from kvcal import recipe

    found = {name: recipe.load(name).description for name in recipe.shipped()}
    if as_json:
        terminal.print_json(found)
    else:
        indent = max(map(len, found)) + 2
        columns = shutil.get_terminal_size().columns
        for name, description in found.items():
            line = f"{name:<{indent}}{description}"
            typer.echo(textwrap.fill(line, columns, subsequent_indent=" " * indent))


@recipes_app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe, or a file.")], as_json: Json = False
) -> None:
    """Print a recipe with every default filled in.

    Example: kvcal recipes show fp8-per-head
    """
    from kvcal import recipe

    found = recipe.load(name)
    if as_json:
        terminal.print_json(found.model_dump())
    else:
        typer.echo(found.to_yaml(), nl=False)


@recipes_app.command("validate")
def recipes_validate(
    name: Annotated[str, typer.Argument(help="Recipe file.")], as_json: Json = False
) -> None:
    """Report every fault of a recipe at once.

    Example: kvcal recipes validate recipes/fp8-ci.yaml
    """
    from kvcal import recipe
    from kvcal.errors import RecipeError

    try:
        recipe.load(name)
    except RecipeError as error:
        if as_json:
            terminal.print_json({"ok": False, "faults": error.faults})
        else:
            for fault in error.faults:
                typer.echo(fault)
        count = len(error.faults)
        terminal.fail(UsageError(f"{name}: {count} fault{'s' if count > 1 else ''}"))
    if as_json:
        terminal.print_json({"ok": True, "faults": []})
    else:
        typer.echo(f"{name}: valid")


def main() -> None:
    """Entry point: every error leaves as one line and its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is ended cleans up like Ctrl-C
    if not sys.warnoptions:
        warnings.filterwarnings("ignore")  # advice of libraries to their own users
    try:
        code = app(standalone_mode=False)
    except KvcalError as error:
        terminal.leave(str(error), error.exit_code)
    except typer.TyperException as error:
        terminal.leave(error.format_message(), UsageError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("KVCAL_TRACEBACK") == "1":
            raise
        terminal.leave(f"a bug in kvcal: {type(error).__name__}: {error} (KVCAL_TRACEBACK=1 shows where)", 1)
    if code == _INTERRUPTED:  # typer turns an interrupt inside a command into this code, without a word
        terminal.leave("interrupted; nothing was left behind", _INTERRUPTED)
    sys.exit(code or 0)


def _recipe(name: str | None, changes: dict[str, Any]) -> Recipe:
    from kvcal import recipe

    return (recipe.load(name) if name else recipe.Recipe()).override(changes)


def _request(
    model: str,
    revision: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
) -> Request:
    from kvcal.models import Trust
    from kvcal.run import Request

    return Request(model, revision, output, overwrite, device, Trust(trust_remote_code, allow_pickle))
