"""Orchestration of ``kvcal evaluate --suite``: a written checkpoint to scores over both caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcal import continuations, evaluate, manifest, opening, suite, suite_report
from kvcal.errors import PlanRefused, UsageError
from kvcal.export import bundle
from kvcal.generation import Served
from kvcal.opening import Request
from kvcal.progress import Narrator
from kvcal.records import SUITE
from kvcal.suite import Runner

_PROMPT_TOKENS = 128  # of a continuation


def run_suite(
    folder: Path,
    request: Request,
    changes: dict[str, Any],
    wanted: dict[str, Any],
    *,
    round_query: bool,
    narrator: Narrator,
) -> suite_report.Document:
    """Run a suite on a checkpoint and write ``kvcal/suite.json`` among its records.

    Args:
        folder: of the checkpoint.
        request: where the model goes.
        changes: of the recipe's evaluation section.
        wanted: arguments of :func:`kvcal.suite.resolve` but the context.
        round_query: kernels round Q too.
        narrator: hears of progress.

    Raises:
        PlanRefused: no kernel rounds Q with this format, or the model has an encoder.
        UsageError: the model is read layer by layer.
    """
    if request.placement.device_map == "layerwise":
        raise UsageError(
            "--suite decodes token by token, and --device-map layerwise would read every layer for each; use"
            " one or auto"
        )
    resolved = opening.recorded_plan(folder, changes)
    if resolved.model.encoder_decoder:
        raise PlanRefused(
            [
                f"{resolved.model.model_type} is an encoder-decoder, and --suite lets decoders continue text;"
                " kvcal evaluate without it measures KL on the decoder's tokens"
            ]
        )
    if round_query and not resolved.format.rounds_query:
        raise PlanRefused([f"--round-query: no kernel computes attention in {resolved.format.name}"])
    chosen = suite.resolve(context=resolved.model.max_context, **wanted)
    model, cache, tokenizer = opening.reopen(folder, resolved, request, narrator)
    wanted_text = resolved.recipe.evaluation
    chunk = wanted_text.chunk
    runner = Runner(
        model,
        tokenizer,
        reference=Served(None, chunk=chunk),
        quantized=Served(cache, round_query, chunk),
        stop=stops(model, tokenizer),
    )
    text = continued = None
    if chosen.continuations:
        held_out = opening.held_out_text(resolved, tokenizer, opening.processor_of(folder, request), narrator)
        if held_out.with_images:
            raise UsageError(
                "--suite continues text alone, and the held-out rows have images; give --dataset with text"
            )
        with narrator.stage("evaluate", held_out.tokens) as on_tokens:
            text = evaluate.evaluate(model, resolved, cache, held_out, on_tokens=on_tokens)
        samples = held_out.samples[: chosen.continuations]
        prompts = [sample[: min(_PROMPT_TOKENS, len(sample) // 2)] for sample in samples]
        with narrator.stage("continue", sum(map(len, prompts))) as on_tokens:
            continued = continuations.measure(
                model,
                runner.reference,
                runner.quantized,
                prompts,
                chosen.new_tokens,
                runner.stop,
                chosen.seed,
                on_tokens=on_tokens,
            )
    with narrator.stage("retrieve", chosen.tokens) as on_tokens:
        grid, rows = suite.needles(chosen, runner, on_tokens=on_tokens)
        rows += suite.others(chosen, runner, narrator.notice, on_tokens=on_tokens)
    record = {
        "format": resolved.format.name,
        "scaling": resolved.scaling,
        "skipped_layers": list(resolved.skipped_layers),
        "round_query": round_query,
        "chunk": chunk,
        "compute": manifest.compute_of(model),
        "stages": narrator.stages,
        "versions": manifest.versions(),
        "machine": manifest.machine(),
    }
    found = suite_report.document(chosen, grid, rows, suite.areas(rows), continued, text, record)
    with bundle.translated_os_errors(folder):
        bundle.write_json(folder / bundle.RECORDS / SUITE, found)
    return found


def stops(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end the model's text."""
    named = (model.generation_config.eos_token_id, tokenizer.eos_token_id)
    each = (ids if isinstance(ids, list) else [ids] for ids in named)
    return frozenset(i for ids in each for i in ids if i is not None)
