"""Where a model's weights go: to one device, over all that there are, or to one device layer by layer."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from kvcal import models
from kvcal.arch import ModelSpec
from kvcal.errors import ModelError, UsageError
from kvcal.layerwise import Layerwise
from kvcal.models import Trust

DeviceMap = Literal["one", "auto", "layerwise"]

_ONE = "use --device-map one, with --device cpu if it only fits there"


@dataclass(frozen=True)
class Placement:
    """What the command line asked for.

    Attributes:
        device: where a model computes; of several, the first.
        device_map: ``one`` device; ``auto``, as accelerate spreads it over GPUs, CPU and disk; ``layerwise``.
        max_memory: of ``auto``: device index, or ``cpu``, to bytes; empty means all that is free.
    """

    device: torch.device
    device_map: DeviceMap = "one"
    max_memory: Mapping[int | str, int] = field(default_factory=dict)


def named(device: str, device_map: str = "one", max_memory: str | None = None) -> Placement:
    """The placement that options name.

    Raises:
        UsageError: there is no such device or map, or a limit that is none.
    """
    if device_map not in get_args(DeviceMap):
        raise UsageError(f"unknown device map {device_map!r}; use {', '.join(get_args(DeviceMap))}")
    if max_memory is not None and device_map != "auto":
        raise UsageError(f"--max-memory is for --device-map auto; {device_map} has nothing to spread")
    limits = dict(map(_limit, max_memory.split(","))) if max_memory else {}
    return Placement(models.device_named(device), device_map, limits)  # type: ignore[arg-type]


def load(folder: Path, spec: ModelSpec, placement: Placement, trust: Trust) -> Any:
    """The model in evaluation mode, otherwise as :func:`kvcal.models.load`.

    Raises:
        ModelError: also for weights that only one device can load: quantized or pickled ones.
    """
    if placement.device_map == "one":
        return models.load(folder, spec, placement.device, trust)
    kind = "pickled" if models.is_pickled(folder) else models.quantization(folder, trust)
    if kind is not None:
        raise ModelError(
            f"{folder}: its weights are {kind} and cannot be read layer by layer or from the disk; {_ONE}"
        )
    if placement.device_map == "layerwise":
        return _streamed(folder, spec, placement.device, trust)
    return _spread(folder, spec, placement, trust)


def about_encoders(placement: Placement) -> list[str]:
    """Why a model with an encoder cannot be placed so; empty if it can."""
    if placement.device_map != "layerwise":
        return []
    return [
        "--device-map layerwise: it streams the layers of one decoder, and this model has an encoder too; use"
        " --device-map one or auto"
    ]


def refusals(
    placement: Placement,
    *,
    folds: bool,
    weights: bool,
    shares_caches: bool = False,
    encoder_decoder: bool = False,
) -> list[str]:
    """Why a job cannot be done so; empty if it can.

    Args:
        placement: of the model.
        folds: transforms are chosen and folded.
        weights: weights are quantized too.
        shares_caches: layers of the model read what earlier ones have cached.
        encoder_decoder: the model has an encoder.
    """
    if placement.device_map == "one":
        return []
    found = about_encoders(placement) if encoder_decoder else []
    if shares_caches and placement.device_map == "layerwise":
        found.append(
            "--device-map layerwise: layers of this model read K and V of earlier ones, which are gone then;"
            " use --device-map auto"
        )
    if folds:
        found.append(
            f"--device-map {placement.device_map}: folds are chosen and proven on weights in memory; {_ONE},"
            " or --deliver metadata where the engine takes scales"
        )
    if weights:
        found.append(
            f"--device-map {placement.device_map}: llm-compressor quantizes weights in memory; {_ONE}"
        )
    return found


def _streamed(folder: Path, spec: ModelSpec, device: torch.device, trust: Trust) -> Layerwise:
    """A model whose layers stay in the checkpoint."""
    scratch = tempfile.TemporaryDirectory(prefix="kvcal-layers-")
    with torch.device("meta"):
        empty = models.without_weights(folder, trust)
    path = list_of_layers(empty, [layer.module for layer in spec.layers])
    where = {"device_map": layers_on_disk(empty, path), "offload_folder": scratch.name}
    model = models.read(folder, spec, models.dtype_on(device, spec), trust, where)
    return Layerwise(model, path, device, scratch)


def list_of_layers(model: torch.nn.Module, attention: Sequence[str]) -> str:
    """Path of the module list that holds the decoder layers, from the paths of their attention.

    Raises:
        ModelError: they are not in one list.
    """
    found = set()
    for path in attention:
        parts = path.split(".")
        prefixes = (".".join(parts[:stop]) for stop in range(1, len(parts)))
        lists = [p for p in prefixes if isinstance(model.get_submodule(p), torch.nn.ModuleList)]
        found.add(lists[0] if lists else "")
    if len(found) != 1 or "" in found:
        raise ModelError(
            f"{type(model).__name__} has its decoder layers not in one list, so it cannot run layer by layer;"
            " use --device-map auto"
        )
    return found.pop()


def layers_on_disk(model: torch.nn.Module, path: str) -> dict[str, str]:
    """A device map with what is in ``path`` on the disk and all else on the CPU."""
    found: dict[str, str] = {}
    prefix, module = "", model
    for step in path.split("."):
        found |= {f"{prefix}{name}": "cpu" for name, _ in module.named_parameters(recurse=False)}
        found |= {f"{prefix}{name}": "cpu" for name, _ in module.named_children()}
        del found[f"{prefix}{step}"]
        module, prefix = module.get_submodule(step), f"{prefix}{step}."
    return found | {path: "disk"}


def _spread(folder: Path, spec: ModelSpec, placement: Placement, trust: Trust) -> Any:
    """A model spread by accelerate, with what does not fit on the disk."""
    from accelerate.utils import get_max_memory

    limits = dict(placement.max_memory)
    if not limits and placement.device.type == "cpu":
        limits = {"cpu": get_max_memory()["cpu"]}
    scratch = tempfile.TemporaryDirectory(prefix="kvcal-offload-")
    where = {"device_map": "auto", "max_memory": limits or None, "offload_folder": scratch.name}
    try:
        model = models.read(folder, spec, models.dtype_on(placement.device, spec), trust, where)
    except torch.OutOfMemoryError:
        raise ModelError(f"{folder}: does not fit; lower --max-memory, or --device-map layerwise") from None
    weakref.finalize(model, scratch.cleanup)
    models.require_finite(folder, model)
    return model


def _limit(text: str) -> tuple[int | str, int]:
    """``0=20GiB`` or ``cpu=64GiB``."""
    from accelerate.utils import convert_file_size_to_int

    device, _, size = (part.strip() for part in text.partition("="))
    try:
        if device != "cpu":
            models.device_named(f"cuda:{int(device)}")
        return device if device == "cpu" else int(device), convert_file_size_to_int(size)
    except ValueError:
        raise UsageError(
            f"--max-memory {text!r}: give DEVICE=SIZE with commas between, such as 0=70GiB,cpu=200GiB"
        ) from None
