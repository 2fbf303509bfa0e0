"""A calibration in the weights: which tensors of a checkpoint change, and what takes each change back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvcal.arch import ModelSpec
from kvcal.errors import ModelError
from kvcal.export.bundle import RECORDS, Bundle, write_json
from kvcal.transforms import weights
from kvcal.transforms.record import Transforms

_TRANSFORMS = "folds.safetensors"
_RECORD = "folds.json"
_ORIGINALS = "originals.safetensors"
_FORMAT = 1

Restored = Literal["bit for bit", "from its copy", "rounded"]


@dataclass(frozen=True)
class FoldedTensor:
    """One tensor that was changed.

    ``sha256`` is of the original's bytes, ``written`` of the folded ones. ``restored``: the inverse fold
    gives them back, or a copy kept among the records does (small tensors only), or the nearest that the dtype
    has.
    """

    sha256: str
    written: str
    restored: Restored


class Folding:
    """Rewrites tensors as a checkpoint is written, and remembers what it takes to undo it."""

    def __init__(self, model: ModelSpec, transforms: Transforms):
        self._transforms = transforms
        self._folds = _folds(model, transforms)
        self._inverse = _folds(model, transforms.inverse())
        self._tensors: dict[str, FoldedTensor] = {}
        self._originals: dict[str, torch.Tensor] = {}

    def onto(self, bundle: Bundle) -> Bundle:
        """The bundle with folded weights beside what it adds."""
        return Bundle(bundle.tensors, bundle.quantization, frozenset(self._folds), self._rewrite)

    @property
    def tensors(self) -> dict[str, FoldedTensor]:
        """What has been rewritten so far, by name."""
        return self._tensors

    @property
    def reversible(self) -> bool:
        """Whether every original can be restored bit for bit."""
        return all(t.restored != "rounded" for t in self._tensors.values())

    def save(self, records: Path) -> None:
        """Write the transforms, the list of tensors and the copies of originals to the records."""
        self._transforms.save(records / _TRANSFORMS)
        write_json(records / _RECORD, self.document())
        if self._originals:
            save_file(self._originals, records / _ORIGINALS)

    def document(self) -> dict[str, Any]:
        """Each fold with its inverse, for people and for ``kvcal unfold``."""
        return {
            "version": _FORMAT,
            "steps": self._transforms.steps,
            "powers_of_two": self._transforms.powers_of_two,
            "reversible": self.reversible,
            "layers": {
                str(index): {
                    step: "fold by its inverse: 1 / s of K, s of Q"
                    if step == "key_scale"
                    else "fold by its inverse: 1 / s of gains and rotary key, s of what reads them"
                    if step == "latent_scale"
                    else "fold by its inverse: N^-1 of V, N of the output projection"
                    if step == "value_map"
                    else "add it to the bias of K again"
                    for step in layer.steps
                }
                for index, layer in self._transforms.layers.items()
            },
            "tensors": {name: asdict(tensor) for name, tensor in sorted(self._tensors.items())},
        }

    def _rewrite(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        new = self._folds[name](tensor)
        if not bool(new.isfinite().all()):
            raise ModelError(
                f"{name}: folding leaves the range of {tensor.dtype}; take"
                f" {' and '.join(self._transforms.steps)} out of folds.transforms"
            )
        restored: Restored = "bit for bit"
        if not torch.equal(_bits(self._inverse[name](new)), _bits(tensor)):
            restored = "from its copy" if tensor.ndim == 1 else "rounded"
            if tensor.ndim == 1:
                self._originals[name] = tensor.clone()
        self._tensors[name] = FoldedTensor(sha256_of(tensor), sha256_of(new), restored)
        return new


@dataclass(frozen=True)
class Record:
    """What :meth:`Folding.save` left in a checkpoint."""

    transforms: Transforms
    tensors: dict[str, FoldedTensor]
    originals: dict[str, torch.Tensor]


def read_record(folder: Path) -> Record | None:
    """The record of a folded checkpoint; None if nothing was folded.

    Raises:
        ModelError: there is one, but it cannot be read.
    """
    records = folder / RECORDS
    if not (records / _RECORD).exists():
        return None
    try:
        document = json.loads((records / _RECORD).read_text(encoding="utf-8"))
        tensors = {name: FoldedTensor(**row) for name, row in document["tensors"].items()}
        found = document["version"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{records / _RECORD}: is no record of folds: {error}") from None
    if found != _FORMAT:
        raise ModelError(f"{records / _RECORD}: version {found} of the record, this kvcal reads {_FORMAT}")
    try:
        originals = load_file(records / _ORIGINALS) if (records / _ORIGINALS).exists() else {}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{records / _ORIGINALS}: holds no tensors that can be read: {error}") from None
    return Record(Transforms.load(records / _TRANSFORMS), tensors, originals)


class Unfolding:
    """Takes folds back as a checkpoint is written, and compares each tensor with the original's hash.

    Raises:
        ModelError: the record is that of another model, from every method.
    """

    def __init__(self, model: ModelSpec, record: Record):
        self._record = record
        try:
            self._inverse = _folds(model, record.transforms.inverse())
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"the record of folds holds a transform without an inverse: {error}") from None
        _require_fit(model, record.transforms)
        unknown = sorted(record.tensors.keys() - self._inverse.keys())
        if unknown:
            raise ModelError(f"{unknown[0]} is in the record of folds, but no fold of this model touches it")
        self.restored: list[str] = []
        self.rounded: list[str] = []

    def onto(self, bundle: Bundle) -> Bundle:
        """The bundle with unfolded weights beside what it adds."""
        return Bundle(bundle.tensors, bundle.quantization, frozenset(self._record.tensors), self._rewrite)

    def restores(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the inverse fold gives the original's bytes."""
        return sha256_of(self._unfolded(name, tensor)) == self._record.tensors[name].sha256

    def _unfolded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return self._inverse[name](tensor)
        except RuntimeError:
            raise ModelError(
                f"{name} has shape {list(tensor.shape)}, which the record of folds does not fit"
            ) from None

    def _rewrite(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        original = self._record.originals.get(name)
        if original is None:
            original = self._unfolded(name, tensor)
        exact = sha256_of(original) == self._record.tensors[name].sha256
        (self.restored if exact else self.rounded).append(name)
        return original


def _folds(model: ModelSpec, transforms: Transforms) -> dict[str, weights.Fold]:
    found: dict[str, weights.Fold] = {}
    for layer in model.layers:
        if layer.index in transforms.layers:
            folds = weights.folds(model, layer, transforms.layers[layer.index])
            found |= {layer.in_checkpoint + n.removeprefix(layer.module): fold for n, fold in folds.items()}
    return found


def _require_fit(model: ModelSpec, transforms: Transforms) -> None:
    """Refuse transforms of layers or heads that the model does not have."""
    layers = {layer.index: layer for layer in model.layers}
    for index, transform in transforms.layers.items():
        layer = layers.get(index)
        vector = [layer.kv_heads, layer.head_dim] if layer else []
        for step in transform.steps:
            shape = list(getattr(transform, step).shape)
            if step == "latent_scale":
                fits = layer is not None and layer.latent is not None and shape == [2]
            else:
                fits = layer is not None and shape in (vector, [*vector, layer.head_dim])
            if not fits:
                raise ModelError(f"layer {index}: {step} of the record of folds is none of this model")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that -0 and 0 count as different."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def sha256_of(tensor: torch.Tensor) -> str:
    """Of the bytes of a tensor, whatever its shape."""
    return hashlib.sha256(_bits(tensor).numpy().tobytes()).hexdigest()
