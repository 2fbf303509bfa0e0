"""Every family of the README goes through the whole job on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvcal import arch, folding
from tests import tiny


def test_the_table_of_families_is_the_tested_one() -> None:
    assert tiny.FAMILIES.keys() | tiny.LATENT_FAMILIES.keys() == arch.FAMILIES.keys()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_plan_to_check(
    family: str, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    folder, output = tiny.save(tmp_path / "model", family), tmp_path / "out"
    kv_heads = 6 if family == "gpt_neox" else 2
    options = ("--granularity", "per_head", "--json")
    planned = kvcal("plan", "--model", folder, *options, *small)
    assert planned.code == 0, planned.stderr
    assert planned.document["bytes_per_token"] == {
        "reference": 3 * 2 * kv_heads * 16 * 2,
        "quantized": 3 * 2 * kv_heads * 16,
    }

    done = kvcal("calibrate", "--model", folder, "--output", output, *options, *small)
    assert done.code == 0, done.stderr
    report = done.document
    assert [layer["index"] for layer in report["layers"]] == [0, 1, 2]
    assert 0 < report["fidelity"]["kl_mean"] < 0.1
    assert 0 < report["attention_error"]["worst"] < 0.2

    written = load_file(output / "kvcal-scales.safetensors")
    module = "gpt_neox.layers.{}.attention" if family == "gpt_neox" else "model.layers.{}.self_attn"
    assert sorted(written) == sorted(f"{module.format(i)}.{side}_scale" for i in range(3) for side in "kvq")
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
    kv_heads = 6 if family == "gpt_neox" else 2
    (tmp_path / "r.yaml").write_text("format: int4_per_token_head\ngates: {kl_mean: null}\n")
    options = ("--recipe", tmp_path / "r.yaml", "--json")
    planned = kvcal("plan", "--model", folder, *options, *small)
    assert planned.code == 0, planned.stderr
    assert planned.document["bytes_per_token"] == {
        "reference": 3 * 2 * kv_heads * 32 * 2,
        "quantized": 3 * 2 * kv_heads * (16 + 4),
    }

    done = kvcal("calibrate", "--model", folder, "--output", output, *options, *small)
    assert done.code == 0, done.stderr
    folds = done.document["folds"]
    # Gains of 1 + w cannot change sign without rounding, so Gemma 3 has no turns.
    assert len(folds["kept"]) >= (1 if family == "gemma3_text" else 2), folds
    assert folds["proof"]["block_error"] < 1e-12
    assert folds["reversible"]
    assert 0 < done.document["fidelity"]["kl_mean"] < 0.5
    before, between = load_file(folder / "model.safetensors"), load_file(output / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], between[name])}
    assert changed <= set(json.loads((output / "kvcal" / "folds.json").read_text())["tensors"])
    touched = [any(f".layers.{index}." in name for name in changed) for index in range(3)]
    assert all(touched) or family == "gemma3_text"  # its heads share scales, which round to 1 here
    assert json.loads((output / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert kvcal("check", output).code == 0

    assert kvcal("unfold", output, "--output", again).code == 0
    after = load_file(again / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before)
