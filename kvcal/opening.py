"""A model and its text, opened for work: what every command that runs a model does first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcal import data, models
from kvcal.errors import ModelError
from kvcal.plan import Plan
from kvcal.progress import Narrator
from kvcal.trial import Trial


@dataclass(frozen=True)
class Request:
    """What the command line asked for, beside the recipe."""

    model: str
    revision: str | None = None
    output: Path | None = None
    overwrite: bool = False
    device: str = "auto"
    trust: models.Trust = models.TRUST_NOTHING


def load(
    folder: Path, resolved: Plan | Trial, device: torch.device, request: Request, narrator: Narrator
) -> Any:
    """The model with its weights; says so where it computes in another dtype than the checkpoint's."""
    model = models.load(folder, resolved.model, device, request.trust)
    computes = str(model.dtype).removeprefix("torch.")
    if computes != resolved.model.dtype:
        narrator.say(f"computing in {computes} on {device}; the checkpoint stays {resolved.model.dtype}")
    return model


def calibration_text(resolved: Plan | Trial, tokenizer: Any, narrator: Narrator) -> data.TokenSet:
    """Text that sets scales.

    Raises:
        ModelError: the tokenizer is that of another model.
    """
    wanted = resolved.recipe.calibration
    found = data.load(wanted, tokenizer, "calibration", resolved.seq_len, wanted.seed)
    return _usable(found, resolved, narrator)


def held_out_text(resolved: Plan | Trial, tokenizer: Any, narrator: Narrator) -> data.TokenSet:
    """Text that judges them."""
    wanted = resolved.recipe.evaluation
    found = data.load(wanted, tokenizer, "evaluation", resolved.evaluation_seq_len, seed=0)
    return _usable(found, resolved, narrator)


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
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
