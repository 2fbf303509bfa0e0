"""KL against bits per element, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

if TYPE_CHECKING:
    from kvcal.comparison import Row

# Directions and distances, in points, at which a label is tried, the nearest first.
_ANGLES = (20, -20, 160, 200, 60, -60, 120, 240, 90, 270)
_DISTANCES = (9, 18, 28, 40, 54, 70)


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG: every scheme a point, those that no other beats joined by a line; KL is logarithmic."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    best = sorted((r for r in rows if r.efficient), key=lambda r: r.bits_per_element)
    axes.plot(
        [r.bits_per_element for r in best],
        [r.fidelity.kl_mean for r in best],
        color="tab:blue",
        linewidth=1,
        label="no other scheme has fewer bits and less KL",
    )
    for served, colour, label in (
        (True, "tab:orange", "vLLM serves it"),
        (False, "0.45", "no engine serves it"),
    ):
        these = [r for r in rows if (r.serves is not None) == served]
        axes.scatter(
            [r.bits_per_element for r in these],
            [r.fidelity.kl_mean for r in these],
            color=colour,
            zorder=4 if served else 3,
            s=28,
            label=label,
        )
    axes.set_yscale("log")
    axes.margins(x=0.12, y=0.08)
    axes.set_xlabel("bits per element, scales and 16-bit tokens included")
    axes.set_ylabel("KL to the 16-bit cache, nats per token")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    canvas.draw()  # fixes the scales that labels are placed in
    _label(axes, canvas.get_renderer(), rows)
    figure.savefig(path, dpi=130)


def _label(axes: Any, renderer: Any, rows: Sequence[Row]) -> None:
    """Name each point where no other name and no point is in the way; a line leads to a distant one."""
    points = [(r.bits_per_element, r.fidelity.kl_mean) for r in rows]
    taken = [_around(*axes.transData.transform(point)) for point in points]
    frame = axes.get_window_extent(renderer)
    for row, point in zip(rows, points, strict=True):
        for distance in _DISTANCES:
            for angle in _ANGLES:
                text = _try(axes, row.scheme, point, distance, math.radians(angle))
                box = text.get_window_extent(renderer)
                inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
                if inside and not any(box.overlaps(other) for other in taken):
                    taken.append(box)
                    break
                text.remove()
            else:
                continue
            break


def _try(axes: Any, name: str, point: tuple[float, float], distance: float, angle: float) -> Any:
    right = math.cos(angle)
    return axes.annotate(
        name,
        point,
        xytext=(distance * right, distance * math.sin(angle)),
        textcoords="offset points",
        horizontalalignment="left" if right > 0.1 else "right" if right < -0.1 else "center",
        verticalalignment="center",
        fontsize=7.5,
        arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.5}
        if distance > _DISTANCES[0]
        else None,
    )


def _around(x: float, y: float) -> Any:
    return Bbox.from_bounds(x - 4, y - 4, 8, 8)
