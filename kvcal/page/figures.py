"""Plots of a run, each with a scale that all runs of the page share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcal.page import svg
from kvcal.page.source import Run
from kvcal.page.svg import Point, Scale
from kvcal.page.tables import Figure, Table, number
from kvcal.recipe import SIDES, Side
from kvcal.report import SIDE_NAMES, nats

_HEADS = {"k": "KV head", "v": "KV head", "q": "query head"}
_SIDES = {"k": "after RoPE, as the cache holds it", "v": "as the cache holds it", "q": "after RoPE"}


def side_name(run: Run, side: Side) -> str:
    """What is cached, or asks for it, in words."""
    return SIDE_NAMES[bool(run.report["latent"])][side]


def magnitudes(runs: Sequence[Run]) -> list[Figure]:
    """Largest magnitude of each head of K, V and Q, layer by layer; one scale for all of them."""
    grids = {(run.name, side): _magnitudes(run, side) for run in runs for side in SIDES}
    scale = Scale.of(all_values(grids.values()), logarithmic=True)
    rows = [
        [
            _by_layer(
                f"Largest magnitude of {side_name(run, side)}",
                _SIDES[side],
                grids[run.name, side],
                scale,
                "m",
                run,
                runs,
                _HEADS[side],
                "",
            )
            for run in runs
        ]
        for side in SIDES
    ]
    return [figure for row in rows for figure in beside(row)]


def attention_errors(runs: Sequence[Run]) -> list[Figure]:
    """Relative error of the attention output per layer and query head."""
    wanted = {
        "cache": ("Attention error", "‖ô − o‖ / ‖o‖ with K and V quantized, on held-out text"),
        "attention": ("Attention error with Q in FP8", "the same with Q and probabilities rounded too"),
    }
    grids = {
        (run.name, key): _transposed([layer["attention_error"][key] for layer in run.report["layers"]])
        for run in runs
        for key in wanted
        if all(layer["attention_error"][key] for layer in run.report["layers"])
    }
    scale = Scale.of(all_values(grids.values()), start=0.0)
    rows = [
        [
            _by_layer(title, caption, grids[run.name, key], scale, "e", run, runs, "query head", "16 bits")
            for run in runs
            if (run.name, key) in grids
        ]
        for key, (title, caption) in wanted.items()
    ]
    return [figure for row in rows for figure in beside(row)]


def sensitivities(runs: Sequence[Run]) -> list[Figure]:
    """What each layer costs when it alone is quantized; layers that stay in 16 bits are outlined."""
    found = []
    for run in runs:
        mixed = run.report["mixed"]
        if mixed is None:
            continue
        cost = {index: group for group in mixed["groups"] for index in group["layers"]}
        layers = sorted(cost)
        values = [float(cost[index]["kl_mean"]) for index in layers]
        worst = max(layers, key=lambda index: float(cost[index]["kl_mean"]))
        kept = frozenset(i for i, index in enumerate(layers) if cost[index]["skipped"])
        found.append(
            Figure(
                titled_as("KL of one layer quantized alone", run, runs),
                f"over {mixed['tokens']:,} calibration tokens; outlines are layers that stay in 16 bits",
                svg.bars(
                    values,
                    Scale.of(values, start=0.0),
                    title=titled_as("KL of one layer quantized alone", run, runs),
                    description=f"{len(layers)} layers; layer {worst} costs most, {nats(max(values))} nats;"
                    f" {len(kept)} layers stay in 16 bits.",
                    column_names=layers,
                    columns="layer",
                    unit="nats per token",
                    tip=lambda i, layers=layers, values=values: (  # type: ignore[misc]
                        f"layer {layers[i]}: {nats(values[i])} nats"
                    ),
                    hollow=kept,
                    width=width_for(runs),
                ),
                Table(
                    ("layers measured together", "KL alone", "cache"),
                    [
                        (
                            ", ".join(map(str, group["layers"])),
                            nats(group["kl_mean"]),
                            "16 bits" if group["skipped"] else "quantized",
                        )
                        for group in mixed["groups"]
                    ],
                    text=frozenset({0, 2}),
                ),
                half=len(runs) > 1,
            )
        )
    return found


def against_bits(runs: Sequence[Run], comparison: Mapping[str, Any] | None) -> Figure | None:
    """KL over bits per element: the runs, and the schemes of a comparison; None for one run alone."""
    if comparison is None and len(runs) < 2:
        return None
    schemes = comparison["rows"] if comparison else []
    points = [
        Point(
            row["scheme"],
            row["bits_per_element"],
            max(row["fidelity"]["kl_mean"], 1e-9),
            "served" if row["serves"] else "other",
            joined=row["efficient"],
            named=row["efficient"] or row["serves"] is not None,
        )
        for row in schemes
    ]
    points += [
        Point(run.name, run.report["bits_per_element"], max(run.report["fidelity"]["kl_mean"], 1e-9), "run")
        for run in runs
    ]
    legend = [("run", "this run" if len(runs) == 1 else "these runs")]
    legend += [("served", "vLLM serves it"), ("other", "no engine serves it")] if schemes else []
    rows = [
        (run.name, f"{run.report['bits_per_element']:.3f}", nats(run.report["fidelity"]["kl_mean"]), "")
        for run in runs
    ]
    rows += [
        (
            row["scheme"],
            f"{row['bits_per_element']:.3f}",
            nats(row["fidelity"]["kl_mean"]),
            row["serves"] or "",
        )
        for row in sorted(schemes, key=lambda row: -row["bits_per_element"])
    ]
    return Figure(
        "KL against bits",
        "logarithmic; the line joins schemes that no other beats in both" if schemes else "logarithmic",
        svg.scatter(
            points,
            title="KL against bits per element",
            description=f"{len(points)} ways to store K and V. "
            + " ".join(
                f"{p.name}: {p.x:.3f} bits, {nats(p.y)} nats." for p in points if p.kind == "run" or p.joined
            ),
            columns="bits per element",
            unit="nats per token",
            legend=legend,
        ),
        Table(
            ("scheme", "bits per element", "KL mean", "vLLM"),
            rows,
            frozenset({0, 3}),
            frozenset(range(len(runs))),
        ),
    )


def needles(run: Run, runs: Sequence[Run]) -> list[Figure]:
    """Scores of a needle by its depth and the length of the text, for the 16-bit and the quantized cache."""
    needle = (run.suite or {}).get("needle")
    if not needle:
        return []
    lengths, depths = needle["lengths"], [f"{100 * depth:.0f} %" for depth in needle["depths"]]
    pair = []
    for key, name in (("reference", "16-bit cache"), ("quantized", "quantized cache")):
        titled = titled_as(f"Needle, {name}", run, runs)
        grid = [list(line) for line in zip(*needle[key], strict=True)]  # depths by lengths
        pair.append(
            Figure(
                titled,
                "share of the needle that was given back; dark is all of it",
                svg.heat(
                    grid,
                    Scale(0.0, 1.0),
                    "m",
                    title=titled,
                    description=f"{len(depths)} depths by {len(lengths)} lengths, up to {max(lengths):,}"
                    f" tokens; mean score {_mean(grid):.3f}.",
                    rows="depth",
                    columns="tokens",
                    column_names=lengths,
                    row_names=depths,
                    tip=lambda y, x, grid=grid: (  # type: ignore[misc]
                        f"depth {depths[y]}, {lengths[x]:,} tokens: {number(grid[y][x])}"
                    ),
                    width=svg.HALF,
                ),
                Table(
                    ("depth", *(f"{length:,}" for length in lengths)),
                    [
                        (depth, *(number(score) for score in line))
                        for depth, line in zip(depths, grid, strict=True)
                    ],
                ),
                half=True,
            )
        )
    return beside(pair)


def _by_layer(
    title: str,
    caption: str,
    grid: svg.Grid,
    scale: Scale,
    hue: svg.Hue,
    run: Run,
    runs: Sequence[Run],
    heads: str,
    skipped: str,
) -> Figure:
    """Heads by layers; ``skipped`` is said of layers in 16 bits, unless it is empty."""
    layers = [layer["index"] for layer in run.report["layers"]]
    hollow = frozenset(x for x, index in enumerate(layers) if skipped and index in run.skipped)
    cells = {
        (layers[x], y): value
        for y, line in enumerate(grid)
        for x, value in enumerate(line)
        if value is not None and x not in hollow
    }
    least, most = (
        (choose(cells, key=lambda cell: cells[cell]) for choose in (min, max)) if cells else ((0, 0),) * 2
    )
    titled = titled_as(title, run, runs)
    outlined = f"; outlined layers stay in {skipped}" if hollow else ""

    def tip(y: int, x: int) -> str:
        what = skipped if x in hollow else number(grid[y][x])
        return f"layer {layers[x]}, {heads} {y}: {what}"

    return Figure(
        titled,
        caption + outlined,
        svg.heat(
            grid,
            scale,
            hue,
            title=titled,
            description=f"{len(layers)} layers by {len(grid)} {heads}s, from {number(cells.get(least))}"
            f" (layer {least[0]}, head {least[1]}) to {number(cells.get(most))} (layer {most[0]}, head"
            f" {most[1]}).",
            rows=heads,
            columns="layer",
            column_names=layers,
            row_names=range(len(grid)),
            tip=tip,
            hollow=hollow,
            width=width_for(runs),
        ),
        Table(
            ("layer", *(f"{heads} {y}" for y in range(len(grid)))),
            [
                (str(index), *(skipped if x in hollow else number(line[x]) for line in grid))
                for x, index in enumerate(layers)
            ],
        ),
        half=len(runs) > 1,
    )


def _magnitudes(run: Run, side: Side) -> list[list[float | None]]:
    """Heads by layers; of a run without statistics one row, the largest of each layer."""
    layers = run.report["layers"]
    if run.statistics is None:
        return [[layer[side]["amax"] if side in layer else None for layer in layers]]
    seen = run.statistics.layers
    return _transposed(
        [
            seen[layer["index"]][side].amax.amax(-1).tolist() if side in seen.get(layer["index"], {}) else []
            for layer in layers
        ]
    )


def _transposed(by_layer: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """Heads by layers; layers with fewer heads leave gaps."""
    heads = max(map(len, by_layer), default=0)
    return [[line[y] if y < len(line) else None for line in by_layer] for y in range(heads)]


def beside(row: Sequence[Figure]) -> list[Figure]:
    """Figures of one kind: the first begins a new row."""
    return [replace(figure, first=not place) for place, figure in enumerate(row)]


def all_values(grids: Iterable[svg.Grid]) -> list[float | None]:
    """What a scale has to cover."""
    return [value for grid in grids for line in grid for value in line]


def _mean(grid: svg.Grid) -> float:
    found = [value for value in all_values([grid]) if value is not None]
    return sum(found) / max(1, len(found))


def width_for(runs: Sequence[Run]) -> int:
    """Several runs stand side by side."""
    return svg.WIDE if len(runs) == 1 else svg.HALF


def titled_as(title: str, run: Run, runs: Sequence[Run]) -> str:
    """With the run's name where there are several."""
    return title if len(runs) == 1 else f"{title}: {run.name}"
