"""vLLM's own decode attention kernels over 16-, 8- and 4-bit caches, timed side by side on one GPU.

    python -m tests.gpu_engine_speed --shape 1x131072 --shape 8x16384 --shape 64x4096

One new token per sequence reads a paged cache of the given length, laid out as the engine lays it out: per
page, token and head K then V, each followed by its scale where the format keeps one per token and head.
``fa3`` is vLLM's FlashAttention-3, which schedules itself here (the engine does it once per step for all
layers), ``triton`` its unified attention with the engine's number of segments. FP8 with one scale per layer
rounds Q too, as the engine does; ``q16`` leaves Q alone. INT4 includes the rotation of Q and of the output,
without which it computes nothing.

Before it is timed, each kernel must agree with float32 attention over what its cache holds: outputs and
scratch are poisoned with NaN, and the relative error is printed; a larger one than the kernel's arithmetic
explains marks the row and fails the run. Afterwards the output of the last replay is judged again. Each
kernel is captured in a CUDA graph of several calls that walk over copies of the cache, so that no call finds
its input in the L2 cache. Every round replays all graphs once, beginning with another one; ratios are taken
within a round.

Needs a CUDA device, torch, triton and vLLM 0.26 to 0.33; nothing of kvcal. FlashAttention-3 is there on
Hopper only. ``--check-only --device cpu`` with ``TRITON_INTERPRET=1`` and an empty
``CUDA_VISIBLE_DEVICES`` judges the Triton kernels without a GPU, slowly, so give a small ``--shape`` and
``--heads``; "bf16" is float16 then, since Triton 3.6 interprets products of bfloat16 wrongly.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
BASELINE = "fa3 bf16"
# The engine's Triton backend cuts a sequence into segments unless the batch alone makes enough programs.
SEGMENTS, PROGRAMS = 16, 128
# The engine's bound on FlashAttention-3's splits within CUDA graphs.
# Random K, V and Q, and static scales with room for all but the rarest of them.
SPREAD = {"k": 1.0, "v": 0.5, "q": 2.0}
SCALE = {side: 6 * spread / FP8_MAX for side, spread in SPREAD.items()}
# Relative errors that the arithmetic explains: 16-bit P; P and sums rounded to E4M3; 16-bit rotations.
SIXTEEN_BIT, EIGHT_BIT, ROTATED = 0.01, 0.05, 0.05


@dataclass(frozen=True)
class Kernel:
    """A kernel of the engine over one cache format; ``mode`` is its member of vLLM's ``KVQuantMode``."""

    family: str
    mode: str
    tolerance: float
    q8: bool = False


KERNELS = {
    BASELINE: Kernel("fa3", "NONE", SIXTEEN_BIT),
    "fa3 fp8": Kernel("fa3", "FP8_PER_TENSOR", EIGHT_BIT, q8=True),
    "triton bf16": Kernel("triton", "NONE", SIXTEEN_BIT),
    "triton fp8": Kernel("triton", "FP8_PER_TENSOR", EIGHT_BIT, q8=True),
    "triton fp8 q16": Kernel("triton", "FP8_PER_TENSOR", SIXTEEN_BIT),
    "triton int8_per_token_head": Kernel("triton", "INT8_PER_TOKEN_HEAD", SIXTEEN_BIT),
    "triton fp8_per_token_head": Kernel("triton", "FP8_PER_TOKEN_HEAD", SIXTEEN_BIT),
    "triton int4_per_token_head": Kernel("triton", "INT4_PER_TOKEN_HEAD", ROTATED),
}

_STORED = {
    "FP8_PER_TENSOR": FP8,
    "INT8_PER_TOKEN_HEAD": torch.int8,
    "FP8_PER_TOKEN_HEAD": FP8,
    "INT4_PER_TOKEN_HEAD": torch.uint8,
}


@dataclass(frozen=True)
class Shape:
    """A batch of sequences of one length, and the attention's sizes."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int

    @property
    def pages(self) -> int:
        return self.batch * self.length // self.page

    def __str__(self) -> str:
        return f"B{self.batch} x {self.length}"


def sixteen_bit(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float16


class Cache:
    """A paged cache in one format, in the engine's layout: (pages, page, heads, K and V, bytes)."""

    def __init__(self, shape: Shape, mode: str, device: str) -> None:
        self.mode, self.stored = mode, _STORED.get(mode, sixteen_bit(device))
        self.per_token_head = mode.endswith("PER_TOKEN_HEAD")
        self.data_bytes = shape.head_dim * 8 // {"NONE": 4, "INT4_PER_TOKEN_HEAD": 16}.get(mode, 8)
        content = self.data_bytes + 4 * self.per_token_head
        size = (shape.pages, shape.page, shape.kv_heads, 2, content)
        self.raw = torch.empty(size, dtype=torch.uint8, device=device)

    def views(self, raw: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """K, V and, where the format has them, the scales of K and V, as the kernels take them."""
        data = [raw[..., side, : self.data_bytes].view(self.stored) for side in (0, 1)]
        if self.per_token_head:
            data += [raw[..., side, self.data_bytes :].view(torch.float32)[..., 0] for side in (0, 1)]
        return tuple(data)

    def write(self, first_page: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Quantize (tokens, heads, head_dim) into consecutive pages; dynamic scales are the engine's own."""
        views = self.views(self.raw)
        page = self.raw.shape[1]
        pages = slice(first_page, first_page + len(key) // page)
        if self.per_token_head:
            from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops
            from vllm.v1.kv_cache_interface import KVQuantMode

            slots = torch.arange(len(key), device=key.device) + first_page * page
            ops.triton_reshape_and_cache_flash_per_token_head_quant(
                key, value, *views, slots, kv_quant_mode=KVQuantMode[self.mode]
            )
            return
        for side, view, x in (("k", views[0], key), ("v", views[1], value)):
            stored = x if self.mode == "NONE" else (x / SCALE[side]).clamp(-FP8_MAX, FP8_MAX)
            view[pages] = stored.to(view.dtype).view(-1, page, *x.shape[1:])

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some pages as float32 (tokens, heads, head_dim); INT4 stays in its rotated basis."""
        views = self.views(self.raw[pages])
        sides = []
        for side, name in enumerate("kv"):
            codes = views[side].flatten(0, 1)
            if self.mode == "INT4_PER_TOKEN_HEAD":
                # Two codes a byte, even channels low; the zero point is in the scale's four lowest bits.
                bits = views[2 + side].flatten(0, 1).contiguous().view(torch.int32)
                scale, zero = (bits & -16).view(torch.float32), (bits & 15).float()
                both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float()
                sides.append((both - zero[..., None]) * scale[..., None])
            elif self.per_token_head:
                sides.append(codes.float() * views[2 + side].flatten(0, 1)[..., None])
            else:
                sides.append(codes.float() * (1.0 if self.mode == "NONE" else SCALE[name]))
        return sides[0], sides[1]


def rotation(head_dim: int, device: str) -> torch.Tensor:
    """INT4's rotation R, a matrix of signs with R R^T = head_dim: rows are rotated to x R."""
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    return single_rht(torch.eye(head_dim, device=device)).sign()


def reference(shape: Shape, cache: Cache, table: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Attention over what the cache holds, in float32: (batch, heads, head_dim)."""
    norm = 1.0
    if rotated := cache.mode == "INT4_PER_TOKEN_HEAD":
        r, norm = rotation(shape.head_dim, str(query.device)), shape.head_dim
        query = query @ r
    out = []
    for pages, q in zip(table, query, strict=True):
        key, value = cache.read(pages)
        grouped = q.view(shape.kv_heads, -1, shape.head_dim)
        scores = torch.einsum("hgd,thd->hgt", grouped, key) * (shape.head_dim**-0.5 / norm)
        out.append(torch.einsum("hgt,thd->hgd", scores.softmax(-1), value).flatten(0, 1))
    result = torch.stack(out)
    return result @ r.T / norm if rotated else result


class Bench:
    """The caches of one shape and, for each kernel, a call on one copy of its cache."""

    def __init__(self, shape: Shape, modes: set[str], device: str, seed: int) -> None:
        self.shape, self.device = shape, device
        dtype = sixteen_bit(device)
        generator = torch.Generator(device).manual_seed(seed)
        self.caches = {mode: Cache(shape, mode, device) for mode in sorted(modes)}
        step = max(1, min(4096, shape.pages))
        for first in range(0, shape.pages, step):
            tokens = (min(step, shape.pages - first)) * shape.page
            size = (tokens, shape.kv_heads, shape.head_dim)
            key, value = (
                (torch.randn(size, generator=generator, device=device) * SPREAD[side]).to(dtype)
                for side in "kv"
            )
            for cache in self.caches.values():
                cache.write(first, key, value)
        shuffled = torch.randperm(shape.pages, generator=generator, device=device)
        self.table = shuffled.view(shape.batch, -1).int()
        size = (shape.batch, shape.heads, shape.head_dim)
        self.q16 = (torch.randn(size, generator=generator, device=device) * SPREAD["q"]).to(dtype)
        self.q8 = (self.q16.float() / SCALE["q"]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        self.starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
        self.lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
        self.scales = {s: torch.full((1,), v, device=device) for s, v in SCALE.items()}
        self.scratch: list[torch.Tensor] = []

    def expected(self, kernel: Kernel) -> torch.Tensor:
        query = self.q8.float() * SCALE["q"] if kernel.q8 else self.q16.float()
        return reference(self.shape, self.caches[kernel.mode], self.table, query)

    def call(self, kernel: Kernel, out: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """A function of the cache's bytes that writes the kernel's output to ``out``."""
        shape, cache = self.shape, self.caches[kernel.mode]
        query = self.q8 if kernel.q8 else self.q16
        per_head = (shape.batch, shape.kv_heads)
        descale = {f"{s}_descale": self.scales[s].expand(per_head) for s in "qkv"}
        if kernel.mode != "FP8_PER_TENSOR":
            descale = dict.fromkeys(descale)
        common = {
            "q": query,
            "out": out,
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": 1,
            "seqused_k": self.lengths,
            "max_seqlen_k": shape.length,
            "softmax_scale": shape.head_dim**-0.5,
            "causal": True,
            "window_size": (-1, -1),
            "block_table": self.table,
            "softcap": 0.0,
        }
        if kernel.family == "fa3":
            from vllm.vllm_flash_attn import flash_attn_varlen_func

            def flash(raw: torch.Tensor) -> None:
                key, value = cache.views(raw)
                flash_attn_varlen_func(
                    k=key,
                    v=value,
                    fa_version=3,
                    **descale,
                    **common,
                )

            return flash

        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode

        if not kernel.q8:
            descale["q_descale"] = None
        most = PROGRAMS // shape.kv_heads
        sizes = [
            (most, shape.heads, SEGMENTS, 1 << (shape.head_dim - 1).bit_length()),
            (most, shape.heads, SEGMENTS),
        ]
        partial, largest, total = (torch.empty(s, device=self.device) for s in (*sizes, sizes[1]))
        self.scratch += [partial, largest, total]

        def unified(raw: torch.Tensor) -> None:
            key, value, *scales = cache.views(raw)
            unified_attention(
                k=key,
                v=value,
                seq_threshold_3D=most,
                num_par_softmax_segments=SEGMENTS,
                softmax_segm_output=partial,
                softmax_segm_max=largest,
                softmax_segm_expsum=total,
                kv_quant_mode=KVQuantMode[kernel.mode],
                k_scale_cache=scales[0] if scales else None,
                v_scale_cache=scales[1] if scales else None,
                **descale,
                **common,
            )

        return unified


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


@dataclass
class Timed:
    """One kernel, ready to be replayed."""

    graph: torch.cuda.CUDAGraph
    calls: int
    out: torch.Tensor
    expected: torch.Tensor
    copies: list[torch.Tensor]
    milliseconds: list[float]


def capture(
    call: Callable[[torch.Tensor], None], copies: list[torch.Tensor], calls: int
) -> torch.cuda.CUDAGraph:
    """A graph of calls that take turns over the copies, after warming up as CUDA graphs want it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(copies[0])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(copies[i % len(copies)])
    return graph


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy: what this device's memory gives."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])


def measure(shape: Shape, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Judge all kernels on one shape, then time those that ran."""
    bench = Bench(shape, {KERNELS[n].mode for n in names}, args.device, args.seed)
    rows: dict[str, dict[str, Any]] = {}
    timed: dict[str, Timed] = {}
    expected: dict[tuple[str, bool], torch.Tensor] = {}
    copies: dict[str, list[torch.Tensor]] = {}
    for name in names:
        kernel, row = KERNELS[name], {}
        rows[name] = row
        try:
            out = torch.full_like(bench.q16, math.nan)
            call = bench.call(kernel, out)
            for tensor in bench.scratch:
                tensor.fill_(math.nan)
            raw = bench.caches[kernel.mode].raw
            call(raw)
            case = (kernel.mode, kernel.q8)
            if case not in expected:
                expected[case] = bench.expected(kernel)
            row["relative_error"] = relative_error(out, expected[case])
            row["agrees"] = row["relative_error"] <= kernel.tolerance
            row["cache_bytes"] = raw.nbytes
            if args.check_only:
                continue
            if kernel.mode not in copies:
                extra = math.ceil(args.walk_mib * 2**20 / raw.nbytes) - 1
                copies[kernel.mode] = [raw, *(raw.clone() for _ in range(extra))]
            walked = copies[kernel.mode]
            calls = math.ceil(args.calls / len(walked)) * len(walked)
            timed[name] = Timed(capture(call, walked, calls), calls, out, expected[case], walked, [])
        except Exception as error:  # a kernel that this device or this vLLM lacks is a row, not the end
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if timed:
        replay(timed, args.rounds)
        for name, t in timed.items():
            t.out.fill_(math.nan)
            t.graph.replay()
            torch.cuda.synchronize()
            again = relative_error(t.out, t.expected)
            row = rows[name]
            row["relative_error_replayed"] = again
            row["agrees"] = row["agrees"] and again <= KERNELS[name].tolerance
            row["microseconds"] = quartiles([1e3 * ms / t.calls for ms in t.milliseconds])
            row["cache_bytes_per_second"] = row["cache_bytes"] / row["microseconds"][1] * 1e6
            if base := timed.get(BASELINE):
                pairs = zip(t.milliseconds, base.milliseconds, strict=True)
                row["ratio"] = quartiles([ms / t.calls / (b / base.calls) for ms, b in pairs])
    return {"shape": asdict(shape), "kernels": rows}


def replay(timed: dict[str, Timed], rounds: int) -> None:
    """Fill in the times: every round replays each graph once, and begins one further."""
    order = list(timed)
    for counter in range(-3, rounds):
        turn = counter % len(order)
        events = {}
        for name in order[turn:] + order[:turn]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            timed[name].graph.replay()
            end.record()
            events[name] = begin, end
        torch.cuda.synchronize()
        if counter >= 0:
            for name, (begin, end) in events.items():
                timed[name].milliseconds.append(begin.elapsed_time(end))


def table(result: dict[str, Any], shape: Shape) -> str:
    """One shape's rows as fixed-width text."""
    lines = [
        f"{shape}: {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, page {shape.page}",
        f"  {'kernel':28s} {'us':>9s} {'quartiles':>19s} {'x fa3 bf16':>10s} {'quartiles':>13s} "
        f"{'TB/s':>5s} {'error':>8s}",
    ]
    for name, row in result["kernels"].items():
        if "relative_error" not in row or "error" in row:
            lines.append(f"  {name:28s} {row.get('error', 'not run')}")
            continue
        line = f"  {name:28s}"
        if "microseconds" in row:
            low, middle, high = row["microseconds"]
            line += f" {middle:9.1f} {f'{low:.1f}-{high:.1f}':>19s}"
            if "ratio" in row:
                low, middle, high = row["ratio"]
                line += f" {middle:10.3f} {f'{low:.3f}-{high:.3f}':>13s}"
            else:
                line += f" {'':10s} {'':13s}"
            line += f" {row['cache_bytes_per_second'] / 1e12:5.2f}"
        line += f" {max(row['relative_error'], row.get('relative_error_replayed', 0)):8.5f}"
        lines.append(line + ("" if row["agrees"] else f"  WRONG, allowed {KERNELS[name].tolerance}"))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape", action="append", metavar="BATCHxLENGTH", help="1x131072, 8x16384 and 64x4096"
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=16, help="tokens per page, a multiple of 16 (16)")
    parser.add_argument("--kernel", action="append", choices=list(KERNELS), help="only these (all)")
    parser.add_argument("--rounds", type=int, default=120, help="timings of each kernel (120)")
    parser.add_argument("--calls", type=int, default=8, help="calls in a graph, at least (8)")
    parser.add_argument("--walk-mib", type=int, default=512, help="cache bytes that a graph walks over (512)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check-only", action="store_true", help="judge the kernels, time nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON document (standard output)")
    args = parser.parse_args()

    import triton
    import vllm

    torch.backends.cuda.matmul.allow_tf32 = False
    document: dict[str, Any] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "settings": {n: getattr(args, n) for n in ("rounds", "calls", "walk_mib", "seed")},
        "results": [],
    }
    if args.device == "cuda" and not args.check_only:
        document["copy_bytes_per_second"] = copy_bandwidth()
        print(f"{document['device']}: a copy moves {document['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    fine = True
    for spec in args.shape or ["1x131072", "8x16384", "64x4096"]:
        batch, length = (int(n) for n in spec.split("x"))
        shape = Shape(batch, length, args.heads, args.kv_heads, args.head_dim, args.page)
        result = measure(shape, args.kernel or list(KERNELS), args)
        document["results"].append(result)
        fine = fine and all(row.get("agrees") for row in result["kernels"].values())
        print(table(result, shape), flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    text = json.dumps(document, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    else:
        print(text)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
