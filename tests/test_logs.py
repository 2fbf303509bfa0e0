"""What is told while a command works: bars for people, nothing in quiet, JSON lines for machines."""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from kvcal import log_lines, progress, recipe, run, scaling, terminal
from kvcal.log_lines import Line, Log
from kvcal.progress import Narrator

Kvcal = Callable[..., Any]
README = (Path(__file__).parent.parent / "README.md").read_text()


def lines_of(text: str) -> list[Line]:
    """Every line of a log, each held against the schema."""
    assert text.endswith("\n")
    found = [Line.model_validate_json(line) for line in text.splitlines()]
    times = [line.time for line in found]
    assert times == sorted(times)
    assert all(time.utcoffset() == timedelta(0) for time in times)
    return found


def stages_of(lines: list[Line]) -> list[str]:
    """Names of stages in order; each begins, goes on and ends before the next begins."""
    told = [line for line in lines if line.stage is not None]
    found = []
    for name, group in itertools.groupby(told, key=lambda line: line.stage):
        events = [line.event for line in group]
        assert events[0] == "stage_started", name
        assert events[-1] == "stage_ended", name
        assert set(events[1:-1]) <= {"progress"}
        found.append(str(name))
    return found


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress of every batch, however fast."""
    monkeypatch.setattr(progress, "EVERY", 0.0)


@pytest.fixture(scope="module")
def another(exported: Path, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like ``exported`` from other text."""
    wanted = recipe.load(str(exported / "kvcal" / "recipe.yaml")).override({"calibration.seed": 9})
    request = run.Request(str(llama_folder), output=tmp_path_factory.mktemp("another") / "tiny")
    _, folder = run.run_calibrate(request, wanted, Narrator.silent())
    return folder


# Words in braces are fixtures; what every command of long work tells as stages.
LONG: dict[str, tuple[str, list[str]]] = {
    "calibrate": (
        "calibrate --model {llama_folder} --output out",
        ["load", "calibrate", "scales", "validate", "evaluate", "export", "check"],
    ),
    "folds": (
        "calibrate --model {planted_folder} --format int8_per_token_head --output out",
        [
            *("load", "calibrate", "choose folds", "prove folds", "calibrate folded", "scales", "validate"),
            *("evaluate", "export", "prove export", "check"),
        ],
    ),
    "mixed": (
        "calibrate --model {llama_folder} --bits-budget 12 --output out",
        [
            *("load", "calibrate", "scales", "sensitivity", "choose layers", "validate", "evaluate"),
            *("export", "check"),
        ],
    ),
    "validate": ("validate {exported}", ["load", "validate"]),
    "evaluate": ("evaluate {exported}", ["load", "evaluate"]),
    "compare": (
        "compare --model {llama_folder} --schemes fp8,int8-per-head",
        ["load", "calibrate", "fit", "attention errors", "compare"],
    ),
    "export": ("export {exported} --engine kernel --output out", ["export"]),
    "merge": ("merge {exported} {another} --output out", ["read", "scales", "export"]),
    "unfold": ("unfold {folded} --output out", ["unfold"]),
    "check": ("check {exported}", ["check"]),
    "capture": ("bench capture --model {llama_folder} --pairs 2", ["load", "bench capture"]),
    "rules": ("bench rules --model {llama_folder}", ["load", "bench rules"]),
    "folds alone": ("bench folds --model {planted_folder}", ["load", "bench folds"]),
    "objectives": (
        "bench objectives --model {llama_folder} --formats fp8_e4m3",
        ["load", "bench objectives"],
    ),
    "reduction": ("bench reduction --model {llama_folder}", ["load", "bench reduction"]),
    "phase": ("bench phase --model {llama_folder}", ["load", "bench phase"]),
}
SIZES = {
    "calibrate": ("--samples", "4", "--evaluation-samples", "2", "--seq-len", "48", "--batch-size", "2"),
    "compare": ("--samples", "4", "--evaluation-samples", "2", "--seq-len", "48", "--batch-size", "2"),
    "bench": ("--samples", "4", "--seq-len", "48", "--batch-size", "2"),
}


def line_of(text: str, request: pytest.FixtureRequest) -> list[str]:
    names = re.findall(r"\{(\w+)\}", text)
    words = text.format(**{name: request.getfixturevalue(name) for name in names}).split()
    return [*words, *SIZES.get(words[0], ())]


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize(("text", "stages"), LONG.values(), ids=LONG)
def test_json_lines_are_all_that_stderr_holds(
    text: str, stages: list[str], kvcal: Kvcal, request: pytest.FixtureRequest
) -> None:
    words = line_of(text, request)
    outcome = kvcal(*words, "--json", "--log-json", "-")
    assert outcome.code == 0, outcome.stderr
    assert outcome.document
    found = lines_of(outcome.stderr)
    assert stages_of(found) == stages
    assert {line.command for line in found} == {words[0]}
    assert [line.event for line in found if line.exit_code is not None] == ["result"]
    assert (found[-1].event, found[-1].exit_code, found[-1].message) == ("result", 0, "passed")
    for line in found:
        if line.event == "progress":
            assert line.unit is not None
            assert 0 < line.done <= line.total * (1 + 1e-9)  # type: ignore[operator]
        if line.event == "stage_ended":
            assert line.peak_host_bytes > 2**20  # type: ignore[operator]
            assert line.host_peak_since is not None
            assert line.done == pytest.approx(line.total)


@pytest.mark.parametrize("name", ["calibrate", "folds", "evaluate", "compare", "merge", "check", "rules"])
def test_quiet_says_nothing_on_stderr(name: str, kvcal: Kvcal, request: pytest.FixtureRequest) -> None:
    outcome = kvcal(*line_of(LONG[name][0], request), "--json", "--quiet")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.document


def test_a_file_takes_lines_and_people_still_read_stderr(
    kvcal: Kvcal, llama_folder: Path, small: tuple[str, ...], tmp_path: Path
) -> None:
    line = ("calibrate", "--model", llama_folder, *small, "--output", "out")
    loud = kvcal("--log-json", "run.jsonl", *line)
    assert loud.code == 0
    assert "100%" in loud.stderr
    assert "{" not in loud.stderr
    first = lines_of((tmp_path / "run.jsonl").read_text())
    calm = kvcal(*line, "--overwrite", "--log-json=run.jsonl", "--quiet")
    assert (calm.code, calm.stderr) == (0, "")
    both = lines_of((tmp_path / "run.jsonl").read_text())
    assert both[: len(first)] == first
    assert stages_of(both[len(first) :]) == stages_of(first)


def test_stages_of_the_records_are_those_that_were_told(
    kvcal: Kvcal, llama_folder: Path, small: tuple[str, ...]
) -> None:
    line = ("calibrate", "--model", llama_folder, *small, "--output", "out", "--json", "--log-json", "-")
    outcome = kvcal(*line)
    told = {line.stage: line for line in lines_of(outcome.stderr) if line.event == "stage_ended"}
    recorded = outcome.document["stages"]
    assert recorded.keys() == told.keys()
    for name, each in recorded.items():
        assert each.keys() == {"seconds", "peak_host_bytes", "host_peak_since", "peak_device_bytes"}
        assert all(getattr(told[name], key) == value for key, value in each.items())


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("calibrate --model nowhere", 4, "nowhere: not a model folder"),
        ("calibrate", 2, "Missing option '--model'"),
        ("calibrate --sampels 3", 2, "No such option"),
        ("calibrat", 2, "No such command"),
        ("check {exported} --engine sglong", 2, "unknown engine"),
        ("recipes validate {faulty}", 2, "1 fault"),
    ],
)
@pytest.mark.parametrize("behind", [True, False], ids=["behind", "in front"])
def test_an_error_is_the_last_line(
    line: str,
    code: int,
    message: str,
    behind: bool,
    kvcal: Kvcal,
    exported: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "faulty.yaml").write_text("format: fp9")
    words = line.format(exported=exported, faulty=tmp_path / "faulty.yaml").split()
    outcome = kvcal(*words, "--log-json", "-") if behind else kvcal("--log-json", "-", *words)
    assert outcome.code == code
    last = lines_of(outcome.stderr)[-1]
    assert (last.event, last.level, last.exit_code) == ("error", "error", code)
    assert message in str(last.message)
    assert last.command == words[0]


def test_a_failed_gate_is_an_error_line_and_quiet_prints_it(
    kvcal: Kvcal, llama_folder: Path, small: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "strict.yaml").write_text("gates: {kl_mean: 0.0, top1_agreement: 0.0}")
    line = ("calibrate", "--model", llama_folder, *small, "--recipe", "strict.yaml", "--output", "out")
    outcome = kvcal(*line, "--quiet", "--log-json", "run.jsonl")
    assert outcome.code == 5
    assert outcome.stderr.startswith("error: kl_mean is ")
    assert outcome.stderr.count("\n") == 1
    last = lines_of((tmp_path / "run.jsonl").read_text())[-1]
    assert (last.event, last.exit_code) == ("error", 5)
    assert f"error: {last.message}\n" == outcome.stderr


def test_a_bug_and_an_interrupt_are_lines_too(kvcal: Kvcal, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((ZeroDivisionError("zero"), 1), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr("kvcal.recipe.shipped", lambda error=error: (_ for _ in ()).throw(error))
        outcome = kvcal("recipes", "list", "--log-json", "-")
        assert outcome.code == code
        assert lines_of(outcome.stderr)[-1].exit_code == code


def test_one_stream_is_not_asked_for_twice(kvcal: Kvcal) -> None:
    outcome = kvcal("recipes", "list", "--quiet", "--log-json", "-")
    assert outcome.code == 2
    assert "leave one out" in outcome.stderr


@pytest.mark.parametrize("target", ["nowhere/run.jsonl", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    target: str, kvcal: Kvcal, llama_folder: Path, tmp_path: Path
) -> None:
    outcome = kvcal("calibrate", "--model", llama_folder, "--output", "out", "--log-json", target)
    assert outcome.code == 7
    assert f"--log-json {target}: cannot be written" in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_disk_ends_the_log_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    log = Log(str(tmp_path / "run.jsonl"), "tests", None)
    monkeypatch.setattr(log, "_path", full)
    with Narrator(Console(quiet=True), log).stage("load"):
        log.write("message", "is lost")
    assert capsys.readouterr().err == "warning: /dev/full: ends here: No space left on device\n"


def test_what_libraries_log_is_a_warning(kvcal: Kvcal, monkeypatch: pytest.MonkeyPatch) -> None:
    def shipped() -> list[str]:
        logging.getLogger("its.package").warning("beware of %s", "the dog")
        logging.getLogger("its.package").info("nothing")
        return ["fp8"]

    monkeypatch.setattr("kvcal.recipe.shipped", shipped)
    (line, _) = lines_of(kvcal("recipes", "list", "--log-json", "-").stderr)
    assert (line.event, line.level, line.message) == ("warning", "warning", "its.package: beware of the dog")
    assert kvcal("recipes", "list").stderr == "warning: its.package: beware of the dog\n"
    assert kvcal("recipes", "list", "--quiet").stderr == ""


def test_a_run_without_the_options_is_not_a_run_before_with_them(kvcal: Kvcal) -> None:
    kvcal("recipes", "show", "nix", "--log-json", "-")
    assert kvcal("recipes", "show", "nix").stderr.startswith("error: ")
    assert kvcal("nix").stderr.startswith("error: ")


def test_an_error_of_another_rank_says_whose_it_is(kvcal: Kvcal, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    (line,) = lines_of(kvcal("plan", "--model", "x", "--log-json", "-").stderr)
    assert (line.rank, line.event, line.exit_code) == (1, "error", 2)
    assert str(line.message).startswith("plan runs in one process")


# --- the narrator alone


def written(tmp_path: Path) -> tuple[Log, Callable[[], list[Line]]]:
    path = tmp_path / "run.jsonl"
    return Log(str(path), "tests", None), lambda: lines_of(path.read_text())


def test_progress_is_told_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.3 s: every fourth one is told, with what is left at that speed."""
    now = itertools.count(0.0, 0.3)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(progress, "seconds_left", lambda task: task.remaining)
    log, read = written(tmp_path)
    with Narrator(Console(quiet=True), log).stage("steps", 10) as advance:
        for _ in range(10):
            advance(1)
    told = [line for line in read() if line.event == "progress"]
    assert [line.done for line in told] == [4, 8]
    assert [line.eta_seconds for line in told] == [6, 2]
    assert [line.seconds for line in told] == pytest.approx([1.2, 2.4])


def test_time_left_is_that_of_the_present_speed() -> None:
    seconds = iter([0.0])
    bar = progress.Progress(get_time=lambda: clock[0], disable=True)
    clock = [next(seconds)]
    (task,) = [bar.tasks[i] for i in [bar.add_task("steps", total=100)]]
    assert progress.seconds_left(task) is None
    clock[0] = 4.0
    bar.advance(task.id, 10)
    assert progress.seconds_left(task) == 36.0  # no speed yet: 90 at 10 in 4 s
    for step in range(1, 81):
        clock[0] = 4.0 + step
        bar.advance(task.id, 0.5)
    assert progress.seconds_left(task) == 100.0  # 50 at half a step a second, whatever the first was


def test_stages_of_one_name_are_added_up() -> None:
    narrator = Narrator.silent()
    for _ in range(2):
        with narrator.stage("load"):
            pass
    once = {"seconds": 1.25, "peak_host_bytes": 7, "host_peak_since": "stage", "peak_device_bytes": None}
    other = once | {"seconds": 0.5, "peak_host_bytes": 9, "peak_device_bytes": 3}
    assert narrator.stages.keys() == {"load"}
    assert progress._together(once, other) == other | {"seconds": 1.75}
    assert progress._together(other, once) == other | {"seconds": 1.75}


def test_what_ranks_of_a_benchmark_say_is_told_once() -> None:
    said = "W1130 torchrun\nerror: no room\nTraceback\nerror: no room\nerror: rank 1 failed\nfooter"
    assert scaling._why(said) == "no room; rank 1 failed"
    assert scaling._why("Traceback\n  KeyError: 1\n\n") == "KeyError: 1"
    assert scaling._why("") == "they said nothing"


def test_a_stage_that_fails_leaves_nothing(tmp_path: Path) -> None:
    log, read = written(tmp_path)
    narrator = Narrator(Console(quiet=True), log)
    with pytest.raises(ZeroDivisionError), narrator.stage("load"):
        raise ZeroDivisionError
    assert narrator.stages == {}
    assert [line.event for line in read()] == ["stage_started"]


@pytest.mark.parametrize(("unit", "total"), [("tokens", 1e9), ("schemes", 1e3)])
def test_bars_fit_80_columns_and_say_what_is_left(
    unit: str, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "seconds_left", lambda _: 100 * 3600.0)
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, legacy_windows=False)
    with Narrator(console).stage("calibrate folded", total, unit) as advance:
        advance(total / 3)
    rows = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue()).replace("\r", "\n").splitlines()
    bars = [row for row in rows if row.startswith("calibrate folded ")]
    assert bars
    assert max(map(len, rows)) <= 80
    assert any("left 100:00:00" in row for row in bars)


def test_a_stage_without_a_total_is_nothing_to_read_in_a_file() -> None:
    shown = io.StringIO()
    with Narrator(Console(file=shown, width=80)).stage("load"):
        pass
    assert shown.getvalue() == ""


@example("check\udc80", "out\n\ud800")
@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_any_text_is_a_line(tmp_path_factory: pytest.TempPathFactory, command: str, message: str) -> None:
    """Names of files may hold anything, halves of surrogate pairs and ends of lines included."""
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    Log(str(path), command, None).write("notice", message)
    content = path.read_bytes()
    assert content.count(b"\n") == 1
    line = Line.model_validate_json(content)
    assert line.message == message.encode("utf-8", "backslashreplace").decode()
    assert abs(datetime.now(UTC) - line.time) < timedelta(minutes=1)


@given(st.lists(st.sampled_from(["--quiet", "--log-json", "-", "--log-json=f", "check", "--json", "--"])))
def test_options_of_the_program_are_found_and_no_word_is_lost(words: list[str]) -> None:
    own, rest = terminal.of_program(words)
    assert sorted(own + rest) == sorted(words)
    end = rest.index("--") if "--" in rest else len(rest)
    assert not {"--quiet", "--log-json", "--log-json=f"} & set(rest[:end])
    assert rest[end:] == words[len(words) - len(rest[end:]) :]


def test_the_readme_documents_every_field() -> None:
    section = README.split("## Progress and logs")[1].split("\n## ")[0]
    fields = set(re.findall(r"`(\w+)`", section))
    assert set(Line.model_fields) <= fields
    assert set(log_lines.Event.__args__) <= fields
    (example,) = (line for line in section.splitlines() if line.strip().startswith("{"))
    assert Line.model_validate(json.loads(example)).event == "progress"
