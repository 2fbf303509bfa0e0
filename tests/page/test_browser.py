"""The page in a real browser: silent, fast, within the screen, light and dark, on paper, named for all."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from kvcal.page import render
from tests import browser
from tests.page.test_page import failed, grown, int4, mixed  # noqa: F401  (fixtures)

pytestmark = pytest.mark.slow

_SECOND = 1.0


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Page]:
    binary = browser.executable()
    if binary is None:
        pytest.skip(f"no browser here: apt-get install chromium gives one ({', '.join(browser.NAMES)})")
    with browser.page(binary) as found:
        yield found


@pytest.fixture(scope="module", params=["one", "several", "32 layers"])
def written(request: pytest.FixtureRequest, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    if request.param == "32 layers":
        folders = [grown(exported, folder / "large", layers=32, kv_heads=8, heads=32, head_dim=128)]
    elif request.param == "one":
        folders = [request.getfixturevalue("int4")]
    else:
        folders = [request.getfixturevalue(name) for name in ("exported", "folded", "mixed", "failed")]
    path = folder / "page.html"
    path.write_text(render.render(folders))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_silent_and_within_the_screen(
    tab: browser.Page, written: Path, scheme: str, width: int
) -> None:
    tab.scheme(scheme)
    tab.size(width)
    tab.open(written)
    assert tab.complaints == []
    assert [url for url in tab.requested if not url.startswith("data:")] == [written.as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    red, green, blue = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").getpixel((2, 2))
    assert (red + green + blue > 600) == (scheme == "light")
    outside = """[...document.querySelectorAll('h1, h2, h3, p, pre, nav a, dd')]
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll'))
        .map(e => e.outerHTML)"""
    assert tab.evaluate(outside) == []


def test_it_is_there_within_a_second(tab: browser.Page, written: Path) -> None:
    tab.scheme("light")
    tab.size(1280)
    taken = []
    for _ in range(3):
        tab.open(written)
        taken.append(
            tab.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart") / 1000
        )
    assert 0 < min(taken) < _SECOND


def test_every_drawing_has_a_name_and_a_description(tab: browser.Page, written: Path) -> None:
    tab.size(1280)
    tab.open(written)
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    images = [n for n in nodes if n["role"]["value"] in ("image", "img") and not n["ignored"]]
    assert len(images) == tab.evaluate("document.querySelectorAll('svg').length") > 5
    for image in images:
        assert image["name"]["value"]
        assert len(image["description"]["value"]) > 20


def test_numbers_open_without_a_script(tab: browser.Page, written: Path) -> None:
    tab.size(390)
    tab.open(written)
    tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert tab.evaluate("document.querySelector('details table').getBoundingClientRect().height") > 20
    assert tab.evaluate("document.documentElement.scrollWidth") == 390


def test_paper_is_white_and_all_of_it_is_printed(tab: browser.Page, written: Path) -> None:
    tab.size(1280)
    tab.open(written)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    tab.call("Emulation.setEmulatedMedia", media="print", features=features)
    try:
        style = "getComputedStyle(document.documentElement).getPropertyValue"
        assert tab.evaluate(f"{style}('--paper')").strip() == "#ffffff"
        assert tab.evaluate(f"{style}('--m9')").strip() == "#0b3c6f"
        assert tab.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
        assert tab.pdf().startswith(b"%PDF")
    finally:
        tab.call("Emulation.setEmulatedMedia", media="", features=[])


def test_what_the_browser_complains_of_is_heard(tab: browser.Page, tmp_path: Path) -> None:
    policy = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'">"""
    bad = tmp_path / "bad.html"
    bad.write_text(f"<!doctype html>{policy}<img src=x.png><div style='width:9000px'>wide</div>")
    tab.size(390)
    tab.open(bad)
    heard, tab.complaints[:] = list(tab.complaints), []
    assert any("violates" in each for each in heard)
    assert tab.evaluate("document.documentElement.scrollWidth") > 390
