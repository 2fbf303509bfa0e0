"""`kvcal compare`: a whole run on tiny models, and what it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvcal import codebooks, comparison, scheme, second_pass, trial
from kvcal.comparison_report import best_within_budgets
from kvcal.errors import PlanRefused
from kvcal.recipe import Recipe
from tests import tiny
from tests.test_calibrate import token_set
from tests.test_storage import scheme_of, spec_of

Kvcal = Callable[..., Any]
QUICK = ["--samples", "4", "--evaluation-samples", "2", "--seq-len", "160", "--batch-size", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compared") / "tiny"
    tiny.save(path, head_dim=32, hidden_size=192)
    return path


def test_every_shipped_scheme_stands_in_one_table(kvcal: Kvcal, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = kvcal("compare", "--model", folder, *QUICK, "--output", out)
    assert done.code == 0, done.stderr
    plain = [name for name in scheme.shipped() if scheme.load(name).mixed is None]
    found = json.loads((out / "compare.json").read_text())
    assert {row["scheme"] for row in found["rows"]} == set(plain)
    bits = [row["bits_per_element"] for row in found["rows"]]
    assert bits == sorted(bits)
    for row in found["rows"]:
        assert row["fidelity"]["kl_mean"] > 0
        assert row["fidelity"]["tokens"] == 320
        assert row["source"]
    table = (out / "compare.md").read_text()
    for name in plain:
        assert re.search(rf"^\| \**{re.escape(name)}\** \|", table, re.MULTILINE), name
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith("written to")) <= 80


def test_mixed_schemes_keep_their_budget_and_say_what_they_chose(kvcal: Kvcal, folder: Path) -> None:
    done = kvcal(
        "compare", "--model", folder, *QUICK, "--schemes", "mixed-3.25,balanced-2,balanced-4", "--json"
    )
    assert done.code == 0, done.stderr
    rows = {row["scheme"]: row for row in done.document["rows"]}
    mixed = rows["mixed-3.25"]
    assert rows["balanced-2"]["bits_per_element"] < mixed["bits_per_element"] <= 3.25
    assert mixed["fidelity"]["kl_mean"] < rows["balanced-2"]["fidelity"]["kl_mean"]
    for side in ("k", "v"):
        chosen = mixed["mixture"][side]
        assert sorted(layer for layers in chosen.values() for layer in layers) == [0, 1, 2]
        assert set(chosen) <= {"balanced-2", "balanced-3", "balanced-4"}


def test_gates_of_a_recipe_hold_for_each_of_its_schemes(kvcal: Kvcal, folder: Path, tmp_path: Path) -> None:
    fields = {"schemes": ["fp8", "balanced-2"], "gates": {"kl_mean": 1e-9}}
    path = tmp_path / "strict.yaml"
    path.write_text(yaml.safe_dump(fields))
    done = kvcal("compare", "--model", folder, *QUICK, "--recipe", path)
    assert done.code == 5
    assert "fp8: kl_mean is" in done.stderr
    assert "balanced-2: kl_mean is" in done.stderr
    calibrate = kvcal("calibrate", "--model", folder, "--recipe", path)
    assert calibrate.code == 3
    assert "use kvcal compare" in calibrate.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--schemes", "kivi-5"], 2, "no scheme named 'kivi-5'; kvcal ships balanced-2"),
        (["--schemes", "fp8,kivi-4", "--output", "."], 7, "exists; give --overwrite"),
    ],
)
def test_refusals_name_what_would_work(
    kvcal: Kvcal, folder: Path, arguments: list[str], code: int, message: str
) -> None:
    done = kvcal("compare", "--model", folder, *QUICK, *arguments)
    assert done.code == code
    assert message in done.stderr


def test_what_a_model_cannot_store_is_refused_if_named_and_left_out_otherwise() -> None:
    spec = spec_of(tiny.build_model("llama"))  # heads of 16 channels
    wanted = {name: scheme.load(name) for name in ("fp8", "kivi-4", "mxfp4", "nvfp4")}
    with pytest.raises(PlanRefused) as refused:
        trial.resolve(Recipe(), spec, wanted, {}, skip=False)
    assert "kivi-4: v: a head of 16 channels does not divide into groups of 32" in str(refused.value)
    assert "mxfp4: k: mxfp4 stores blocks of 32 channels" in str(refused.value)
    left = trial.resolve(Recipe(), spec, wanted, {}, skip=True)
    assert set(left.schemes) == {"fp8", "nvfp4"}
    assert any("left out: kivi-4" in notice for notice in left.notices)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", "fp8"),
        ("fp8-per-head", "fp8"),
        ("vllm-int8-per-token-head", "int8_per_token_head"),
        ("vllm-int4-per-token-head", "int4_per_token_head"),
        ("int8-per-channel", None),
        ("kivi-4", None),
        ("nvfp4", None),
        ("mixed-2.5", None),
    ],
)
def test_what_vllm_serves_is_named(name: str, dtype: str | None) -> None:
    assert trial.served_as(scheme.load(name)) == dtype


def test_a_point_is_efficient_unless_another_is_nowhere_worse() -> None:
    points = {"a": (4.0, 0.1), "b": (4.0, 0.2), "c": (8.0, 0.1), "d": (8.0, 0.01), "e": (2.0, 1.0)}
    assert comparison.efficient(points) == {"a", "d", "e"}
    assert comparison.efficient({"one": (1.0, 1.0), "same": (1.0, 1.0)}) == {"one", "same"}


# Second passes


def test_moving_extremes_follow_llm_compressors_formula() -> None:
    model, tokens = tiny.build_model(), token_set([20, 31, 17])
    layers = {layer.index: layer for layer in spec_of(model).layers}
    found = second_pass.moving_extremes(model, layers, tokens)
    with torch.inference_mode():
        each = [
            model(torch.tensor([s]), use_cache=True).past_key_values.layers[1].values for s in tokens.samples
        ]
    low, high = float(each[0].min()), float(each[0].max())
    for values in each[1:]:
        low += 0.01 * (float(values.min()) - low)
        high += 0.01 * (float(values.max()) - high)
    assert float(found[1]["v"]) == pytest.approx(max(-low, high), rel=1e-5)
    assert float(found[1]["v"]) < max(float(v.abs().max()) for v in each)


def test_fisher_levels_leave_no_trace_and_lie_where_errors_cost() -> None:
    model, tokens = tiny.build_model(), token_set([30, 30])
    spec = spec_of(model)
    layers = {layer.index: layer for layer in spec.layers}
    wide = torch.full((2, 1, 16), 1000.0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    ranges = dict.fromkeys(layers, (-wide, wide))
    found = second_pass.fisher_levels(
        model, layers, ranges, tokens, bits={"k": 3, "v": 3}, skip=1, before_rope=True
    )
    for index in layers:
        assert found[index]["k"].shape == (8,)
        # In a range far too wide all keys lie in the middle, and so do the levels that weigh anything.
        assert float(found[index]["k"].abs().median()) < 0.05
        assert float(found[index]["v"].min()) < -0.3  # V's range is its own
        assert bool((found[index]["v"].diff() > 0).all())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert parameter.requires_grad


def test_fisher_weights_are_those_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny.build_model().double(), token_set([12])
    layers = {layer.index: layer for layer in spec_of(model).layers}
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        codebooks, "count", lambda x, weight: seen.append(weight) or torch.ones(codebooks.BINS)
    )
    one = torch.ones(2, 1, 16)
    second_pass.fisher_levels(
        model,
        layers,
        dict.fromkeys(layers, (-one, one)),
        tokens,
        bits={"k": 2, "v": 2},
        skip=0,
        before_rope=False,
    )
    ids = torch.tensor([tokens.samples[0]])
    projection = model.model.layers[2].self_attn.k_proj
    projection.bias = torch.nn.Parameter(torch.zeros(32, dtype=torch.float64))
    held: list[torch.Tensor] = []
    projection.register_forward_hook(lambda m, i, out: held.append(out) or out.retain_grad())
    logits = model(ids).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
    # Before RoPE the gradient has other components but the same length per pair.
    theirs = held[0].grad[0].view(12, 2, 16).transpose(0, 1)
    expected = theirs.square().sum(-1)
    assert any(torch.allclose(weight.sum(-1)[0].double(), expected, rtol=1e-4, atol=0) for weight in seen)


def rows_of(*points: tuple[str, float, float, str | None]) -> list[Any]:
    from types import SimpleNamespace

    return [
        SimpleNamespace(
            scheme=name, bits_per_element=bits, fidelity=SimpleNamespace(kl_mean=kl), serves=serves
        )
        for name, bits, kl, serves in points
    ]


def test_the_best_within_each_budget_is_named_and_the_best_that_is_served() -> None:
    found = best_within_budgets(
        rows_of(
            ("a", 8.0, 0.01, "fp8"), ("b", 8.5, 0.001, None), ("c", 4.25, 0.02, None), ("d", 4.5, 0.05, "x")
        )
    )
    named = {best["bits"]: (best["scheme"], best["served"]) for best in found}
    assert named == {16.0: ("b", "a"), 8.5: ("b", "a"), 4.5: ("c", "d"), 4.25: ("c", None)}


def test_bits_follow_each_layers_own_geometry() -> None:
    spec = spec_of(tiny.build_model("llama", head_dim=32, hidden_size=192))
    k = {"format": "int4", "granularity": "per_token_head", "scale_bits": 16}
    wanted = {"one": scheme_of(k=k, v=k | {"format": "int8", "scale_bits": 32})}
    found = trial.resolve(Recipe(), spec, wanted, wanted, skip=False)
    assert found.bits(wanted["one"], 512) == pytest.approx((4.5 + 9) / 2)
    assert found.item_bits([(0, "k")], "one", 512) == pytest.approx(4.5)
    assert found.item_bits([(0, "k"), (1, "v")], "one", 512) == pytest.approx(6.75)


def test_candidates_with_different_windows_are_refused() -> None:
    spec = spec_of(tiny.build_model("llama", head_dim=32, hidden_size=192))
    candidates = {name: scheme.load(name) for name in ("kivi-4", "balanced-4")}
    mixed = scheme.parse(
        {"description": "a", "source": "b", "candidates": list(candidates), "mixed": {"bits_budget": 5.0}},
        "x",
    )
    with pytest.raises(PlanRefused, match="different recent tokens"):
        trial.resolve(Recipe(), spec, {"mixed": mixed}, candidates, skip=False)


def test_keys_with_large_biases_want_another_scheme(kvcal: Kvcal, tmp_path: Path) -> None:
    """Rotation spreads what all tokens share over every channel; a scale or a mean per channel bears it."""
    tiny.save_with_key_biases(tmp_path / "model")
    names = "int8-per-channel,vllm-int8-per-token-head,quarot-4,balanced-4,balanced-4-before-rope"
    done = kvcal("compare", "--model", tmp_path / "model", *QUICK, "--schemes", names, "--json")
    assert done.code == 0, done.stderr
    kl = {row["scheme"]: row["fidelity"]["kl_mean"] for row in done.document["rows"]}
    assert kl["int8-per-channel"] * 3 < kl["vllm-int8-per-token-head"]
    assert kl["balanced-4"] * 3 < kl["quarot-4"]
    assert kl["balanced-4-before-rope"] * 3 < kl["quarot-4"]


def test_a_limit_on_kl_takes_no_more_bits_than_it_needs(kvcal: Kvcal, folder: Path, tmp_path: Path) -> None:
    rows = {}
    for name, limit in (("strict", 0.1), ("loose", 10.0)):
        path = tmp_path / f"{name}.yaml"
        fields = {"description": "", "source": "", "candidates": ["balanced-2", "balanced-4"]}
        path.write_text(yaml.safe_dump(fields | {"mixed": {"max_kl": limit, "passes": 12, "samples": 1}}))
        done = kvcal("compare", "--model", folder, *QUICK, "--schemes", path, "--json")
        assert done.code == 0, done.stderr
        (rows[name],) = done.document["rows"]
    assert set(rows["loose"]["mixture"]["k"]) == {"balanced-2"}
    assert rows["strict"]["bits_per_element"] > rows["loose"]["bits_per_element"]
    assert rows["strict"]["fidelity"]["kl_mean"] < rows["loose"]["fidelity"]["kl_mean"]


def test_other_text_can_judge(kvcal: Kvcal, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "judge.txt"
    text.write_text(
        "\n\n".join(f"Paragraph {i} says that {i} and {i + 1} make {2 * i + 1}." for i in range(4000))
    )
    names = ("--schemes", "fp8", "--evaluation-dataset", text, "--json")
    found = kvcal("compare", "--model", folder, *QUICK, *names).document["manifest"]
    assert found["evaluation"]["dataset"] == str(text)
    assert found["calibration"]["dataset"] == "builtin"


def test_objectives_are_benched_for_each_granularity(kvcal: Kvcal, folder: Path) -> None:
    options = ("--samples", "2", "--seq-len", "40", "--formats", "fp8,int3", "--json")
    done = kvcal("bench", "objectives", "--model", folder, *options)
    assert done.code == 0, done.stderr
    assert len(done.document) == 3 * 4 * (1 + 2)
    kl = {
        (r["format"], r["granularity"], r["objective"], r["zero_point"]): r["kl_mean"] for r in done.document
    }
    assert kl["int3", "per_tensor", "mse", "none"] < kl["int3", "per_tensor", "amax", "none"]
