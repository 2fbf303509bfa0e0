"""Orchestration: each command's steps in order. The steps themselves live in their own modules."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcal import (
    bench,
    calibrate,
    check,
    check_live,
    data,
    distributed,
    engines,
    evaluate,
    folding,
    gates,
    live_engine,
    manifest,
    markdown,
    measure,
    mixed,
    models,
    opening,
    phase,
    plan,
    preflight,
    report,
    run_ranks,
    scales,
    sources,
    tensor_parallel,
    unfold,
    validate,
    weights,
)
from kvcal import recipe as recipes
from kvcal.attention_bench import decode
from kvcal.attention_bench import report as attention_report
from kvcal.errors import PlanRefused, UsageError
from kvcal.export import bundle, naming, targets
from kvcal.opening import Request
from kvcal.page import render
from kvcal.page.render import PAGE
from kvcal.placement import Placement
from kvcal.progress import Narrator

LIVE_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at a temperature of",
)
LIVE_NEW_TOKENS = 24


def run_calibrate(
    request: Request, recipe: recipes.Recipe, narrator: Narrator
) -> tuple[report.Report, Path] | None:
    """The main job: plan, calibrate, fold, scales, validate, evaluate, export, check, report.

    Returns the report and the folder that was written: the checkpoint, or ``<output>.failed`` with the
    records alone if a gate failed. None on ranks other than 0, if a launcher started several.
    """
    opening.quiet_libraries()
    with distributed.joined() as here:
        if not here.leads:
            run_ranks.follow(request, recipe)
            return None
        return _calibrate(request, recipe, narrator)


def _calibrate(request: Request, recipe: recipes.Recipe, narrator: Narrator) -> tuple[report.Report, Path]:
    where = distributed.placed(request.placement)
    resolved, source = preflight.resolve(request.model, request.revision, recipe, narrator)
    opening.require_placeable(resolved, where)
    run_ranks.refuse(resolved)
    destination = request.output or _default_output(source, resolved)
    with (
        bundle.staging(destination, overwrite=request.overwrite, base=source.folder) as stage,
        contextlib.ExitStack() as within,
    ):
        plan_document = report.plan_document(resolved, source.name)
        report.print_plan(narrator.console, plan_document)
        with narrator.stage("load"):
            source = sources.locate(request.model, request.revision, weights=True, say=narrator.say)
            named = bundle.base_weight_map(source.folder)
            resolved = replace(resolved, model=models.as_stored(resolved.model, named))
            bundle.require_absent(source.folder, named, naming.tensor_names(resolved))  # before the work
            if recipe.weights is not None:
                weights.refuse(source.folder, recipe.weights.scheme, resolved.model)
            tokenizer = models.load_tokenizer(source.folder, request.trust)
            processor = opening.processor_of(source.folder, request)
            text = opening.calibration_text(resolved, tokenizer, processor, narrator)
            held_out = opening.held_out_text(resolved, tokenizer, processor, narrator)
            distributed.meet("rank 0 is ready")
            agreed = run_ranks.agree(
                source.folder, resolved, text, held_out, where, request, narrator, stage.destination
            )
            within.enter_context(agreed.state.explained())
            # No other name for the model: the job must be able to let go of it.
            loaded = opening.load(source.folder, resolved, where, request, narrator)
            job = measure.Job(resolved, loaded, text, held_out, narrator, agreed.digest, agreed.state)
            del loaded
        folds = measure.fold(job) if resolved.folds else None
        base, onto_base = source.folder, folds
        if recipe.weights is not None:
            base, folds = _quantize_weights(job, source.folder, folds, stage, where, request)
            resolved, onto_base = job.plan, None  # folded already
        outcome = measure.measure(job, onto_base)
        resolved = replace(resolved, skipped_layers=job.plan.skipped_layers)
        compute = manifest.compute_of(job.model)

        results = gates.apply(recipe.gates, outcome.evaluation.cache, outcome.validation.worst[1])
        with bundle.translated_os_errors(stage.destination):
            base_config = sources.read_config(base).get("quantization_config")
            with narrator.stage("export"):
                written = targets.of(resolved).to_bundle(outcome.cache.scales, resolved, base_config)
                if written.alone is not None:  # the model itself, as it was, for evaluation of the folder
                    bundle.write(bundle.Bundle({}, None), base, stage.folder)
                bundle.write(onto_base.folding.onto(written) if onto_base else written, base, stage.folder)
            if onto_base is not None:
                job.forget_model()  # the written one is loaded now, and two may not fit
                onto_base = folds = onto_base.without_weights()
                with narrator.stage("prove export"):
                    folds = measure.prove_written(
                        onto_base, opening.load(stage.folder, resolved, where, request, narrator)
                    )
            if folds is not None:
                folds.folding.save(stage.records)
            (stage.records / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
            with narrator.stage("check"):
                findings = check.check(stage.folder, recipe.engine)
            out = str(stage.destination)
            serve, before = targets.serve_command(out, resolved), targets.before_serving(out, resolved)
            document = report.build(resolved, outcome, folds, results, findings, serve, before)
            document["memory"] = {"device_map": compute["device_map"], "passes": job.memory}
            document["stages"] = narrator.stages
            folded = onto_base.folding.tensors if onto_base else ()
            outcome.statistics.save(stage.records / "statistics.safetensors")
            if resolved.granularity is not None and outcome.cache.scales is not None:
                outcome.cache.scales.save(stage.records / "scales.safetensors")
            bundle.write_json(stage.records / "plan.json", plan_document)
            record = manifest.build(source, resolved, compute, text, held_out, narrator.stages)
            record["model"]["sha256"] = job.digest
            record["processes"] = distributed.place().size
            record["memory"] = job.memory
            record["sha256"] = bundle.hashes(stage.folder, written, folded)
            bundle.write_json(stage.records / "manifest.json", record)
            bundle.write_json(stage.records / manifest.SAMPLES, outcome.text.hashes)
            if document["mixed"] is not None:
                bundle.write_json(stage.records / mixed.RECORD, document["mixed"])
            bundle.write_json(stage.records / "report.json", document)
            text_document = markdown.render(document, resolved, source.name)
            (stage.records / "report.md").write_text(text_document, encoding="utf-8")
            failed = document["verdict"] == "fail"
            name = stage.destination.name + (bundle.FAILED if failed else "")
            (stage.records / PAGE).write_text(render.render([stage.folder], names=[name]), encoding="utf-8")
            if failed:
                destination = stage.commit_failure()
            else:
                stage.commit()
        distributed.meet("written")
        agreed.state.remove()
    return document, destination


def written_report(folder: Path) -> str:
    """The Markdown among the records of a run, whether it passed or failed."""
    records = folder / bundle.RECORDS
    return ((records if records.is_dir() else folder) / "report.md").read_text(encoding="utf-8")


def _quantize_weights(
    job: measure.Job,
    base: Path,
    folds: measure.Folds | None,
    stage: bundle.Stage,
    where: Placement,
    request: Request,
) -> tuple[Path, measure.Folds | None]:
    """Fold, then quantize the weights; the job goes on with the outcome. Returns its folder and the folds."""
    scheme = job.plan.recipe.weights.scheme  # type: ignore[union-attr]
    spec = job.plan.model
    job.forget_model()
    with bundle.translated_os_errors(stage.destination):
        if folds is not None:
            folds = folds.without_weights()
            plain = stage.beside("folded")
            with job.narrator.stage("prove export"):
                bundle.write(folds.folding.onto(bundle.Bundle({}, None)), base, plain)
                written = opening.load(plain, job.plan, where, request, job.narrator)
                folds = measure.prove_written(folds, written)
                del written
            base = plain
        job.narrator.say(f"quantizing the weights: {scheme}")
        target = stage.beside("quantized")
        with job.narrator.stage("quantize weights"):
            say = job.narrator.notice
            weights.quantize(base, target, scheme, job.text, spec, trust=request.trust, say=say)
    job.digest = models.digest(target)
    quantized = models.described(target)
    # The KV part of the plan stays as it was; folds are in the weights already.
    job.plan = replace(job.plan, model=replace(quantized, dtype=spec.dtype))
    with job.narrator.stage("load"):
        job.model = opening.load(target, job.plan, where, request, job.narrator)
    return target, folds


def run_unfold(
    folder: Path, output: Path, narrator: Narrator, *, overwrite: bool, rounded: bool
) -> unfold.Unfolded:
    """Write the checkpoint that a folded one was made from."""
    with (
        bundle.staging(output, overwrite=overwrite, base=folder) as stage,
        bundle.translated_os_errors(output),
        narrator.stage("unfold"),
    ):
        found = unfold.unfold(folder, stage.folder, rounded=rounded)
        stage.records.rmdir()  # what is written is no outcome of a calibration
        stage.commit()
    return found


def run_check(
    folder: Path, engine: str, *, live: bool, engine_python: str | None, narrator: Narrator
) -> list[check.Finding]:
    """Check the files, and with ``live`` also what the real engine holds after loading them."""
    if live and not engines.get(engine).answers_live:
        asked = ", ".join(each.name for each in engines.ENGINES if each.answers_live)
        raise UsageError(f"--live cannot start {engine}; it can start {asked}")
    python = live_engine.engine_python(engine_python) if live else None
    with narrator.stage("check"):
        findings = check.check(folder, engine)
    if python is None:
        return findings
    if not all(f.ok for f in findings):
        narrator.notice("the files are broken already; the engine was not started")
        return findings
    opening.quiet_libraries()
    model, written, announced = check.scales_of(folder, engine)
    narrator.say("starting the engine; this takes about a minute")
    with narrator.stage("check live"):
        result = check_live.check_live(
            folder,
            written,
            {layer.index: engines.get(engine).module_held(model, layer) for layer in model.layers},
            python,
            LIVE_PROMPTS,
            LIVE_NEW_TOKENS,
            announced=announced,
            scales_over="fp8" if engines.get(engine).forgets_over_16_bits else None,
        )
    return findings + _live_findings(result, announced)


def run_shares(folder: Path, engine: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank of a tensor-parallel engine holds of the written scales."""
    return [vars(share) for share in tensor_parallel.shares(folder, engine, ranks)]


def _live_findings(result: check_live.LiveResult, announced: bool) -> list[check.Finding]:
    scale_problems = [f"layer {f.layer} {f.side}_scale: {f.problem}" for f in result.scales if f.problem]
    text_problems = [f"prompt {i}: {t.problem}" for i, t in enumerate(result.texts, 1) if t.problem]
    others = [p for p in result.problems if p not in scale_problems and p not in text_problems]
    over_fp8 = "and over an FP8 cache" if result.fp8.done else f"no FP8 cache here: {result.fp8.why_not}"
    rules = [
        (
            f"{result.engine} holds the written scales" if announced else f"{result.engine} scales by 1.0",
            scale_problems + ([] if announced else others),
            f"{len(result.scales)} compared, bit-equal",
        ),
        (
            f"{result.engine} continues text as transformers does",
            text_problems,
            f"{len(result.texts)} prompts over a {result.cache_dtype} cache; {over_fp8}",
        ),
    ]
    if announced:
        by_default = f"{result.engine} serves the quantized cache by default"
        rules.append((by_default, others, str(result.default_cache_dtype)))
    return [check.Finding(rule, not faults, "; ".join(faults) or note) for rule, faults, note in rules]


def run_validate(
    folder: Path, request: Request, changes: dict[str, Any], narrator: Narrator
) -> validate.Validation:
    """Validate a written checkpoint again, on held-out text."""
    resolved = opening.recorded_plan(folder, changes)
    model, cache, tokenizer = opening.reopen(folder, resolved, request, narrator)
    processor = opening.processor_of(folder, request)
    held_out = opening.held_out_text(resolved, tokenizer, processor, narrator)
    return measure.validated(model, cache, held_out, narrator)


def run_evaluate(
    folder: Path, request: Request, changes: dict[str, Any], narrator: Narrator
) -> evaluate.Evaluation:
    """Evaluate a written checkpoint again, on held-out text."""
    resolved = opening.recorded_plan(folder, changes)
    model, cache, tokenizer = opening.reopen(folder, resolved, request, narrator)
    processor = opening.processor_of(folder, request)
    held_out = opening.held_out_text(resolved, tokenizer, processor, narrator)
    with narrator.stage("evaluate", held_out.tokens) as on_tokens:
        return evaluate.evaluate(model, resolved, cache, held_out, on_tokens=on_tokens)


def run_bench_capture(
    request: Request, recipe: recipes.Recipe, pairs: int, narrator: Narrator
) -> list[bench.Overhead]:
    """What collecting statistics costs beside a plain forward pass."""
    model, resolved, text = _open(request, recipe, narrator)
    with narrator.stage("bench capture", text.tokens * pairs * 6) as on_tokens:
        return bench.capture_overhead(model, resolved, text, pairs, on_tokens)


def run_bench_rules(request: Request, recipe: recipes.Recipe, narrator: Narrator) -> list[bench.RuleRow]:
    """How scale rules compare, on calibration text alone."""
    model, resolved, text = _open(request, recipe, narrator)
    with narrator.stage("bench rules", text.tokens // 2 * (1 + len(bench.RULES))) as on_tokens:
        return bench.scale_rules(model, resolved, text, on_tokens)


def run_bench_folds(request: Request, recipe: recipes.Recipe, narrator: Narrator) -> list[bench.FoldRow]:
    """What each transform is worth on its own, on calibration text alone."""
    model, resolved, text = _open(request, recipe, narrator)
    with narrator.stage("bench folds", text.tokens) as on_tokens:
        return bench.folds(model, resolved, text, on_tokens, narrator.notice)


def run_bench_objectives(
    request: Request, recipe: recipes.Recipe, names: Sequence[str], narrator: Narrator
) -> list[bench.ObjectiveRow]:
    """How ways to choose a static range compare, on calibration text alone."""
    model, resolved, text = _open(request, recipe, narrator)
    with narrator.stage("bench objectives", text.tokens) as on_tokens:
        return bench.static_objectives(model, resolved, text, names, on_tokens)


def run_bench_reduction(
    request: Request, recipe: recipes.Recipe, narrator: Narrator
) -> list[bench.ReductionRow]:
    """What an engine's coarser scales cost, on calibration text alone."""
    model, resolved, text = _open(request, recipe, narrator)
    with narrator.stage("bench reduction", text.tokens) as on_tokens:
        return bench.scale_reductions(model, resolved, text, on_tokens)


def run_bench_phase(
    request: Request, recipe: recipes.Recipe, bands: int, narrator: Narrator
) -> tuple[phase.Phase, plan.Plan]:
    """Which frequency bands of K make the logit error, on calibration text that did not set the scales."""
    model, resolved, text = _open(request, recipe, narrator, latents=True)
    phase.refuse(resolved.layers, resolved.format)
    setting, judging = folding.split(text, len(text.samples) // 2)
    with narrator.stage("bench phase", setting.tokens + judging.tokens) as on_tokens:
        collect = scales.collect(resolved)
        seen = calibrate.calibrate(model, resolved, setting, on_tokens=on_tokens, collect=collect)
        cache = measure.cache_of(resolved, seen, model)
        found = phase.measure(model, resolved.layers, cache, judging, bands, on_tokens=on_tokens)
    return found, resolved


def run_bench_attention(
    shapes: Sequence[str], names: Sequence[str], repeats: int, output: Path | None, narrator: Narrator
) -> decode.Measurement:
    """Decode attention of every format beside others' kernels; files in ``output``."""
    chosen = [decode.Shape.parse(text) for text in shapes] or decode.SHAPES
    with narrator.stage("bench attention", len(chosen), "shapes") as on_shapes:
        found = decode.measure(chosen, names, repeats, on_shapes=on_shapes)
    if output is not None:
        attention_report.write(found, output)
        narrator.say(f"wrote attention.json, attention.md and attention.png to {output}")
    return found


def _open(
    request: Request, recipe: recipes.Recipe, narrator: Narrator, *, latents: bool = False
) -> tuple[Any, plan.Plan, data.TokenSet]:
    """``latents``: the benchmark can do with models that cache them."""
    opening.quiet_libraries()
    where = request.placement
    preflight.refuse_encoder(request.model, request.revision, narrator)
    resolved, _ = preflight.resolve(request.model, request.revision, recipe, narrator)
    if resolved.model.latent is not None and not latents:
        raise PlanRefused(
            [f"{resolved.model.model_type} caches a latent; this benchmark is about K and V of heads"]
        )
    with narrator.stage("load"):
        source = sources.locate(request.model, request.revision, weights=True, say=narrator.say)
        tokenizer = models.load_tokenizer(source.folder, request.trust)
        processor = opening.processor_of(source.folder, request)
        text = opening.calibration_text(resolved, tokenizer, processor, narrator)
        model = opening.load(source.folder, resolved, where, request, narrator)
    return model, resolved, text


def _default_output(source: sources.Source, resolved: plan.Plan) -> Path:
    name = "SmolLM2-135M-Instruct" if source.kind == "demo" else Path(source.name).stem or "model"
    if source.kind in ("hub", "folder"):
        # A folder may have been called "."; a hub snapshot's folder is named after its commit.
        name = source.folder.name if source.kind == "folder" else Path(source.name).name
    how = "folded" if resolved.deliver == "fold" else resolved.scaling
    return Path(f"{name}-{resolved.format.name}-{how}")
