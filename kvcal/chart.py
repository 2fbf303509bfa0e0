"""KL against bits per element, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from kvcal.comparison import Row

# Where labels go around a point, in turn, so that those of neighbours part.
_AROUND = ((6, 5, "left"), (6, -11, "left"), (-6, 5, "right"), (-6, -11, "right"))


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG: every scheme a point, those that no other beats joined by a line; KL is logarithmic."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots()
    best = sorted((r for r in rows if r.efficient), key=lambda r: r.bits_per_element)
    axes.plot(
        [r.bits_per_element for r in best],
        [r.fidelity.kl_mean for r in best],
        color="tab:blue",
        linewidth=1,
        label="no other scheme is better in both",
    )
    for served, marker, label in ((True, "s", "an engine serves it"), (False, "o", "no engine serves it")):
        these = [r for r in rows if (r.serves is not None) == served]
        colours = ["tab:blue" if r.efficient else "0.55" for r in these]
        axes.scatter(
            [r.bits_per_element for r in these],
            [r.fidelity.kl_mean for r in these],
            c=colours,
            marker=marker,
            zorder=3,
            label=label,
        )
    for place, row in enumerate(sorted(rows, key=lambda r: (r.bits_per_element, r.fidelity.kl_mean))):
        x, y, side = _AROUND[place % len(_AROUND)]
        axes.annotate(
            row.scheme,
            (row.bits_per_element, row.fidelity.kl_mean),
            xytext=(x, y),
            textcoords="offset points",
            horizontalalignment=side,
            fontsize=7.5,
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits per element, scales and 16-bit tokens included")
    axes.set_ylabel("KL to the 16-bit cache, nats per token")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
