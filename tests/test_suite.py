"""Suites: what is concluded from scores, and a whole run on a model that was built to find needles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kvcal import continuations, evaluate, generation, recipe, run, suite
from kvcal.errors import ModelError, UsageError
from kvcal.generation import Served
from kvcal.progress import Narrator
from kvcal.retrieval import TASKS
from kvcal.scales import Scales
from kvcal.suite import CANNOT, UNCHANGED, Runner
from tests import induction, tiny
from tests.test_calibrate import token_set
from tests.test_evaluate import prepared

BY_NAME = {task.name: task for task in TASKS}
QUIET = Narrator(Console(stderr=True, quiet=True))


@pytest.fixture(scope="session")
def copier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint of the model that copies. Tests that change files copy it first."""
    folder = tmp_path_factory.mktemp("copier")
    fields = {"samples": 4, "seq_len": 128}
    wanted = recipe.parse(
        {"granularity": "per_head", "calibration": fields, "evaluation": fields | {"samples": 2}}, "tests"
    )
    wanted = wanted.override({"gates.kl_mean": None})
    request = run.Request(str(induction.save(folder / "model")), output=folder / "fp8")
    return run.run_calibrate(request, wanted, QUIET)[1]


def plant_small_scales(folder: Path) -> None:
    """Scales 64 times too small, as if somebody had mistaken a unit."""
    path = folder / "kvcal" / "scales.safetensors"
    found = Scales.load(path)
    Scales({i: {s: t / 64 for s, t in sides.items()} for i, sides in found.layers.items()}).save(path)


LONG = ("--suite", "long", "--max-length", "400", "--depths", "2", "--prompts", "3", "--device", "cpu")


def test_a_needle_is_found_over_a_good_cache_and_lost_over_a_bad_one(
    copier: Path, tmp_path: Path, kvcal: Callable[..., Any]
) -> None:
    good = kvcal("evaluate", copier, *LONG, "--json")
    assert good.code == 0, good.stderr
    (row,) = good.document["tasks"]
    assert (row["name"], row["length"], row["prompts"], row["able"]) == ("needle", 400, 6, True)
    assert row["reference"] == row["quantized"] == 1.0
    assert row["note"] == UNCHANGED
    assert row["low"] < -0.3  # six prompts cannot promise more
    assert row["p_value"] == 1.0
    folder = Path(shutil.copytree(copier, tmp_path / "bad"))
    plant_small_scales(folder)
    bad = kvcal("evaluate", folder, *LONG, "--json").document
    (row,) = bad["tasks"]
    assert row["able"]
    assert row["reference"] == 1.0
    assert row["quantized"] == 0.0
    assert row["high"] < 0
    assert row["p_value"] == pytest.approx(2 / 2**6)
    assert bad["needle"]["reference"] == [[1.0, 1.0]]
    assert bad["needle"]["quantized"] == [[0.0, 0.0]]
    assert bad["areas"] == {"needle": {"reference": 1.0, "quantized": 0.0}}
    assert json.loads((folder / "kvcal" / "suite.json").read_text()) == bad


def test_same_seed_same_record_other_seed_other_prompts(copier: Path, kvcal: Callable[..., Any]) -> None:
    few = (*LONG[:4], "--depths", "1", "--prompts", "1", "--device", "cpu", "--json")
    one, again, other = (kvcal("evaluate", copier, *few, "--seed", seed).document for seed in ("0", "0", "5"))
    assert [one.pop("stages").keys(), again.pop("stages").keys()] == [{"load", "retrieve"}] * 2
    assert one == again
    assert (one["seed"], other["seed"]) == (0, 5)


def test_a_task_that_nobody_can_do_says_nothing_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcal.suite.TASKS", (BY_NAME["needle"], BY_NAME["variables"]))
    runner = Runner(induction.build(), tiny.build_tokenizer(), Served(None), Served(None), {257})
    wanted = replace(suite.resolve("full", 600, depths=1, each=2), lengths=())
    (row,) = suite.others(wanted, runner, pytest.fail)
    assert row.reference == row.quantized
    assert not row.able
    assert row.note == CANNOT
    assert (row.low, row.high, row.p_value) == (None, None, None)
    assert suite.areas([row]) == {}


def test_every_part_is_in_the_record_and_within_eighty_columns(
    tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    model = tiny.save(tmp_path / "model", max_position_embeddings=700, num_hidden_layers=1)
    kvcal("calibrate", "--model", model, *small, "--output", tmp_path / "out")
    options = ("--suite", "full", "--depths", "1", "--prompts", "1", "--chunk", "100", "--round-query")
    done = kvcal("evaluate", tmp_path / "out", *options, "--summary", "s.md")
    assert done.code == 0, done.stderr
    summary = (tmp_path / "s.md").read_text()
    tasks = json.loads((tmp_path / "out" / "kvcal" / "suite.json").read_text())["tasks"]
    for task in tasks:
        assert (
            f"| {task['name']} | {task['length']:,} | {task['prompts']} | {task['reference']:.3f} |"
            in summary
        )
    assert all(words in summary for words in ("# Suite full on ", "| K and V |", "own greedy text", CANNOT))
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in ("own greedy text", "16-bit cache", "quantized cache", CANNOT, "fidelity over"):
        assert words in done.stdout
    assert "left out: coreference needs" in done.stderr
    record = json.loads((tmp_path / "out" / "kvcal" / "suite.json").read_text())
    assert record.keys() >= {"suite", "seed", "needle", "tasks", "continuations", "versions", "text", "areas"}
    assert (record["suite"], record["round_query"], record["chunk"]) == ("full", True, 100)
    assert [row["name"] for row in record["tasks"]] == [task.name for task in TASKS[:-1]]
    assert {row["length"] for row in record["tasks"]} == {700}
    assert record["needle"]["lengths"] == [700]
    assert record["needle"]["depths"] == [0.5]
    assert record["text"]["fidelity"]["tokens"] == 96
    assert record["continuations"]["prompts"] == 2
    assert kvcal("check", tmp_path / "out").code == 0
    assert kvcal("report", tmp_path / "out").code == 0
    assert "Needle, quantized cache" in (tmp_path / "out" / "kvcal" / "report.html").read_text()


# What a suite consists of


@pytest.mark.parametrize(
    ("name", "context", "limit", "lengths", "task_lengths"),
    [
        ("quick", 8192, None, (512, 1024), (512,)),
        ("quick", 256, None, (128, 256), (128,)),
        ("long", 8192, None, (512, 1024, 2048, 4096, 8192), ()),
        ("long", 8192, 3000, (750, 1500, 3000), ()),
        ("full", 8192, 2048, (512, 1024, 2048), (512, 1024, 2048)),
        ("full", 300, None, (300,), (300,)),
    ],
)
def test_lengths(name: str, context: int, limit: int | None, lengths: Any, task_lengths: Any) -> None:
    found = suite.resolve(name, context, max_length=limit)
    assert (found.lengths, found.task_lengths) == (lengths, task_lengths)
    assert found.depths[0] == 0
    assert found.depths[-1] == 1


def test_options_of_a_suite() -> None:
    found = suite.resolve("long", 1024, depths=5, each=7, seed=3)
    assert found.depths == (0, 0.25, 0.5, 0.75, 1)
    assert (found.prompts, found.seed) == (7, 3)
    assert found.tokens == 5 * 7 * (512 + 1024)
    assert suite.resolve("full", 512, depths=1, each=1).tokens == 512 * len(TASKS)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--suite", "short"), 2, "unknown suite 'short'; use quick, long, full"),
        (
            ("--suite", "long", "--max-length", "9999"),
            2,
            "--max-length 9999 is beyond the model's context of 256",
        ),
        (("--max-length", "64"), 2, "--max-length is for suites; add --suite"),
        (("--seed", "1"), 2, "--seed is for suites"),
        (("--depths", "1"), 2, "--depths is for suites"),
        (("--prompts", "1"), 2, "--prompts is for suites"),
        (("--round-query",), 2, "--round-query is for suites"),
        (("--suite", "long"), 2, "needle needs"),
        (("--suite", "quick", "--device-map", "layerwise"), 2, "--suite decodes token by token"),
    ],
)
def test_refusals(
    exported: Path, kvcal: Callable[..., Any], arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = kvcal("evaluate", exported, *arguments)
    assert done.code == code
    assert message in done.stderr


def test_no_format_rounds_q_that_no_kernel_attends_in(folded: Path, kvcal: Callable[..., Any]) -> None:
    done = kvcal("evaluate", folded, "--suite", "quick", "--round-query")
    assert done.code == 3
    assert "--round-query: no kernel computes attention in int8_per_token_head" in done.stderr


# What follows from scores


@pytest.mark.parametrize(
    ("pairs", "guess", "able"),
    [
        ([(1.0, 1.0)] * 6, 0.0, True),
        ([(1.0, 0.0)] * 6, 0.5, True),
        ([(1.0, 1.0)] * 3, 0.5, False),  # three right answers can be luck
        ([(0.5, 0.5)] * 50, 0.5, False),
        ([(0.0, 0.0)] * 50, 0.0, False),
        ([(0.0, 1.0)] * 50, 0.0, False),  # whatever the quantized cache does
        ([(0.08, 0.0)] * 5000, 0.0, False),  # next to nothing to lose
    ],
)
def test_a_model_is_able_if_it_beats_guessing_for_certain(pairs: Any, guess: float, able: bool) -> None:
    found = suite.row("task", 512, pairs, guess=guess, seed=0)
    assert found.able == able
    assert (found.note == CANNOT) == (not able)
    assert (found.low is None) == (found.p_value is None) == (not able)


def test_areas_are_over_length() -> None:
    rows = [
        suite.row("a", length, [(1.0, found)] * 8, guess=0, seed=0)
        for length, found in ((2048, 0.0), (512, 1.0), (1024, 1.0))
    ]
    assert suite.areas(rows) == {"a": {"reference": 1.0, "quantized": pytest.approx(2 / 3)}}


# The model's own text


def test_continuations_against_one_pass_in_float64() -> None:
    tokens = token_set([30, 26, 21])
    model, _, cache, _ = prepared("llama", tokens)
    model = model.double()
    prompts = [sample[:15] for sample in tokens.samples]
    found = continuations.measure(
        model, Served(None, chunk=4), Served(cache, chunk=4), prompts, 12, stop=(), seed=0
    )
    kl, same = [], []
    for prompt, length, at in zip(prompts, found.lengths, found.divergence, strict=True):
        texts = [_decoded(model, held, prompt, 12) for held in (None, cache)]
        assert length == 12
        differs = [a != b for a, b in zip(*texts, strict=True)]
        assert at == (differs.index(True) if any(differs) else None)
        ids = torch.tensor([[*prompt, *texts[0]]])
        with torch.inference_mode():
            p = model(ids).logits[0, 14:-1].log_softmax(-1)
            with evaluate.through(model, cache):
                q = model(ids, use_cache=False).logits[0, 14:-1].log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    assert found.tokens == 36
    assert found.kl_mean == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
    assert found.top1_agreement == pytest.approx(float(torch.cat(same).double().mean()))
    assert found.reference_agreement == 1.0
    assert found.kl_low is not None
    assert found.kl_low < found.kl_mean < found.kl_high  # type: ignore[operator]
    assert found.diverged == sum(at is not None for at in found.divergence) > 0


def _decoded(model: Any, cache: Any, prompt: Any, room: int) -> list[int]:
    text = list(prompt)
    with torch.inference_mode(), evaluate.through(model, cache):
        for _ in range(room):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def test_a_model_without_text_of_its_own_is_refused() -> None:
    tokens = token_set([20])
    model, _, cache, _ = prepared("llama", tokens)
    everything = range(model.config.vocab_size)
    with pytest.raises(ModelError, match="ends every held-out text at once"):
        continuations.measure(model, Served(None), Served(cache), tokens.samples, 5, everything, seed=0)


def test_logits_that_are_no_numbers_are_refused() -> None:
    tokens = token_set([20])
    model, _, _, _ = prepared("llama", tokens)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="logits hold NaN"):
        generation.greedy(model, Served(None), tokens.samples[0], 5, stop=())


def test_needles_too_long_for_a_length_are_an_error() -> None:
    runner = Runner(None, tiny.build_tokenizer(), Served(None), Served(None), ())
    with pytest.raises(UsageError, match="needle needs"):
        suite.needles(suite.resolve("quick", 128), runner)


@pytest.mark.slow
def test_the_demo_model_finds_a_near_needle_and_loses_it_over_a_bad_cache(
    tmp_path: Path, kvcal: Callable[..., Any]
) -> None:
    samples = ("--samples", "2", "--evaluation-samples", "1", "--seq-len", "256")
    done = kvcal("calibrate", "--model", "demo", *samples, "--output", tmp_path / "demo")
    assert done.code == 0, done.stderr
    options = ("--suite", "long", "--max-length", "256", "--depths", "2", "--prompts", "3", "--json")
    (good,) = kvcal("evaluate", tmp_path / "demo", *options).document["tasks"]
    plant_small_scales(tmp_path / "demo")
    (bad,) = kvcal("evaluate", tmp_path / "demo", *options).document["tasks"]
    assert good["able"]
    assert good["quantized"] >= good["reference"] - 0.2
    assert bad["high"] < 0
