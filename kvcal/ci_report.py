"""What continuous integration shows of a command: JUnit XML, and Markdown for a job's summary.

JUnit XML is what GitLab (``artifacts:reports:junit``) and the usual GitHub Actions read: a ``testsuite`` with
a ``testcase`` for every gate and every rule that was checked, with a ``failure`` in those that were broken,
and an ``error`` where the command could not do its work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvcal.errors import KvcalError, OutputError

# What XML 1.0 has no way to write.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Case:
    """Something that holds or does not; ``text`` says how it was found."""

    group: str
    name: str
    passed: bool
    text: str


@dataclass
class Outcome:
    """What a command has to say, filled in as it works."""

    cases: list[Case] = field(default_factory=list)
    markdown: str = ""
    error: KvcalError | None = None


@contextmanager
def reporting(command: str, junit: Path | None, summary: Path | None) -> Iterator[Outcome]:
    """Write both files when the command is done, whether it passed, failed or was refused.

    ``junit`` is replaced. ``summary`` is appended to, as the steps of a GitHub job share one file.

    Raises:
        OutputError: a file cannot be written; of a folder that is not there, before any work is done.
    """
    for path in (junit, summary):
        if path is not None:
            _refuse_unwritable(path)
    outcome = Outcome()
    try:
        yield outcome
    except KvcalError as error:
        outcome.error = error
        outcome.markdown = f"**kvcal {command} ended with an error** (exit code {error.exit_code}): {error}\n"
        _write(command, outcome, junit, summary)
        raise
    _write(command, outcome, junit, summary)


def _refuse_unwritable(path: Path) -> None:
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise OutputError(f"{path}: cannot be written; is it a folder, or in one that does not exist?")


def _write(command: str, outcome: Outcome, junit: Path | None, summary: Path | None) -> None:
    try:
        if junit is not None:
            junit.write_text(junit_xml(command, outcome), encoding="utf-8")
        if summary is not None:
            with summary.open("a", encoding="utf-8") as file:
                file.write(outcome.markdown.rstrip("\n") + "\n")
    except OSError as error:
        raise OutputError(f"{error.filename}: cannot be written: {error.strerror}") from None


def junit_xml(command: str, outcome: Outcome) -> str:
    """The document; characters that XML cannot hold become question marks."""
    cases, error = outcome.cases, outcome.error
    counts = {
        "tests": str(len(cases) + (error is not None)),
        "failures": str(sum(not case.passed for case in cases)),
        "errors": str(int(error is not None)),
    }
    root = ElementTree.Element("testsuites", {"name": "kvcal", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": f"kvcal {command}", **counts})
    for case in cases:
        where = {"classname": f"kvcal.{command}.{case.group}", "name": _printable(case.name)}
        element = ElementTree.SubElement(suite, "testcase", where)
        if not case.passed:
            failure = ElementTree.SubElement(element, "failure", {"message": _printable(case.text)})
            failure.text = _printable(case.text)
        elif case.text:
            ElementTree.SubElement(element, "system-out").text = _printable(case.text)
    if error is not None:
        where = {"classname": f"kvcal.{command}", "name": "completed"}
        element = ElementTree.SubElement(suite, "testcase", where)
        kind = {"type": type(error).__name__, "message": _printable(str(error))}
        ElementTree.SubElement(element, "error", kind).text = _printable(str(error))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    return _NO_XML.sub("?", text)


def gate_cases(gates: Sequence[dict[str, Any]]) -> list[Case]:
    """Of gates as reports hold them."""
    return [Case("gates", gate["name"], gate["passed"], gate["text"]) for gate in gates]


def comparison_cases(gates: Sequence[dict[str, Any]]) -> list[Case]:
    """Of gates that every scheme of a comparison is held against."""
    return [Case(gate["scheme"], gate["name"], gate["passed"], gate["text"]) for gate in gates]


def check_cases(findings: Sequence[dict[str, Any]]) -> list[Case]:
    """Of rules of a loader contract: ``rule``, ``ok`` and ``message``."""
    return [Case("checks", each["rule"], each["ok"], each["message"]) for each in findings]


def check_markdown(folder: Path, engine: str, findings: Sequence[dict[str, Any]]) -> str:
    """Findings of ``kvcal check`` as a table."""
    broken = sum(not each["ok"] for each in findings)
    lines = [
        f"# {folder} for {engine}",
        "",
        f"**{broken} of {len(findings)} rules are broken.**" if broken else "**Every rule is kept.**",
        "",
        "| rule | | |",
        "|---|---|---|",
    ]
    for each in findings:
        message = " ".join(each["message"].split()).replace("|", "\\|")
        lines.append(f"| {each['rule']} | {'ok' if each['ok'] else '**broken**'} | {message} |")
    return "\n".join([*lines, ""])
