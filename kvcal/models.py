"""Model and tokenizer from a local folder, after its weight files were found whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvcal.arch import ModelSpec
from kvcal.errors import ModelError, UsageError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


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
        raise UsageError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name!r} was asked for, but torch sees no CUDA device")
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
    elif (folder / SINGLE_NAME).exists():
        return dict.fromkeys(_tensor_names(folder / SINGLE_NAME), SINGLE_NAME)
    else:
        raise ModelError(f"{folder}: has no {SINGLE_NAME} and no {INDEX_NAME}")
    for file in sorted(set(announced.values())):
        if Path(file).name != file:
            raise ModelError(f"{index}: shard {file!r} must be a plain file name")
        if not (folder / file).is_file():
            raise ModelError(f"{folder}: shard {file} is missing; download the model again")
        present = _tensor_names(folder / file)
        lost = [name for name, where in announced.items() if where == file and name not in present]
        if lost:
            raise ModelError(f"{folder / file}: lacks {lost[0]}, which the index places there")
    return announced


def load(folder: Path, spec: ModelSpec, device: torch.device, trust: Trust) -> Any:
    """The model in evaluation mode.

    On a CPU it computes in float32, whatever the checkpoint's dtype: BF16 there is slow and not the same on
    every processor. On a GPU it computes in the checkpoint's dtype.

    Raises:
        ModelError: weights are missing, broken, pickled or of other shapes than the config says.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not _is_pickled(folder):
        weight_map(folder)
    elif not trust.pickle:
        raise ModelError(
            f"{folder}: holds pickled weights only, which can run code when loaded;"
            " convert them to safetensors or pass --allow-pickle"
        )
    dtype = torch.float32 if device.type == "cpu" else getattr(torch, spec.dtype)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust.remote_code)
        _as_base(config)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map=str(device),
            # Scaled dot-product attention drops the logit softcap without a word.
            attn_implementation="eager" if spec.softcap is not None else "sdpa",
            use_safetensors=not trust.pickle,
            trust_remote_code=trust.remote_code,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise ModelError(f"{folder}: does not fit into the memory of {device}; try --device cpu") from None
    except Exception as error:  # transformers raises whatever its loaders raise
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(f"{folder}: cannot be loaded: {first_line}") from None
    for what in ("missing_keys", "mismatched_keys"):
        if info[what]:
            first = sorted(map(str, info[what]))[0]
            raise ModelError(f"{folder}: {len(info[what])} weights are {what.split('_')[0]}, first {first}")
    return model.eval()


def load_tokenizer(folder: Path, trust: Trust) -> Any:
    """The tokenizer of the folder.

    Raises:
        ModelError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust.remote_code)
    except Exception as error:  # transformers raises whatever its loaders raise
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(f"{folder}: has no tokenizer that can be loaded: {first_line}") from None


def non_finite_weight(model: Any) -> str | None:
    """Name of the first parameter that holds NaN or infinity."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            return str(name)
    return None


def _is_pickled(folder: Path) -> bool:
    safe = (folder / SINGLE_NAME).exists() or (folder / INDEX_NAME).exists()
    return not safe and any((folder / name).exists() for name in _PICKLED)


def _as_base(config: Any) -> None:
    """Leave out the KV scheme, which is what is being measured; dequantize weights that are stored packed."""
    section = getattr(config, "quantization_config", None)
    if not isinstance(section, dict) or section.get("quant_method") != "compressed-tensors":
        return
    if section.get("config_groups"):
        config.quantization_config = section | {"kv_cache_scheme": None, "dequantize": True}
    else:
        del config.quantization_config


def _tensor_names(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: is not a whole safetensors file: {error}; download it again") from None
