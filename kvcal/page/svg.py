"""Plots as inline SVG: small, sharp at any size, coloured by the page's style sheet, readable without eyes.

Every drawing is an image with a title and a description; colours are classes (``m0`` to ``m9`` for
magnitudes, ``e0`` to ``e9`` for errors), so that dark mode and paper need no second drawing. Text is escaped
here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

LEVELS = 10
WIDE, HALF = 816, 400  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 26, 34
_CHARACTER = 6.6  # width of one at 11 pixels, about

Hue = Literal["m", "e"]
Grid = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Scale:
    """From values to ten colours or to a length; logarithmic ones start at the least positive value."""

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def of(
        cls, values: Iterable[float | None], *, logarithmic: bool = False, start: float | None = None
    ) -> Scale:
        """Over finite values; over positive ones if logarithmic."""
        found = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not logarithmic)]
        if not found:
            return cls(1.0, 10.0, logarithmic) if logarithmic else cls(0.0, 1.0)
        low = min(found) if start is None else start
        high = max(found)
        if high <= low:
            high = low * 2 if low > 0 else low + 1
        return cls(low, high, logarithmic)

    def place(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``; what is outside stays at the ends."""
        if math.isinf(value):
            return 1.0 if value > 0 else 0.0
        if self.logarithmic:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def level(self, value: float) -> int:
        """Which of the ten colours.

        >>> Scale(0, 1).level(0.05), Scale(0, 1).level(1.0), Scale(1, 100, True).level(10)
        (0, 9, 5)
        """
        return min(LEVELS - 1, int(self.place(value) * LEVELS + 1e-9))

    def ticks(self) -> list[float]:
        """Round numbers inside: 1, 2 and 5 times powers of ten, as many as a small plot has room for."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
                if len(found) <= 6:
                    return found
            return found[:: -(-len(found) // 6)]
        step = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(step * f for f in (0.2, 0.5, 1, 2) if (self.high - self.low) / (step * f) <= 5.5)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def drawing(width: float, height: float, title: str, description: str, parts: Iterable[str]) -> Markup:
    """The frame of every plot; ``parts`` are elements with text escaped already."""
    return Markup(
        f'<svg role="img" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def heat(
    values: Grid,
    scale: Scale,
    hue: Hue,
    *,
    title: str,
    description: str,
    rows: str,
    columns: str,
    column_names: Sequence[object],
    row_names: Sequence[object],
    tip: Callable[[int, int], str],
    hollow: frozenset[int] = frozenset(),
    width: int = WIDE,
) -> Markup:
    """A cell for each value that there is, with its number as a tooltip.

    ``rows`` and ``columns`` say what they are; columns in ``hollow`` are outlined, whatever their value.
    """
    deep = _row_height(len(values))
    wide = (width - _LEFT - _RIGHT) / max(1, len(column_names))
    gap = 1 if min(deep, wide) >= 6 else 0
    parts = [_legend(scale, hue, _LEFT + _CHARACTER * len(rows) + 16)]
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value is None:
                continue
            kind = "hollow" if x in hollow else f"{hue}{scale.level(value)}"
            left, top = round(_LEFT + x * wide, 1), round(_TOP + y * deep, 1)
            box = f"M{left:g} {top:g}h{wide - gap:.4g}v{deep - gap:.4g}H{left:g}z"
            parts.append(f'<path class="{kind}" d="{box}"><title>{escape(tip(y, x))}</title></path>')
    height = _TOP + deep * len(values)
    parts += _across([(_LEFT + (i + 0.5) * wide, name) for i, name in enumerate(column_names)], height, wide)
    parts += _down(row_names, deep, every=-(-11 // deep))
    parts += _axes(rows, columns, width - _RIGHT, height + _BOTTOM)
    return drawing(width, height + _BOTTOM, title, description, parts)


def raster(
    values: Grid,
    scale: Scale,
    hue: Hue,
    *,
    title: str,
    description: str,
    rows: str,
    columns: str,
    row_names: Sequence[object],
    width: int = HALF,
) -> Markup:
    """The same for grids too fine to point at: cells of one colour are one path."""
    count = max(map(len, values))
    deep = min(14.0, max(4.0, round(200 / len(values), 1)))
    parts = [_legend(scale, hue, _LEFT + _CHARACTER * len(rows) + 16)]
    paths: dict[int, list[str]] = {}
    for y, line in enumerate(values):
        for level, x, run in _runs(line, scale):
            paths.setdefault(level, []).append(f"M{x} {y}h{run}v1h-{run}z")
    stretch = (width - _LEFT - _RIGHT) / count
    parts.append(f'<g class="crisp" transform="translate({_LEFT} {_TOP}) scale({stretch:.5g} {deep:g})">')
    parts += [f'<path class="{hue}{level}" d="{"".join(boxes)}"/>' for level, boxes in sorted(paths.items())]
    parts.append("</g>")
    height = _TOP + deep * len(values)
    parts += _across([(_LEFT + (i + 0.5) * stretch, i) for i in range(count)], height, stretch)
    every = -(-11 // deep)
    parts += _down(row_names, deep, every if every <= 2 else 5 * -(-every // 5))
    parts += _axes(rows, columns, width - _RIGHT, height + _BOTTOM)
    return drawing(width, height + _BOTTOM, title, description, parts)


@dataclass(frozen=True)
class Line:
    """One series; ``kind`` is the class of its stroke."""

    name: str
    values: Sequence[float]
    kind: str


def lines(
    series: Sequence[Line],
    scale: Scale,
    *,
    title: str,
    description: str,
    columns: str,
    unit: str,
    width: int = HALF,
    height: int = 220,
) -> Markup:
    """Steps over whole numbers, one step a value; the legend is above."""
    right, bottom = width - _RIGHT, height - _BOTTOM
    count = max(len(line.values) for line in series)
    wide = (right - _LEFT) / count
    parts = _levels(scale, right, bottom)
    for line in series:
        y = [round(bottom - scale.place(v) * (bottom - _TOP), 1) for v in line.values]
        steps = "".join(f"V{at:g}h{wide:.4g}" for at in y)
        parts.append(f'<path class="line {line.kind}" d="M{_LEFT} {y[0]:g}{steps}"/>')
    parts += _across([(_LEFT + (i + 0.5) * wide, i) for i in range(count)], bottom, wide)
    parts.append(_text(_LEFT, 14, unit, "start", "axis"))
    x = _LEFT + _CHARACTER * len(unit) + 16
    for line in series:
        parts.append(f'<path class="line {line.kind}" d="M{x:g} 10h14"/>')
        parts.append(_text(x + 18, 14, line.name, "start"))
        x += 18 + _CHARACTER * len(line.name) + 12
    parts.append(_text(right, height - 6, columns, "end", "axis"))
    return drawing(width, height, title, description, parts)


def bars(
    values: Sequence[float],
    scale: Scale,
    *,
    title: str,
    description: str,
    column_names: Sequence[object],
    columns: str,
    unit: str,
    tip: Callable[[int], str],
    hollow: frozenset[int] = frozenset(),
    width: int = WIDE,
    height: int = 170,
) -> Markup:
    """One bar a value, coloured by it; those in ``hollow`` are outlines."""
    right, bottom = width - _RIGHT, height - _BOTTOM
    wide = (right - _LEFT) / len(values)
    parts = _levels(scale, right, bottom)
    for i, value in enumerate(values):
        tall = max(0.5, scale.place(value) * (bottom - _TOP))
        kind = "open" if i in hollow else f"e{scale.level(value)}"
        left = round(_LEFT + i * wide, 1)
        box = f"M{left:g} {bottom}v-{tall:.1f}h{wide - 1:.4g}V{bottom}z"
        parts.append(f'<path class="{kind}" d="{box}"><title>{escape(tip(i))}</title></path>')
    parts += _across([(_LEFT + (i + 0.5) * wide, n) for i, n in enumerate(column_names)], bottom, wide)
    parts += _axes(unit, columns, right, height)
    return drawing(width, height, title, description, parts)


@dataclass(frozen=True)
class Point:
    """One point; ``kind`` is the class of its mark, ``joined`` puts it on the line, ``named`` labels it."""

    name: str
    x: float
    y: float
    kind: Literal["run", "served", "other"]
    joined: bool = False
    named: bool = True


def scatter(
    points: Sequence[Point],
    *,
    title: str,
    description: str,
    columns: str,
    unit: str,
    legend: Sequence[tuple[str, str]],
    width: int = WIDE,
    height: int = 380,
) -> Markup:
    """Points over a logarithmic height; labels go where they cover nothing, or are left out."""
    right, bottom = width - _RIGHT, height - _BOTTOM
    ys = Scale.of((p.y for p in points), logarithmic=True)
    ys = Scale(ys.low / 1.8, ys.high * 1.4, logarithmic=True)
    xs = Scale.of(p.x for p in points)
    pad = 0.06 * (xs.high - xs.low)
    xs = Scale(max(0.0, xs.low - pad), xs.high + 2.5 * pad)
    at = {
        id(p): (_LEFT + xs.place(p.x) * (right - _LEFT), bottom - ys.place(p.y) * (bottom - _TOP))
        for p in points
    }
    parts = _levels(ys, right, bottom)
    for tick in xs.ticks():
        x = _LEFT + xs.place(tick) * (right - _LEFT)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
        parts.append(_text(x, bottom + 14, f"{tick:g}", "middle"))
    front = sorted((p for p in points if p.joined), key=lambda p: p.x)
    if len(front) > 1:
        path = "L".join(f"{at[id(p)][0]:.1f} {at[id(p)][1]:.1f}" for p in front)
        parts.append(f'<path class="line front" d="M{path}"/>')
    for p in sorted(points, key=lambda p: ("other", "served", "run").index(p.kind)):
        x, y = at[id(p)]
        tip = f"{p.name}: {p.x:.3f} bits, {p.y:.4g} nats"
        parts.append(_mark(p.kind, x, y, tip))
    parts += _labels(
        [(p.name, *at[id(p)], p.kind) for p in points if p.named], list(at.values()), right, bottom
    )
    parts.append(_text(_LEFT, 14, unit, "start", "axis"))
    x = _LEFT + _CHARACTER * len(unit) + 16
    for kind, text in legend:
        parts.append(_mark(kind, x + 5, 10, text))
        parts.append(_text(x + 15, 14, text, "start"))
        x += 15 + _CHARACTER * len(text) + 16
    parts.append(_text(right, height - 6, columns, "end", "axis"))
    return drawing(width, height, title, description, parts)


def _short(value: float) -> str:
    """Three digits, without an exponent where there is room.

    >>> _short(4043.5), _short(0.30603), _short(0.00002)
    ('4040', '0.306', '2e-05')
    """
    return f"{float(f'{value:.3g}'):g}"


def _row_height(rows: int) -> float:
    return min(16.0, max(5.0, round(200 / max(1, rows), 1)))


def _runs(line: Sequence[float | None], scale: Scale) -> Iterable[tuple[int, int, int]]:
    """Colour, start and length of each stretch of one colour."""
    x = 0
    for level, group in itertools.groupby(line, key=lambda v: None if v is None else scale.level(v)):
        run = len(list(group))
        if level is not None:
            yield level, x, run
        x += run


def _legend(scale: Scale, hue: Hue, left: float) -> str:
    """Ten swatches between the least and the largest value, above the left end."""
    low, high = _short(scale.low), _short(scale.high)
    start = left + _CHARACTER * len(low) + 6
    swatches = "".join(f'<path class="{hue}{i}" d="M{start + 9 * i:g} 5h9v9h-9z"/>' for i in range(LEVELS))
    return _text(left, 14, low, "start") + swatches + _text(start + 9 * LEVELS + 6, 14, high, "start")


def _levels(scale: Scale, right: float, bottom: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        y = bottom - scale.place(tick) * (bottom - _TOP)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right:g}"/>')
        parts.append(_text(_LEFT - 6, y + 3.5, _short(tick), "end"))
    return parts


def _across(names: Sequence[tuple[float, object]], y: float, wide: float) -> list[str]:
    """Labels below an axis, as many as there is room for."""
    longest = max((len(str(name)) for _, name in names), default=1)
    room = (longest + 1) * _CHARACTER / max(wide, 1e-9)
    every = next(n for n in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 256, 1024, 10**6) if n >= room)
    return [_text(x, y + 14, name, "middle") for i, (x, name) in enumerate(names) if i % every == 0]


def _down(names: Sequence[object], deep: float, every: float) -> list[str]:
    """Labels of rows, left of them, of each row so many further down."""
    return [
        _text(_LEFT - 6, _TOP + (i + 0.5) * deep + 3.5, name, "end")
        for i, name in enumerate(names)
        if i % every == 0
    ]


def _axes(down: str, across: str, right: float, height: float) -> list[str]:
    """What the axes of a drawing are, at its top left and bottom right."""
    return [_text(_LEFT, 14, down, "start", "axis"), _text(right, height - 6, across, "end", "axis")]


def _text(x: float, y: float, text: object, anchor: str, kind: str | None = None) -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}"{named}>{escape(str(text))}</text>'


def _mark(kind: str, x: float, y: float, tip: str) -> str:
    title = f"<title>{escape(tip)}</title>"
    if kind == "run":
        shape = f"M{x:.1f} {y - 7:.1f}l7 7-7 7-7-7z"
        return f'<path class="point run" d="{shape}">{title}</path>'
    return f'<circle class="point {kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'


Box = tuple[float, float, float, float]


def _labels(
    wanted: Sequence[tuple[str, float, float, str]],
    marks: Sequence[tuple[float, float]],
    right: float,
    bottom: float,
) -> list[str]:
    """Names beside their points, runs first; one that would cover another or a mark is left to the table."""
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in marks]
    parts = []
    for name, x, y, kind in sorted(wanted, key=lambda each: each[3] != "run"):
        wide = _CHARACTER * len(name)
        for left, base in (
            (x + 9, y + 4), (x - 9 - wide, y + 4), (x + 6, y - 8), (x + 6, y + 16),
            (x - 6 - wide, y - 8), (x - 6 - wide, y + 16), (x - wide / 2, y - 12), (x - wide / 2, y + 20),
        ):  # fmt: skip
            box = (left, base - 9, left + wide, base + 3)
            inside = left > _LEFT and box[2] < right and box[1] > _TOP - 12 and box[3] < bottom
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                parts.append(_text(left, base, name, "start", "strong" if kind == "run" else None))
                break
    return parts


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
