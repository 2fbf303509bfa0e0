"""``kvcal bench attention``: how near to the memory's limit decode attention runs, format by format.

Decode reads K and V once and does little else, so the measure is bytes of KV per second over what a plain
read of the same card's memory reaches. Everything runs in one process through CUDA graphs, over as many
copies of a cache as no L2 holds, and takes turns. What fails its parity check gets no time.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

from kvcal import formats
from kvcal.attention_bench import timing
from kvcal.attention_bench.peers import PAGE, PEERS, Decode, Peer, first_line
from kvcal.errors import UsageError
from kvcal.kernels import dispatch, paged, paged_reference
from kvcal.kernels.paged import Pages, Segment, Sharing

# Relative Frobenius norm against float64. bfloat16 outputs are rounded by 2e-3.
LIMIT = 1e-2

_SEED = 0
_FEWEST_CALLS = 12

# Workspaces of peers, splits, and what the allocator keeps.
_SPARE_BYTES = 4 << 30


@dataclass(frozen=True)
class Shape:
    """One decode step: a query per sequence."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``BATCH,HEADS,KV_HEADS,LENGTH,HEAD_DIM``.

        Raises:
            UsageError: other text, or a shape that no kernel takes.
        """
        try:
            batch, heads, kv_heads, length, head_dim = (int(part) for part in text.split(","))
        except ValueError:
            raise UsageError(
                f"shape {text!r}: give BATCH,HEADS,KV_HEADS,LENGTH,HEAD_DIM, as in 8,32,8,16384,128"
            ) from None
        if min(batch, heads, kv_heads, length) < 1 or heads % kv_heads:
            raise UsageError(f"shape {text!r}: positive numbers, and heads a multiple of KV heads")
        if heads // kv_heads > paged.LARGEST_GROUP:
            raise UsageError(f"shape {text!r}: at most {paged.LARGEST_GROUP} heads share a KV head")
        if head_dim not in paged.HEAD_DIMS:
            raise UsageError(f"shape {text!r}: heads of {', '.join(map(str, paged.HEAD_DIMS))} channels")
        if length % PAGE:
            raise UsageError(f"shape {text!r}: a length in whole pages of {PAGE}")
        return cls(batch, heads, kv_heads, length, head_dim)

    def __str__(self) -> str:
        return f"{self.batch}×{self.length}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"


SHAPES = tuple(
    Shape(*numbers)
    for numbers in (
        (1, 32, 8, 131072, 128),
        (8, 32, 8, 16384, 128),
        (64, 32, 8, 4096, 128),
        (32, 64, 8, 8192, 128),
        (16, 16, 16, 8192, 128),
    )
)


@dataclass(frozen=True)
class Case:
    """What kvcal's kernel reads in one row of the table."""

    name: str
    fmt: str | None
    sharing: Sharing = "head"
    asymmetric: bool = False
    group: int = 0
    fp8_query: bool = False


CASES = (
    Case("bf16", None),
    Case("fp8_e4m3", "fp8_e4m3"),
    Case("fp8_e4m3, fp8 query", "fp8_e4m3", fp8_query=True),
    Case("fp8_e5m2", "fp8_e5m2"),
    Case("int8", "int8"),
    Case("int8 per channel", "int8", "channel"),
    Case("int4", "int4"),
    Case("int4 per token and head", "int4", "token_head", asymmetric=True),
    Case("int4 per group of 32", "int4", "group", group=32),
    Case("int2 per channel", "int2", "channel", asymmetric=True),
    Case("nvfp4", "nvfp4", "group"),
)


@dataclass(frozen=True)
class Row:
    """One implementation at one shape.

    Attributes:
        microseconds: median over replays, per call; None where there is no time.
        low: first quartile.
        high: third quartile.
        terabytes_per_second: bytes of K and V, scales that lie with the tokens included.
        percent_of_peak: of the read peak measured in the same run.
        speed_of_bf16: time of kvcal's bf16 kernel over this one's in the same round, the median.
        error: relative, against float64.
        failure: why there is no time.
    """

    shape: str
    name: str
    ours: bool
    bytes: int = 0
    microseconds: float | None = None
    low: float | None = None
    high: float | None = None
    terabytes_per_second: float | None = None
    percent_of_peak: float | None = None
    speed_of_bf16: float | None = None
    error: float | None = None
    failure: str | None = None

    @property
    def label(self) -> str:
        """Whose it is, and its name."""
        return f"kvcal {self.name}" if self.ours else self.name

    @property
    def ratio(self) -> str:
        """``speed_of_bf16`` as tables have it; empty where kvcal's bf16 was not timed."""
        return "" if self.speed_of_bf16 is None else f"{self.speed_of_bf16:.2f}"


@dataclass(frozen=True)
class Measurement:
    """A run, with what it ran on."""

    environment: dict[str, Any]
    read_peak: float
    rows: list[Row] = field(default_factory=list)

    @property
    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Entry:
    """An implementation ready to run at a shape: one call per copy of its cache."""

    name: str
    ours: bool
    bytes: int
    calls: list[Callable[[], Any]] = field(default_factory=list)
    error: float | None = None
    failure: str | None = None
    times: list[float] = field(default_factory=list)


def cases_named(names: Sequence[str]) -> list[Case]:
    """Rows by format; all without names. bf16 is always among them: the others are compared with it.

    Raises:
        UsageError: a format that no paged kernel reads.
    """
    known = ("bf16", *paged.FORMATS)
    for name in names:
        if name not in known:
            raise UsageError(f"no paged kernel reads {name!r}; they read {', '.join(known)}")
    return [case for case in CASES if not names or case.fmt is None or case.fmt in names]


def measure(
    shapes: Sequence[Shape],
    names: Sequence[str],
    repeats: int,
    *,
    on_shapes: Callable[[float], None] = lambda _: None,
) -> Measurement:
    """Check and time every implementation at every shape.

    Args:
        shapes: at each, all formats take turns.
        names: formats; empty for all.
        repeats: replays of each graph.
        on_shapes: hears of each finished shape.

    Raises:
        UsageError: no GPU, a format that no kernel reads, or a shape that does not fit into memory.
    """
    cases = cases_named(names)
    if not torch.cuda.is_available():
        raise UsageError("bench attention measures a GPU, and none is visible here")
    torch.manual_seed(_SEED)
    peers = [peer for peer in PEERS if peer.missing() is None]
    for shape in shapes:
        require_room(shape, cases, peers, torch.cuda.mem_get_info()[0], timing.l2_bytes())
    first = timing.read_peak()
    found: list[tuple[Shape, list[_Entry]]] = []
    for shape in shapes:
        found.append((shape, _at_shape(shape, cases, repeats)))
        on_shapes(1)
        gc.collect()
        torch.cuda.empty_cache()
    last = timing.read_peak()
    peak = max(first, last)
    environment = {
        "card": torch.cuda.get_device_name(),
        "driver": timing.driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: timing.version(name) for name in ("triton", "vllm", "flashinfer-python")},
        "seed": _SEED,
        "repeats": repeats,
        "page_size": PAGE,
        "read_peak_first": first,
        "read_peak_last": last,
    }
    rows = [row for shape, entries in found for row in rows_of(str(shape), entries, peak)]
    return Measurement(environment, peak, rows)


def rows_of(shape: str, entries: Sequence[_Entry], peak: float) -> list[Row]:
    """Rows from what was timed; one that failed its check, or has no time, keeps its reason alone.

    Args:
        shape: for the tables.
        entries: the first of ours named ``bf16`` is what others are compared with.
        peak: bytes per second.
    """
    base = next((e.times for e in entries if e.name == "bf16" and e.times and e.failure is None), None)
    rows = []
    for entry in entries:
        if entry.failure is not None or not entry.times:
            failure = entry.failure or "not timed"
            rows.append(Row(shape, entry.name, entry.ours, error=entry.error, failure=failure))
            continue
        time = median(entry.times)
        low, _, high = quantiles(entry.times, n=4) if len(entry.times) > 1 else (time, time, time)
        rows.append(
            Row(
                shape,
                entry.name,
                entry.ours,
                entry.bytes,
                time * 1e6,
                low * 1e6,
                high * 1e6,
                entry.bytes / time / 1e12,
                100 * entry.bytes / time / peak,
                None if base is None else median(b / t for b, t in zip(base, entry.times, strict=True)),
                entry.error,
            )
        )
    return rows


def _at_shape(shape: Shape, cases: Sequence[Case], repeats: int) -> list[_Entry]:
    entries = [_ours(case, shape) for case in cases] + [_peer(peer, shape) for peer in PEERS]
    graphs = []
    for entry in entries:
        if entry.failure is not None:
            continue
        # The start of a graph costs microseconds, which few calls would share.
        entry.calls *= -(-_FEWEST_CALLS // len(entry.calls))
        try:
            graphs.append((entry, timing.graph(entry.calls)))
        except Exception as error:  # not every kernel of others can be captured
            entry.failure = first_line(error)[:160]
    for _ in range(repeats):
        for entry, graph in graphs:
            entry.times.append(timing.replay(graph) / len(entry.calls))
    for entry in entries:
        entry.calls.clear()
    return entries


def _ours(case: Case, shape: Shape) -> _Entry:
    backend = dispatch.choose(torch.device("cuda"))
    segments = [_segment(case, shape)]
    token = segments[0].k.bytes_per_token_head + segments[0].v.bytes_per_token_head
    entry = _Entry(case.name, True, int(token * shape.batch * shape.length * shape.kv_heads))
    segments += [_segment(case, shape) for _ in range(_copies(entry.bytes, timing.l2_bytes()) - 1)]
    q = torch.randn(shape.batch, shape.heads, 1, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((shape.batch,), shape.length, device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"scaling": shape.head_dim**-0.5}
    if case.fp8_query:
        options["q_scale"] = torch.full((1,), 0.013, device="cuda")

    entry.calls = [partial(backend.paged_attention, q, [each], lengths, **options) for each in segments]
    out = entry.calls[0]()[:1]
    one = Segment(segments[0].k, segments[0].v, segments[0].table[:1])
    right = paged_reference.paged_attention(q[:1], [one], lengths[:1], dtype=torch.float64, **options)
    return _checked(entry, out, right, LIMIT)


def _peer(peer: Peer, shape: Shape) -> _Entry:
    entry = _Entry(peer.name, False, 0)
    reason = peer.missing()
    if reason is not None:
        entry.failure = reason
        return entry
    try:
        pages = shape.batch * shape.length // PAGE
        decode = Decode(
            torch.randn(shape.batch, shape.heads, shape.head_dim, device="cuda", dtype=torch.bfloat16),
            torch.randperm(pages, device="cuda", dtype=torch.int32).view(shape.batch, -1),
            torch.full((shape.batch,), shape.length, device="cuda", dtype=torch.int32),
            shape.kv_heads,
        )
        generator = torch.Generator("cuda").manual_seed(_SEED)
        caches = [peer.cache(decode, generator)]
        entry.bytes = sum(side.numel() * side.element_size() for side in caches[0])
        caches += [peer.cache(decode, generator) for _ in range(_copies(entry.bytes, timing.l2_bytes()) - 1)]
        attend = peer.bind(decode, peer.query(decode))
        entry.calls = [partial(attend, *cache) for cache in caches]
        out = entry.calls[0]()[:1]
        return _checked(entry, out, peer.expected(decode, caches[0], [0]), peer.limit)
    except Exception as error:  # whatever another's kernel raises on a card or shape it was not made for
        entry.failure = first_line(error)[:160]
        entry.calls = []
        return entry


def _checked(entry: _Entry, out: torch.Tensor, right: torch.Tensor, limit: float) -> _Entry:
    error = float((out.double() - right).norm() / right.norm())
    if not math.isfinite(error):  # JSON has no NaN
        entry.failure = "wrong: the output holds NaN or infinity"
        return entry
    entry.error = error
    if error > limit:
        entry.failure = f"wrong: relative error {error:.1e}, limit {limit:.0e}"
    return entry


def _segment(case: Case, shape: Shape) -> Segment:
    pages = shape.batch * shape.length // PAGE
    k, v = (_random_pages(case, shape, pages) for _ in range(2))
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(shape.batch, -1)
    return Segment(k, v, table)


def _random_pages(case: Case, shape: Shape, pages: int, device: torch.device | str = "cuda") -> Pages:
    """Normal values of mean 0, stored as the case does.

    Logits then spread by about 1 and outputs have no common part, so that a K misread or a key left out
    shows as an error far above the limit.
    """
    fmt = None if case.fmt is None else formats.get(case.fmt)
    scale = low = tensor_scale = None
    if fmt is not None and case.sharing in ("head", "channel"):
        size = (shape.kv_heads, 1, 1 if case.sharing == "head" else shape.head_dim)
        reach = (torch.rand(size, device=device) * 0.2 + 0.9) * {2: 1.5, 4: 2.5}.get(fmt.bits, 4.0)
        # E5M2 reaches farther than a float16 product should.
        scale = reach * 2 / (2**fmt.bits - 1) if case.asymmetric else reach / min(fmt.max, 448.0)
        low = -reach if case.asymmetric else None
    if fmt is not None and fmt.block:
        tensor_scale = torch.full((1,), 4.0 / (448 * 6), device=device)
    made = paged.allocate(
        fmt,
        pages=pages,
        kv_heads=shape.kv_heads,
        page_size=PAGE,
        head_dim=shape.head_dim,
        sharing=case.sharing,
        scale=scale,
        low=low,
        group=case.group,
        asymmetric=case.asymmetric and scale is None,
        tensor_scale=tensor_scale,
        device=device,
    )
    slots = torch.arange(pages * PAGE, device=device)
    for part in slots.tensor_split(-(-slots.numel() * shape.kv_heads * shape.head_dim // 2**25)):
        size = (part.numel(), shape.kv_heads, shape.head_dim)
        paged_reference.write(torch.randn(size, device=device), part, made)
    return made


def require_room(
    shape: Shape, cases: Sequence[Case], peers: Sequence[Peer], free: int, l2_bytes: int
) -> None:
    """All caches of a shape lie in memory together, beside one sequence in float64.

    Raises:
        UsageError: they do not fit into ``free`` bytes.
    """
    elements = 2 * shape.batch * shape.length * shape.kv_heads * shape.head_dim
    each = [math.ceil(elements * _bits(case) / 8) for case in cases]
    each += [elements * peer.dtype.itemsize for peer in peers]
    group = shape.heads // shape.kv_heads
    # K, V and a temporary of each, then both repeated for the heads of a group.
    definition = 8 * shape.length * shape.kv_heads * shape.head_dim * (4 + 2 * group)
    needed = sum(size * _copies(size, l2_bytes) for size in each) + definition + _SPARE_BYTES
    if needed > free:
        raise UsageError(
            f"shape {shape}: takes {needed / 1e9:.1f} GB of GPU memory, and {free / 1e9:.1f} GB are free;"
            " give a smaller --shape or fewer formats"
        )


def _bits(case: Case) -> float:
    """Of an element, at most; scales beside it included."""
    return 16 if case.fmt is None else formats.get(case.fmt).bits + (1 if case.sharing != "head" else 0)


def _copies(bytes_read: int, l2_bytes: int) -> int:
    """So many that together they pass L2 five times over."""
    return max(2, -(-5 * l2_bytes // bytes_read))
