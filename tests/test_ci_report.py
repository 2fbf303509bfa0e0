"""Files that continuous integration reads, as commands write them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvcal import ci_report, cli, terminal
from kvcal.ci_report import Case, Outcome
from kvcal.errors import DataError, OutputError
from kvcal.report import nats
from tests import tiny

README = (Path(__file__).parent.parent / "README.md").read_text()
STRICT = "gates: {kl_mean: 0.0, top1_agreement: 0.0}"


def parsed(path: Path) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Counts of the suite, and the test cases by class and name."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == "testsuites"
    (suite,) = root
    assert all(suite.get(key) == root.get(key) for key in ("tests", "failures", "errors"))
    cases = {f"{c.get('classname')}: {c.get('name')}": c for c in suite.iter("testcase")}
    assert len(cases) == int(str(suite.get("tests")))
    return {key: suite.get(key) for key in ("tests", "failures", "errors")}, cases


def test_a_calibration_has_a_case_for_each_gate_and_rule(
    kvcal: Callable[..., Any], small: tuple[str, ...], llama_folder: Path, tmp_path: Path
) -> None:
    line = ("calibrate", "--model", llama_folder, *small, "--output", "out")
    outcome = kvcal(*line, "--junit", "k.xml", "--summary", "s.md", "--json")
    counts, cases = parsed(tmp_path / "k.xml")
    checks = outcome.document["checks"]
    assert len(checks) > 5
    assert counts == {"tests": str(1 + len(checks)), "failures": "0", "errors": "0"}
    assert "kvcal.calibrate.gates: kl_mean" in cases
    assert {f"kvcal.calibrate.checks: {check['rule']}" for check in checks} < cases.keys()
    summary = (tmp_path / "s.md").read_text()
    assert summary == (tmp_path / "out" / "kvcal" / "report.md").read_text()
    assert summary.count("<details>") == summary.count("</details>") == 1


def test_a_broken_gate_is_a_failure_and_the_files_are_still_written(
    kvcal: Callable[..., Any], small: tuple[str, ...], llama_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "strict.yaml").write_text(STRICT)
    line = ("calibrate", "--model", llama_folder, *small, "--recipe", "strict.yaml", "--output", "out")
    assert kvcal(*line, "--junit", "k.xml", "--summary", "s.md").code == 5
    counts, cases = parsed(tmp_path / "k.xml")
    assert counts["failures"] == "1"
    failure = cases["kvcal.calibrate.gates: kl_mean"].find("failure")
    assert failure.get("message").startswith("kl_mean is ")
    assert cases["kvcal.calibrate.gates: top1_agreement"].find("failure") is None
    assert "**Verdict: fail.**" in (tmp_path / "s.md").read_text()


def test_a_refusal_is_an_error(kvcal: Callable[..., Any], copied: Path, tmp_path: Path) -> None:
    tiny.edit_config(copied, head_dim=40)
    outcome = kvcal("calibrate", "--model", copied, "--junit", "k.xml", "--summary", "s.md")
    assert outcome.code == 3
    counts, cases = parsed(tmp_path / "k.xml")
    assert counts == {"tests": "1", "failures": "0", "errors": "1"}
    error = cases["kvcal.calibrate: completed"].find("error")
    assert error.get("type") == "PlanRefused"
    assert "head size 40" in error.get("message")
    assert "exit code 3): head size 40" in (tmp_path / "s.md").read_text()


def test_check_writes_its_rules(kvcal: Callable[..., Any], exported_copy: Path, tmp_path: Path) -> None:
    line = ("check", exported_copy, "--junit", "k.xml", "--summary", "s.md")
    findings = kvcal(*line, "--json").document["findings"]
    counts, cases = parsed(tmp_path / "k.xml")
    assert counts == {"tests": str(len(findings)), "failures": "0", "errors": "0"}
    assert "**Every rule is kept.**" in (tmp_path / "s.md").read_text()
    tiny.edit_config(exported_copy, quantization_config=None)
    assert kvcal(*line).code == 6
    counts, cases = parsed(tmp_path / "k.xml")
    broken = [name for name, case in cases.items() if case.find("failure") is not None]
    assert len(broken) == int(str(counts["failures"])) > 0
    summary = (tmp_path / "s.md").read_text()
    assert summary.index("Every rule is kept") < summary.index("rules are broken")  # appended


def test_places_that_cannot_be_written_are_refused_before_the_work(
    kvcal: Callable[..., Any], llama_folder: Path, tmp_path: Path
) -> None:
    for option, path in (("--junit", "nowhere/k.xml"), ("--summary", str(tmp_path))):
        outcome = kvcal("calibrate", "--model", llama_folder, option, path, "--output", "out")
        assert outcome.code == 7
        assert "cannot be written" in outcome.stderr
        assert not (tmp_path / "out").exists()


def test_nothing_is_written_after_a_bug(tmp_path: Path) -> None:
    """A crash says nothing about gates; an empty file would look as if all had passed."""
    with pytest.raises(ZeroDivisionError), ci_report.reporting("check", tmp_path / "k.xml", None):
        raise ZeroDivisionError
    assert not (tmp_path / "k.xml").exists()


def test_an_error_goes_on_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text"), ci_report.reporting("check", tmp_path / "k.xml", None):
        raise DataError("no text")
    assert 'type="DataError"' in (tmp_path / "k.xml").read_text()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with pytest.raises(OutputError, match="cannot be written"):  # noqa: SIM117
        with ci_report.reporting("check", None, Path("/dev/full")) as outcome:
            outcome.cases, outcome.markdown = [Case("checks", "rule", True, "")], "x" * 10**6


@given(st.text(), st.text(), st.booleans())
def test_any_text_survives_as_xml(name: str, text: str, passed: bool) -> None:
    document = ci_report.junit_xml("check", Outcome([Case("checks", name, passed, text)]))
    suite = ElementTree.fromstring(document.encode())
    (case,) = suite.iter("testcase")
    assert len(str(case.get("name"))) == len(name)
    assert (case.find("failure") is None) == passed
    if not passed and text.isascii() and text.isprintable():
        assert case.find("failure").get("message") == text  # type: ignore[union-attr]


def test_a_table_cell_cannot_break_its_row() -> None:
    findings = [{"rule": "r", "ok": False, "message": "a | b\nc"}]
    assert "| r | **broken** | a \\| b c |" in ci_report.check_markdown(Path("out"), "vllm", findings)


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for child in children for text in strings(child)]


def test_snippets_of_the_readme_are_valid_and_their_commands_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a log is opened before its command is judged
    snippets = [yaml.safe_load(text) for text in re.findall("```yaml\n(.*?)```", README, re.DOTALL)]
    lines = [text for snippet in snippets for text in strings(snippet) if text.startswith("kvcal ")]
    assert [line.split()[1] for line in lines] == 2 * ["calibrate", "check", "diff"]
    root: Any = typer.main.get_command(cli.app)
    for line in lines:
        own, (name, *arguments) = terminal.of_program(shlex.split(line)[1:])
        root.make_context("kvcal", [*own, name, *arguments])
        root.commands[name].make_context(name, arguments)


def test_a_comparison_has_a_case_for_each_scheme_and_gate(
    kvcal: Callable[..., Any], small: tuple[str, ...], llama_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "strict.yaml").write_text("gates: {kl_mean: 0.0, top1_agreement: 0.0}\nschemes: [fp8]")
    line = ("compare", "--model", llama_folder, *small, "--schemes", "fp8,int8-per-head")
    outcome = kvcal(*line, "--recipe", "strict.yaml", "--junit", "k.xml", "--summary", "s.md", "--json")
    assert outcome.code == 5
    counts, cases = parsed(tmp_path / "k.xml")
    assert counts == {"tests": "4", "failures": "2", "errors": "0"}
    for scheme in ("fp8", "int8-per-head"):
        message = cases[f"kvcal.compare.{scheme}: kl_mean"].find("failure").get("message")
        assert message.startswith(f"{scheme}: kl_mean is ")
        assert cases[f"kvcal.compare.{scheme}: top1_agreement"].find("failure") is None
    summary = (tmp_path / "s.md").read_text()
    assert f"| {outcome.document['gates'][0]['text']} | **failed** |" in summary
    assert "compare.png" not in summary  # which a summary could not show
    plain = kvcal(*line, "--summary", "plain.md", "--output", "compared")
    assert plain.code == 0
    assert "gate" not in (tmp_path / "plain.md").read_text()
    written = (tmp_path / "compared" / "compare.md").read_text()
    assert written.replace("![KL against bits](compare.png)\n\n", "") == (tmp_path / "plain.md").read_text()


def test_a_comparison_without_gates_has_no_cases(
    kvcal: Callable[..., Any], llama_folder: Path, tmp_path: Path
) -> None:
    outcome = kvcal("compare", "--model", llama_folder, "--schemes", "fp8", "--junit", "k.xml")
    assert outcome.code == 2
    assert "--junit lists gates, and there are none" in outcome.stderr
    assert not (tmp_path / "k.xml").exists()


def test_an_evaluation_is_summed_up(kvcal: Callable[..., Any], exported: Path, tmp_path: Path) -> None:
    found = kvcal("evaluate", exported, "--samples", "1", "--summary", "s.md", "--json").document["fidelity"]
    summary = (tmp_path / "s.md").read_text()
    assert f"# Fidelity of {exported}" in summary
    assert f"| K and V | {nats(found['kl_mean'])} | {nats(found['kl_p99'])} |" in summary
    assert f"{found['tokens']:,} held-out tokens." in summary
    refused = kvcal("evaluate", exported, "--dataset", "no.txt", "--summary", "s.md")
    assert refused.code == 4
    assert (tmp_path / "s.md").read_text().startswith(summary)
    assert "**kvcal evaluate ended with an error** (exit code 4)" in (tmp_path / "s.md").read_text()
