"""A real headless Chromium, spoken to over a pipe in its DevTools protocol: no driver, no port, no package.

``python -m tests.browser PAGE FOLDER`` writes what a person would look at: the page wide, narrow, dark and
printed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage")


def executable() -> str | None:
    """Where Chromium is; None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Messages of its console, and addresses it asked for, are gathered."""

    def __init__(self, to_browser: int, from_browser: int):
        self._out, self._in = to_browser, os.fdopen(from_browser, "rb")
        self._number = 0
        self._session: str | None = None
        self._rest = b""
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, file: Path) -> None:
        """Go there and wait until it is loaded."""
        self._events.clear()
        self.requested.clear()
        self.call("Page.navigate", url=file.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def size(self, width: int, height: int = 900) -> None:
        """Of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def scheme(self, name: str) -> None:
        """What the user prefers, light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self) -> bytes:
        """Of the whole page, as PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def pdf(self) -> bytes:
        """As it would be printed on A4."""
        printed = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        return base64.b64decode(printed["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._in.fileno(), 1 << 20)
            assert piece, "the browser has gone"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method, parameters = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.consoleAPICalled":
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        return message


@contextmanager
def page(binary: str) -> Iterator[Page]:
    """A tab of a fresh browser, which ends with it."""
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()
    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads commands from descriptor 3 and writes answers to descriptor 4.
        command = 'exec "$@" 3<&"$IN" 4>&"$OUT"'
        launched = [binary, "--remote-debugging-pipe", f"--user-data-dir={profile}", *flags]
        process = subprocess.Popen(
            ["bash", "-c", command, "bash", *launched],
            pass_fds=(to_browser, to_us),
            env=os.environ | {"IN": str(to_browser), "OUT": str(to_us)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(to_us)
        try:
            yield Page(from_us, from_browser)
        finally:
            os.close(from_us)  # it leaves when its pipe closes
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def look(file: Path, folder: Path) -> None:
    """Write screenshots and a PDF of a page."""
    binary = executable()
    assert binary, "no Chromium here"
    folder.mkdir(parents=True, exist_ok=True)
    with page(binary) as tab:
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                tab.scheme(scheme)
                tab.size(width)
                tab.open(file)
                (folder / f"{scheme}-{width}.png").write_bytes(tab.screenshot())
        tab.scheme("dark")  # paper stays white
        tab.size(1280)
        tab.open(file)
        (folder / "printed.pdf").write_bytes(tab.pdf())
        print(tab.complaints, tab.requested)


if __name__ == "__main__":
    look(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
