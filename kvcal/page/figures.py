"""Plots of a run, each with a scale that all runs of the page share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kvcal.page import channels, svg
from kvcal.page.channels import Profile
from kvcal.page.source import Run
from kvcal.page.svg import Line, Point, Scale
from kvcal.page.tables import Figure, Table, number
from kvcal.recipe import SIDES, Side
from kvcal.report import nats

_HEADS = {"k": "KV head", "v": "KV head", "q": "query head"}
_SIDE_NAMES = {"k": "K", "v": "V", "q": "Q"}


def magnitudes(runs: Sequence[Run]) -> list[Figure]:
    """Largest magnitude of each head of K, V and Q, layer by layer; one scale for all of them."""
    grids = {(run.name, side): _magnitudes(run, side) for run in runs for side in SIDES}
    scale = Scale.of(_all(grids.values()), logarithmic=True)
    return [
        _by_layer(
            f"Largest magnitude of {_SIDE_NAMES[side]}",
            f"{_SIDE_NAMES[side]} after RoPE, as the cache holds it" if side != "q" else "Q after RoPE",
            grids[run.name, side],
            scale,
            "m",
            run,
            runs,
            _HEADS[side],
            "",
        )
        for run in runs
        for side in SIDES
    ]


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
    scale = Scale.of(_all(grids.values()), start=0.0)
    return [
        _by_layer(title, caption, grids[run.name, key], scale, "e", run, runs, "query head", "16 bits")
        for run in runs
        for key, (title, caption) in wanted.items()
        if (run.name, key) in grids
    ]


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
                _titled("KL of one layer quantized alone", run, runs),
                f"over {mixed['tokens']:,} calibration tokens; outlines are layers that stay in 16 bits",
                svg.bars(
                    values,
                    Scale.of(values, start=0.0),
                    title=_titled("KL of one layer quantized alone", run, runs),
                    description=f"{len(layers)} layers; layer {worst} costs most, {nats(max(values))} nats;"
                    f" {len(kept)} layers stay in 16 bits.",
                    column_names=layers,
                    columns="layer",
                    unit="nats per token",
                    tip=lambda i, layers=layers, values=values: (  # type: ignore[misc]
                        f"layer {layers[i]}: {nats(values[i])} nats"
                    ),
                    hollow=kept,
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
            )
        )
    return found


def channel_figures(run: Run, runs: Sequence[Run]) -> list[Figure]:
    """K and V channel by channel: every layer in colours, and one head in numbers; before and after folds."""
    if run.statistics is None:
        return []
    found = []
    for side in ("k", "v"):
        after = {
            index: channels.profile(sides[side])
            for index, sides in sorted(run.statistics.layers.items())
            if side in sides
        }
        before = _before(run, side, after)
        if after:
            found += _channel_maps(side, before, after, run, runs)
            found.append(_head(side, before, after, run, runs))
    return found


def value_is_mixed(run: Run) -> bool:
    """Whether some layer's V was folded by a map that extremes cannot take back."""
    if run.statistics is None or run.transforms is None:
        return False
    seen = run.statistics.layers
    return any(
        channels.unfolded_value(seen[index]["v"], transform) is None
        for index, transform in run.transforms.layers.items()
        if "v" in seen.get(index, {})
    )


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
        Point(
            run.name, run.report["bits_per_element"], max(run.report["fidelity"]["kl_mean"], 1e-9), "run"
        )
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
        Table(("scheme", "bits per element", "KL mean", "vLLM"), rows, frozenset({0, 3}), frozenset(range(len(runs)))),
    )


def needles(run: Run, runs: Sequence[Run]) -> list[Figure]:
    """Scores of a needle by its depth and the length of the text, for the 16-bit and the quantized cache."""
    needle = (run.suite or {}).get("needle")
    if not needle:
        return []
    lengths, depths = needle["lengths"], needle["depths"]
    scale = Scale(0.0, 1.0)
    return [
        Figure(
            _titled(f"Needle, {name}", run, runs),
            "share of the needle that was given back; 1 is all of it",
            svg.heat(
                needle[key],
                scale,
                "m",
                title=_titled(f"Needle, {name}", run, runs),
                description=f"{len(depths)} depths by {len(lengths)} lengths, up to {max(lengths):,} tokens;"
                f" mean score {_mean(needle[key]):.3f}.",
                rows="depth",
                columns="tokens",
                column_names=lengths,
                row_names=depths,
                tip=lambda y, x, grid=needle[key]: (  # type: ignore[misc]
                    f"depth {depths[y]}, {lengths[x]} tokens: {number(grid[y][x])}"
                ),
                width=svg.HALF,
            ),
            Table(
                ("depth", *(f"{length:,}" for length in lengths)),
                [
                    (str(depth), *(number(score) for score in line))
                    for depth, line in zip(depths, needle[key], strict=True)
                ],
            ),
            half=True,
        )
        for key, name in (("reference", "16-bit cache"), ("quantized", "quantized cache"))
    ]


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
    least, most = (choose(cells, key=lambda cell: cells[cell]) for choose in (min, max)) if cells else ((0, 0),) * 2
    titled = _titled(title, run, runs)
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
            description=f"{len(layers)} layers by {len(grid)} {heads}s, from {number(cells.get(least))} (layer"
            f" {least[0]}, head {least[1]}) to {number(cells.get(most))} (layer {most[0]}, head {most[1]}).",
            rows=heads,
            columns="layer",
            column_names=layers,
            row_names=range(len(grid)),
            tip=tip,
            hollow=hollow,
        ),
        Table(
            ("layer", *(f"{heads} {y}" for y in range(len(grid)))),
            [
                (str(index), *(skipped if x in hollow else number(line[x]) for line in grid))
                for x, index in enumerate(layers)
            ],
        ),
    )


def _magnitudes(run: Run, side: Side) -> list[list[float | None]]:
    """Heads by layers; of a run without statistics one row, the largest of each layer."""
    layers = run.report["layers"]
    if run.statistics is None:
        return [[layer[side]["amax"] if side in layer else None for layer in layers]]
    seen = run.statistics.layers
    return _transposed(
        [
            seen[layer["index"]][side].amax.amax(-1).tolist()
            if side in seen.get(layer["index"], {})
            else []
            for layer in layers
        ]
    )


def _before(run: Run, side: str, after: Mapping[int, Profile]) -> dict[int, Profile] | None:
    """Profiles before the folds of this side; None if nothing of it is folded, or it cannot be known."""
    assert run.statistics is not None
    if run.transforms is None:
        return None
    found = dict(after)
    touched = False
    for index, transform in run.transforms.layers.items():
        if index not in found:
            continue
        mine = [step for step in transform.steps if step.startswith("key" if side == "k" else "value")]
        touched |= bool(mine)
        seen = run.statistics.layers[index][side]  # type: ignore[index]
        known = (channels.unfolded_key if side == "k" else channels.unfolded_value)(seen, transform)
        if known is None:
            return None
        found[index] = known
    return found if touched else None


def _channel_maps(
    side: str, before: Mapping[int, Profile] | None, after: Mapping[int, Profile], run: Run, runs: Sequence[Run]
) -> list[Figure]:
    """Largest magnitude of each channel over heads, layers by channels, before and after on one scale."""
    stages = {"as cached": after} if before is None else {"before folds": before, "after folds": after}
    grids = {
        stage: [profile.amax.amax(0).tolist() for profile in profiles.values()]
        for stage, profiles in stages.items()
    }
    scale = Scale.of(_all(grids.values()), logarithmic=True)
    name = _SIDE_NAMES[side]
    found = []
    for stage, profiles in stages.items():
        titled = _titled(f"{name} by channel, {stage}", run, runs)
        widest = {index: _widest(profile) for index, profile in profiles.items()}
        most = max(widest, key=lambda index: widest[index][2])
        found.append(
            Figure(
                titled,
                "largest magnitude over heads",
                svg.raster(
                    grids[stage],
                    scale,
                    "m",
                    title=titled,
                    description=f"{len(profiles)} layers by {len(grids[stage][0])} channels. Channels differ most in"
                    f" layer {most}, head {widest[most][0]}: channel {widest[most][1]} is"
                    f" {widest[most][2]:.1f} times the median.",
                    rows="layer",
                    columns="channel of a head",
                    row_names=list(profiles),
                ),
                Table(
                    ("layer", "head", "widest channel", "amax", "over the median"),
                    [
                        (
                            str(index),
                            str(head),
                            str(channel),
                            number(float(profiles[index].amax[head, channel])),
                            f"{spread:.2f}",
                        )
                        for index, (head, channel, spread) in widest.items()
                    ],
                ),
                half=True,
            )
        )
    return found


def _head(
    side: str, before: Mapping[int, Profile] | None, after: Mapping[int, Profile], run: Run, runs: Sequence[Run]
) -> Figure:
    """The head whose channels differ most before folds: amax and rms of each channel."""
    first = before or after
    widest = {index: _widest(profile) for index, profile in first.items()}
    index = max(widest, key=lambda each: widest[each][2])
    head, channel, spread = widest[index]
    columns = {"amax": after[index].amax[head], "rms": after[index].rms[head]}
    if before is not None:
        columns = {
            "amax before": before[index].amax[head],
            "rms before": before[index].rms[head],
            "amax after": columns["amax"],
            "rms after": columns["rms"],
        }
    strokes = {"amax before": "amax old", "rms before": "rms old", "amax after": "amax", "rms after": "rms"}
    values = {name: tensor.tolist() for name, tensor in columns.items()}
    titled = _titled(f"{_SIDE_NAMES[side]} of layer {index}, head {head}", run, runs)
    folded = "" if before is None else f"; {float(after[index].spread[head]):.1f} times after the folds"
    caption = f"the head whose channels differ most: channel {channel} is {spread:.1f} times the median{folded}"
    return Figure(
        titled,
        caption,
        svg.lines(
            [Line(name, each, strokes.get(name, name)) for name, each in values.items()],
            Scale.of(_all([list(values.values())]), logarithmic=True),
            title=titled,
            description=f"{caption[0].upper()}{caption[1:]}.",
            columns="channel",
            unit="magnitude, logarithmic",
            width=svg.WIDE,
        ),
        Table(
            ("channel", *values),
            [(str(i), *map(number, row)) for i, row in enumerate(zip(*values.values(), strict=True))],
        ),
    )


def _widest(profile: Profile) -> tuple[int, int, float]:
    """Head and channel with the largest amax over the median of the head's channels, and that ratio."""
    head = int(profile.spread.argmax())
    return head, int(profile.amax[head].argmax()), float(profile.spread[head])


def _transposed(by_layer: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """Heads by layers; layers with fewer heads leave gaps."""
    heads = max(map(len, by_layer), default=0)
    return [[line[y] if y < len(line) else None for line in by_layer] for y in range(heads)]


def _all(grids: Iterable[svg.Grid]) -> list[float | None]:
    return [value for grid in grids for line in grid for value in line]


def _mean(grid: svg.Grid) -> float:
    found = [value for value in _all([grid]) if value is not None]
    return float(torch.tensor(found).double().mean()) if found else 0.0


def _titled(title: str, run: Run, runs: Sequence[Run]) -> str:
    return title if len(runs) == 1 else f"{title}: {run.name}"
