"""The capacity planner's answer in the terminal and as a document. Nothing is computed here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from kvcal.planner.capacity import PLAIN, Capacity, Row
from kvcal.planner.recommendation import Recommendation

_GIB = 2**30


def document(found: Capacity, recommendation: Recommendation) -> dict[str, Any]:
    """What ``kvcal plan --gpu … --json`` prints: bytes, seconds, and the price's currency."""
    model, deployment = found.model, found.deployment
    return {
        "model": model.name,
        "weights_bytes": model.weights_bytes,
        "weights_bits": model.weight_bits,
        "parameters": model.parameters.total if model.parameters else None,
        "active_parameters": model.parameters.active if model.parameters else None,
        "gpu": {
            "name": deployment.gpu.name,
            "title": deployment.gpu.title,
            "memory_bytes": deployment.gpu.memory_bytes,
            "bandwidth": deployment.gpu.bandwidth,
            "flops": deployment.gpu.flops,
            "source": deployment.gpu.source,
        },
        "engine": {"name": deployment.engine.name, "version": deployment.engine.version},
        "context": deployment.context,
        "headroom": deployment.headroom,
        "tensor_parallel": deployment.ranks,
        "page_size": deployment.page,
        "price_per_hour": deployment.price_per_hour,
        "free_bytes_per_gpu": found.free_bytes,
        "formats": [asdict(row) | {"tokens_per_second": row.rate} for row in found.rows],
        "recommendation": asdict(recommendation),
        "notices": list(found.notices),
    }


def print_capacity(console: Console, found: Capacity, recommendation: Recommendation) -> None:
    """Within 80 columns."""
    model, deployment = found.model, found.deployment
    many = deployment.ranks > 1
    gpus = f"{deployment.ranks} × {deployment.gpu.title}" if many else deployment.gpu.title
    count = f"{model.parameters.total / 1e9:.1f} B parameters, " if model.parameters else ""
    console.print(f"[bold]{model.name}[/] on {gpus}", highlight=False)
    console.print(f"{count}{model.weights_bytes / _GIB:.1f} GiB of weights", highlight=False)
    console.print(
        f"{found.free_bytes / _GIB:.1f} GiB for the cache{' of each GPU' if many else ''},"
        f" {100 * deployment.headroom:g} % headroom, pages of {deployment.page} tokens",
        highlight=False,
    )
    console.print(_table(found))
    for line in _legend(found):
        console.print(line, highlight=False, markup=False)
    for notice in found.notices:
        console.print(f"note: {notice}", style="yellow", markup=False, highlight=False)
    console.print(f"recommended: {recommendation.format}", style="bold", highlight=False)
    for reason in recommendation.reasons:
        console.print(Padding(f"- {reason}", (0, 0, 0, 2)), highlight=False, markup=False)


def _table(found: Capacity) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    price = found.deployment.price_per_hour is not None
    headings = [
        "cache",
        "bytes/\ntoken",
        f"GiB at\n{found.deployment.context:,}",
        "fit",
        "GB/\nstep",
        "ms/\nstep",
        "kernel\nms",
        *(["price/\nM tok."] if price else []),
    ]
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in found.rows:
        cells = [
            f"{row.format} *" if _taken(row) else row.format,
            f"{row.bytes_per_token:,}",
            f"{row.request_bytes / _GIB:.3f}",
            f"{row.fitting:,}",
            f"{row.step_bytes / 1e9:,.0f}" if row.requests else "",
            _ms(row.latency),
            _ms(row.kernel_latency if _taken(row) else None),
            *([f"{row.price_per_million:.3f}" if row.price_per_million is not None else ""] if price else []),
        ]
        table.add_row(*cells)
    return table


def _taken(row: Row) -> bool:
    """By the engine, and quantized."""
    return row.format != PLAIN and row.refused is None


def _legend(found: Capacity) -> list[str]:
    engine, gpu = found.deployment.engine, found.deployment.gpu
    quantized = [row for row in found.rows if row.format != PLAIN]
    native = ", ".join(row.format for row in quantized if row.native)
    wanted = found.deployment.requests
    how = f"in {native} natively, and dequantizes the others" if native else "in none; all are dequantized"
    lines = [
        f"fit: requests beside the weights. step: a token for each of {wanted or 'them'}, at peak bandwidth"
        " and arithmetic, so at least; kernel ms: with attention as slow as the engine's kernels were seen to"
        " be on an H200.",
        f"* {engine.name} takes it. {gpu.architecture} computes {how} on load.",
    ]
    for row in quantized:
        others = ", ".join(name for name in row.served_by if name != engine.name)
        if row.refused is not None:
            lines.append(f"{row.format}: {row.refused}{f'; served by {others}' if others else ''}")
        elif others:
            lines.append(f"{row.format}: also served by {others}")
    return lines


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"
