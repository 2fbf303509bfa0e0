"""What the processes of one run agree on before they work, and the part of those that write nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcal import data, distributed, manifest, measure, models, opening, preflight, resume, sources
from kvcal.errors import PlanRefused
from kvcal.opening import Request
from kvcal.placement import Placement
from kvcal.plan import Plan
from kvcal.progress import Narrator
from kvcal.recipe import Recipe


@dataclass(frozen=True)
class Agreed:
    """``digest``: of the model's files. ``state``: what is kept for a run that goes on from this one."""

    digest: str
    state: resume.State


def refuse(plan: Plan) -> None:
    """Refuse what several processes cannot do together.

    Raises:
        PlanRefused: naming it, with what would work.
    """
    if distributed.place().size > 1 and plan.recipe.weights is not None:
        raise PlanRefused(
            [
                "weights: llm-compressor quantizes in one process; run this recipe without a launcher, or"
                " quantize the model first and calibrate the outcome by several"
            ]
        )


def agree(
    folder: Path,
    plan: Plan,
    text: data.TokenSet,
    held_out: data.TokenSet,
    where: Placement,
    request: Request,
    narrator: Narrator,
    destination: Path | None = None,
) -> Agreed:
    """See that all ranks have the same model, text, settings and versions, and an interrupted run too.

    Rank 0 comes here when nothing is left to refuse, download or convert, and knows the destination; the
    others wait for that before they touch the model (:func:`follow`).

    Raises:
        UsageError: something differs; it is named.
    """
    output = Path(distributed.gathered("output", str(destination))[0])
    # One process per host reads all files; the others have the same ones.
    here = distributed.place()
    digests = distributed.gathered("digest", models.digest(folder) if here.local_rank == 0 else None)
    digest = digests[here.rank] or digests[0]
    assert digest is not None
    facts = manifest.facts(digest, plan, text, held_out, where, here.size)
    distributed.require_same(facts)
    state = resume.State(output, here, facts, request.save_every)
    if request.resume:
        if not state.go_on():
            narrator.notice(f"nothing is saved in {state.folder} to go on from; starting at the beginning")
    elif state.start_anew():
        narrator.notice("starting anew; what an interrupted run had saved is gone (--resume goes on from it)")
    distributed.meet("state")  # rank 0 has cleared the folder before another rank writes to it
    return Agreed(digest, state)


def follow(request: Request, recipe: Recipe) -> None:
    """The run as ranks other than 0 know it: the same steps on their share of the batches, and no files."""
    distributed.meet("rank 0 is ready")
    narrator = Narrator.silent()
    where = distributed.placed(request.placement)
    plan, _ = preflight.resolve(request.model, request.revision, recipe, narrator)
    source = sources.locate(request.model, request.revision, weights=True, say=narrator.say)
    tokenizer = models.load_tokenizer(source.folder, request.trust)
    processor = opening.processor_of(source.folder, request)
    text = opening.calibration_text(plan, tokenizer, processor, narrator)
    held_out = opening.held_out_text(plan, tokenizer, processor, narrator)
    agreed = agree(source.folder, plan, text, held_out, where, request, narrator)
    with agreed.state.explained():
        loaded = opening.load(source.folder, plan, where, request, narrator)
        job = measure.Job(plan, loaded, text, held_out, narrator, agreed.digest, agreed.state)
        measure.measure(job, measure.fold(job) if plan.folds else None)
        job.forget_model()
        distributed.meet("written")
    agreed.state.remove()
