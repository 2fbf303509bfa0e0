"""Re-reads written files against the engine's loader contract, stricter than the engine itself.

vLLM's compressed-tensors loader accepts zero, NaN, missing and over-long scales without a word
(compressed_tensors.py, CompressedTensorsKVCacheMethod), SGLang's serves 1.0 for what it does not know; each
of those is an error here. What an engine reads is in its row and in :data:`_SECTIONS`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvcal import engines, formats, granularity, models, probe, sources
from kvcal import recipe as recipes
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.engine_spec import UNQUANTIZED, EngineSpec
from kvcal.errors import CheckFailed, KvcalError, ModelError, RecipeError, UsageError
from kvcal.export import bundle, folded, kernel, modelopt
from kvcal.granularity import Granularity
from kvcal.recipe import SIDES, Side

# Anything that an engine's name mapper could take for a scale of K, V or Q.
_SCALE_LIKE = re.compile(
    r"(?:\b|_)(?:[kvq]|kv|prob)_(?:scale|zero_point|bias_value)$|[kvq]_cache\.scale$|\boutput_scale$",
    re.IGNORECASE,
)


# Of old GPT-2 and GPT-NeoX checkpoints; transformers drops them.
_CAUSAL_MASKS = ("bias", "masked_bias")


@dataclass(frozen=True)
class Finding:
    """One rule of the contract and whether the files keep it."""

    rule: str
    ok: bool
    message: str


@dataclass(frozen=True)
class Checkpoint:
    """What the files of a folder say, read once."""

    folder: Path
    config: dict[str, Any]
    model: ModelSpec
    files: dict[str, list[str]]  # shard -> tensors in it
    weight_map: dict[str, str]
    scales: dict[str, torch.Tensor]
    folds: folded.Record | None

    @property
    def section(self) -> dict[str, Any]:
        """``quantization_config``; empty if there is none."""
        section = self.config.get("quantization_config")
        return section if isinstance(section, dict) else {}

    @property
    def announces_scales(self) -> bool:
        """Whether static scales are part of it; a folded checkpoint may do without."""
        return self.folds is None or bool(_scheme(self)) or bool(self.scales)


def check(folder: Path, engine_name: str) -> list[Finding]:
    """All findings for one engine, failed ones included; the order is that of loading."""
    engine = engines.get(engine_name)
    if engine.standalone:
        if not os.path.isdir(folder):
            raise UsageError(f"{folder}: no such folder")
        wrong = list(kernel.faults(folder))
        return [Finding("scales are those of the layout", not wrong, _join(wrong))]
    try:
        checkpoint = _read(folder)
    except UsageError:
        raise
    except KvcalError as error:
        return [Finding("files are readable", False, str(error))]
    findings = [Finding("files are readable", True, f"{len(checkpoint.files)} shards")]
    for rule, test in _rules(checkpoint, engine):
        faults = list(test(checkpoint, engine))
        findings.append(Finding(rule, not faults, _join(faults)))
    return findings


def require(folder: Path, engine_name: str) -> list[Finding]:
    """Refuse files that the engine would not load as they are meant; the rules that they keep.

    Raises:
        CheckFailed: with every finding that failed.
    """
    findings = check(folder, engine_name)
    failed = [f for f in findings if not f.ok]
    if failed:
        raise CheckFailed("; ".join(f"{f.rule}: {f.message}" for f in failed))
    return findings


def scales_of(folder: Path, engine_name: str) -> tuple[ModelSpec, dict[int, dict[Side, list[float]]], bool]:
    """The scales as written, for comparison with what an engine holds: 1.0 where none are.

    Also the model, and whether ``config.json`` announces the scales.
    """
    checkpoint = _read(folder)
    engine = engines.get(engine_name)
    if not checkpoint.announces_scales:
        ones: dict[Side, list[float]] = {side: [1.0] for side in _sides(engine)}
        written = dict.fromkeys((layer.index for layer in checkpoint.model.layers), ones)
        return checkpoint.model, written, False
    written = {
        layer.index: {
            side: [float(x) for x in checkpoint.scales[engine.scale_name(layer, side)].flatten()]
            for side in _sides(engine)
        }
        for layer in checkpoint.model.layers
    }
    return checkpoint.model, written, True


def _read(folder: Path) -> Checkpoint:
    if not os.path.isdir(folder):
        raise UsageError(f"{folder}: no such folder")
    config = sources.read_config(folder)
    weight_map = models.weight_map(folder)
    model = models.as_stored(probe.read(config), weight_map)
    files: dict[str, list[str]] = {}
    scales: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                files[path.name] = sorted(file.keys())
                for name in files[path.name]:
                    if _SCALE_LIKE.search(name):
                        scales[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is not a whole safetensors file: {error}") from None
    return Checkpoint(folder, config, model, files, weight_map, scales, folded.read_record(folder))


@dataclass(frozen=True)
class _Section:
    """What ``quantization_config`` must say.

    ``keys`` are those of ``kv_cache_scheme`` with the values that are allowed, ``strategy`` left to the
    engine's granularities; none where the section has no word for the cache. ``shape`` is that of every
    scale, None if the granularity decides.
    """

    keys: Mapping[str, Any]
    has_strategy: bool
    shape: tuple[int, ...] | None


_SECTIONS = {
    "compressed-tensors": _Section(
        {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}, has_strategy=True, shape=None
    ),
    "modelopt": _Section({"type": "float", "num_bits": 8, "dynamic": False}, has_strategy=False, shape=()),
    "fp8": _Section({}, has_strategy=False, shape=(1,)),
    UNQUANTIZED: _Section({}, has_strategy=False, shape=(1,)),
}


def _scheme(checkpoint: Checkpoint) -> dict[str, Any]:
    scheme = checkpoint.section.get("kv_cache_scheme")
    return scheme if isinstance(scheme, dict) else {}


def _sides(engine: EngineSpec) -> list[Side]:
    return [side for side in SIDES if side in engine.scale_suffixes]


def _form(checkpoint: Checkpoint, engine: EngineSpec) -> _Section:
    method = str(checkpoint.section.get("quant_method"))
    return _SECTIONS[method if method in engine.scalar_quant_methods else engine.base_quant_methods[0]]


def _granularity(checkpoint: Checkpoint, engine: EngineSpec) -> Granularity | None:
    loaded = [granularity.get(name) for name in engine.granularities]
    if not _form(checkpoint, engine).has_strategy:
        return loaded[0]
    strategy = _scheme(checkpoint).get("strategy")
    matches = [g for g in loaded if g.compressed_tensors_strategy == strategy]
    return matches[0] if matches else None


def _config(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    section, form = checkpoint.section, _form(checkpoint, engine)
    if engine.base_quant_methods[0] == UNQUANTIZED:
        if section:
            yield f"config.json has a quantization_config, with which {engine.title} reads no scale"
        return
    if not section:
        yield f"config.json has no quantization_config; {engine.title} then refuses the k_scale tensors"
        return
    if not form.keys:
        return
    if section.get("quant_method") not in engine.base_quant_methods:
        yield f"quant_method is {section.get('quant_method')!r}, must be {engine.base_quant_methods[0]!r}"
    if form.has_strategy and not isinstance(section.get("config_groups"), dict):
        why = f"{engine.title} cannot count heads without (write {{}})"
        yield f'quantization_config has no "config_groups"; {why}'
    if not form.has_strategy and section.get("quant_algo") is None:
        yield 'quantization_config has no "quant_algo", which is mandatory in this form'
    if not form.has_strategy:
        yield from modelopt.disagreements(checkpoint.folder / modelopt.OWN_CONFIG)
    scheme = section.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        yield f"quantization_config has no kv_cache_scheme; {engine.title} then serves scale 1.0"
        return
    allowed: dict[str, list[Any]] = {key: [value] for key, value in form.keys.items()}
    if form.has_strategy:
        known = [granularity.get(name).compressed_tensors_strategy for name in engine.granularities]
        allowed["strategy"] = known
    for key, values in allowed.items():
        if scheme.get(key) not in values or isinstance(scheme.get(key), bool) != isinstance(values[0], bool):
            shown = " or ".join(json.dumps(v) for v in values)
            yield f"kv_cache_scheme.{key} is {json.dumps(scheme.get(key))}, must be {shown}"


def _consumed(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    gran = _granularity(checkpoint, engine)
    if gran is not None:
        fmt = formats.get(engine.loads_scales[0])
        yield from engine.refusals(checkpoint.model, fmt, gran, "metadata")


def _plain(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    """A folded checkpoint without scales must not look as if it had any."""
    section = checkpoint.section
    if section and not section.get("config_groups"):
        yield "config.json has a quantization_config that quantizes nothing; remove it"


def _no_scales(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    """For engines that have no place for any."""
    for name in sorted(checkpoint.scales):
        yield f"{name}: {engine.title} loads no scales, and may fail on one; export again with kvcal export"
    if _scheme(checkpoint):
        yield f"config.json has a kv_cache_scheme, which {engine.title} does not read"


def _has_format(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    try:
        recipe = recipes.load(str(checkpoint.folder / bundle.RECORDS / "recipe.yaml"))
    except RecipeError as error:
        yield str(error)
        return
    unquantized = dataclasses.replace(checkpoint.model, quant_method=None)  # weights may be, after the fold
    yield from engine.refusals(unquantized, formats.get(recipe.format), None, "fold")


def _folds_delivered(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    """What is in the files must be what was written, and the record must fit the model."""
    assert checkpoint.folds is not None
    if checkpoint.section.get("config_groups"):
        return  # rounded since: the weights say nothing exact any more
    try:
        yield from _not_as_written(checkpoint, checkpoint.folds)
    except ModelError as error:  # folds of another model
        yield str(error)


def _not_as_written(checkpoint: Checkpoint, folds: folded.Record) -> Iterator[str]:
    unfolding = folded.Unfolding(checkpoint.model, folds)
    for name, row in folds.tensors.items():
        file = checkpoint.weight_map.get(name)
        if file is None:
            yield f"{name} was folded and is not in the files"
            continue
        with safe_open(checkpoint.folder / file, framework="pt") as shard:
            tensor = shard.get_tensor(name)
        if not bool(tensor.isfinite().all()):
            yield f"{name} holds NaN or infinity"
        elif folded.sha256_of(tensor) != row.written:
            yield f"{name} is not what was written"
        elif row.restored == "bit for bit" and not unfolding.restores(name, tensor):
            yield f"{name}: unfolding it by the record does not give the original"


def _index(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    where: dict[str, str] = {}
    for file, names in checkpoint.files.items():
        for name in names:
            if name in where:
                yield f"{name} is in {where[name]} and in {file}; which one is loaded is chance"
            where[name] = file
            if checkpoint.weight_map.get(name) != file:
                listed = checkpoint.weight_map.get(name, "nowhere")
                yield f"{name} lies in {file}, the index places it {listed}"


def _present(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    for layer in checkpoint.model.layers:
        lost = [side for side in _sides(engine) if engine.scale_name(layer, side) not in checkpoint.scales]
        if lost:
            names = ", ".join(engine.scale_suffixes[side] for side in lost)
            yield f"layer {layer.index} has no {names}; {engine.title} would serve 1.0 without a word"


def _known_names(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    layers = checkpoint.model.layers
    expected = {engine.scale_name(layer, side) for layer in layers for side in _sides(engine)}
    # Whatever else lies directly in an attention module is a scale with a slip in its name.
    own = {
        f"{layer.in_checkpoint}.{name}" for layer in layers for name in (*layer.own_tensors, *_CAUSAL_MASKS)
    }
    modules = {layer.in_checkpoint for layer in layers}
    inside = {n for names in checkpoint.files.values() for n in names if n.rpartition(".")[0] in modules}
    for name in sorted((checkpoint.scales.keys() | inside) - expected - own):
        yield f"{name} is no name that this model loads scales from; expected is {sorted(expected)[0]}"


def _shapes(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    gran = _granularity(checkpoint, engine)
    if gran is None:
        return
    for layer, side, name, scale in _scales(checkpoint, engine):
        by_granularity = gran.scale_shape(layer.heads_of(side), layer.head_dim)
        shape = _form(checkpoint, engine).shape
        wanted = torch.Size(by_granularity if shape is None else shape)
        if scale.dtype != torch.float32:
            yield f"{name} is {scale.dtype}, must be torch.float32"
        if scale.shape != wanted:
            yield f"{name} has shape {list(scale.shape)}, must be {list(wanted)} ({gran.name})"


def _values(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    for _, _, name, scale in _scales(checkpoint, engine):
        if scale.dtype != torch.float32:
            continue  # a fault of its own, and not every dtype can be compared
        if bool(scale.isnan().any()):
            yield f"{name} holds NaN"
        elif not bool(scale.isfinite().all()):
            yield f"{name} holds infinity"
        elif bool((scale <= 0).any()):
            yield f"{name} holds {float(scale.min()):g}; a scale must be above 0"


def _shared(checkpoint: Checkpoint, engine: EngineSpec) -> Iterator[str]:
    layers = {layer.index: layer for layer in checkpoint.model.layers}
    for layer in layers.values():
        if layer.shares is None:
            continue
        for side in ("k", "v"):
            mine, owner = (engine.scale_name(each, side) for each in (layer, layers[layer.shares]))
            if not torch.equal(*(checkpoint.scales.get(name, torch.ones(1)) for name in (mine, owner))):
                yield f"{mine} is not {owner}, with which the cache that it reads was written"


def _scales(
    checkpoint: Checkpoint, engine: EngineSpec
) -> Iterator[tuple[LayerSpec, Side, str, torch.Tensor]]:
    for layer in checkpoint.model.layers:
        for side in _sides(engine):
            name = engine.scale_name(layer, side)
            if name in checkpoint.scales:
                yield layer, side, name, checkpoint.scales[name]


def _join(faults: list[str]) -> str:
    if len(faults) <= 3:
        return "; ".join(faults)
    return "; ".join(faults[:3]) + f"; and {len(faults) - 3} more"


Rule = tuple[str, Callable[[Checkpoint, EngineSpec], Iterator[str]]]

_INDEX: Rule = ("index and shards agree", _index)
_SCALES: tuple[Rule, ...] = (
    ("config announces the cache as the engine reads it", _config),
    ("engine consumes it for this model", _consumed),
    _INDEX,
    ("every layer has k and v scales", _present),
    ("no scale under another name", _known_names),
    ("shapes and dtypes fit the strategy", _shapes),
    ("values are finite and above zero", _values),
)
# Of models where there is something to it.
_SHARED: Rule = ("layers that share a cache share its scales", _shared)
_FOLDED: Rule = ("folded weights are what was written", _folds_delivered)
_NO_SCALES: Rule = ("no scale that the engine has no place for", _no_scales)
_PLAIN: tuple[Rule, ...] = (
    ("config announces nothing but the weights", _plain),
    ("engine has the format for this model", _has_format),
    _INDEX,
)


def _rules(checkpoint: Checkpoint, engine: EngineSpec) -> tuple[Rule, ...]:
    if not engine.scale_suffixes:
        rules = (_NO_SCALES, *_PLAIN)
    else:
        rules = _SCALES if checkpoint.announces_scales else _PLAIN
        if checkpoint.announces_scales and checkpoint.model.shares_caches:
            rules = (*rules, _SHARED)
        if "q" in engine.scale_suffixes:
            rules = tuple((rule.replace("k and v", "k, v and q"), test) for rule, test in rules)
    return rules if checkpoint.folds is None else (*rules, _FOLDED)
