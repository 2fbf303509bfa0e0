"""Tables and figures as the template gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup


@dataclass(frozen=True)
class Table:
    """Text in rows; ``text`` names the columns that are words and not numbers.

    ``strong`` holds the rows that stand out, ``marks`` cells that are good or bad, by row and column.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: frozenset[int] = frozenset({0})
    strong: frozenset[int] = frozenset()
    marks: dict[tuple[int, int], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A drawing, what it shows, and its numbers for those who cannot see it.

    ``half`` leaves room for a second one beside it; ``first`` begins a new row.
    """

    title: str
    caption: str
    drawing: Markup
    table: Table
    half: bool = False
    first: bool = False


@dataclass(frozen=True)
class Section:
    """A heading of the page and what stands under it, in this order."""

    anchor: str
    title: str
    lead: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()


def number(value: float | None) -> str:
    """Four digits; nothing for what is not there.

    >>> number(10.368623), number(None), number(123456.0)
    ('10.37', '', '123500')
    """
    if value is None:
        return ""
    text = f"{value:.4g}"
    return f"{float(text):.0f}" if "e+" in text and abs(value) < 1e9 else text
