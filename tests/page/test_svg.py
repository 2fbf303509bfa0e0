"""Drawings: well-formed, escaped, and as many marks as there are values."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcal.page import svg
from kvcal.page.svg import Line, Point, Scale

positive = st.floats(1e-9, 1e9)
WORDS: dict[str, Any] = {"title": "a <b> & c", "description": 'says "d" > e'}
AXES: dict[str, Any] = {"rows": "head <", "columns": "layer &"}


def marks(drawing: str, kind: str) -> list[ElementTree.Element]:
    return [
        each for each in ElementTree.fromstring(drawing).iter() if each.get("class", "").split()[:1] == [kind]
    ]


@given(st.lists(positive, min_size=1, max_size=20), st.booleans())
def test_scales_keep_order_and_ends(values: list[float], logarithmic: bool) -> None:
    scale = Scale.of(values, logarithmic=logarithmic)
    levels = [scale.level(v) for v in sorted(values)]
    assert levels == sorted(levels)
    assert 0 <= levels[0] <= levels[-1] < svg.LEVELS
    assert scale.place(min(values)) == 0
    assert len(set(values)) == 1 or scale.place(max(values)) == 1


@given(positive, positive, st.booleans())
def test_ticks_are_inside_and_few(a: float, b: float, logarithmic: bool) -> None:
    scale = Scale.of([a, b], logarithmic=logarithmic)
    ticks = scale.ticks()
    assert len(ticks) <= 7
    assert ticks == sorted(ticks)
    slack = 1e-6 * (scale.high - scale.low)
    assert all(scale.low - slack <= tick <= scale.high + slack for tick in ticks)
    if not logarithmic:
        assert len(ticks) >= 2


@pytest.mark.parametrize("values", [[], [None], [float("inf")], [0.0, 0.0], [-1.0, 0.0]])
def test_nothing_to_scale_is_a_scale_all_the_same(values: list[Any]) -> None:
    for logarithmic in (False, True):
        scale = Scale.of(values, logarithmic=logarithmic)
        assert scale.low < scale.high
        assert [scale.level(v) for v in (-1.0, 0.0, float("inf"))] == sorted(
            scale.level(v) for v in (-1.0, 0.0, float("inf"))
        )


def heat(values: svg.Grid, **more: Any) -> str:
    columns = range(max(map(len, values)))
    return svg.heat(
        values, Scale(0, 1), "e", **WORDS, **AXES, column_names=columns, row_names=range(len(values)),
        tip=lambda y, x: f"<{y}> & {x}", **more,
    )  # fmt: skip


@given(st.lists(st.lists(st.none() | st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_heat_map_has_a_cell_for_each_value(values: list[list[float | None]]) -> None:
    root = ElementTree.fromstring(heat(values))
    tips = [each.findtext("title") for each in root.iter("path") if each.find("title") is not None]
    there = [(y, x) for y, line in enumerate(values) for x, value in enumerate(line) if value is not None]
    assert tips == [f"<{y}> & {x}" for y, x in there]


def test_every_drawing_has_a_name_and_a_description_and_is_escaped() -> None:
    plain = {"columns": "layer &", "unit": "nats <"}
    tip = "<1> & 2"
    drawings = [
        heat([[0.1, 0.9]]),
        svg.raster([[0.1, 0.9]], Scale(0, 1), "m", **WORDS, **AXES, row_names=["<0>"]),
        svg.lines([Line("<amax>", [1.0, 2.0], "amax")], Scale(1, 2), **WORDS, **plain),
        svg.bars([0.1, 0.2], Scale(0, 1), **WORDS, **plain, column_names=["<", "&"], tip=lambda _: tip),
        svg.scatter(
            [Point("<p>", 1, 2, "run"), Point("&", 2, 3, "other")], **WORDS, **plain, legend=[("run", "<r>")]
        ),
    ]  # fmt: skip
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.get("role") == "img"
        assert [root.findtext("title"), root.findtext("desc")] == [WORDS["title"], WORDS["description"]]


def test_hollow_columns_have_no_colour() -> None:
    drawing = heat([[0.0, 1.0], [0.0, 1.0]], hollow=frozenset({1}))
    assert len(marks(drawing, "hollow")) == 2
    assert [each for each in marks(drawing, "e9") if each.find("title") is not None] == []


@given(st.lists(st.lists(st.floats(0, 1), min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_raster_covers_every_cell_once_in_its_colour(values: list[list[float]]) -> None:
    scale = Scale(0, 1)
    drawing = svg.raster(values, scale, "m", **WORDS, **AXES, row_names=range(len(values)))
    group = ElementTree.fromstring(drawing).find("g")
    assert group is not None
    covered = {
        (int(y), int(x) + i): path.get("class")
        for path in group
        for x, y, run in re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d", ""))
        for i in range(int(run))
    }
    assert covered == {
        (y, x): f"m{scale.level(value)}" for y, line in enumerate(values) for x, value in enumerate(line)
    }


def test_names_of_points_cover_no_other() -> None:
    points = [Point(f"scheme-{i}", 4 + i % 3, 0.01 * (1 + i // 3 / 50), "other") for i in range(30)]
    drawing = svg.scatter(points, **WORDS, columns="x", unit="y", legend=[])
    texts = [t for t in ElementTree.fromstring(drawing).iter("text") if (t.text or "").startswith("scheme-")]
    boxes = [(float(t.get("x", 0)), float(t.get("y", 0)), len(t.text or "")) for t in texts]
    assert 0 < len(boxes) < 30
    for i, (x, y, n) in enumerate(boxes):
        for other_x, other_y, m in boxes[:i]:
            assert abs(y - other_y) >= 12 or x + 6 * n <= other_x or other_x + 6 * m <= x
