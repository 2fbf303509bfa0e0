"""A checkpoint written whole or not at all, beside the base model and without rewriting its weights."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvcal import models
from kvcal.errors import ModelError, OutputError

SCALE_SHARD = "kvcal-scales.safetensors"
RECORDS = "kvcal"
FAILED = ".failed"  # of a folder with the records of a run that failed
# The base's only shard gets this name: transformers would read a model.safetensors before any index.
_ONLY_SHARD = "model-base.safetensors"
_REPLACED = "replaced"


@dataclass(frozen=True)
class Bundle:
    """What a target makes of the base checkpoint.

    Attributes:
        tensors: added in a shard of their own.
        quantization: new ``quantization_config``; None leaves the base's.
        rewritten: names of the base's tensors that change; those that it lacks are passed over.
        rewrite: ``(name, tensor) -> tensor`` of the same shape and dtype, called once for each of them.
        alone: no checkpoint, but the tensors in a file of this name beside a document: two names and the
            document.
    """

    tensors: dict[str, torch.Tensor]
    quantization: dict[str, Any] | None
    rewritten: frozenset[str] = frozenset()
    rewrite: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor
    alone: tuple[str, str, Any] | None = None


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

    def beside(self, name: str) -> Path:
        """A new folder for an intermediate checkpoint, gone when the stage is."""
        folder = self.folder.with_name(name)
        folder.mkdir()
        return folder

    def commit(self) -> None:
        """Put the finished checkpoint in place; an existing one goes only now."""
        _refuse_existing(self.destination, self.overwrite)  # it may have come while the run worked
        _swap(self.folder, self.destination)

    def commit_failure(self) -> Path:
        """Keep the records of a run whose gates failed in ``<destination>.failed``; no checkpoint appears."""
        failed = self.destination.with_name(self.destination.name + FAILED)
        _swap(self.records, failed)
        return failed


@contextmanager
def staging(destination: Path, *, overwrite: bool, base: Path | None = None) -> Iterator[Stage]:
    """A stage for ``destination`` that vanishes unless it is committed.

    ``base`` is the folder of the model, which no output may replace.

    Raises:
        OutputError: the destination exists, another run is writing to it, or the disk refuses.
    """
    with translated_os_errors(destination):
        destination = destination.absolute()
        _refuse_existing(destination, overwrite)
        _refuse_precious(destination, base)
        scratch = destination.with_name(f".{destination.name}.kvcal-partial")
        new_parents = [parent for parent in destination.parents if not parent.exists()]
    try:
        with translated_os_errors(destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
            _claim(scratch, destination)
        try:
            with translated_os_errors(destination):
                _refuse_existing(destination, overwrite)  # the run that held it may have finished just now
                stage = Stage(destination, scratch / "checkpoint", overwrite)
                stage.records.mkdir(parents=True)
            yield stage
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        for parent in new_parents:
            with contextlib.suppress(OSError):  # they are not empty after a commit
                parent.rmdir()


def write(bundle: Bundle, base: Path, folder: Path, *, drop_quantization: bool = False) -> None:
    """Fill ``folder`` with a complete checkpoint: weights, config, tokenizer, and an index where it is due.

    Shards without a rewritten tensor are linked; the others are read, changed and written one by one.
    ``drop_quantization``: the base's section is one that kvcal wrote for another engine, and goes.

    Raises:
        ModelError: the base already carries such scales inside a shard of its own weights.
        OutputError: not enough disk space for a copy where hard links are impossible.
    """
    if bundle.alone is not None:
        tensors, document, value = bundle.alone
        _save(bundle.tensors, folder / tensors)
        write_json(folder / document, value)
        return
    if models.is_pickled(base):
        weight_map = _convert_pickled(bundle, base, folder)
    else:
        base_map = base_weight_map(base)
        require_absent(base, base_map, bundle.tensors)
        only = _ONLY_SHARD if bundle.tensors else models.SINGLE_NAME
        names = {file: only if file == models.SINGLE_NAME else file for file in set(base_map.values())}
        weight_map = {name: names[file] for name, file in base_map.items()}
        touched = {file for name, file in base_map.items() if name in bundle.rewritten}
        _link_or_copy({base / file: folder / name for file, name in names.items() if file not in touched})
        _rewrite(bundle, {base / file: folder / names[file] for file in touched})
    models.copy_small_files(base, folder, except_for=("config.json", models.INDEX_NAME))

    if bundle.tensors:
        _save(bundle.tensors, folder / SCALE_SHARD)
        weight_map |= dict.fromkeys(bundle.tensors, SCALE_SHARD)
    if set(weight_map.values()) != {models.SINGLE_NAME}:
        total_size = sum((folder / file).stat().st_size for file in sorted(set(weight_map.values())))
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / models.INDEX_NAME, index)

    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if drop_quantization:
        config.pop("quantization_config", None)
    if bundle.quantization is not None:
        config["quantization_config"] = bundle.quantization
    write_json(folder / "config.json", config)


def _rewrite(bundle: Bundle, pairs: dict[Path, Path]) -> None:
    """Change shards one at a time: no more than one is in memory."""
    for source, target in sorted(pairs.items()):
        _save(_rewritten(bundle, load_file(source)), target)


def _rewritten(bundle: Bundle, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    changed = {
        name: bundle.rewrite(name, tensors[name]).contiguous()
        for name in sorted(bundle.rewritten & tensors.keys())
    }
    return tensors | changed


def base_weight_map(base: Path) -> dict[str, str]:
    """Tensor -> shard of the base's own weights, without scales that an earlier kvcal run added.

    What a shard holds beside what the index lists is in it too. Empty for pickled weights, which have no
    header to read.

    Raises:
        ModelError: a tensor lies in two shards, of which an engine would read one or the other.
    """
    if models.is_pickled(base):
        return {}
    listed = {name: file for name, file in models.weight_map(base).items() if file != SCALE_SHARD}
    found = dict(listed)
    for file in sorted(set(listed.values())):
        for name in sorted(models.tensor_names(base / file)):
            if found.setdefault(name, file) != file:
                raise ModelError(f"{base / file}: holds {name}, which is in {found[name]} too; remove one")
    return found


def require_absent(base: Path, base_map: Mapping[str, str], added: Iterable[str]) -> None:
    """Refuse tensors that lie among the base's weights already.

    Raises:
        ModelError: an engine would read both values in no certain order.
    """
    for name in sorted(base_map.keys() & set(added)):
        raise ModelError(
            f"{base / base_map[name]}: already carries {name}; calibrate the checkpoint it was made from"
        )


def hashes(folder: Path, bundle: Bundle, rewritten: Iterable[str]) -> dict[str, str]:
    """SHA-256 of what kvcal itself wrote, the shards of ``rewritten`` tensors among it."""
    weight_map = models.weight_map(folder)
    shards = sorted({weight_map[name] for name in rewritten})
    alone = bundle.alone[:2] if bundle.alone else ()
    written = ("config.json", models.INDEX_NAME, SCALE_SHARD, *shards, *alone)
    return {name: _sha256(folder / name) for name in written if (folder / name).exists()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a final newline; NaN and infinity are refused."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def translated_os_errors(where: Path) -> Iterator[None]:
    """Turn a full disk, a missing permission and the like into an error that says so."""
    try:
        yield
    except OSError as error:
        raise _output_error(where, error.errno, error.strerror or str(error)) from None
    except SafetensorError as error:  # carries the number of the system's error in its text alone
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise _output_error(where, int(number[1]), os.strerror(int(number[1]))) from None


def _output_error(where: Path, number: int | None, text: str) -> OutputError:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"{where}: the disk is full; nothing was left behind; make room and run again")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return OutputError(f"{where}: no permission to write; choose another --output")
    return OutputError(f"{where}: cannot be written: {text}; choose another --output")


def _refuse_existing(destination: Path, overwrite: bool) -> None:
    if not os.path.lexists(destination):
        return
    if not destination.is_dir():
        raise OutputError(f"{destination} is not a folder; choose another --output")
    if not overwrite and any(destination.iterdir()):
        raise OutputError(f"{destination} exists; choose another --output or pass --overwrite")


def _refuse_precious(destination: Path, base: Path | None) -> None:
    """A folder that cannot be replaced without harm, ``--overwrite`` or not."""
    resolved = destination.resolve()
    for folder, what in ((base, "the model itself"), (Path.cwd(), "the current folder")):
        if folder is not None and folder.resolve().is_relative_to(resolved):
            raise OutputError(f"{destination} holds {what}; choose another --output")


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
        if (scratch / _REPLACED).exists() and not destination.exists():
            os.rename(scratch / _REPLACED, destination)  # it died between the two renames of _swap
        shutil.rmtree(scratch)
        scratch.mkdir()
    try:
        owner.write_text(f"{socket.gethostname()} {os.getpid()}\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _abandoned(owner: Path) -> bool:
    try:
        host, pid = owner.read_text(encoding="utf-8").split()
        if host != socket.gethostname():
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return False


def _link_or_copy(pairs: dict[Path, Path]) -> None:
    to_copy: dict[Path, Path] = {}
    for source, target in pairs.items():
        try:
            os.link(source.resolve(), target)
        except FileExistsError:  # a copy would write through the link that is there already
            raise ModelError(
                f"{source.parent}: has two shards that would be {target.name}; rename one"
            ) from None
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


def _convert_pickled(bundle: Bundle, base: Path, folder: Path) -> dict[str, str]:
    """Pickled weights as safetensors: an engine that finds one safetensors file reads no other kind."""
    weight_map: dict[str, str] = {}
    for path in models.pickled_files(base):
        target = folder / path.with_suffix(".safetensors").name
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        tensors = {name: tensor.contiguous().clone() for name, tensor in loaded.items()}
        _save(_rewritten(bundle, tensors), target)
        weight_map |= dict.fromkeys(tensors, target.name)
    return weight_map


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a shard that others may read, as far as the umask lets them; safetensors makes it private."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)


def _swap(new: Path, destination: Path) -> None:
    """Rename ``new`` to ``destination``; what stood there is removed only after that."""
    old = new.with_name(_REPLACED)
    try:
        if destination.exists():
            os.rename(destination, old)
        os.rename(new, destination)
    except BaseException:  # Ctrl-C too
        if old.exists() and not destination.exists():
            os.rename(old, destination)
        raise
    with contextlib.suppress(OSError):
        shutil.rmtree(old)
