"""Every number of the page is one of the records; whatever they hold, the page is whole and harmless."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from kvcal import recipe, run, run_compare
from kvcal.engines import VLLM
from kvcal.page import render, serving, source
from kvcal.planner import capacity, gpus
from kvcal.planner.capacity import Deployment
from kvcal.progress import Narrator
from kvcal.report import nats
from kvcal.statistics import Statistics
from tests import tiny
from tests.page.reading import numbers, read, tables

Kvcal = Callable[..., Any]
SMALL = {"samples": 4, "seq_len": 48}


def calibrated(model: Path, output: Path, **fields: Any) -> Path:
    wanted = recipe.parse({"calibration": SMALL, "evaluation": SMALL | {"samples": 2}, **fields}, "tests")
    request = run.Request(str(model), output=output)
    _, folder = run.run_calibrate(request, wanted, Narrator(Console(stderr=True, quiet=True)))
    return folder


@pytest.fixture(scope="module")
def fp8(exported: Path) -> Path:
    return exported


@pytest.fixture(scope="module")
def int8(folded: Path) -> Path:
    return folded


@pytest.fixture(scope="module")
def int4(planted_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(planted_folder, tmp_path_factory.mktemp("int4") / "out", format="int4_per_token_head")


@pytest.fixture(scope="module")
def mixed(planted_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    budget = {"bits_budget": 11.0}
    return calibrated(planted_folder, tmp_path_factory.mktemp("mixed") / "out", format="fp8", mixed=budget)


@pytest.fixture(scope="module")
def failed(planted_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    gates = {"kl_mean": 1e-12, "top1_agreement": 0.01}
    return calibrated(planted_folder, tmp_path_factory.mktemp("failed") / "out", format="fp8", gates=gates)


RUNS = ("fp8", "int8", "int4", "mixed", "failed")
every_run = pytest.mark.parametrize("name", RUNS)


def place(folder: Path) -> Path:
    return folder / "kvcal" if (folder / "kvcal").is_dir() else folder


def record(folder: Path, name: str) -> Any:
    return json.loads((place(folder) / f"{name}.json").read_text())


def edit(folder: Path, name: str, change: Callable[[Any], object]) -> None:
    path = place(folder) / f"{name}.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


@every_run
def test_calibrate_writes_what_report_writes_again(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, kvcal: Kvcal
) -> None:
    folder = request.getfixturevalue(name)
    written = (place(folder) / "report.html").read_text()
    again = copy(folder, tmp_path / folder.name)
    (place(again) / "report.html").write_text("old")
    done = kvcal("report", again)
    assert done.code == 0, done.stderr
    assert (place(again) / "report.html").read_text() == written


@every_run
def test_first_comes_what_is_to_be_done(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    report, page = record(folder, "report"), read(place(folder) / "report.html")
    header = page.root.find("body/header")
    assert header is not None
    assert header.findtext("p[@class='verdict']/strong") == report["verdict"]
    serve = header.find("pre")
    if report["verdict"] == "pass":
        assert serve is not None
        assert "".join(serve.itertext()) == report["serve"]
    else:
        assert serve is None
        assert report["serve"] not in page.text
        assert "No checkpoint was written" in page.text
    failures = [each.text for each in header.findall("p[@class='failure']")]
    assert failures == [gate["text"] for gate in report["gates"] if not gate["passed"]]
    tiles = {tile.findtext("dt"): [dd.text for dd in tile.findall("dd")] for tile in header.iter("div")}
    cache, error = report["fidelity"], report["attention_error"]
    assert tiles["KL to the 16-bit cache"][0] == nats(cache["kl_mean"])
    assert tiles["top-1 agreement"][0] == f"{100 * cache['top1_agreement']:.2f} %"
    reference = f"{cache['perplexity_reference']:.3f} in 16 bits"
    assert tiles["perplexity"] == [f"{cache['perplexity']:.3f}", reference]
    worst = f"worst {error['worst']:.4f}, layer {error['worst_layer']}"
    assert tiles["attention error"] == [f"{error['mean']:.4f}", worst]
    assert tiles["bits per element"][0] == f"{report['bits_per_element']:.3f}"
    sizes = [f"{report['bytes_per_token'][key]:,.0f}" for key in ("reference", "quantized")]
    assert tiles["bits per element"][1] == f"{sizes[0]} → {sizes[1]} bytes per token"


@every_run
def test_fidelities_are_those_of_the_report(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    report, page = record(folder, "report"), read(place(folder) / "report.html")
    (rows,) = tables(page.section("fidelity"))
    expected = []
    for key in ("fidelity", "fidelity_fp8_attention"):
        for document in (report["folds"] and report["folds"]["before"], report):
            if document and document[key]:
                each = document[key]
                shares = f"{100 * each['top1_agreement']:.2f} %"
                expected.append(
                    [nats(each["kl_mean"]), nats(each["kl_p99"]), shares, f"{each['perplexity']:.3f}"]
                )
    assert [row[1:] for row in rows[2:]] == expected
    assert rows[1] == ["nothing", "", "", "", f"{report['fidelity']['perplexity_reference']:.3f}"]
    assert f"{report['fidelity']['tokens']:,} held-out tokens" in page.text


@every_run
def test_gates_and_checks_are_listed(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    report, page = record(folder, "report"), read(place(folder) / "report.html")
    (rows,) = tables(page.section("gates"))
    outcome = {True: "passed", False: "failed"}
    assert [(row[0], row[3]) for row in rows[1:-1]] == [
        (gate["name"], outcome[gate["passed"]]) for gate in report["gates"]
    ]
    count = len(report["checks"])
    assert rows[-1] == ["loader contract of vllm", f"{count} of {count} rules hold", "", "passed"]


@every_run
def test_maps_of_heads_hold_the_records_numbers(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    report, page = record(folder, "report"), read(place(folder) / "report.html")
    skipped = set(report["skipped_layers"])
    for key, title in (("cache", "Attention error"), ("attention", "Attention error with Q in FP8")):
        errors = {layer["index"]: layer["attention_error"][key] for layer in report["layers"]}
        if errors[0] is None:
            assert title not in page.figures
            continue
        rows = numbers(page.figure(title))[1:]
        assert rows == [
            [str(index), *("16 bits" if index in skipped else f"{e:.4g}" for e in heads)]
            for index, heads in errors.items()
        ]
    statistics = Statistics.load(place(folder) / "statistics.safetensors")
    for side in "kvq":
        rows = numbers(page.figure(f"Largest magnitude of {side.upper()}"))[1:]
        found = {int(row[0]): [float(cell) for cell in row[1:]] for row in rows}
        for layer in report["layers"]:
            seen = statistics.layers[layer["index"]][side]  # type: ignore[index]
            direct = torch.maximum(seen.maximum, -seen.minimum).amax(-1)
            assert found[layer["index"]] == pytest.approx(direct.tolist(), rel=1e-3)
            assert max(found[layer["index"]]) == pytest.approx(layer[side]["amax"], rel=1e-3)


def test_darker_is_worse(int8: Path) -> None:
    page = read(place(int8) / "report.html")
    figure = page.figure("Attention error")
    worst = record(int8, "report")["attention_error"]
    cells = {
        path.findtext("title"): path.get("class")
        for path in figure.iter("path")
        if path.find("title") is not None
    }
    levels = {tip: int(str(kind)[1:]) for tip, kind in cells.items()}
    values = {tip: float(str(tip).rsplit(": ", 1)[1]) for tip in cells}
    ordered = sorted(values, key=lambda tip: values[tip])
    assert [levels[tip] for tip in ordered] == sorted(levels.values())
    assert str(ordered[-1]).startswith(f"layer {worst['worst_layer']}, ")
    assert levels[ordered[-1]] == 9
    assert levels[ordered[0]] == int(10 * values[ordered[0]] / values[ordered[-1]])


def test_layers_in_16_bits_are_shown_as_such(mixed: Path, fp8: Path) -> None:
    report, page = record(mixed, "report"), read(place(mixed) / "report.html")
    rows = numbers(page.figure("KL of one layer quantized alone"))[1:]
    assert rows == [
        [", ".join(map(str, g["layers"])), nats(g["kl_mean"]), "16 bits" if g["skipped"] else "quantized"]
        for g in report["mixed"]["groups"]
    ]
    skipped = report["skipped_layers"]
    assert skipped
    bars = [path.get("class") for path in page.figure("KL of one layer quantized alone").iter("path")]
    assert bars.count("open") == len(skipped)
    hollow = [path.get("class") for path in page.figure("Attention error").iter("path")]
    assert hollow.count("hollow") == len(skipped) * 6
    assert "sensitivity" not in read(place(fp8) / "report.html").anchors


def test_folds_are_told_and_seen(int8: Path, fp8: Path, planted_folder: Path) -> None:
    report, page = record(int8, "report"), read(place(int8) / "report.html")
    (rows,) = tables(page.section("folds"))
    judged = report["folds"]
    assert rows[1][:2] == ["none", nats(judged["judging"]["kl_before"])]
    assert [row[0] for row in rows[1:] if row[2] == "kept"] == judged["kept"]
    before = {row[0]: float(row[4]) for row in numbers(page.figure("K by channel, before folds"))[1:]}
    after = {row[0]: float(row[4]) for row in numbers(page.figure("K by channel, after folds"))[1:]}
    assert before.keys() == after.keys() == {"0", "1", "2"}
    assert all(before[layer] > 4 > after[layer] for layer in before), (before, after)
    assert "folds" not in read(place(fp8) / "report.html").anchors
    assert "K by channel, as cached" in read(place(fp8) / "report.html").figures


def test_before_folds_is_what_an_unfolded_run_sees(int8: Path, planted_folder: Path, tmp_path: Path) -> None:
    """The same text, no folds: its statistics are the truth about the time before."""
    wanted = {"format": "fp8", "granularity": "per_head"}
    plain = Statistics.load(
        place(calibrated(planted_folder, tmp_path / "plain", **wanted)) / "statistics.safetensors"
    )
    figure = next(
        each
        for each in read(place(int8) / "report.html").root.iter("figure")
        if "the head that folds changed most" in (each.findtext("figcaption/p") or "")
    )
    named = re.fullmatch(r"K of layer (\d), head (\d)", figure.findtext("figcaption/h3") or "")
    assert named
    seen = plain.layers[int(named[1])]["k"]
    rows = numbers(figure)
    assert rows[0] == ["channel", "amax before", "rms before", "amax after", "rms after"]
    amax = seen.amax[int(named[2])].tolist()
    rms = (seen.squares[int(named[2])] / int(seen.tokens)).sqrt().tolist()
    assert [float(row[1]) for row in rows[1:]] == pytest.approx(amax, rel=2e-3)
    assert [float(row[2]) for row in rows[1:]] == pytest.approx(rms, rel=2e-3)
    assert [float(row[3]) for row in rows[1:]] != pytest.approx(amax, rel=0.1)


def test_the_run_is_told(fp8: Path) -> None:
    page, manifest = read(place(fp8) / "report.html"), record(fp8, "manifest")
    facts, times, *_ = tables(page.section("facts"))
    told = {row[0]: row[1] for row in facts[1:]}
    assert told["model"] == manifest["model"]["name"]
    assert f"{manifest['calibration']['tokens']:,} tokens of builtin, seed 0" == told["calibrated on"]
    for name, version in manifest["versions"].items():
        assert f"{name} {version}" in told["versions"]
    assert told["held-out text, SHA-256"] == manifest["evaluation"]["sha256"]
    stages = record(fp8, "report")["stages"]
    assert stages == manifest["stages"]
    assert [row[0] for row in times[1:-1]] == list(stages)
    assert [float(row[1]) for row in times[1:-1]] == [each["seconds"] for each in stages.values()]
    assert float(times[-1][1]) == pytest.approx(sum(each["seconds"] for each in stages.values()), abs=0.01)
    assert [row[2] for row in times[1:-1]] == [
        f"{each['peak_host_bytes'] / 2**30:.2f} GiB" for each in stages.values()
    ]


@pytest.mark.parametrize("since", ["stage", "process"])
def test_peak_memory_is_told_of_host_and_gpu(since: str, fp8: Path, tmp_path: Path) -> None:
    folder = copy(fp8, tmp_path / "out")

    def on_a_gpu(found: Any) -> None:
        found["memory"]["passes"]["calibrate"].update(device="cuda:0", expected_bytes=2**30)
        found["stages"]["calibrate"] = {
            "seconds": 1.5,
            "peak_host_bytes": 3 * 2**29,
            "host_peak_since": since,
            "peak_device_bytes": 3 * 2**28,
        }

    edit(folder, "report", on_a_gpu)
    section = page_of(folder).section("facts")
    row = ["calibrate", "1.50", "1.50 GiB", "0.75 GiB", "1.00 GiB of cuda:0"]
    assert row in tables(section)[-1]
    assert ("has held so far" in "".join(section.itertext())) == (since == "process")


def page_of(*folders: Path, **more: Any) -> Any:
    path = folders[0].parent / "page-of.html"
    path.write_text(render.render(folders, **more))
    return read(path)


@every_run
def test_nothing_is_fetched_and_nothing_runs(name: str, request: pytest.FixtureRequest) -> None:
    path = place(request.getfixturevalue(name)) / "report.html"
    page = read(path)
    for each in page.root.iter():
        assert each.tag not in ("script", "iframe", "img", "object", "embed")
        assert not [key for key in each.attrib if key.startswith("on")]
        assert each.get("src") is None
        assert re.match(r"#|data:,$", each.get("href", "#"))
    assert not re.search(r"url\(|@import|https?:", path.read_text())
    links = {a.get("href") for a in page.root.iter("a")}
    assert links == {f"#{anchor}" for anchor in page.anchors}


@every_run
def test_every_drawing_is_named_and_has_its_numbers(name: str, request: pytest.FixtureRequest) -> None:
    page = read(place(request.getfixturevalue(name)) / "report.html")
    drawings = list(page.root.iter("svg"))
    assert len(drawings) >= 6
    for figure in page.root.iter("figure"):
        (drawing,) = figure.iter("svg")
        assert drawing.findtext("title") == figure.findtext("figcaption/h3") or drawing.findtext("title")
        assert len(drawing.findtext("desc") or "") > 20
        assert len(numbers(figure)) > 1
    assert sum(1 for _ in page.root.iter("figure")) == len(drawings)


EVIL = """</title><script>alert("1")</script><img src=x onerror='x'>&amp;"""


def test_what_users_name_is_escaped(fp8: Path, tmp_path: Path) -> None:
    folder = copy(fp8, tmp_path / "<b>&\"'")

    def rename(manifest: Any) -> None:
        manifest["model"]["name"] = EVIL
        manifest["evaluation"]["dataset"] = EVIL

    edit(folder, "manifest", rename)
    edit(folder, "report", lambda report: report.update(serve=f"vllm serve {EVIL}"))
    edit(folder, "report", lambda report: report["layers"][0]["k"]["flags"].append(EVIL))
    page = page_of(folder, folder)
    assert [each.tag for each in page.root.iter() if each.tag in ("script", "img", "b")] == []
    assert EVIL in {pre.findtext("code", "").removeprefix("vllm serve ") for pre in page.root.iter("pre")}
    (title,) = page.root.findall("head/title")
    assert title.text == f"{Path(EVIL).name}: KV cache"
    assert "<b>&\"'" in page.text
    assert EVIL in [row[3] for row in tables(page.section("layers"))[0]]


def test_what_was_not_measured_is_not_shown_but_said(fp8: Path, tmp_path: Path) -> None:
    folder = copy(fp8, tmp_path / "out")
    (folder / "kvcal" / "statistics.safetensors").unlink()
    page, report = page_of(folder), record(fp8, "report")
    assert not {"channels", "bits", "long-context", "sensitivity"} & set(page.anchors)
    for what in ("Other schemes", "What each layer costs", "Long-context tasks", "Channels:"):
        assert what in page.text
    rows = numbers(page.figure("Largest magnitude of K"))[1:]
    assert [float(row[1]) for row in rows] == pytest.approx(
        [layer["k"]["amax"] for layer in report["layers"]], rel=1e-3
    )


ABLE = {"able": True, "low": -0.1234, "high": 0.0056, "p_value": 0.0312, "prompts": 24, "guess": 0.0}
UNABLE = {"able": False, "low": None, "high": None, "p_value": None, "prompts": 8, "guess": 0.1}
SUITE = {
    "needle": {  # [length][depth]
        "lengths": [512, 2048],
        "depths": [0.0, 0.5, 1.0],
        "reference": [[1.0, 1.0, 1.0], [1.0, 0.5, 1.0]],
        "quantized": [[1.0, 0.25, 1.0], [0.75, 0.0, 1.0]],
    },
    "tasks": [
        ABLE
        | {"name": "multi-key <needle>", "length": 2048, "reference": 0.91, "quantized": 0.85, "note": ""},
        UNABLE
        | {"name": "variables", "length": 512, "reference": 0.01, "quantized": 0.02, "note": "guesses"},
    ],
    "continuations": None,
}


def test_long_context_appears_once_it_was_measured(fp8: Path, tmp_path: Path) -> None:
    folder = copy(fp8, tmp_path / "out")
    (folder / "kvcal" / "suite.json").write_text(json.dumps(SUITE))
    page = page_of(folder)
    tasks = tables(page.section("long-context"))[0]
    first = ["multi-key <needle>", "2,048", "24", "0.910", "0.850", "-0.123 to +0.006", "0.031", ""]
    assert tasks[1:] == [first, ["variables", "512", "8", "0.010", "0.020", "", "", "cannot do it: guesses"]]
    rows = numbers(page.figure("Needle, quantized cache"))
    assert rows == [
        ["depth", "512", "2,048"],
        ["0 %", "1", "0.75"],
        ["50 %", "0.25", "0"],
        ["100 %", "1", "1"],
    ]
    cells = [p for p in page.figure("Needle, 16-bit cache").iter("path") if p.find("title") is not None]
    assert [p.get("class") for p in cells] == ["m9", "m9", "m9", "m5", "m9", "m9"]
    assert "Long-context tasks" not in page.text


def test_what_evaluate_records_is_what_is_shown(tmp_path: Path, kvcal: Kvcal, small: tuple[str, ...]) -> None:
    model = tiny.save(tmp_path / "model", max_position_embeddings=700, num_hidden_layers=1)
    assert kvcal("calibrate", "--model", model, *small, "--output", "out").code == 0
    done = kvcal("evaluate", "out", "--suite", "full", "--depths", "2", "--prompts", "1", "--json")
    assert done.code == 0, done.stderr
    assert kvcal("report", "out").code == 0
    page, found = read(tmp_path / "out" / "kvcal" / "report.html"), done.document
    tasks = tables(page.section("long-context"))[0][1:]
    assert [row[:4] for row in tasks] == [
        [task["name"], f"{task['length']:,}", str(task["prompts"]), f"{task['reference']:.3f}"]
        for task in found["tasks"]
    ]
    assert len(numbers(page.figure("Needle, 16-bit cache"))) == 3
    assert f"KL {nats(found['continuations']['kl_mean'])}" in page.text


@pytest.mark.parametrize("suite", ["{", "[]", "{}", '{"tasks": [{"name": "x"}]}'])
def test_a_broken_suite_is_refused_by_name(suite: str, fp8: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    folder = copy(fp8, tmp_path / "out")
    (folder / "kvcal" / "suite.json").write_text(suite)
    done = kvcal("report", folder)
    assert done.code == 4
    assert str(folder) in done.stderr


@pytest.fixture(scope="module")
def compared(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("compared") / "schemes"
    wanted = recipe.parse({"calibration": SMALL, "evaluation": SMALL | {"samples": 2}, "gates": {}}, "tests")
    request = run.Request(str(llama_folder), output=output)
    quiet = Narrator(Console(stderr=True, quiet=True))
    run_compare.run_compare(request, wanted, ["fp8", "int8-per-head", "fp8-e5m2"], quiet)
    return output


def test_peers_are_shown_where_there_is_a_comparison(
    fp8: Path, int8: Path, compared: Path, tmp_path: Path, kvcal: Kvcal
) -> None:
    rows = json.loads((compared / "compare.json").read_text())["rows"]
    report = record(fp8, "report")
    for given in (compared, compared / "compare.json"):
        done = kvcal("report", fp8, "--comparison", given, "--output", "page.html", "--overwrite")
        assert done.code == 0, done.stderr
    page = read(tmp_path / "page.html")
    found = {row[0]: row[1:] for row in numbers(page.figure("KL against bits"))[1:]}
    own = [f"{report['bits_per_element']:.3f}", nats(report["fidelity"]["kl_mean"]), ""]
    assert found.pop(fp8.name) == own
    assert found == {
        row["scheme"]: [
            f"{row['bits_per_element']:.3f}",
            nats(row["fidelity"]["kl_mean"]),
            row["serves"] or "",
        ]
        for row in rows
    }
    kept = copy(fp8, tmp_path / "kept")
    shutil.copy(compared / "compare.json", kept / "kvcal" / "compare.json")
    assert "bits" in page_of(kept).anchors
    refused = kvcal("report", int8, "--comparison", compared, "--output", "other.html")
    assert refused.code == 0 or "is about another model" in refused.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["manifest"]["architecture"].update(layers=77), "is about another model than"),
        (lambda d: d.update(rows=[]), "no schemes"),
        (lambda d: d.pop("manifest"), "is no comparison that kvcal compare wrote"),
        (lambda d: d["rows"][0].pop("fidelity"), "lacks what is asked of it"),
    ],
)
def test_other_comparisons_are_refused(
    change: Callable[[Any], object], says: str, fp8: Path, compared: Path, tmp_path: Path, kvcal: Kvcal
) -> None:
    document = json.loads((compared / "compare.json").read_text())
    change(document)
    (tmp_path / "other.json").write_text(json.dumps(document))
    done = kvcal("report", fp8, "--comparison", tmp_path / "other.json", "--output", "page.html")
    assert done.code == 4
    assert says in done.stderr
    assert "other.json" in done.stderr
    nowhere = kvcal("report", fp8, "--comparison", tmp_path / "nowhere", "--output", "page.html")
    assert (nowhere.code, "no such file" in nowhere.stderr) == (2, True)


def test_runs_stand_side_by_side(fp8: Path, int8: Path, failed: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    folders = (fp8, int8, failed)
    done = kvcal("report", *folders, "--output", "runs.html", "--json")
    assert done.code == 0, done.stderr
    written = tmp_path / "runs.html"
    assert done.document == {"output": "runs.html", "bytes": written.stat().st_size}
    page, reports = read(written), [record(folder, "report") for folder in folders]
    header = page.root.find("body/header")
    assert header is not None
    (rows,) = tables(header)
    names = rows[0][1:]
    assert len(set(names)) == 3
    assert all(str(folder).endswith(name) for folder, name in zip(folders, names, strict=True))
    column = {row[0]: row[1:] for row in rows[1:]}
    assert column["verdict"] == [report["verdict"] for report in reports] == ["pass", "pass", "fail"]
    assert column["KL to the 16-bit cache"] == [nats(report["fidelity"]["kl_mean"]) for report in reports]
    assert column["bits per element"] == [f"{report['bits_per_element']:.3f}" for report in reports]
    serves = ["".join(pre.itertext()) for pre in header.iter("pre")]
    assert serves == [report["serve"] for report in reports[:2]]
    for name in names:
        assert f"Attention error: {name}" in page.figures
        assert f"Largest magnitude of V: {name}" in page.figures
    assert [row[0] for row in numbers(page.figure("KL against bits"))[1:]] == names
    rows_begin = [title for title in page.figures if "row" in page.figure(title).get("class", "").split()]
    kinds = (
        "Attention error",
        "Attention error with Q in FP8",
        *(f"Largest magnitude of {side}" for side in "KVQ"),
    )
    assert rows_begin[:5] == [f"{kind}: {names[0]}" for kind in kinds]


def test_one_scale_serves_all_runs(fp8: Path, int8: Path, tmp_path: Path) -> None:
    page = page_of(copy(fp8, tmp_path / "a"), copy(int8, tmp_path / "b"))
    legends = {
        tuple(each.text for each in page.figure(f"Largest magnitude of {side}: {name}").iter("text"))[:2]
        for side in "KVQ"
        for name in "ab"
    }
    assert len(legends) == 1


def test_runs_on_other_text_are_not_set_against_each_other(fp8: Path, tmp_path: Path) -> None:
    a, b = copy(fp8, tmp_path / "a"), copy(fp8, tmp_path / "b")
    assert "cannot be set against" not in page_of(a, b).text
    edit(b, "manifest", lambda found: found["evaluation"].update(sha256="0" * 64))
    assert "cannot be set against" in page_of(a, b).text


def test_folders_of_one_name_are_told_apart(tmp_path: Path, fp8: Path) -> None:
    a, b = copy(fp8, tmp_path / "one" / "out"), copy(fp8, tmp_path / "two" / "out")
    assert [run.name for run in source.load([a, b])] == ["one/out", "two/out"]
    assert [run.name for run in source.load([a])] == ["out"]


def test_where_it_is_written(fp8: Path, int8: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    several = kvcal("report", fp8, int8)
    assert (several.code, "--output FILE" in several.stderr) == (2, True)
    (tmp_path / "there.html").write_text("mine")
    taken = kvcal("report", fp8, "--output", "there.html")
    assert (taken.code, "--overwrite" in taken.stderr) == (7, True)
    assert (tmp_path / "there.html").read_text() == "mine"
    folder = kvcal("report", fp8, "--output", tmp_path, "--overwrite")
    assert (folder.code, "is a folder" in folder.stderr) == (7, True)
    assert kvcal("report", fp8, "--output", "there.html", "--overwrite").code == 0
    assert kvcal("report", fp8, "--output", "new/place/page.html").code == 0
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"there.html", "page.html"}


def test_folders_without_whole_records_are_refused_by_name(
    fp8: Path, llama_folder: Path, tmp_path: Path, kvcal: Kvcal
) -> None:
    for folder, code, says in (
        (tmp_path / "nowhere", 2, "no such folder"),
        (llama_folder, 4, "holds no kvcal records"),
    ):
        done = kvcal("report", fp8, folder, "--output", "page.html")
        assert (done.code, done.stderr.count(f"{folder}: {says}")) == (code, 1)
    broken = copy(fp8, tmp_path / "broken")
    (broken / "kvcal" / "statistics.safetensors").write_bytes(b"no")
    done = kvcal("report", fp8, broken, "--output", "page.html")
    assert (done.code, f"{broken}/kvcal/statistics.safetensors" in done.stderr) == (4, True)
    shutil.copy(fp8 / "kvcal" / "statistics.safetensors", broken / "kvcal")
    for name in ("report", "plan", "manifest"):
        original = (broken / "kvcal" / f"{name}.json").read_text()
        for content in ("{", "[]", "{}"):
            (broken / "kvcal" / f"{name}.json").write_text(content)
            done = kvcal("report", fp8, broken, "--output", "page.html")
            assert (done.code, f"{broken}: its records are not whole" in done.stderr) == (4, True), (
                name,
                content,
            )
        (broken / "kvcal" / f"{name}.json").write_text(original)
    assert not (tmp_path / "page.html").exists()


def capacity_rows(folder: Path, gpu: str) -> dict[str, int]:
    (found,) = source.load([folder])
    model = serving._model(found)
    where = Deployment(gpus.get(gpu), VLLM, min(serving.CONTEXT, model.max_context))
    return {row.format: row.fitting for row in capacity.plan(model, where).rows}


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_capacity_agrees_with_the_planner(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    (rows,) = [t for t in tables(read(place(folder) / "report.html").section("capacity")) if t[0][0] == "GPU"]
    assert [row[0] for row in rows[1:]] == [gpus.get(gpu).title for gpu in serving.GPUS]
    for gpu, row in zip(serving.GPUS, rows[1:], strict=True):
        planned = capacity_rows(folder, gpu)
        shown = [int(cell.replace(",", "")) for cell in row[1:]]
        stored = planned[record(folder, "plan")["format"]]
        assert shown[0] == planned[capacity.PLAIN]
        assert shown[1] == pytest.approx(stored, abs=1)  # a few bytes of static scales


def test_layers_in_16_bits_count_as_such(mixed: Path) -> None:
    (found,) = source.load([mixed])
    report = found.report
    context = 256
    for quantized, key in ((False, "reference"), (True, "quantized")):
        counted = serving.request_bytes(found, serving._kept(found), context, quantized=quantized)
        assert counted == context * report["bytes_per_token"][key]
    assert report["bytes_per_token"]["quantized"] > report["bytes_per_token"]["reference"] / 2


def test_a_failed_run_serves_nothing(failed: Path) -> None:
    assert "capacity" not in read(failed / "report.html").anchors


def grown(folder: Path, target: Path, layers: int, kv_heads: int, heads: int, head_dim: int) -> Path:
    """The records of a larger model, made of random numbers."""
    copy(folder, target)
    (target / "config.json").unlink()
    generator = torch.Generator().manual_seed(0)

    def grow(report: Any) -> None:
        first = report["layers"][0]
        errors = torch.rand(layers, 2, heads, generator=generator).tolist()
        report["layers"] = [
            first
            | {"index": i, "attention_error": {"cache": a, "attention": b, "logit_snr_db": [30.0] * heads}}
            for i, (a, b) in enumerate(errors)
        ]

    edit(target, "report", grow)
    tensors = load_file(folder / "kvcal" / "statistics.safetensors")
    sides = {}
    for i in range(layers):
        for side, count in (("k", kv_heads), ("v", kv_heads), ("q", heads)):
            high = torch.randn(count, head_dim, generator=generator).exp()
            fields = {
                "tokens": tensors["layers.0.k.tokens"].clone(),
                "minimum": -high,
                "maximum": high * 1.1,
                "total": high.double(),
                "squares": high.double() ** 2,
                "saturated": torch.zeros(count, dtype=torch.int64),
                "zeroed": torch.zeros(count, dtype=torch.int64),
            }
            sides.update({f"layers.{i}.{side}.{name}": value for name, value in fields.items()})
    save_file(sides, target / "kvcal" / "statistics.safetensors", {"kvcal_statistics": "1"})
    return target


def test_the_page_of_a_model_of_32_layers_is_small(fp8: Path, tmp_path: Path) -> None:
    folder = grown(fp8, tmp_path / "large", layers=32, kv_heads=8, heads=32, head_dim=128)
    text = render.render([folder])
    assert 200_000 < len(text.encode()) < 1_000_000


def test_layers_of_unlike_shape_leave_gaps(fp8: Path, tmp_path: Path) -> None:
    folder = copy(fp8, tmp_path / "out")
    edit(folder, "report", lambda report: report["layers"][1]["attention_error"].update(cache=[0.5]))
    page = page_of(folder)
    rows = numbers(page.figure("Attention error"))
    assert rows[2] == ["1", "0.5", "", "", "", "", ""]


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_and_colours_told_apart(scheme: int) -> None:
    style = (Path(render.__file__).parent / "page.css").read_text()
    colours = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.S)
    ][scheme]
    pairs = [("ink", "paper"), ("ink", "panel"), ("muted", "paper"), ("link", "paper"), ("good", "paper")]
    pairs += [("good", "good-back"), ("bad", "bad-back"), ("bad", "paper")]
    for text, back in pairs:
        assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
    for hue in "me":
        ramp = [luminance(colours[f"{hue}{i}"]) for i in range(10)]
        assert ramp == sorted(ramp, reverse=scheme == 0)
        assert contrast(colours[f"{hue}0"], colours[f"{hue}9"]) > 6


def test_help_names_an_example(kvcal: Kvcal) -> None:
    assert "kvcal report model-fp8kv model-int8kv" in " ".join(kvcal("report", "--help").stdout.split())


def test_a_larger_family_is_drawn_too(tmp_path: Path) -> None:
    """Sliding windows, QK-norm, one more head."""
    folder = calibrated(tiny.save(tmp_path / "gemma", "gemma3_text", head_dim=32), tmp_path / "out")
    assert "capacity" in read(place(folder) / "report.html").anchors


def test_an_exported_checkpoint_is_served_by_its_own_engine(fp8: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    assert kvcal("export", fp8, "--engine", "sglang", "--output", "sgl").code == 0
    done = kvcal("report", "sgl")
    assert done.code == 0, done.stderr
    page = read(tmp_path / "sgl" / "kvcal" / "report.html")
    (serve,) = page.root.iter("pre")
    assert (
        "".join(serve.itertext())
        == "python -m sglang.launch_server --model-path sgl --kv-cache-dtype fp8_e4m3"
    )
    assert "for sglang 0.5" in page.text
    assert "per_head then and are per_tensor now" in page.text
    assert "SGLang takes no scale of Q" in page.text
    assert "vllm serve" not in page.text
    assert kvcal("export", fp8, "--engine", "kernel", "--output", "vectors").code == 0
    assert kvcal("report", "vectors").code == 0
    alone = read(tmp_path / "vectors" / "kvcal" / "report.html")
    assert list(alone.root.iter("pre")) == []
    assert "No checkpoint was written" not in alone.text
