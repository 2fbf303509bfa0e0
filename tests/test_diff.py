"""``kvcal diff`` over records of real runs, edited where a difference is wanted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvcal import regression
from kvcal.errors import ModelError, UsageError
from kvcal.regression import Margin


@pytest.fixture
def old(exported: Path, tmp_path: Path) -> Path:
    """The records of a calibration, without its checkpoint, as a failed run leaves them."""
    return Path(shutil.copytree(exported / "kvcal", tmp_path / "old"))


@pytest.fixture
def new(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported / "kvcal", tmp_path / "new"))


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    document = json.loads((folder / name).read_text())
    change(document)
    (folder / name).write_text(json.dumps(document))


def scale_fidelity(folder: Path, field: str, factor: float, key: str = "fidelity") -> None:
    edit(folder, "report.json", lambda r: r[key].update({field: r[key][field] * factor}))


def test_equal_calibrations_pass(kvcal: Callable[..., Any], exported: Path, old: Path) -> None:
    outcome = kvcal("diff", old, exported, "--json")
    found = outcome.document
    assert (outcome.code, found["verdict"]) == (0, "pass")
    assert (found["changes"], found["scales"], found["incomparable"]) == ([], [], [])
    assert [gate["name"] for gate in found["gates"]] == [
        *(f"{n}, K and V" for n in ("KL mean", "perplexity over 16-bit", "top-1 agreement")),
        *(f"{n}, K, V and Q" for n in ("KL mean", "perplexity over 16-bit", "top-1 agreement")),
    ]
    assert all(gate["old"] == gate["value"] for gate in found["gates"])


# Field, factor on the new one, the option, a margin that it keeps and one that it does not.
@pytest.mark.parametrize("key", ["fidelity", "fidelity_fp8_attention"])
@pytest.mark.parametrize(
    ("field", "factor", "option", "kept", "broken"),
    [
        ("kl_mean", 1.2, "--max-kl-increase", "21%", "19%"),
        ("perplexity", 1.03, "--max-perplexity-increase", "3.1%", "2.9%"),
        ("top1_agreement", 0.9, "--max-top1-decrease", "10.1%", "9.9%"),
    ],
)
def test_each_measure_has_its_margin(
    key: str,
    field: str,
    factor: float,
    option: str,
    kept: str,
    broken: str,
    old: Path,
    new: Path,
    kvcal: Callable[..., Any],
) -> None:
    scale_fidelity(new, field, factor, key)
    assert kvcal("diff", old, new, option, kept).code == 0
    outcome = kvcal("diff", old, new, option, broken)
    assert outcome.code == 5
    assert outcome.stdout.count("WORSE") == 1
    assert "must be at" in outcome.stderr
    assert kvcal("diff", new, old, option, broken).code == 0  # better is never worse


def test_default_margins(kvcal: Callable[..., Any], old: Path, new: Path) -> None:
    scale_fidelity(new, "kl_mean", 1.09)
    assert kvcal("diff", old, new).code == 0
    scale_fidelity(new, "kl_mean", 1.02)
    assert kvcal("diff", old, new).code == 5


def test_absolute_margins(kvcal: Callable[..., Any], old: Path, new: Path) -> None:
    edit(old, "report.json", lambda r: r["fidelity"].update(kl_mean=0.010))
    edit(new, "report.json", lambda r: r["fidelity"].update(kl_mean=0.012))
    assert kvcal("diff", old, new, "--max-kl-increase", "0.0021").code == 0
    assert kvcal("diff", old, new, "--max-kl-increase", "0.0019").code == 5


def test_a_value_that_is_no_number_never_passes(old: Path, new: Path) -> None:
    edit(new, "report.json", lambda r: r["fidelity"].update(kl_mean=float("nan")))
    margins = regression.Margins(*[Margin(1e9, relative=False)] * 3)
    assert not regression.compare(regression.read(old), regression.read(new), margins).passed


@given(st.floats(0, 10), st.floats(0, 10), st.booleans(), st.booleans())
def test_margins_widen(value: float, amount: float, relative: bool, at_least: bool) -> None:
    narrow = Margin(amount, relative).beyond(value, at_least=at_least)
    wide = Margin(2 * amount, relative).beyond(value, at_least=at_least)
    assert (wide <= narrow <= value) if at_least else (wide >= narrow >= value)


@pytest.mark.parametrize("text", ["", "%", "ten", "-1", "-1%", "nan", "inf", "1%%"])
def test_margins_that_cannot_be_meant(text: str, kvcal: Callable[..., Any], exported: Path) -> None:
    outcome = kvcal("diff", exported, exported, f"--max-kl-increase={text}")
    assert outcome.code == 2
    assert "--max-kl-increase must be an amount like 0.001 or a share like 10%" in outcome.stderr


def test_a_calibration_that_newly_fails_its_own_gates_is_worse(
    kvcal: Callable[..., Any], old: Path, new: Path
) -> None:
    edit(new, "report.json", lambda r: r.update(verdict="fail"))
    outcome = kvcal("diff", old, new)
    assert outcome.code == 5
    assert "fails a gate or a check of its own" in outcome.stderr
    edit(old, "report.json", lambda r: r.update(verdict="fail"))
    assert kvcal("diff", old, new).code == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["model"].update(name="/models/other"), "about other"),
        (lambda m: m["architecture"].update(hidden_size=97), "hidden_size was 96 and is 97"),
        (lambda m: m["evaluation"].update(sha256="0", dataset="x.txt"), "the held-out text differs"),
    ],
)
def test_what_cannot_be_compared_is_refused_unless_told(
    change: Callable[[Any], Any], words: str, kvcal: Callable[..., Any], old: Path, new: Path
) -> None:
    edit(new, "manifest.json", change)
    outcome = kvcal("diff", old, new)
    assert (outcome.code, outcome.stdout) == (4, "")
    assert words in outcome.stderr
    assert "--anyway compares them all the same" in outcome.stderr
    told = kvcal("diff", old, new, "--anyway")
    assert told.code == 0
    assert words in " ".join(told.stdout.split())


def test_the_same_model_in_another_folder_is_the_same(
    kvcal: Callable[..., Any], old: Path, new: Path
) -> None:
    name = Path(json.loads((old / "manifest.json").read_text())["model"]["name"]).name
    edit(new, "manifest.json", lambda m: m["model"].update(name=f"./elsewhere/{name}/"))
    assert kvcal("diff", old, new).code == 0


def test_changes_are_listed(kvcal: Callable[..., Any], old: Path, new: Path) -> None:
    recipe = yaml.safe_load((new / "recipe.yaml").read_text())
    recipe["scale"]["headroom"] = 2.0
    (new / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    edit(new, "manifest.json", lambda m: m["versions"].update(torch="9.9"))
    edit(new, "report.json", lambda r: r["layers"][1]["v"].update(scale=[0.5, 0.125]))
    edit(old, "report.json", lambda r: r["layers"][1]["v"].update(scale=[0.5, 0.5]))
    found = kvcal("diff", old, new, "--json").document
    changes = {change["what"]: (change["old"], change["new"]) for change in found["changes"]}
    assert changes.keys() == {"scale.headroom", "torch"}
    assert changes["scale.headroom"] == ("1.25", "2")
    assert found["scales"] == [{"layer": 1, "side": "v", "old": 0.5, "new": 0.125, "factor": 0.25}]
    shown = kvcal("diff", old, new).stdout
    assert "layer 1, V" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_largest_change_of_scales_comes_first(old: Path, new: Path) -> None:
    def change(report: Any) -> None:
        for layer, factor in ((0, 1.5), (1, 0.1), (2, 3.0)):
            report["layers"][layer]["k"]["scale"] = [
                s * factor for s in report["layers"][layer]["k"]["scale"]
            ]

    edit(new, "report.json", change)
    margins = regression.Margins(*[Margin(0, relative=False)] * 3)
    found = regression.compare(regression.read(old), regression.read(new), margins).scales
    assert [(c.layer, c.side) for c in found] == [(1, "k"), (2, "k"), (0, "k")]


def test_scales_of_another_granularity_are_compared_by_the_largest(old: Path, new: Path) -> None:
    edit(old, "report.json", lambda r: r["layers"][0]["k"].update(scale=[0.5, 0.25]))
    edit(new, "report.json", lambda r: r["layers"][0]["k"].update(scale=[1.0]))
    margins = regression.Margins(*[Margin(0, relative=False)] * 3)
    (found,) = regression.compare(regression.read(old), regression.read(new), margins).scales
    assert (found.old, found.new, found.factor) == (0.5, 1.0, 2.0)


def test_folded_checkpoints_are_compared_too(kvcal: Callable[..., Any], folded: Path, tmp_path: Path) -> None:
    new = Path(shutil.copytree(folded / "kvcal", tmp_path / "new-folds"))
    edit(new, "report.json", lambda r: r["layers"][0]["q"].update(amax=2 * r["layers"][0]["q"]["amax"]))
    found = kvcal("diff", folded, new, "--json").document
    assert len(found["gates"]) == 3  # no kernel rounds Q for this format
    assert [(c["layer"], c["side"], c["factor"]) for c in found["scales"]] == [(0, "q", 2.0)]


def test_a_new_calibration_of_a_tiny_model(
    kvcal: Callable[..., Any], small: tuple[str, ...], llama_folder: Path
) -> None:
    line = ("calibrate", "--model", llama_folder, *small)
    kvcal(*line, "--output", "first")
    kvcal(*line, "--output", "second", "--granularity", "per_head", "--seed", 3)
    found = kvcal("diff", "first", "second", "--max-kl-increase", "1", "--json").document
    changes = {change["what"]: (change["old"], change["new"]) for change in found["changes"]}
    assert changes["granularity"] == ("none", "per_head")
    assert changes["scales"] == ("per_tensor", "per_head")
    assert changes["calibration.seed"] == ("0", "3")
    assert "calibration text" in changes
    assert found["verdict"] == "pass"


def test_records_that_are_missing_or_broken(old: Path, tmp_path: Path, kvcal: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        regression.read(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="holds no kvcal records"):
        regression.read(tmp_path / "empty")
    for name in ("report.json", "plan.json", "manifest.json", "recipe.yaml"):
        for text in ("", "[]", "{}", "nonsense: ["):
            broken = Path(shutil.copytree(old, tmp_path / "broken", dirs_exist_ok=True))
            (broken / name).write_text(text)
            if name == "recipe.yaml" and text == "{}":
                continue  # an empty recipe is one
            with pytest.raises(ModelError, match="its records are not whole"):
                regression.read(broken)


def test_diff_waits_for_no_torch(old: Path) -> None:
    code = f"""
import sys
from kvcal.cli import main
sys.argv = ["kvcal", "diff", {str(old)!r}, {str(old)!r}]
try:
    main()
except SystemExit:
    print(*{{"torch", "transformers"}} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no scale changed" in done.stdout
    assert done.stderr.strip() == ""


def test_files_for_ci(kvcal: Callable[..., Any], old: Path, new: Path, tmp_path: Path) -> None:
    scale_fidelity(new, "kl_mean", 2.0)
    outcome = kvcal("diff", old, new, "--junit", "diff.xml", "--summary", "summary.md")
    assert outcome.code == 5
    suite = ElementTree.parse(tmp_path / "diff.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("7", "1", "0")
    (failure,) = suite.iter("failure")
    assert "KL mean, K and V is" in str(failure.get("message"))
    summary = (tmp_path / "summary.md").read_text()
    assert "**Verdict: fail.**" in summary
    assert "| KL mean, K and V |" in summary
    assert "WORSE |" in summary
