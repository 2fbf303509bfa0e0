"""A model and its text, opened for work: what every command that runs a model does first."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcal import data, halves, mixed, models, placement, plan, scales, sources
from kvcal import recipe as recipes
from kvcal.cache import QuantizedCache
from kvcal.errors import ModelError, PlanRefused, UsageError
from kvcal.export import bundle, modelopt
from kvcal.placement import Placement
from kvcal.plan import Plan
from kvcal.progress import Narrator
from kvcal.scales import Scales
from kvcal.trial import Trial


@dataclass(frozen=True)
class Request:
    """What the command line asked for, beside the recipe.

    ``save_every``: seconds between two writes of what ``resume`` goes on from.
    """

    model: str
    revision: str | None = None
    output: Path | None = None
    overwrite: bool = False
    device: str = "auto"
    trust: models.Trust = models.TRUST_NOTHING
    device_map: str = "one"
    max_memory: str | None = None
    resume: bool = False
    save_every: float = 60.0

    @property
    def placement(self) -> Placement:
        """Where the model goes.

        Raises:
            UsageError: nothing that there is.
        """
        return placement.named(self.device, self.device_map, self.max_memory)


def load(folder: Path, resolved: Plan | Trial, where: Placement, request: Request, narrator: Narrator) -> Any:
    """The model with its weights; says so where it computes in another dtype than the checkpoint's."""
    refused = placement.about_encoders(where) if resolved.model.encoder_decoder else []
    if refused:
        raise PlanRefused(refused)
    models.require_as_announced(folder, resolved.model, request.trust)
    model = placement.load(folder, resolved.model, where, request.trust)
    computes = str(model.dtype).removeprefix("torch.")
    if computes != resolved.model.dtype:
        narrator.say(
            f"computing in {computes} on {where.device}; the checkpoint stays {resolved.model.dtype}"
        )
    return model


def require_placeable(resolved: Plan, where: Placement) -> None:
    """Refuse a job that needs weights where this placement has none.

    Raises:
        PlanRefused: with every reason found.
    """
    reasons = placement.refusals(
        where,
        folds=resolved.folds,
        weights=resolved.recipe.weights is not None,
        shares_caches=resolved.model.shares_caches,
        encoder_decoder=resolved.model.encoder_decoder,
    )
    if reasons:
        raise PlanRefused(reasons)


def processor_of(folder: Path, request: Request) -> Callable[[], Any]:
    """What loads the model's processor once a row with images needs it.

    It refuses models without one, and ways to run a model that cannot do with images.
    """

    def load() -> Any:
        if request.device_map == "layerwise":
            raise PlanRefused(
                [
                    "--device-map layerwise: what images become is made outside the decoder layers, not where"
                    " their tokens are; use one or auto, or leave rows with images out"
                ]
            )
        return models.load_processor(folder, request.trust)

    return functools.cache(load)


def calibration_text(
    resolved: Plan | Trial, tokenizer: Any, processor: Callable[[], Any], narrator: Narrator
) -> data.TokenSet:
    """Text that sets scales.

    Raises:
        ModelError: the tokenizer is that of another model.
        PlanRefused: weights are to be quantized on rows with images.
    """
    wanted = resolved.recipe.calibration
    found = _text(resolved, wanted, tokenizer, processor, "calibration", wanted.seed)
    if found.with_images and resolved.recipe.weights is not None:
        raise PlanRefused(
            [
                "weights: llm-compressor is given text alone, and the calibration dataset has rows with"
                " images; leave them out, or quantize the weights first and calibrate the outcome"
            ]
        )
    return _usable(found, resolved, narrator)


def held_out_text(
    resolved: Plan | Trial, tokenizer: Any, processor: Callable[[], Any], narrator: Narrator
) -> data.TokenSet:
    """Text that judges them."""
    wanted = resolved.recipe.evaluation
    found = _text(resolved, wanted, tokenizer, processor, "evaluation", 0)
    return _usable(found, resolved, narrator)


def _text(
    resolved: Plan | Trial,
    wanted: recipes.Text,
    tokenizer: Any,
    processor: Callable[[], Any],
    role: data.Role,
    seed: int,
) -> data.TokenSet:
    seq_len = resolved.seq_len if role == "calibration" else resolved.evaluation_seq_len
    start = resolved.model.decoder_start
    if start is None:
        return data.load(wanted, tokenizer, role, seq_len, seed, processor)
    return halves.load(wanted, tokenizer, role, seq_len, seed, start)


def _usable(found: data.TokenSet, resolved: Plan | Trial, narrator: Narrator) -> data.TokenSet:
    largest = max(map(max, found.samples))
    if largest >= resolved.model.vocab_size:
        raise ModelError(
            f"the tokenizer gives token {largest}, the model's vocabulary has {resolved.model.vocab_size};"
            " is it the tokenizer of another model?"
        )
    for notice in found.notices:
        narrator.notice(notice)
    return found


def quiet_libraries() -> None:
    """Their progress bars and advice would drown ours; errors still come as exceptions."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_default_handler()  # errors go where those of other libraries go
    transformers_logging.enable_propagation()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def recorded_plan(folder: Path, changes: Mapping[str, Any] | None = None) -> Plan:
    """The plan that a checkpoint was written by, with recipe fields replaced.

    Raises:
        UsageError: there is no such folder.
        ModelError: it was not written by ``kvcal calibrate``.
    """
    quiet_libraries()  # a plan runs the model's code
    records = folder / bundle.RECORDS
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    if not (records / "recipe.yaml").is_file():
        raise ModelError(f"{folder}: holds no kvcal records; it was not written by kvcal calibrate")
    recipe = recipes.load(str(records / "recipe.yaml")).override(changes or {})
    # Folds are in the weights already, so quantized weights are no obstacle to them any more.
    model = models.described(folder)
    resolved = plan.resolve(recipe, replace(model, quant_method=None))
    if recipe.mixed is not None:
        skipped = mixed.read_skipped(records / mixed.RECORD, resolved)
        resolved = replace(resolved, skipped_layers=skipped)
    return resolved


def recorded_scales(folder: Path) -> Scales:
    """The scales among the records of a checkpoint.

    Raises:
        ModelError: there are none.
    """
    path = folder / bundle.RECORDS / "scales.safetensors"
    if not path.is_file():
        raise ModelError(f"{folder}: its records lack {path.name}; calibrate again")
    return Scales.load(path)


def base_quantization(folder: Path) -> dict[str, Any] | None:
    """What a written checkpoint's config says about the weights alone; None where they are not quantized."""
    section = sources.read_config(folder).get("quantization_config")
    if section is None and (folder / modelopt.OWN_CONFIG).is_file():
        section = modelopt.section_of(folder / modelopt.OWN_CONFIG)
    if not isinstance(section, dict):
        return None
    if section.get("config_groups") == {} or section.get("ignore") == ["*"]:  # as kvcal writes it
        return None
    return {key: value for key, value in section.items() if key != "kv_cache_scheme"}


def reopen(
    folder: Path, resolved: Plan, request: Request, narrator: Narrator
) -> tuple[Any, QuantizedCache, Any]:
    """Model, cache and tokenizer of a checkpoint, by its plan.

    Raises:
        ModelError: also for scales of other layers than its config announces.
    """
    cache = _written_cache(folder, resolved)
    with narrator.stage("load"):
        tokenizer = models.load_tokenizer(folder, request.trust)
        model = load(folder, resolved, request.placement, request, narrator)
    return model, cache, tokenizer


def _written_cache(folder: Path, resolved: Plan) -> QuantizedCache:
    """The cache that the engine keeps for a checkpoint."""
    skipped = resolved.skipped_layers
    if resolved.format.dynamic:
        return QuantizedCache(resolved.format, skipped=skipped)
    if resolved.granularity is None:
        return QuantizedCache(resolved.format, scales.unit(resolved), skipped=skipped)
    found = recorded_scales(folder)
    announced = {layer.index: set(recipes.SIDES) for layer in resolved.layers}
    if {index: set(sides) for index, sides in found.layers.items()} != announced:
        raise ModelError(f"{folder}: its scales cover other layers than its config.json announces")
    return QuantizedCache(resolved.format, found, skipped=skipped)
