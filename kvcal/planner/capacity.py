"""How many requests fit beside the weights, and what a decode step then costs: arithmetic, nothing measured.

A step reads the weights once and the cache of every running request. Its time is the larger of bytes over
bandwidth and operations over the tensor cores' rate, for the linear layers and for attention each (a
roofline, Williams et al. 2009); both at their peaks, so a lower bound. Communication between GPUs, prefill,
sampling and the host are not in it. Activations and CUDA graphs have to find room in the headroom.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcal import engines, formats
from kvcal.engine_spec import EngineSpec
from kvcal.errors import PlanRefused, UsageError
from kvcal.formats import KVFormat
from kvcal.planner.gpus import Gpu
from kvcal.planner.layer_cache import LayerCache
from kvcal.planner.served_model import ServedModel

PLAIN = "16 bits"  # the row of the unquantized cache
_STATIC_SCALES = 3 * 4  # bytes of a layer's scales of K, V and Q per tensor, whatever the number of tokens


@dataclass(frozen=True)
class Deployment:
    """Where and how it is served.

    Attributes:
        gpu: each of them.
        engine: which formats it takes.
        context: tokens of every request.
        headroom: part of the memory that stays free of weights and cache.
        ranks: GPUs that share one copy of the model (tensor parallel).
        page: tokens of a page.
        requests: that run at once; None for as many as fit.
        price_per_hour: of one GPU; None if costs are of no interest.
    """

    gpu: Gpu
    engine: EngineSpec
    context: int
    headroom: float = 0.1
    ranks: int = 1
    page: int = 16
    requests: int | None = None
    price_per_hour: float | None = None


@dataclass(frozen=True)
class Row:
    """One format. Requests and steps are those of all GPUs that share the model, bytes those of one copy.

    Attributes:
        format: its name; :data:`PLAIN` for the unquantized cache.
        page: tokens of a page; more than were asked for where the engine makes it hold a recurrent state.
        bytes_per_token: that a token adds while no window is full, with its scales.
        state_bytes: of a request's recurrent states, whatever its length, as the engine stores them.
        request_bytes: of one request at the context, in whole pages, with its states.
        fitting: requests that fit beside the weights.
        requests: that the step below is about; 0 if none fits.
        step_bytes: moved by one decode step, on all GPUs together: weights and cache are read, states read
            and written.
        latency: seconds of a decode step, at least; None without a request.
        kernel_latency: the same with attention as slow as this engine's kernel was measured to be.
        limit: what bounds the larger part of the step, ``memory`` or ``compute``.
        price_per_million: of generated tokens, at least; None without a price.
        native: tensor cores take the codes as they are.
        refused: why this engine does not take it; None if it does.
        served_by: engines that have this cache.
    """

    format: str
    page: int
    bytes_per_token: int
    state_bytes: int
    request_bytes: int
    fitting: int
    requests: int
    step_bytes: float
    latency: float | None
    kernel_latency: float | None
    limit: str | None
    price_per_million: float | None
    native: bool
    refused: str | None
    served_by: tuple[str, ...]

    @property
    def rate(self) -> float:
        """Generated tokens per second, by the slower latency; 0 if nothing runs."""
        slowest = self.kernel_latency or self.latency
        return self.requests / slowest if slowest else 0.0


@dataclass(frozen=True)
class Capacity:
    """The planner's answer."""

    model: ServedModel
    deployment: Deployment
    free_bytes: float  # for the cache, on each GPU
    rows: tuple[Row, ...]
    notices: tuple[str, ...]


def plan(model: ServedModel, deployment: Deployment) -> Capacity:
    """Count.

    Raises:
        UsageError: the engine serves nothing, heads cannot be dealt out to the GPUs, or the context is longer
            than the model's.
        PlanRefused: the weights do not fit, or nothing does beside them.
    """
    if not _serves(deployment.engine):
        serving = ", ".join(engine.name for engine in engines.ENGINES if _serves(engine))
        raise UsageError(f"{deployment.engine.title} serves no quantized cache; --engine takes {serving}")
    if deployment.context > model.max_context:
        raise UsageError(
            f"--context {deployment.context} is longer than the {model.max_context} tokens of the model"
        )
    free = free_bytes(model, deployment)
    if free <= 0:
        raise PlanRefused([_too_large(model, deployment)])
    # That of cached latents is listed for them whoever serves it: vLLM's own form of it takes more.
    served = [f for f in formats.FORMATS if _served_by(f, model) or (f.latent_only and model.latent)]
    rows = tuple(_row(model, deployment, free, fmt) for fmt in (None, *served))
    if not any(row.fitting for row in rows):
        raise PlanRefused(
            [
                f"no request of {deployment.context} tokens fits into the {free / 2**30:.1f} GiB that the"
                f" weights leave on each GPU; use a shorter --context or more GPUs (--tensor-parallel)"
            ]
        )
    return Capacity(model, deployment, free, rows, _notices(model, deployment))


def free_bytes(model: ServedModel, deployment: Deployment) -> float:
    """Bytes for the cache on each GPU: its memory, without headroom and its share of the weights."""
    return _usable(deployment) - model.weights_bytes / deployment.ranks


def _usable(deployment: Deployment) -> float:
    return deployment.gpu.memory_bytes * (1 - deployment.headroom)


def _too_large(model: ServedModel, deployment: Deployment) -> str:
    ranks, gpu = deployment.ranks, deployment.gpu
    wider = [ranks * 2**power for power in range(1, 11)]
    enough = [n for n in wider if free_bytes(model, replace(deployment, ranks=n)) > 0]
    ways = [f"--tensor-parallel {enough[0]}"] if enough else []
    if model.parameters and model.weight_bits > 8:
        smaller = replace(model, weights_bytes=model.parameters.bytes(8))
        ways += ["--weights-bits 8"] if free_bytes(smaller, deployment) > 0 else []
    return (
        f"{model.weights_bytes / ranks / 2**30:.1f} GiB of weights do not fit into the"
        f" {_usable(deployment) / 2**30:.1f} GiB that --headroom leaves of {gpu.title};"
        f" {' or '.join(ways) or 'a larger GPU'} would hold them"
    )


def _serves(engine: EngineSpec) -> bool:
    """Whether it serves: transformers only emulates a quantized cache, and a kernel alone is no engine."""
    return not engine.standalone and engine != engines.TRANSFORMERS


def _served_by(fmt: KVFormat, model: ServedModel) -> tuple[str, ...]:
    """Engines that store this model's cache so; vLLM is one, with two forms."""
    serving = [e for e in engines.ENGINES if _serves(e) and e != engines.VLLM_MODELOPT]
    return tuple(e.name for e in serving if fmt.name in (e.latent_formats if model.latent else e.cache_dtype))


def refusal(fmt: KVFormat, model: ServedModel, deployment: Deployment) -> str | None:
    """Why the engine does not serve this model with such a cache on this GPU; None if it does."""
    engine, gpu = deployment.engine, deployment.gpu
    if fmt.name not in engine.cache_dtype:
        return f"{engine.title} has no such cache{_about_own_form(fmt, model)}"
    if engine.nvidia_only and not gpu.title.startswith("NVIDIA"):
        return f"{engine.title} runs on NVIDIA GPUs alone"
    if model.latent and fmt.name not in engine.latent_formats:
        return f"{engine.title} stores no latent (MLA) in it"
    unit = engine.needs_hardware.get(fmt.name)
    if unit is not None and not (gpu.fp8 if unit == "fp8" else gpu.fp4):
        return f"{engine.title} needs {unit.upper()} units for it, {gpu.architecture} has none"
    multiple, smallest = engine.head_dim_multiple.get(fmt.name, 1), engine.smallest_head_dim.get(fmt.name, 1)
    for width in sorted({width for cache in model.caches for width in _read_at_once(cache)}):
        if width % multiple or width < smallest:
            return (
                f"{engine.title} takes heads of {smallest} and more, in multiples of {multiple}, not {width}"
            )
    return None


def _read_at_once(cache: LayerCache) -> tuple[int, ...]:
    """Elements of the vectors that kernels read: a latent and its rotary key are one."""
    return (sum(cache.vectors),) if cache.latent else cache.vectors


def _about_own_form(fmt: KVFormat, model: ServedModel) -> str:
    """How vLLM's fp8_ds_mla differs from a format that has its layout (``flashmla_sparse.py``)."""
    if not fmt.latent_only:
        return ""
    cache = model.caches[0]
    tiles = -(-cache.vectors[0] // 128)
    size = cache.bytes_per_token(fmt)
    return (
        f"; vLLM's fp8_ds_mla, for sparse attention alone, adds a float32 scale to each 128 channels:"
        f" {size + 4 * tiles} bytes per token and layer, not {size}"
    )


def _row(model: ServedModel, deployment: Deployment, free: float, fmt: KVFormat | None) -> Row:
    ranks, page = deployment.ranks, page_of(model, deployment, fmt)
    caches = model.caches
    on_each = _request_bytes(model, deployment, fmt, ranks)
    scales = 0 if fmt is None or fmt.dynamic else _STATIC_SCALES * len(caches)
    fitting = max(0, int((free - scales) // on_each))
    wanted = fitting if deployment.requests is None else deployment.requests
    requests = wanted if wanted <= fitting else 0
    step = _step(model, deployment, fmt, requests) if requests else None
    price = deployment.price_per_hour
    return Row(
        format=fmt.name if fmt else PLAIN,
        page=page,
        bytes_per_token=sum(cache.bytes_added(fmt) for cache in caches),
        state_bytes=_state_bytes(model, deployment, fmt, 1),
        request_bytes=_request_bytes(model, deployment, fmt, 1),
        fitting=fitting,
        requests=requests,
        step_bytes=step.bytes if step else 0.0,
        latency=step.seconds if step else None,
        kernel_latency=step.kernel_seconds if step else None,
        limit=step.limit if step else None,
        price_per_million=price * ranks / 3600 * step.seconds / requests * 1e6 if step and price else None,
        native=fmt is None or deployment.gpu.native(fmt),
        refused=refusal(fmt, model, deployment) if fmt else None,
        served_by=_served_by(fmt, model) if fmt else (),
    )


def page_of(model: ServedModel, deployment: Deployment, fmt: KVFormat | None) -> int:
    """Tokens of a page: as many as are asked for, or the least multiple of it that holds a state."""
    page, ranks = deployment.page, deployment.ranks
    if not (model.states and deployment.engine.pages_hold_states):
        return page
    state = max(state.bytes_on(ranks) for state in model.states)
    return page * -(-state // (page * _widest(model, fmt, ranks)))


def _widest(model: ServedModel, fmt: KVFormat | None, ranks: int) -> int:
    """Bytes of a token in the layer that adds most."""
    return max(cache.bytes_added(fmt, ranks) for cache in model.caches)


def _request_bytes(model: ServedModel, deployment: Deployment, fmt: KVFormat | None, ranks: int) -> int:
    """Of one request on one of ``ranks`` GPUs, 1 for all of it."""
    page, context = page_of(model, deployment, fmt), deployment.context
    tokens = sum(c.bytes_per_token(fmt, ranks) * c.tokens_held(context, page) for c in model.caches)
    return tokens + _state_bytes(model, deployment, fmt, ranks)


def _state_bytes(model: ServedModel, deployment: Deployment, fmt: KVFormat | None, ranks: int) -> int:
    """Of one request's recurrent states, in pages where the engine keeps them there."""
    if model.states and deployment.engine.pages_hold_states:
        return len(model.states) * page_of(model, deployment, fmt) * _widest(model, fmt, ranks)
    return sum(state.bytes_on(ranks) for state in model.states)


@dataclass(frozen=True)
class _Step:
    bytes: float
    seconds: float
    kernel_seconds: float | None
    limit: str


def _step(model: ServedModel, deployment: Deployment, fmt: KVFormat | None, requests: int) -> _Step:
    """One decode step of ``requests`` sequences, on each of the GPUs at once."""
    gpu, ranks, engine = deployment.gpu, deployment.ranks, deployment.engine
    weights = model.weights_read(requests) / ranks
    rate = gpu.flops * (2 if gpu.fp8 and model.weight_bits == 8 else 1)
    active = model.parameters.active if model.parameters else 0
    linear = (weights / gpu.bandwidth, 2 * active * requests / ranks / rate)
    states = requests * 2 * sum(state.bytes_on(ranks) for state in model.states)
    cache = requests * _cache_read(model, deployment, fmt) + states
    attention = (cache / gpu.bandwidth, requests * _attention_time(model, deployment, fmt))
    seconds = max(linear) + max(attention)
    kernel = None
    if fmt is not None and fmt.name in engine.decode_time and not model.latent:
        plain = requests * _cache_read(model, deployment, None) / gpu.bandwidth
        kernel = max(linear) + max(*attention, plain * engine.decode_time[fmt.name] + states / gpu.bandwidth)
    larger = max(linear, attention, key=max)
    return _Step(
        bytes=ranks * (weights + cache),
        seconds=seconds,
        kernel_seconds=kernel,
        limit="memory" if larger[0] >= larger[1] else "compute",
    )


def _cache_read(model: ServedModel, deployment: Deployment, fmt: KVFormat | None) -> int:
    """Bytes of one request's K and V that a step reads on each GPU, shared ones once per layer."""
    return sum(
        cache.bytes_per_token(fmt, deployment.ranks) * cache.tokens_read(deployment.context)
        for cache in model.caches
    )


def _attention_time(model: ServedModel, deployment: Deployment, fmt: KVFormat | None) -> float:
    """Seconds of one request's attention on each GPU at the tensor cores' peak."""
    gpu = deployment.gpu
    operations = sum(
        2 * cache.query_heads * cache.contracted * cache.tokens_read(deployment.context)
        for cache in model.caches
    )
    rate = gpu.flops * (2 if fmt is not None and gpu.fp8 and gpu.native(fmt) else 1)
    return operations / deployment.ranks / rate


def _notices(model: ServedModel, deployment: Deployment) -> tuple[str, ...]:
    notices = []
    ranks, fewest = deployment.ranks, min(model.caches, key=lambda cache: cache.kv_heads)
    if ranks > fewest.kv_heads:
        alike = len({cache.kv_heads for cache in model.caches}) == 1
        what = "the latent" if fewest.latent else "each KV head" if alike else "a KV head of some layers"
        notices.append(f"{what} is held {ranks // fewest.kv_heads} times by {ranks} GPUs")
    if model.states:
        notices.append(_about_states(model, deployment))
    if model.parameters is None:
        notices.append("all weights count as read by every step, and none of their arithmetic is counted")
    elif model.parameters.experts:
        notices.append("tokens are taken to choose experts evenly")
    if deployment.gpu.note:
        notices.append(f"{deployment.gpu.title}: {deployment.gpu.note}")
    return tuple(notices)


def _about_states(model: ServedModel, deployment: Deployment) -> str:
    size = sum(state.bytes_on() for state in model.states)
    told = (
        f"layers with a recurrence ({len(model.states)}) keep {size / 2**20:.1f} MiB of a request at any"
        " length, as vLLM stores it; no format makes it smaller"
    )
    page = page_of(model, deployment, None)
    if page == deployment.page:
        return told
    return f"{told}; {deployment.engine.title} holds each in a page, which has {page:,} tokens in 16 bits"
