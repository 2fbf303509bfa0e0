"""What a pass will need of its device's memory, and what it took.

The estimate is a bound made of shapes alone: of a layer, every input and output of every weight at once, a
few float32 copies of the widest, K and V once more for every query head, a mask, and scores where attention
is eager. It is to be printed before a long job; it is not tight. What makes hidden
states of images is left out.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvcal import histogram, models, peaks
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.data import Batch, TokenSet
from kvcal.layerwise import Layerwise
from kvcal.statistics import Collect

# Float32 copies of the widest tensor of a token that norms, RoPE and statistics hold at a time.
_COPIES = 8
# What matrix libraries take for themselves on a GPU: 32 MiB a stream on Hopper, and torch keeps two kinds.
_WORKSPACE = 64 * 2**20


@dataclass(frozen=True)
class Estimate:
    """Bytes, at most.

    Attributes:
        held: in use before the pass; on a CPU all that the process holds.
        layer: weights of the largest decoder layer, if they come and go.
        activations: of the largest piece of a batch in one layer, and its KV cache if there are several.
        statistics: what is gathered of all layers; 0 where nothing is.
        logits: of the largest piece, and what comparing them takes; 0 where there are none.
        waiting: hidden states and masks between layers, which are on the CPU.
        workspace: of matrix libraries; 0 on a CPU.
        on_cpu: whether the device is the CPU itself.
    """

    held: int
    layer: int
    activations: int
    statistics: int
    logits: int
    waiting: int
    workspace: int
    on_cpu: bool

    @property
    def peak(self) -> int:
        """Of the device."""
        passing = max(self.layer + self.activations, self.logits)
        return self.held + self.statistics + passing + self.workspace + self.waiting * self.on_cpu

    def __str__(self) -> str:
        parts = {
            "held": self.held,
            "one layer": self.layer,
            "activations": self.activations,
            "statistics": self.statistics,
            "logits": self.logits,
            "workspace": self.workspace,
            "states between layers, on the CPU": self.waiting,
        }
        each = [f"{name} {human(size)}" for name, size in parts.items() if size]
        return f"{human(self.peak)} ({', '.join(each)})"


def human(size: int) -> str:
    """A size for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def estimate(
    model: Any,
    spec: ModelSpec,
    tokens: TokenSet,
    batch_size: int,
    *,
    collect: Collect | None = None,
    variants: int | None = None,
) -> Estimate:
    """For one pass over a text.

    Args:
        model: as loaded.
        spec: its geometry.
        tokens: the text.
        batch_size: samples per forward pass.
        collect: what is gathered, if anything.
        variants: of logits that are compared; None if there are none.
    """
    item, device = model.dtype.itemsize, models.device_of(model)
    batches = list(tokens.batches(batch_size))
    streamed, runs = isinstance(model, Layerwise), variants or 1
    return Estimate(
        held=in_use(device),
        layer=max(_weights(model, layer, item) for layer in spec.layers) if _comes_and_goes(model) else 0,
        activations=max(_activations(model, spec, batch, item, runs) for batch in batches),
        statistics=_statistics(spec, collect) if collect else 0,
        logits=0 if variants is None else max(_logits(model, spec, batch, item) for batch in batches),
        waiting=sum(_waiting(spec, batch, item, runs) for batch in batches) if streamed else 0,
        workspace=0 if device.type == "cpu" else _WORKSPACE,
        on_cpu=device.type == "cpu",
    )


@contextmanager
def watched(
    name: str, model: Any, expected: Estimate, record: dict[str, Any], say: Callable[[str], None]
) -> Iterator[None]:
    """Say what is expected before, and record it with the measured peak after."""
    device = models.device_of(model)
    say(f"{name}: expects {device} memory of {expected}")
    peaks.restart()
    yield
    measured = peak(device)
    record[name] = {
        "device": str(device),
        "expected_bytes": expected.peak,
        "peak_bytes": measured,
        **{f"{part}_bytes": size for part, size in asdict(expected).items() if part != "on_cpu"},
    }
    say(f"{name}: {human(measured)} of {device} memory at the peak")


def in_use(device: torch.device) -> int:
    """Bytes of tensors on a GPU; on a CPU those that the process holds, libraries and all."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak(device)
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak(device: torch.device) -> int:
    """The most that was in use since :func:`kvcal.peaks.restart`, or on some CPUs since the process began."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peaks.host()


def _comes_and_goes(model: Any) -> bool:
    return isinstance(model, Layerwise) or any(p.is_meta for p in model.parameters())


def _decoder_layer(model: Any, layer: LayerSpec) -> torch.nn.Module:
    """The element of the outermost list of modules that the attention is in, else what is around it."""
    parts = layer.module.split(".")
    paths = [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
    lists = [i for i, p in enumerate(paths[:-1]) if isinstance(model.get_submodule(p), torch.nn.ModuleList)]
    found: torch.nn.Module = model.get_submodule(paths[lists[0] + 1] if lists else paths[-2])
    return found


def _layers(model: Any, spec: ModelSpec) -> list[torch.nn.Module]:
    """Decoder layers, and those of an encoder in front of them."""
    found = [_decoder_layer(model, layer) for layer in spec.layers]
    if spec.encoder_decoder:
        lists = [m for m in model.get_encoder().children() if isinstance(m, torch.nn.ModuleList)]
        found += [layer for each in lists for layer in each]
    return found


def _weights(model: Any, layer: LayerSpec, item: int) -> int:
    return item * sum(int(p.numel()) for p in _decoder_layer(model, layer).parameters())


def _activations(model: Any, spec: ModelSpec, batch: Batch, item: int, runs: int) -> int:
    rows, keys = batch.input_ids.shape
    queries = _queries(batch)
    chunked = queries < keys
    if batch.encoder is not None:  # while the decoder runs, what the encoder gave is held
        keys = max(keys, batch.encoder.input_ids.shape[1])
        queries = keys
    heads = max(layer.heads for layer in spec.layers)
    width = max(layer.heads * layer.head_dim for layer in spec.layers)
    cached = [layer.cached_elements for layer in spec.layers]
    # Of the largest layer twice, since a cache grows by a copy.
    kept = max(cached) * 2 * runs + (0 if isinstance(model, Layerwise) else sum(cached) * runs)
    eager = 2 * item + 8 if spec.softcap is not None or spec.position_bias else 0
    return (
        rows * queries * _through_weights(model, spec) * item
        + rows * queries * max(spec.hidden_size, width) * 4 * _COPIES
        + rows * keys * 2 * width * item
        + rows * queries * keys * ((1 + item) * 2 + heads * eager)
        + (rows * keys * kept * item if chunked else 0)
    )


def _queries(batch: Batch) -> int:
    """Columns of the largest piece."""
    return min(batch.input_ids.shape[1], batch.chunk or batch.input_ids.shape[1])


def _through_weights(model: Any, spec: ModelSpec) -> int:
    """Elements per token that go into and come out of the weights of one layer."""
    routed = max(getattr(model.config, name, None) or 1 for name in ("num_experts_per_tok", "top_k"))
    return max(
        sum(sum(p.shape[-2:]) * (routed if p.ndim == 3 else 1) for p in layer.parameters() if p.ndim > 1)
        for layer in _layers(model, spec)
    )


def _statistics(spec: ModelSpec, collect: Collect) -> int:
    total = 0
    for layer in spec.layers:
        cached = layer.cached_elements
        # Two float32 and two float64 per channel, twice while they are copied to the CPU.
        total += 2 * 24 * (cached + layer.heads * layer.head_dim)
        if collect == "distribution":
            moments = 4 * layer.kv_heads * layer.head_dim**2
            total += 2 * (4 * cached * histogram.BINS + 8 * (layer.heads * histogram.BINS + moments))
    return total


def _logits(model: Any, spec: ModelSpec, batch: Batch, item: int) -> int:
    rows = batch.input_ids.shape[0]
    queries = _queries(batch)
    head = spec.vocab_size * spec.hidden_size * item if isinstance(model, Layerwise) else 0
    # Logits of the model and of a variant, softcapped maybe, then a row of both in float32 a few times.
    return head + queries * spec.vocab_size * (rows * 4 * item + 6 * 4)


def _waiting(spec: ModelSpec, batch: Batch, item: int, runs: int) -> int:
    rows, keys = batch.input_ids.shape
    states = rows * keys * spec.hidden_size * item * runs
    plain = batch.keep is None and all(layer.kind == "full" for layer in spec.layers)
    masks = 0 if plain and spec.softcap is None else 2 * (item if spec.softcap is not None else 1)
    return states + rows * sum(int((p.stop - p.start) * p.stop) for p in batch.pieces()) * masks
