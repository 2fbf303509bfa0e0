"""Every family of the README goes through the whole job on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kvcal import arch
from tests import tiny


def test_the_table_of_families_is_the_tested_one() -> None:
    assert set(tiny.FAMILIES) == set(arch.FAMILIES)


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
