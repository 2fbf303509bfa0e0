"""Model and tokenizer from a local folder, after its weight files were found whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvcal import probe, sources
from kvcal.arch import ModelSpec
from kvcal.errors import ModelError, UsageError, in_one_line

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLED_NAME = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
_SMALL_FILES = (".json", ".txt", ".model", ".jinja", ".py", ".md")
_TEMPLATES = "additional_chat_templates"  # where transformers keeps all but the default one
# A weight of a layer; scales and the RoPE frequencies of old checkpoints may be there without a use.
_LAYER_WEIGHT = re.compile(r"\.(?:layers|h)\.(\d+)\..*\b(?:weight|bias)$")


@dataclass(frozen=True)
class Trust:
    """What the user allowed: code from the model's folder, and pickled weights. Nothing by default."""

    remote_code: bool = False
    pickle: bool = False


TRUST_NOTHING = Trust()


def device_named(name: str) -> torch.device:
    """``auto`` is the first CUDA device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"device {name!r} was asked for, but torch sees {count} CUDA devices")
    return device


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or the headers, after checking that every file is whole.

    Raises:
        ModelError: no safetensors, a missing or truncated shard, or an index that does not fit them.
    """
    index = folder / INDEX_NAME
    if index.exists():
        try:
            announced = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise ModelError(f"{index}: is not a safetensors index (no weight_map)") from None
        if not isinstance(announced, dict) or not all(isinstance(f, str) for f in announced.values()):
            raise ModelError(f"{index}: weight_map must map tensor names to file names")
        if not announced:
            raise ModelError(f"{index}: weight_map is empty; download the model again")
    elif (folder / SINGLE_NAME).exists():
        return dict.fromkeys(sorted(tensor_names(folder / SINGLE_NAME)), SINGLE_NAME)
    elif is_pickled(folder):
        raise ModelError(
            f"{folder}: holds pickled weights only, which can run code when loaded;"
            " convert them to safetensors or pass --allow-pickle"
        )
    else:
        raise ModelError(f"{folder}: has no {SINGLE_NAME} and no {INDEX_NAME}; give a model with its weights")
    for file in sorted(set(announced.values())):
        if Path(file).name != file:
            raise ModelError(f"{index}: shard {file!r} must be a plain file name")
        if not os.path.isfile(folder / file):  # says False to a name that no file can have
            raise ModelError(f"{folder}: shard {file} is missing; download the model again")
        present = tensor_names(folder / file)
        lost = [name for name, where in announced.items() if where == file and name not in present]
        if lost:
            raise ModelError(f"{folder / file}: lacks {lost[0]}, which the index places there")
    return announced


def as_stored(spec: ModelSpec, weights: Collection[str]) -> ModelSpec:
    """The spec with the paths under which a checkpoint keeps its layers.

    Some checkpoints leave out the name of the base model, which transformers puts in front as it loads them.

    Args:
        spec: of the checkpoint's config.
        weights: names of its tensors; none at all says nothing.

    Raises:
        ModelError: the weights of a layer are not where they should be.
    """
    held = {name.rpartition(".")[0] for name in weights}
    held |= {module.rpartition(".")[0] for module in held}  # of projections inside an attention module
    layers = []
    for layer in spec.layers:
        path = layer.in_checkpoint
        candidates = (path, path.partition(".")[2])
        stored = next((each for each in candidates if each in held), None if weights else path)
        if stored is None:
            raise ModelError(
                f"layer {layer.index}: the checkpoint has no weights under {path}, where transformers keeps"
                " them; is it the config of another model?"
            )
        layers.append(replace(layer, stored=None if stored == layer.module else stored))
    return replace(spec, layers=tuple(layers))


def described(folder: Path) -> ModelSpec:
    """The model of a checkpoint, as its config and the names of its tensors say.

    Raises:
        ModelError: no config that transformers and kvcal understand, weights that are not whole, or not both
            of one model.
    """
    return as_stored(probe.read(sources.read_config(folder)), weight_map(folder))


def load(folder: Path, spec: ModelSpec, device: torch.device, trust: Trust) -> Any:
    """The model in evaluation mode.

    On a CPU it computes in float32, whatever the checkpoint's dtype: BF16 there is slow and not the same on
    every processor. On a GPU it computes in the checkpoint's dtype.

    Raises:
        ModelError: weights are missing, broken, pickled, not finite or others than the config says.
    """
    try:
        model = read(folder, spec, dtype_on(device, spec), trust, {"device_map": str(device)})
    except torch.OutOfMemoryError:
        raise ModelError(
            f"{folder}: does not fit into the memory of {device}; try --device-map layerwise"
        ) from None
    require_finite(folder, model)
    return model


def require_finite(folder: Path, model: Any) -> None:
    """Refuse a model with NaN or infinity among its weights."""
    broken = non_finite_weight(model)
    if broken is not None:
        raise ModelError(f"{folder}: {_named(broken)} holds NaN or infinity; download the model again")


def require_as_announced(folder: Path, spec: ModelSpec, trust: Trust) -> None:
    """Hold the spec against the code of its model, before a weight is loaded.

    Raises:
        ModelError: naming layer and field that differ.
    """
    probe.verify(_config(folder, trust), spec, trust_remote_code=trust.remote_code)


def dtype_on(device: torch.device, spec: ModelSpec) -> torch.dtype:
    """What a model computes in."""
    found: torch.dtype = torch.float32 if device.type == "cpu" else getattr(torch, spec.dtype)
    return found


def without_weights(folder: Path, trust: Trust) -> Any:
    """The model as its class makes it, on whatever device is the default."""
    config = _config(folder, trust)
    return probe.auto_class(config).from_config(config, trust_remote_code=trust.remote_code)


def read(folder: Path, spec: ModelSpec, dtype: torch.dtype, trust: Trust, where: dict[str, Any]) -> Any:
    """The model in evaluation mode, with the checkpoint's weights, which may hold NaN.

    ``where`` is passed to transformers: a device map and what belongs to it.

    Raises:
        ModelError: as of :func:`load`.
        torch.OutOfMemoryError: weights do not fit.
    """
    pickled = is_pickled(folder)
    if not (pickled and trust.pickle):
        weight_map(folder)
    config = _config(folder, trust)
    _as_base(config)
    try:
        model, info = probe.auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            # Scaled dot-product attention drops softcaps and sinks without a word.
            attn_implementation="eager" if spec.softcap is not None or spec.sinks else "sdpa",
            use_safetensors=not pickled,
            ignore_mismatched_sizes=True,  # refused below, by name
            trust_remote_code=trust.remote_code,
            output_loading_info=True,
            **where,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers raises whatever its loaders raise
        raise ModelError(f"{folder}: cannot be loaded: {in_one_line(error)}") from None
    _require_same_weights(folder, info)
    return model.eval()


def device_of(model: Any) -> torch.device:
    """Where a model takes its inputs; that of its first weight is ``meta`` if accelerate has offloaded it."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    hook = getattr(embedding, "_hf_hook", None)
    return torch.device(model.device if hook is None else hook.execution_device)


def weight(model: Any, name: str) -> torch.Tensor:
    """A parameter by name, read from the disk if it is there."""
    from transformers.integrations.accelerate import load_offloaded_parameter

    found: torch.Tensor = model.get_parameter(name)
    return load_offloaded_parameter(model, name) if found.is_meta else found


def quantization(folder: Path, trust: Trust) -> str | None:
    """How the weights are quantized; None if they are not, whatever is said of the cache."""
    config = _config(folder, trust)
    _as_base(config)
    section = getattr(config, "quantization_config", None)
    return None if section is None else f"quantized ({dict(section).get('quant_method')})"


def load_tokenizer(folder: Path, trust: Trust) -> Any:
    """The tokenizer of the folder.

    Raises:
        ModelError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    _config(folder, trust)  # AutoTokenizer reads it too, and would be blamed for a fault in it
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust.remote_code)
    except Exception as error:  # transformers raises whatever its loaders raise
        raise ModelError(f"{folder}: has no tokenizer that can be loaded: {in_one_line(error)}") from None


def load_processor(folder: Path, trust: Trust) -> Any:
    """The processor that makes inputs of text and images for the model of the folder.

    Raises:
        ModelError: the model takes no images, or transformers cannot load its processor.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    if probe.auto_class(_config(folder, trust)) is not AutoModelForImageTextToText:
        raise ModelError(
            f"{folder}: is run as a model of text alone, and the dataset has rows with images; leave them out"
        )
    try:
        found = AutoProcessor.from_pretrained(
            folder, trust_remote_code=trust.remote_code, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever its loaders raise
        raise ModelError(
            f"{folder}: has no processor that can be loaded, which rows with images need:"
            f" {in_one_line(error)}"
        ) from None
    if getattr(found, "image_processor", None) is None:
        raise ModelError(f"{folder}: has no image processor beside its tokenizer; rows with images need one")
    return found


def non_finite_weight(model: Any) -> str | None:
    """Name of the first parameter that holds NaN or infinity."""
    for name, listed in model.named_parameters():
        if not listed.is_floating_point() or listed.numel() == 0:
            continue
        parameter = weight(model, name) if listed.is_meta else listed
        # One pass without a temporary; 8-bit floats have no comparison of their own.
        ends = (parameter.float() if parameter.itemsize == 1 else parameter).detach().aminmax()
        if not bool(torch.stack(ends).isfinite().all()):
            return str(name)
    return None


def is_pickled(folder: Path) -> bool:
    """Whether the folder holds pickled weights and no safetensors."""
    safe = (folder / SINGLE_NAME).exists() or (folder / INDEX_NAME).exists()
    return not safe and any((folder / name).exists() for name in (_PICKLED_NAME, _PICKLED_INDEX))


def pickled_files(folder: Path) -> list[Path]:
    """The pickled weight files that transformers would load."""
    if (folder / _PICKLED_NAME).exists():
        return [folder / _PICKLED_NAME]
    index = json.loads((folder / _PICKLED_INDEX).read_text(encoding="utf-8"))
    return [folder / file for file in sorted(set(index["weight_map"].values()))]


def digest(folder: Path) -> str:
    """SHA-256 over the weight files and ``config.json``: what a model is, whatever its folder is called."""
    files = {folder / "config.json"}
    files |= (
        set(pickled_files(folder))
        if is_pickled(folder)
        else {folder / f for f in weight_map(folder).values()}
    )

    def one(path: Path) -> str:
        try:
            with path.open("rb") as file:
                return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None

    with ThreadPoolExecutor() as pool:  # hashing lets go of Python's lock
        return hashlib.sha256("\n".join(pool.map(one, sorted(files))).encode()).hexdigest()


def copy_small_files(source: Path, target: Path, *, except_for: Collection[str]) -> None:
    """Tokenizer, templates and the like: all of a checkpoint but its weights and ``except_for``."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _SMALL_FILES and path.name not in except_for:
            shutil.copyfile(path, target / path.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, target / _TEMPLATES, dirs_exist_ok=True)


def tensor_names(path: Path) -> set[str]:
    """Names in the header of a safetensors file, which must be whole.

    Raises:
        ModelError: it is truncated or no safetensors file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path}: is not a whole safetensors file: {in_one_line(error)}; download it again"
        ) from None


def _config(folder: Path, trust: Trust) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust.remote_code)
    except Exception as error:  # transformers raises whatever its loaders raise
        raise ModelError(f"{folder / 'config.json'}: transformers refuses it: {in_one_line(error)}") from None


def _require_same_weights(folder: Path, info: dict[str, Any]) -> None:
    """Refuse what transformers would fill with random numbers or leave out."""
    if info["missing_keys"]:
        first, *others = sorted(info["missing_keys"])
        raise ModelError(f"{folder}: {_named(first)} is missing{more(others)}; download the model again")
    if info["mismatched_keys"]:
        (first, found, wanted), *others = sorted(info["mismatched_keys"])
        raise ModelError(
            f"{folder}: {_named(first)} has shape {list(found)}, config.json wants {list(wanted)}"
            f"{more(others)}; is it the config of another model?"
        )
    unused = sorted(name for name in info["unexpected_keys"] if _LAYER_WEIGHT.search(name))
    if unused:
        raise ModelError(
            f"{folder}: {_named(unused[0])} has no place in the model of config.json"
            f"{more(unused[1:])}; is it the config of another model?"
        )


def _named(weight: str) -> str:
    found = _LAYER_WEIGHT.search(weight)
    return f"layer {found[1]}: {weight}" if found else weight


def more(others: list[Any]) -> str:
    """Tells in a message of the first of many how many others there are."""
    return f" (and {len(others)} more)" if others else ""


def _as_base(config: Any) -> None:
    """Leave out the KV scheme, which is what is being measured; dequantize weights that are stored packed."""
    section = getattr(config, "quantization_config", None)
    if not isinstance(section, dict) or section.get("quant_method") != "compressed-tensors":
        return
    if section.get("config_groups"):
        config.quantization_config = section | {"kv_cache_scheme": None, "dequantize": True}
    else:
        del config.quantization_config
