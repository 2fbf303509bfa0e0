"""Every family of the README goes through the whole job on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvcal import families, folding
from tests import tiny


def test_the_table_of_families_is_the_tested_one() -> None:
    assert tiny.FAMILIES.keys() | tiny.LATENT_FAMILIES.keys() == families.FAMILIES.keys()


# Rounding that sends a token to other experts, and from there through linear layers, is not small any more.
_ALLOWED_KL = {"qwen3_next": 0.2}


def _expected(family: str) -> tuple[list[int], int, str]:
    """Layers with a cache, KV heads, and the names of attention modules as scales have them."""
    layers = [0, 2] if family == "qwen3_next" else [0, 1, 2]
    kv_heads = {"gpt_neox": 6, "gpt2": 6, "opt": 6, "falcon": 1}.get(family, 2)
    modules = {
        "gpt_neox": "gpt_neox.layers.{}.attention",
        "gpt2": "transformer.h.{}.attn.attn",
        "opt": "model.decoder.layers.{}.self_attn",
        "falcon": "transformer.h.{}.self_attention",
    }
    return layers, kv_heads, modules.get(family, "model.layers.{}.self_attn")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_plan_to_check(
    family: str, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    folder, output = tiny.save(tmp_path / "model", family), tmp_path / "out"
    layers, kv_heads, module = _expected(family)
    (tmp_path / "r.yaml").write_text("granularity: per_head\ngates: {kl_mean: null}\n")
    options = ("--recipe", tmp_path / "r.yaml", "--json")
    planned = kvcal("plan", "--model", folder, *options, *small)
    assert planned.code == 0, planned.stderr
    assert planned.document["bytes_per_token"] == {
        "reference": len(layers) * 2 * kv_heads * 16 * 2,
        "quantized": len(layers) * 2 * kv_heads * 16,
    }

    done = kvcal("calibrate", "--model", folder, "--output", output, *options, *small)
    assert done.code == 0, done.stderr
    report = done.document
    assert [layer["index"] for layer in report["layers"]] == layers
    assert 0 < report["fidelity"]["kl_mean"] < _ALLOWED_KL.get(family, 0.1)
    assert 0 < report["attention_error"]["worst"] < 0.2

    written = load_file(output / "kvcal-scales.safetensors")
    assert sorted(written) == sorted(f"{module.format(i)}.{side}_scale" for i in layers for side in "kvq")
    assert json.loads((output / "config.json").read_text())["quantization_config"]["config_groups"] == {}
    assert kvcal("check", output).code == 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_plan_to_unfold(
    family: str,
    tmp_path: Path,
    kvcal: Callable[..., Any],
    small: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every fold that this family has a use for, whether it pays on random weights or not."""
    monkeypatch.setattr(folding, "MARGIN", -1e9)
    folder = tiny.save(tmp_path / "model", family, hidden_size=192, head_dim=32)
    output, again = tmp_path / "out", tmp_path / "again"
    layers, kv_heads, _ = _expected(family)
    (tmp_path / "r.yaml").write_text("format: int4_per_token_head\ngates: {kl_mean: null}\n")
    options = ("--recipe", tmp_path / "r.yaml", "--json")
    planned = kvcal("plan", "--model", folder, *options, *small)
    assert planned.code == 0, planned.stderr
    assert planned.document["bytes_per_token"] == {
        "reference": len(layers) * 2 * kv_heads * 32 * 2,
        "quantized": len(layers) * 2 * kv_heads * (16 + 4),
    }

    done = kvcal("calibrate", "--model", folder, "--output", output, *options, *small)
    assert done.code == 0, done.stderr
    folds = done.document["folds"]
    # Gains of 1 + w cannot change sign without rounding, so these have no turns.
    without_turns = family in ("gemma3_text", "qwen3_next")
    assert len(folds["kept"]) >= (1 if without_turns else 2), folds
    assert folds["proof"]["block_error"] < 1e-12
    assert folds["reversible"]
    assert 0 < done.document["fidelity"]["kl_mean"] < 5 * _ALLOWED_KL.get(family, 0.1)
    before, between = load_file(folder / "model.safetensors"), load_file(output / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], between[name])}
    assert changed <= set(json.loads((output / "kvcal" / "folds.json").read_text())["tensors"])
    touched = [any(f".{index}." in name for name in changed) for index in layers]
    assert all(touched) or without_turns  # their heads share scales, which round to 1 here
    assert json.loads((output / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert kvcal("check", output).code == 0

    assert kvcal("unfold", output, "--output", again).code == 0
    after = load_file(again / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before)


@pytest.mark.parametrize("family", tiny.WITHOUT_ROW)
def test_plan_to_check_without_a_row(
    family: str, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    """Scales beside the weights of models that kvcal knows by their code alone."""
    folder, output = tiny.save(tmp_path / "model", family), tmp_path / "out"
    (tmp_path / "r.yaml").write_text("granularity: per_head\ngates: {kl_mean: null}\n")
    options = ("--recipe", tmp_path / "r.yaml", "--json")
    planned = kvcal("plan", "--model", folder, *options, *small)
    assert planned.code == 0, planned.stderr
    attending = {"lfm2": [0, 2], "granitemoehybrid": [1]}
    of_four = ("gemma3n_text", "gemma4_text")
    layers = attending.get(family, [0, 1, 2, 3] if family in of_four else [0, 1, 2])
    own = {"gemma3n_text": 2, "gemma4_text": 3}.get(family, len(layers))
    widths = 16 + 32 + 16 if family == "gemma4_text" else own * 16
    assert planned.document["layers"] == len(layers)
    assert planned.document["layers_with_own_cache"] == own
    assert planned.document["bytes_per_token"] == {
        "reference": 2 * 2 * widths * 2,
        "quantized": 2 * 2 * widths,
    }

    done = kvcal("calibrate", "--model", folder, "--output", output, *options, *small)
    assert done.code == 0, done.stderr
    assert [layer["index"] for layer in done.document["layers"]] == layers
    assert 0 < done.document["fidelity"]["kl_mean"] < 0.5
    assert 0 < done.document["attention_error"]["worst"] < 0.2
    written, base = load_file(output / "kvcal-scales.safetensors"), load_file(folder / "model.safetensors")
    modules = {name.rpartition(".q_proj")[0] for name in base if name.endswith(".q_proj.weight")}
    modules = {name for name in modules if "vision" not in name and "visual" not in name}
    assert sorted(written) == sorted(f"{module}.{side}_scale" for module in modules for side in "kvq")
    if own < len(layers):  # who reads another layer's cache must read it with that layer's scales
        first, last = (0, 2) if family == "gemma3n_text" else (1, 3)
        for side in "kv":
            name = "model.layers.{}.self_attn." + f"{side}_scale"
            assert torch.equal(written[name.format(first)], written[name.format(last)])
    assert kvcal("check", output).code == 0
    for command in ("evaluate", "validate"):
        again = kvcal(command, output, "--json")
        assert again.code == 0, again.stderr
    refused = kvcal("calibrate", "--model", folder, "--deliver", "fold", "--output", tmp_path / "no", *small)
    assert refused.code == 3
    assert "make Q, K and V is not known" in " ".join(refused.stderr.split())
