"""Plots of K and V channel by channel, as cached and as they were before folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcal.page import channels, svg
from kvcal.page.channels import Profile
from kvcal.page.figures import all_values, beside, side_name, titled_as, width_for
from kvcal.page.source import Run
from kvcal.page.svg import Line, Scale
from kvcal.page.tables import Figure, Table, number
from kvcal.recipe import Side


def channel_figures(run: Run, runs: Sequence[Run]) -> list[Figure]:
    """K and V channel by channel: every layer in colours, and one head in lines; before and after folds."""
    if run.statistics is None:
        return []
    maps: list[list[Figure]] = []
    heads = []
    for side in ("k", "v"):
        after = {
            index: channels.profile(sides[side])
            for index, sides in sorted(run.statistics.layers.items())
            if side in sides
        }
        before = _before(run, side, after)
        if after:
            maps.append(_channel_maps(side, before, after, run, runs))
            heads.append(_head(side, before, after, run, runs))
    pairs = [figure for side in maps for figure in side]
    rows = [pairs] if len(pairs) == 2 else maps  # K and V in one row where neither was folded
    return [figure for row in [*rows, heads] for figure in beside(row)]


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


def _before(run: Run, side: Side, after: Mapping[int, Profile]) -> dict[int, Profile] | None:
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
        seen = run.statistics.layers[index][side]
        known = (channels.unfolded_key if side == "k" else channels.unfolded_value)(seen, transform)
        if known is None:
            return None
        found[index] = known
    return found if touched else None


def _channel_maps(
    side: Side,
    before: Mapping[int, Profile] | None,
    after: Mapping[int, Profile],
    run: Run,
    runs: Sequence[Run],
) -> list[Figure]:
    """Largest magnitude of each channel over heads, layers by channels, before and after on one scale."""
    stages = {"as cached": after} if before is None else {"before folds": before, "after folds": after}
    grids = {
        stage: [profile.amax.amax(0).tolist() for profile in profiles.values()]
        for stage, profiles in stages.items()
    }
    scale = Scale.of(all_values(grids.values()), logarithmic=True)
    name = side_name(run, side)
    found = []
    for stage, profiles in stages.items():
        titled = titled_as(f"{name} by channel, {stage}", run, runs)
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
                    description=f"{len(profiles)} layers by {len(grids[stage][0])} channels, which differ"
                    f" most in layer {most}, head {widest[most][0]}: channel {widest[most][1]} is"
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
    side: Side,
    before: Mapping[int, Profile] | None,
    after: Mapping[int, Profile],
    run: Run,
    runs: Sequence[Run],
) -> Figure:
    """Amax and rms of each channel of the head that folds changed most, or whose channels differ most."""
    index, head, caption = _worth_a_look(before, after)
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
    titled = titled_as(f"{side_name(run, side)} of layer {index}, head {head}", run, runs)
    return Figure(
        titled,
        caption,
        svg.lines(
            [Line(name, each, strokes.get(name, name)) for name, each in values.items()],
            Scale.of(all_values([list(values.values())]), logarithmic=True),
            title=titled,
            description=f"{caption[0].upper()}{caption[1:]}.",
            columns="channel",
            unit="logarithmic",
            width=width_for(runs),
        ),
        Table(
            ("channel", *values),
            [(str(i), *map(number, row)) for i, row in enumerate(zip(*values.values(), strict=True))],
        ),
        half=len(runs) > 1,
    )


def _worth_a_look(before: Mapping[int, Profile] | None, after: Mapping[int, Profile]) -> tuple[int, int, str]:
    """Layer and head to show, and why."""
    if before is not None:
        ratio = {i: (before[i].spread / profile.spread).log().abs() for i, profile in after.items()}
        index = max(ratio, key=lambda i: float(ratio[i].max()))
        head = int(ratio[index].argmax())
        if float(ratio[index].max()) > 0:
            spreads = [float(each[index].spread[head]) for each in (before, after)]
            return (
                index,
                head,
                "the head that folds changed most: its widest channel was"
                f" {spreads[0]:.1f} times the median and is {spreads[1]:.1f} times",
            )
    widest = {index: _widest(profile) for index, profile in after.items()}
    index = max(widest, key=lambda each: widest[each][2])
    head, channel, spread = widest[index]
    return (
        index,
        head,
        f"the head whose channels differ most: channel {channel} is {spread:.1f} times the median",
    )


def _widest(profile: Profile) -> tuple[int, int, float]:
    """Head and channel with the largest amax over the median of the head's channels, and that ratio."""
    head = int(profile.spread.argmax())
    return head, int(profile.amax[head].argmax()), float(profile.spread[head])
