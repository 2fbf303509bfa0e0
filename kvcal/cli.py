"""The command line. It parses, hands over to ``run``, prints, and sets the exit code.

Heavy imports happen inside the commands: ``kvcal --help`` must not wait for torch.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcal import __version__, cli_bench, cli_diff, cli_plan, cli_recipes, cli_report, launch, terminal
from kvcal.errors import EXIT_CODES, CheckFailed, GateFailed, KvcalError, UsageError
from kvcal.options import (
    CALIBRATION_FIELDS,
    COMPARISON_FIELDS,
    EVALUATION_FIELDS,
    AllowPickle,
    BatchSize,
    BitsBudget,
    Chunk,
    Column,
    Dataset,
    Deliver,
    Depths,
    Device,
    DeviceMap,
    Engine,
    EvaluationDataset,
    EvaluationSamples,
    Folder,
    Format,
    GranularityName,
    Json,
    Junit,
    MaxKL,
    MaxLength,
    MaxMemory,
    Model,
    PromptsEach,
    RecipeName,
    Revision,
    RoundQuery,
    Samples,
    Schemes,
    Seed,
    SeqLen,
    Split,
    SuiteName,
    SuiteSeed,
    Summary,
    TrustRemoteCode,
    changes,
    recipe_named,
    request_of,
    suite_of,
)

# As they are come to: the main job, what follows it, what is asked beside it.
_ORDER = (
    *("plan", "calibrate", "check", "evaluate", "validate", "report", "export", "engines"),
    *("diff", "merge", "unfold", "compare", "recipes", "bench"),
)


class _Program(TyperGroup):
    """Its own options may stand behind a command too, and count before the command line is judged."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return sorted(super().list_commands(ctx), key=_ORDER.index)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words of the command that are left."""
        own, rest = terminal.of_program(args)
        found: list[str] = super().parse_args(ctx, own + rest)
        command = "" if not rest or rest[0].startswith("-") else rest[0]
        terminal.listen(command, quiet=ctx.params["quiet"], log_json=ctx.params["log_json"])
        return found


app = typer.Typer(
    name="kvcal",
    cls=_Program,
    help="Calibrate the quantized KV cache of a language model and write a checkpoint that engines load.",
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES) + ".",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_recipes.app, name="recipes")
app.add_typer(cli_bench.app, name="bench")

_INTERRUPTED = 130

app.command()(cli_plan.plan)
app.command()(cli_diff.diff)
app.command()(cli_report.report)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    quiet: Annotated[
        bool, typer.Option(terminal.QUIET, help="Say nothing but errors on stderr. Also behind a command.")
    ] = False,
    log_json: Annotated[
        str | None,
        typer.Option(
            terminal.LOG_JSON,
            metavar="FILE",
            help="Also add what is said to FILE as JSON lines; with - they are all that stderr holds. Also"
            " behind a command.",
        ),
    ] = None,
) -> None:
    if version:
        typer.echo(f"kvcal {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(UsageError.exit_code)
    if ctx.invoked_subcommand != "calibrate":
        launch.refuse_several(ctx.invoked_subcommand)


@app.command()
def calibrate(
    ctx: typer.Context,
    model: Model,
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
    output: Annotated[Path | None, typer.Option(help="Checkpoint folder to write.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output after success.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the statistics of an interrupted run.")
    ] = False,
    save_every: Annotated[
        float, typer.Option(min=0, help="Seconds between two savings of what --resume goes on from.")
    ] = 60.0,
    revision: Revision = None,
    device: Device = "auto",
    device_map: DeviceMap = "one",
    max_memory: MaxMemory = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    junit: Junit = None,
    summary: Summary = None,
    as_json: Json = False,
) -> None:
    """Calibrate, validate, evaluate, export and check, in one run.

    Under torchrun or accelerate launch, several processes share the work.

    Example: kvcal calibrate --model demo --format fp8 --granularity per_head
    """
    from kvcal import ci_report, report, run

    wanted = changes(ctx, CALIBRATION_FIELDS)
    request = request_of(
        model,
        revision,
        device,
        trust_remote_code,
        allow_pickle,
        output,
        overwrite,
        device_map=device_map,
        max_memory=max_memory,
        resume=resume,
        save_every=save_every,
    )
    if not launch.place_if_any().leads:  # rank 0 reports
        junit = summary = None
    with ci_report.reporting("calibrate", junit, summary) as outcome:
        found = run.run_calibrate(request, recipe_named(recipe, wanted), terminal.narrator())
        if found is None:
            return
        document, folder = found
        outcome.cases = ci_report.gate_cases(document["gates"]) + ci_report.check_cases(document["checks"])
        outcome.markdown = run.written_report(folder)
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
def engines(as_json: Json = False) -> None:
    """List what each serving engine loads, and what it ignores.

    Example: kvcal engines
    """
    from kvcal import engine_report
    from kvcal.engines import ENGINES

    if as_json:
        terminal.print_json([engine_report.engine_document(engine) for engine in ENGINES])
    else:
        engine_report.print_engines(terminal.console(), ENGINES)


@app.command()
def export(
    folder: Folder,
    engine: Annotated[str, typer.Option(help="Serving engine; `kvcal engines` lists them.")],
    base: Annotated[
        Path | None,
        typer.Option(help="Write the scales beside these weights: the same model, quantized as a rule."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Checkpoint folder to write.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output after success.")] = False,
    as_json: Json = False,
) -> None:
    """Write a calibrated checkpoint in the form of another engine, without running the model.

    Example: kvcal export out/demo --engine sglang
    """
    from kvcal import engine_report, run_export

    found = run_export.run_export(folder, engine, output, terminal.narrator(), overwrite=overwrite, base=base)
    if as_json:
        terminal.print_json(vars(found))
    else:
        engine_report.print_exported(terminal.console(), vars(found))


@app.command()
def merge(
    runs: Annotated[list[Path], typer.Argument(help="Checkpoint folders that kvcal calibrate wrote.")],
    output: Annotated[Path | None, typer.Option(help="Checkpoint folder to write.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output after success.")] = False,
    as_json: Json = False,
) -> None:
    """Merge calibrations of one model on different texts, without running it.

    Example: kvcal merge out/chats out/code --output out/both
    """
    from kvcal import engine_report, run_merge

    found = run_merge.run_merge(runs, output, terminal.narrator(), overwrite=overwrite)
    if as_json:
        terminal.print_json(vars(found))
    else:
        engine_report.print_merged(terminal.console(), vars(found))


@app.command()
def compare(
    ctx: typer.Context,
    model: Model,
    schemes: Schemes = None,
    recipe: RecipeName = None,
    dataset: Dataset = None,
    dataset_split: Split = None,
    dataset_column: Column = None,
    evaluation_dataset: EvaluationDataset = None,
    samples: Samples = None,
    evaluation_samples: EvaluationSamples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    output: Annotated[Path | None, typer.Option(help="Folder for compare.json, .md and .png.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    revision: Revision = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    junit: Junit = None,
    summary: Summary = None,
    as_json: Json = False,
) -> None:
    """Measure ways to store K and V against each other: bits, KL, perplexity.

    Example: kvcal compare --model demo --schemes fp8,kivi-4,balanced-4
    """
    from kvcal import ci_report, comparison_report, run_compare
    from kvcal.recipe import Gates

    wanted = recipe_named(recipe, changes(ctx, COMPARISON_FIELDS))
    if recipe is None:  # the default gates are meant for one calibration
        wanted = wanted.model_copy(update={"gates": Gates()})
    if junit is not None and wanted.gates == Gates():
        raise UsageError("--junit lists gates, and there are none; give --recipe one that has them")
    names = schemes.split(",") if schemes else wanted.schemes
    request = request_of(model, revision, device, trust_remote_code, allow_pickle, output, overwrite)
    with ci_report.reporting("compare", junit, summary) as outcome:
        document, rows = run_compare.run_compare(request, wanted, names, terminal.narrator())
        outcome.cases = ci_report.comparison_cases(document["gates"])
        outcome.markdown = comparison_report.markdown(rows, document, picture=False)
    if as_json:
        terminal.print_json(document)
    else:
        comparison_report.print_comparison(terminal.console(), rows, document)
        if output is not None:
            terminal.console().print(f"written to {output}", highlight=False, soft_wrap=True)
    failed = [gate["text"] for gate in document["gates"] if not gate["passed"]]
    if failed:
        terminal.fail(GateFailed("; ".join(failed)))


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

    found = run.run_unfold(folder, output, terminal.narrator(), overwrite=overwrite, rounded=rounded)
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
    engine: Annotated[str, typer.Option(help="Serving engine; `kvcal engines` lists them.")] = "vllm",
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Also show what each of this many ranks will hold.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Also load it in the real engine and compare.")
    ] = False,
    engine_python: Annotated[
        str | None, typer.Option(help="Python interpreter that has the engine, for --live.")
    ] = None,
    junit: Junit = None,
    summary: Summary = None,
    as_json: Json = False,
) -> None:
    """Hold the written files against the engine's loader contract.

    Example: kvcal check SmolLM2-135M-Instruct-fp8_e4m3-per_head --engine vllm
    """
    from kvcal import ci_report, engine_report, report, run

    with ci_report.reporting("check", junit, summary) as outcome:
        findings = run.run_check(
            folder, engine, live=live, engine_python=engine_python, narrator=terminal.narrator()
        )
        documents = [vars(f) for f in findings]
        outcome.cases = ci_report.check_cases(documents)
        outcome.markdown = ci_report.check_markdown(folder, engine, documents)
    failed = [f for f in findings if not f.ok]
    shares = run.run_shares(folder, engine, tensor_parallel) if tensor_parallel and not failed else []
    if as_json:
        document = {"ok": not failed, "findings": documents}
        terminal.print_json(document | ({"ranks": shares} if tensor_parallel else {}))
    else:
        report.print_findings(terminal.console(), findings)
        if shares:
            engine_report.print_shares(terminal.console(), shares)
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
    chunk: Chunk = None,
    device: Device = "auto",
    device_map: DeviceMap = "one",
    max_memory: MaxMemory = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Compare quantized attention with full precision, layer by layer, on held-out text.

    Example: kvcal validate SmolLM2-135M-Instruct-fp8_e4m3-per_head
    """
    from kvcal import report, run

    wanted = changes(ctx, EVALUATION_FIELDS)
    request = request_of(
        str(folder),
        device=device,
        trust_remote_code=trust_remote_code,
        device_map=device_map,
        max_memory=max_memory,
    )
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
    chunk: Chunk = None,
    device: Device = "auto",
    device_map: DeviceMap = "one",
    max_memory: MaxMemory = None,
    suite: SuiteName = None,
    max_length: MaxLength = None,
    depths: Depths = None,
    prompts: PromptsEach = None,
    seed: SuiteSeed = None,
    round_query: RoundQuery = False,
    trust_remote_code: TrustRemoteCode = False,
    summary: Summary = None,
    as_json: Json = False,
) -> None:
    """Measure KL, agreement and perplexity over the quantized cache, on held-out text.

    With --suite: on the model's own text and in retrieval tasks too, whose scores over both caches are
    compared; the record is kvcal/suite.json in the folder.

    Example: kvcal evaluate out/demo --dataset notes.txt --samples 4
    """
    from kvcal import ci_report, markdown, report, run, run_suite, suite_report

    wanted, wanted_suite = changes(ctx, EVALUATION_FIELDS), suite_of(ctx)
    request = request_of(
        str(folder),
        device=device,
        trust_remote_code=trust_remote_code,
        device_map=device_map,
        max_memory=max_memory,
    )
    with ci_report.reporting("evaluate", None, summary) as outcome:
        if wanted_suite is None:
            found = run.run_evaluate(folder, request, wanted, terminal.narrator())
            document = report.fidelity_document(found)
            outcome.markdown = markdown.evaluation(document, str(folder))
        else:
            document = run_suite.run_suite(
                folder, request, wanted, wanted_suite, round_query=round_query, narrator=terminal.narrator()
            )
            outcome.markdown = suite_report.markdown(document, str(folder))
    if as_json:
        terminal.print_json(document)
    elif wanted_suite is None:
        report.print_fidelity(terminal.console(), document)
    else:
        suite_report.print_suite(terminal.console(), document)


for group in (app, cli_bench.app, cli_recipes.app):
    for each in group.registered_commands:
        each.epilog = f"Also {terminal.QUIET} and {terminal.LOG_JSON} FILE: see kvcal --help."


def main() -> None:
    """Entry point: every error leaves as one line and its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is ended cleans up like Ctrl-C
    if not sys.warnoptions:
        warnings.filterwarnings("ignore")  # advice of libraries to their own users
    terminal.hear_libraries()
    terminal.listen("", quiet=False, log_json=None)
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
    if not code:
        terminal.succeed()
    sys.exit(code or 0)
