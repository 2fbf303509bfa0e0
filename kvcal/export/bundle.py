"""A checkpoint written whole or not at all, beside the base model and without rewriting its weights."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvcal import models
from kvcal.errors import ModelError, OutputError

SCALE_SHARD = "kvcal-scales.safetensors"
RECORDS = "kvcal"
# The base's only shard gets this name: transformers would read a model.safetensors before any index.
_ONLY_SHARD = "model-base.safetensors"
_SMALL_FILES = (".json", ".txt", ".model", ".jinja", ".py", ".md")


@dataclass(frozen=True)
class Bundle:
    """What an engine target adds to the base checkpoint."""

    tensors: dict[str, torch.Tensor]
    quantization: dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A folder under construction beside ``destination``."""

    destination: Path
    folder: Path
    overwrite: bool

    @property
    def records(self) -> Path:
        """Where the run's own records go."""
        return self.folder / RECORDS

    def commit(self) -> None:
        """Put the finished checkpoint in place; an existing one goes only now."""
        _swap(self.folder, self.destination)

    def commit_failure(self) -> Path:
        """Keep the records of a run whose gates failed in ``<destination>.failed``; no checkpoint appears."""
        failed = self.destination.with_name(self.destination.name + ".failed")
        _swap(self.records, failed)
        return failed


@contextmanager
def staging(destination: Path, *, overwrite: bool) -> Iterator[Stage]:
    """A stage for ``destination`` that vanishes unless it is committed.

    Raises:
        OutputError: the destination exists, another run is writing to it, or the disk refuses.
    """
    destination = destination.absolute()
    if not overwrite and destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise OutputError(f"{destination} exists; choose another --output or pass --overwrite")
    scratch = destination.with_name(f".{destination.name}.kvcal-partial")
    with translated_os_errors(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        _claim(scratch, destination)
    try:
        with translated_os_errors(destination):
            stage = Stage(destination, scratch / "checkpoint", overwrite)
            stage.records.mkdir(parents=True)
            yield stage
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write(bundle: Bundle, base: Path, folder: Path) -> None:
    """Fill ``folder`` with a complete checkpoint: linked weights, one new shard, index, config, tokenizer.

    Raises:
        ModelError: the base already carries such scales inside a shard of its own weights.
        OutputError: not enough disk space for a copy where hard links are impossible.
    """
    base_map = base_weight_map(base, set(bundle.tensors))
    names = {file: _ONLY_SHARD if file == models.SINGLE_NAME else file for file in set(base_map.values())}
    _link_or_copy({base / file: folder / name for file, name in names.items()})
    for path in sorted(base.iterdir()):
        if (
            path.is_file()
            and path.suffix in _SMALL_FILES
            and path.name not in ("config.json", models.INDEX_NAME)
        ):
            shutil.copyfile(path, folder / path.name)

    save_file(bundle.tensors, folder / SCALE_SHARD, metadata={"format": "pt"})
    weight_map = {name: names[file] for name, file in base_map.items()}
    weight_map |= dict.fromkeys(bundle.tensors, SCALE_SHARD)
    total_size = sum((folder / file).stat().st_size for file in sorted(set(weight_map.values())))
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / models.INDEX_NAME, index)

    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", config | {"quantization_config": bundle.quantization})


def base_weight_map(base: Path, added: set[str]) -> dict[str, str]:
    """Tensor -> shard of the base's own weights, without scales that an earlier kvcal run added.

    Raises:
        ModelError: tensors about to be added lie in a shard together with weights, where an engine would
            read both values in no certain order.
    """
    full = models.weight_map(base)
    kept = {name: file for name, file in full.items() if file != SCALE_SHARD}
    for name in sorted(added & kept.keys()):
        raise ModelError(
            f"{base / kept[name]}: already carries {name}; calibrate the checkpoint it was made from"
        )
    return kept


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a final newline; NaN and infinity are refused."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def translated_os_errors(where: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into an error that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"{where}: the disk is full; nothing was left behind") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise OutputError(f"{where}: no permission to write; choose another --output") from None
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG):
            raise OutputError(f"{where}: cannot be a folder: {error.strerror}") from None
        raise


def _claim(scratch: Path, destination: Path) -> None:
    """Create the scratch folder, which also keeps a second run away from the same destination."""
    owner = scratch / "owner"
    try:
        scratch.mkdir()
    except FileExistsError:
        if not _abandoned(owner):
            raise OutputError(
                f"{destination} is being written by another run; wait, or remove {scratch} if it is dead"
            ) from None
        shutil.rmtree(scratch)
        scratch.mkdir()
    owner.write_text(f"{socket.gethostname()} {os.getpid()}\n", encoding="utf-8")


def _abandoned(owner: Path) -> bool:
    try:
        host, pid = owner.read_text(encoding="utf-8").split()
        if host != socket.gethostname():
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _link_or_copy(pairs: dict[Path, Path]) -> None:
    to_copy: dict[Path, Path] = {}
    for source, target in pairs.items():
        try:
            os.link(source.resolve(), target)
        except OSError:  # another file system, or links not allowed here
            to_copy[source] = target
    needed = sum(source.stat().st_size for source in to_copy)
    for target in list(to_copy.values())[:1]:
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise OutputError(
                f"{target.parent.parent.parent}: needs {needed / 1e9:.1f} GB for a copy of the weights,"
                f" {free / 1e9:.1f} GB are free; an --output on the model's own disk needs none"
            )
    for source, target in to_copy.items():
        shutil.copyfile(source, target)


def _swap(new: Path, destination: Path) -> None:
    """Rename ``new`` to ``destination``; what stood there is removed only after that."""
    old = new.with_name("replaced")
    replaced = destination.exists()
    if replaced:
        os.rename(destination, old)
    try:
        os.rename(new, destination)
    except OSError:
        if replaced:
            os.rename(old, destination)
        raise
    with contextlib.suppress(OSError):
        shutil.rmtree(old)
