"""Weights quantized by llm-compressor, from a plain checkpoint folder to a compressed-tensors one.

llm-compressor is an optional dependency: nothing of it is imported before :func:`quantize` needs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvcal import models, sources
from kvcal.arch import ModelSpec
from kvcal.data import TokenSet
from kvcal.errors import DataError, ModelError, OutputError, PlanRefused, UsageError

# What a decoder layer multiplies with; embeddings and the head stand outside the layers and are left alone.
_LAYER_LINEAR = re.compile(r"\.layers\.\d+\..*\.weight$")
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # llm-compressor sets it and leaves it set
_LOG_DISABLED = "LLM_COMPRESSOR_LOG_DISABLED"
_TRACER = logging.getLogger("torch.fx._symbolic_trace")
_LOGGERS = ("llmcompressor", "compressed_tensors")


@dataclass(frozen=True)
class Scheme:
    """A preset of compressed-tensors and what it asks for.

    Attributes:
        name: the preset's name, which is also what recipes say.
        samples: whether calibration text is needed.
        group_size: input features that share a scale, None where a whole row does.
    """

    name: str
    samples: bool
    group_size: int | None


SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        # E4M3 with a scale per row; the engine rounds activations per token as it runs.
        Scheme("FP8_DYNAMIC", samples=False, group_size=None),
        # Symmetric INT4; activations stay as they are.
        Scheme("W4A16", samples=True, group_size=128),
    )
}


def scheme_named(name: str) -> Scheme:
    """Look a scheme up.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in SCHEMES:
        raise UsageError(f"unknown weight scheme {name!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[name]


def refuse(source: Path, scheme: str, model_spec: ModelSpec) -> None:
    """Everything that cannot work, from names and shapes alone.

    Groups must fill every row: compressed-tensors cannot cut other rows, nor has vLLM a place for the scale
    of a part of a group. With tensor parallelism the same holds for each rank's share of a row.

    Raises:
        UsageError: an unknown scheme, or llm-compressor is not installed.
        PlanRefused: the weights are quantized already, are those of experts, or do not divide into groups.
        ModelError: the weight files are not whole.
    """
    wanted = scheme_named(scheme)
    if importlib.util.find_spec("llmcompressor") is None:
        raise UsageError(
            f"weights with scheme {wanted.name} need llm-compressor, which is not installed:"
            " pip install 'kvcal[llm-compressor]'"
        )
    reasons = list(_reasons(source, wanted, model_spec))
    if reasons:
        raise PlanRefused(reasons)


def quantize(
    source: Path,
    target: Path,
    scheme: str,
    tokens: TokenSet | None,
    model_spec: ModelSpec,
    *,
    trust: models.Trust = models.TRUST_NOTHING,
    say: sources.Say | None = None,
) -> None:
    """Write ``source`` with quantized weights to ``target``, a complete checkpoint folder.

    Linear layers are quantized, ``lm_head`` and embeddings are not. The weights are in the checkpoint's own
    dtype while that happens, and so are the scales: an engine holds them in that dtype anyway.

    W4A16 uses GPTQ, not round-to-nearest: with 4 bits the rounding of single weights is no longer small,
    and GPTQ moves each column's error into the columns that are still to be rounded, weighted by what the
    calibration text puts through the layer. It asks for nothing but the text that is there for the KV
    statistics. Columns are visited in order of activation (``actorder: static``), which the file format
    does not show. A layer for which it fails is rounded to nearest, and ``say`` is told. It is work for a
    GPU: two CPU cores take one to two minutes for a decoder layer of four million weights.

    Samples go through one at a time, without padding; nothing is drawn at random, so the same input gives
    the same files. Attention is eager meanwhile: scores take ``heads * tokens^2`` elements per sample.
    If torch sees an accelerator, llm-compressor works on the first one, a decoder layer at a time.

    Args:
        source: an unquantized checkpoint folder; it is only read.
        target: a folder that is empty or not there; its parents are made. After an error it is gone.
        scheme: a name in :data:`SCHEMES`.
        tokens: calibration samples; may be None for a scheme that needs none.
        model_spec: what the source's config says.
        trust: what the user allowed when the model is loaded.
        say: is told, in one line, what the user should know.

    Raises:
        UsageError, PlanRefused, ModelError: as :func:`refuse`, before anything is loaded.
        DataError: the scheme needs samples and got none.
        ModelError: the model cannot be loaded, or llm-compressor fails on it.
        OutputError: the target holds files.
        OSError, SafetensorError: the disk refuses.
    """
    refuse(source, scheme, model_spec)
    wanted = SCHEMES[scheme]
    if wanted.samples and (tokens is None or not tokens.samples):
        raise DataError(f"weights with scheme {scheme} need calibration samples, and there are none")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target} exists; choose another folder for the quantized weights")
    tokenizer = models.load_tokenizer(source, trust)
    model = models.load(source, model_spec, torch.device("cpu"), trust)
    _as_stored(model, getattr(torch, model_spec.dtype))
    target.mkdir(parents=True, exist_ok=True)
    try:
        with _contained():
            fallen_back = _oneshot(model, tokenizer, wanted, tokens, target, trust)
        _copy_small_files(source, target)
        _require_as_asked(source, target)
    except BaseException as error:  # Ctrl-C too
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, Exception) and not isinstance(error, (OSError, SafetensorError, ModelError)):
            # llm-compressor raises whatever its parts raise
            first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise ModelError(f"{source}: llm-compressor cannot make {scheme} of it: {first_line}") from error
        raise
    if fallen_back and say is not None:
        say(
            f"GPTQ failed for {len(fallen_back)} layers ({fallen_back[0]} first), which were rounded to"
            " nearest instead; more calibration samples may help"
        )


def _reasons(source: Path, scheme: Scheme, model_spec: ModelSpec) -> Iterator[str]:
    """Why these weights cannot be quantized so."""
    if model_spec.quant_method is not None:
        yield (
            f"{source}: its weights are quantized already ({model_spec.quant_method}); take the scheme for"
            " weights out of the recipe, or give the checkpoint that this one was made from"
        )
        return  # packed shapes say nothing about groups
    shapes = _linear_shapes(source)
    if any(".experts." in name for name in shapes):
        # Mixtral's experts come back under names that neither transformers nor vLLM looks for.
        yield f"{source}: the weights of {model_spec.model_type}'s experts cannot be quantized yet"
    group = scheme.group_size
    uneven = {n: columns for n, (_, columns) in shapes.items() if group is not None and columns % group}
    if uneven:
        first, *others = uneven
        more = f" (and {len(others)} more)" if others else ""
        yield (
            f"{source}: {first} has {uneven[first]} input features, which groups of {group} do not"
            f" divide{more}; use FP8_DYNAMIC"
        )


def _linear_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """Name -> (output, input features) of the linear weights of the decoder layers, from the headers."""
    by_file: dict[str, list[str]] = {}
    for name, file in sorted(models.weight_map(folder).items()):
        if _LAYER_LINEAR.search(name):
            by_file.setdefault(file, []).append(name)
    shapes = {}
    for file, names in by_file.items():
        with safe_open(folder / file, framework="numpy") as shard:
            for name in names:
                shape = shard.get_slice(name).get_shape()
                if len(shape) == 2:
                    shapes[name] = (shape[0], shape[1])
    return shapes


def _as_stored(model: Any, dtype: torch.dtype) -> None:
    """Give the parameters the checkpoint's dtype back, which loses nothing.

    Not ``model.to``: it would also round the RoPE frequencies, which transformers keeps in float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _oneshot(
    model: Any, tokenizer: Any, scheme: Scheme, tokens: TokenSet | None, target: Path, trust: models.Trust
) -> list[str]:
    """Quantize and save. Returns the layers for which GPTQ failed."""
    llmcompressor = importlib.import_module("llmcompressor")
    modifiers = importlib.import_module("llmcompressor.modifiers.quantization")
    common = {"targets": "Linear", "scheme": scheme.name, "ignore": ["lm_head"]}
    if scheme.samples and tokens is not None:
        modifier = modifiers.GPTQModifier(**common)
        data = {
            "dataset": _dataset(tokens),
            "num_calibration_samples": len(tokens.samples),
            "shuffle_calibration_samples": False,
            "batch_size": 1,
            "pipeline": "sequential",
        }
    else:
        modifier = modifiers.QuantizationModifier(**common)
        data = {"pipeline": "datafree"}
    failed: list[str] = []

    def note_failures(of: Any) -> None:
        failed.extend(of._rtn_fallback_module_names)  # only logged, and forgotten after that

    with (
        llmcompressor.create_session(),  # the caller's session, if there is one, stays as it is
        _replaced(modifiers.GPTQModifier, "_log_rtn_fallback_summary", note_failures),
    ):
        llmcompressor.oneshot(
            model=model,
            processor=tokenizer,
            recipe=modifier,
            trust_remote_code_model=trust.remote_code,
            **data,
        )
        model.save_pretrained(target)  # oneshot replaced it with one that compresses
    return failed


def _dataset(tokens: TokenSet) -> Any:
    import datasets

    return datasets.Dataset.from_dict(
        {
            "input_ids": [list(sample) for sample in tokens.samples],
            "attention_mask": [[1] * len(sample) for sample in tokens.samples],
        }
    )


@contextmanager
def _contained() -> Iterator[None]:
    """Keep to itself what llm-compressor does to a process: messages, bars, variables, random numbers.

    Imported as it comes, it removes every loguru handler and logs to stdout. A first import in here leaves
    handlers alone and its logger disabled.
    """
    from loguru import logger

    tqdm = importlib.import_module("tqdm").tqdm
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        stack.callback(_TRACER.setLevel, _TRACER.level)
        _TRACER.setLevel(logging.ERROR)  # it warns of a function that its caller should rename
        warnings.simplefilter("ignore")
        stack.enter_context(_variable(_PARALLELISM, os.environ.get(_PARALLELISM, "false")))
        stack.enter_context(torch.random.fork_rng(devices=[]))  # a DataLoader draws one number
        settings = _logger_settings()
        stack.enter_context(_replaced(tqdm, "__init__", _without_bar(tqdm.__init__)))
        # It makes w of Gemma's 1 + w and back, both rounded, for modifiers that change norms. None does here.
        entry = importlib.import_module("llmcompressor.entrypoints.oneshot")
        stack.enter_context(_replaced(entry, "norm_calibration_context", contextlib.nullcontext))
        try:
            logger.level("METRIC")
        except ValueError:  # with its logger disabled it logs to a level that it did not make
            logger.level("METRIC", no=38)
        for name in _LOGGERS:
            logger.disable(name)
        try:
            yield
        finally:
            if not settings.disabled:
                logger.enable("llmcompressor")
            logger.enable("compressed_tensors")


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute that must be there for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _without_bar(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def silent(self: Any, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named | {"disable": True})

    return silent


def _logger_settings() -> Any:
    """llm-compressor's logger configuration; its first import comes here, and with logging disabled."""
    first = "llmcompressor" not in sys.modules
    with _variable(_LOG_DISABLED, "true") if first else contextlib.nullcontext():
        return importlib.import_module("llmcompressor.logger").LOGGER_CONFIG


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _copy_small_files(source: Path, target: Path) -> None:
    """Tokenizer and other small files as they are; weights, index and config were written anew."""
    models.copy_small_files(source, target, except_for=("config.json", models.INDEX_NAME))
    for path in target.glob("*.safetensors"):
        path.chmod(target.stat().st_mode & 0o666)  # safetensors makes them private


def _require_as_asked(source: Path, target: Path) -> None:
    """llm-compressor passes in silence over a layer that it does not recognize, and has rounded others.

    Raises:
        ModelError: a linear weight is not quantized, or another tensor is not what it was.
    """
    plain, written = models.weight_map(source), models.weight_map(target)
    linear = _linear_shapes(source)
    for name in linear:
        if f"{name}_scale" not in written:
            raise ModelError(f"{source}: llm-compressor left {name} as it was")
    for name in sorted((plain.keys() & written.keys()) - linear.keys()):
        before, after = _tensor(source / plain[name], name), _tensor(target / written[name], name)
        if not torch.equal(before.to(after.dtype), after):
            raise ModelError(f"{source}: llm-compressor changed {name}, which is not quantized")


def _tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor
