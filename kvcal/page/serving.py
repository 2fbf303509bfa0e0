"""What the cache of a run takes on GPUs: arithmetic from the checkpoint's config, nothing measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcal import engines, formats, probe
from kvcal.errors import KvcalError, ModelError
from kvcal.formats import KVFormat
from kvcal.page.source import Run
from kvcal.page.tables import Table
from kvcal.planner import capacity, gpus, served_model
from kvcal.planner.capacity import Deployment
from kvcal.planner.served_model import Kept, ServedModel

GPUS = ("a100-80gb", "l40s", "h100", "h200", "b200", "mi300x")
CONTEXT = 8192
PAGE = 16
_CONTEXTS = (2048, 8192, 32768, 131072)
_GIB = 2**30


def requests_table(runs: Sequence[Run]) -> tuple[Table | None, list[str]]:
    """Bytes of one request by its length, in 16 bits and as each run stores it; and why runs are missing."""
    rows, notes = [], []
    for run in runs:
        try:
            kept = _kept(run)
        except KvcalError as error:
            notes.append(f"Requests of {run.name} are not counted: {error}.")
            continue
        for context in _contexts(run):
            plain, stored = (
                request_bytes(run, kept, context, quantized=False),
                request_bytes(run, kept, context),
            )
            rows.append(
                (run.name, f"{context:,}", _bytes(plain), _bytes(stored), f"{plain / stored:.2f} × less")
            )
    headings = ("run", "tokens", "16 bits", "quantized", "")
    return (Table(headings, rows) if rows else None), notes


@dataclass(frozen=True)
class Fit:
    """Requests of ``context`` tokens beside the weights of one GPU; ``how`` its kernels read the codes."""

    gpu: str
    context: int
    plain: int
    stored: int
    how: str


def gpu_table(runs: Sequence[Run]) -> tuple[Table | None, list[str]]:
    """Requests beside the weights on one GPU of each kind, in 16 bits and as each run stores them."""
    found: dict[str, list[Fit]] = {}
    notes = []
    for run in runs:
        try:
            found[run.name] = fits(run)
        except KvcalError as error:
            notes.append(f"{run.name} on a GPU is not counted: {error}.")
            continue
        notes += [_how(run, found[run.name])]
    if not found:
        return None, notes
    headings = ["GPU"]
    for name, each in found.items():
        of = "" if len(runs) == 1 else f"{name}, "
        headings += [f"{of}requests of {each[0].context:,} tokens, 16 bits", f"{of}quantized"]
    rows = [
        (gpu[0].gpu, *(f"{count:,}" for fit in gpu for count in (fit.plain, fit.stored)))
        for gpu in zip(*found.values(), strict=True)
    ]
    return Table(headings, rows), list(dict.fromkeys(notes))


def fits(run: Run) -> list[Fit]:
    """On one GPU of each kind.

    Raises:
        KvcalError: there is no checkpoint, or its caches or weights cannot be counted.
    """
    kept, model, fmt = _kept(run), _model(run), _format(run)
    engine = engines.get(run.report["engine"]["name"])
    context = min(CONTEXT, model.max_context)
    found = []
    for name in GPUS:
        where = Deployment(gpus.get(name), engine, context, page=PAGE)
        free = capacity.free_bytes(model, where)
        plain, stored = (
            max(0, int(free // request_bytes(run, kept, context, quantized=quantized)))
            for quantized in (False, True)
        )
        reads = "computed natively" if where.gpu.native(fmt) else "dequantized on load"
        how = capacity.refusal(fmt, model, where) or reads
        found.append(Fit(where.gpu.title, context, plain, stored, how))
    return found


def _how(run: Run, found: Sequence[Fit]) -> str:
    ways = dict.fromkeys(fit.how for fit in found)
    told = (f"{', '.join(fit.gpu for fit in found if fit.how == way)}: {way}" for way in ways)
    return f"{run.records.plan['format']} on {'; '.join(told)}."


def request_bytes(run: Run, kept: Kept, context: int, *, quantized: bool = True) -> int:
    """Bytes of one request in whole pages and with its states; layers that stay in 16 bits count as such."""
    fmt, layers = _format(run), run.report["layers"]
    tokens = sum(
        cache.bytes_per_token(fmt if quantized and layer["index"] not in run.skipped else None)
        * cache.tokens_held(context, PAGE)
        for cache, layer in zip(kept.caches, layers, strict=True)
    )
    return tokens + sum(state.bytes_on() for state in kept.states)


def _kept(run: Run) -> Kept:
    return served_model.kept(_config(run), probe.read)


def _model(run: Run) -> ServedModel:
    """With the weights as they lie on the disk where the config does not tell their size."""
    quantized = run.records.manifest["architecture"]["quant_method"] is not None
    shards = run.records.folder.glob("*.safetensors")
    size = sum(shard.stat().st_size for shard in shards) / _GIB if quantized else None
    return served_model.of(_config(run), run.records.model, size, spec=probe.read)


def _config(run: Run) -> Mapping[str, Any]:
    """Without the section on quantization, which may be about the cache alone."""
    if run.config is None:
        raise ModelError("there is no checkpoint, so nothing to serve")
    return {key: value for key, value in run.config.items() if key != "quantization_config"}


def _format(run: Run) -> KVFormat:
    return formats.get(run.records.plan["format"])


def _contexts(run: Run) -> list[int]:
    longest = int(run.records.manifest["architecture"]["max_context"])
    return [*[context for context in _CONTEXTS if context < longest][-3:], longest]


def _bytes(count: float) -> str:
    """In the unit that leaves one to four digits before the point.

    >>> _bytes(6480), _bytes(3 * 2**30)
    ('6.3 KiB', '3.00 GiB')
    """
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < _GIB else f"{count / _GIB:.2f} GiB"
