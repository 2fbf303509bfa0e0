"""What ``kvcal bench attention`` found: on the terminal, as Markdown, and as bars below a roof."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvcal.export import bundle

if TYPE_CHECKING:
    from kvcal.attention_bench.decode import Measurement, Row


def write(found: Measurement, folder: Path) -> None:
    """``attention.json``, ``attention.md`` and ``attention.png`` in ``folder``."""
    with bundle.translated_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        bundle.write_json(folder / "attention.json", found.document)
        (folder / "attention.md").write_text(markdown(found), encoding="utf-8")
        draw(found, folder / "attention.png")


def show(console: Console, found: Measurement) -> None:
    """A table per shape, within 80 columns."""
    peak = f"read peak {found.read_peak / 1e12:.2f} TB/s"
    console.print(f"{found.environment['card']}, {peak}", highlight=False)
    for shape in _shapes(found):
        table = Table(title=shape, title_justify="left")
        table.add_column("implementation")
        for name in ("µs", "TB/s", "% of peak", "× bf16"):
            table.add_column(name, justify="right")
        failed = []
        for row in found.rows:
            if row.shape != shape:
                continue
            if row.microseconds is None:
                failed.append(f"{row.label}: {row.failure}")
                continue
            table.add_row(
                row.label,
                f"{row.microseconds:.1f}",
                f"{row.terabytes_per_second:.2f}",
                f"{row.percent_of_peak:.1f}",
                row.ratio,
            )
        console.print(table)
        for line in failed:
            console.print(line, style="yellow", markup=False, highlight=False)


def markdown(found: Measurement) -> str:
    """A table per shape."""
    about = ", ".join(f"{name} {value}" for name, value in found.environment.items() if value is not None)
    lines = [
        "# Decode attention",
        "",
        f"Read peak {found.read_peak / 1e12:.2f} TB/s. {about}.",
    ]
    for shape in _shapes(found):
        lines += [
            "",
            f"## {shape}",
            "",
            "| implementation | µs | quartiles | TB/s | % of peak | × bf16 | error |",
            "|---|---:|---|---:|---:|---:|---:|",
        ]
        lines += [_line(row) for row in found.rows if row.shape == shape]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    if row.microseconds is None:
        return f"| {row.label} | {row.failure} | | | | | |"
    return (
        f"| {row.label} | {row.microseconds:.1f} | {row.low:.1f} to {row.high:.1f}"
        f" | {row.terabytes_per_second:.2f} | {row.percent_of_peak:.1f} | {row.ratio} | {row.error:.1e} |"
    )


def draw(found: Measurement, path: Path) -> None:
    """A panel per shape, a bar per implementation that was timed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = _shapes(found)
    timed = [[r for r in found.rows if r.shape == s and r.percent_of_peak is not None] for s in shapes]
    heights = [max(len(rows), 1) for rows in timed]
    figure = Figure(figsize=(9, 1.2 + 0.24 * sum(heights) + 0.7 * len(shapes)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(len(shapes), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, shape, rows in zip(panels, shapes, timed, strict=True):
        colours = ["tab:blue" if row.ours else "tab:orange" for row in rows]
        bars = axes.barh([row.label for row in rows], [row.percent_of_peak for row in rows], color=colours)
        labels = [f"{row.percent_of_peak:.0f} %, {row.microseconds:.0f} µs" for row in rows]
        axes.bar_label(bars, labels, padding=3, fontsize=7)
        axes.axvline(100, color="0.3", linewidth=1)
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=7)
        axes.set_title(shape, fontsize=9, loc="left")
        axes.set_xlim(0, 118)
    panels[-1].set_xlabel(f"percent of the read peak, {found.read_peak / 1e12:.2f} TB/s")
    figure.suptitle(f"Decode attention on {found.environment['card']}: KV bytes per second", fontsize=10)
    canvas.print_png(path)


def _shapes(found: Measurement) -> list[str]:
    return list(dict.fromkeys(row.shape for row in found.rows))
