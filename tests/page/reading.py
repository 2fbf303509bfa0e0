"""The page read back: strict XML, tables as rows of text, figures by their titles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element


@dataclass(frozen=True)
class Page:
    """A parsed page."""

    root: Element

    @property
    def text(self) -> str:
        """Everything that is shown, and titles of drawings."""
        body = self.root.find("body")
        assert body is not None
        return " ".join(" ".join(body.itertext()).split())

    def section(self, anchor: str) -> Element:
        (found,) = [each for each in self.root.iter("section") if each.get("id") == anchor]
        return found

    @property
    def anchors(self) -> list[str]:
        return [each.get("id", "") for each in self.root.iter("section")]

    def figure(self, title: str) -> Element:
        (found,) = [each for each in self.root.iter("figure") if each.findtext("figcaption/h3") == title]
        return found

    @property
    def figures(self) -> list[str]:
        return [each.findtext("figcaption/h3") or "" for each in self.root.iter("figure")]


def read(path: Path) -> Page:
    return Page(ElementTree.fromstring(path.read_text(encoding="utf-8").removeprefix("<!doctype html>\n")))


def tables(element: Element) -> list[list[list[str]]]:
    """Rows of cells of every table in it, the headings first."""
    return [
        [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
        for table in element.iter("table")
    ]


def numbers(figure: Element) -> list[list[str]]:
    """The table that stands in for a drawing."""
    (found,) = tables(figure)
    return found
