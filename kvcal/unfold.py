"""Takes the folds of a checkpoint back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvcal import models, sources
from kvcal.errors import ModelError, UsageError
from kvcal.export import bundle, folded


@dataclass(frozen=True)
class Unfolded:
    """Names of tensors that are the original's bit for bit, and of those that are only close to it."""

    restored: list[str]
    rounded: list[str]


def unfold(source: Path, target: Path, *, rounded: bool) -> Unfolded:
    """Write to ``target`` the checkpoint that ``source`` was folded from, without scales or their config.

    Args:
        source: a folded checkpoint.
        target: an empty folder.
        rounded: write tensors that rounding keeps from being restored, too.

    Raises:
        ModelError: nothing was folded, weights were quantized after the fold, the record does not fit, or a
            tensor cannot be restored and ``rounded`` is False.
    """
    if not source.is_dir():
        raise UsageError(f"{source}: no such folder")
    record = folded.read_record(source)
    if record is None:
        raise ModelError(
            f"{source}: holds no record of folds; it was not written with --deliver fold or both"
        )
    if not rounded:
        _refuse_rounded(source, [n for n, t in record.tensors.items() if t.restored == "rounded"])
    config = sources.read_config(source)
    model = models.described(source)
    if (config.get("quantization_config") or {}).get("config_groups"):
        raise ModelError(f"{source}: its weights were quantized after the fold; unfold the model before that")
    lost = sorted(record.tensors.keys() - models.weight_map(source).keys())
    if lost:
        raise ModelError(f"{source}: lacks {lost[0]}, which the record of folds names")
    unfolding = folded.Unfolding(model, record)
    bundle.write(unfolding.onto(bundle.Bundle({}, None)), source, target)
    _drop_kv_scheme(target)
    if not rounded:  # the files may have changed since they were folded
        _refuse_rounded(source, unfolding.rounded)
    return Unfolded(sorted(unfolding.restored), sorted(unfolding.rounded))


def _refuse_rounded(source: Path, names: list[str]) -> None:
    if names:
        raise ModelError(
            f"{source}: {names[0]}{models.more(names[1:])} was rounded by the fold and cannot be restored bit"
            " for bit; pass --rounded for the nearest values, or take the original model"
        )


def _drop_kv_scheme(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.pop("quantization_config", None) is not None:
        bundle.write_json(path, config)
