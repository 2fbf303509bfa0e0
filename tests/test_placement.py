"""A model over CPU and disk, or taken layer by layer, goes through the whole job as one in memory does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvcal import arch, calibrate, evaluate, models, placement, scales, sources, validate
from kvcal.cache import QuantizedCache
from kvcal.calibrate import View
from kvcal.errors import ModelError, UsageError
from kvcal.evaluate import Variant
from kvcal.formats import FP8_E4M3
from tests import tiny
from tests.test_calibrate import MIXED, plan_for, token_set
from tests.test_layerwise import require_equal

MAPS = ("auto", "layerwise")
# Weights that are stored otherwise than the model has them, tied ones, and several kinds of masks.
FAMILIES = ["mixtral", "gemma2", "gpt_neox"]


def limit_of(folder: Path) -> str:
    """Memory for some of the layers, in float32."""
    return f"cpu={(folder / 'model.safetensors').stat().st_size * 3 // 2000}KB"


def place(device_map: str, folder: Path) -> tuple[str, ...]:
    limit = ("--max-memory", limit_of(folder)) if device_map == "auto" else ()
    return ("--device", "cpu", "--device-map", device_map, *limit)


@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_job(
    family: str, device_map: str, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    folder = tiny.save(tmp_path / "model", family)
    options = ("--model", folder, "--granularity", "per_head", "--json", *small)
    plain = kvcal("calibrate", "--output", tmp_path / "plain", "--device", "cpu", *options)
    assert plain.code == 0, plain.stderr
    done = kvcal("calibrate", "--output", tmp_path / "out", *options, *place(device_map, folder))
    assert done.code == 0, done.stderr
    same = ("fidelity", "fidelity_fp8_attention", "attention_error", "layers")
    assert {key: done.document[key] for key in same} == {key: plain.document[key] for key in same}
    written, expected = (load_file(tmp_path / f / "kvcal-scales.safetensors") for f in ("out", "plain"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    manifest = json.loads((tmp_path / "out" / "kvcal" / "manifest.json").read_text())
    assert manifest["compute"]["device_map"] == device_map

    again = kvcal("evaluate", tmp_path / "out", "--json", *place(device_map, folder))
    assert again.code == 0, again.stderr
    assert again.document["fidelity"] == done.document["fidelity"]
    assert kvcal("validate", tmp_path / "out", *place(device_map, folder)).code == 0


def test_auto_leaves_on_the_disk_what_is_over_the_limit(llama_folder: Path) -> None:
    spec = arch.read(sources.read_config(llama_folder))
    model = placement.load(
        llama_folder, spec, placement.named("cpu", "auto", limit_of(llama_folder)), models.TRUST_NOTHING
    )
    assert {"cpu", "disk"} <= set(map(str, model.hf_device_map.values()))
    assert any(p.is_meta for p in model.parameters())
    whole = models.load(llama_folder, spec, torch.device("cpu"), models.TRUST_NOTHING)
    for name, parameter in whole.named_parameters():
        assert torch.equal(models.weight(model, name), parameter)


def test_attention_weighted_scales_read_weights_wherever_they_are(
    tmp_path: Path, llama_folder: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    (tmp_path / "r.yaml").write_text("scale: {objective: attention}\n")
    options = ("--model", llama_folder, "--recipe", tmp_path / "r.yaml", *small)
    for name in ("one", *MAPS):
        where = ("--device", "cpu") if name == "one" else place(name, llama_folder)
        done = kvcal("calibrate", "--output", tmp_path / name, *options, *where)
        assert done.code == 0, done.stderr
    expected = load_file(tmp_path / "one" / "kvcal-scales.safetensors")
    for name in MAPS:
        found = load_file(tmp_path / name / "kvcal-scales.safetensors")
        assert all(torch.equal(found[key], scale) for key, scale in expected.items())


@pytest.mark.parametrize("device_map", MAPS)
def test_folds_are_refused_before_weights_load(
    device_map: str, planted_folder: Path, kvcal: Callable[..., Any]
) -> None:
    options = ("--model", planted_folder, "--format", "int8_per_token_head")
    done = kvcal("calibrate", *options, *place(device_map, planted_folder))
    assert done.code == 3
    assert f"--device-map {device_map}: folds are chosen and proven on weights in memory" in done.stderr


@pytest.mark.parametrize("device_map", MAPS)
def test_quantized_weights_are_refused_by_name(device_map: str, tmp_path: Path) -> None:
    folder = tiny.in_fp8(tiny.save(tmp_path / "model"))
    spec = arch.read(sources.read_config(folder))
    with pytest.raises(ModelError, match=r"its weights are quantized \(fp8\) .* use --device-map one"):
        placement.load(folder, spec, placement.named("cpu", device_map), models.TRUST_NOTHING)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("cpu", "layered"), "unknown device map 'layered'; use one, auto, layerwise"),
        (("cpu", "layerwise", "cpu=1GiB"), "--max-memory is for --device-map auto"),
        (("cpu", "one", "cpu=1GiB"), "--max-memory is for --device-map auto"),
        (("cpu", "auto", "cpu"), "give DEVICE=SIZE"),
        (("cpu", "auto", "cpu=much"), "give DEVICE=SIZE"),
        (("cpu", "auto", "gpu=1GiB"), "give DEVICE=SIZE"),
        (("cpu", "auto", "97=1GiB"), "'cuda:97' was asked for"),
    ],
)
def test_placements_that_cannot_be_meant(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        placement.named(*options)


def spread_is_whole(folder: Path, limits: str) -> set[str]:
    """Statistics of a spread model against one on the first GPU; the devices of the spread one."""
    spec, tokens = arch.read(sources.read_config(folder)), token_set(MIXED)
    whole = models.load(folder, spec, torch.device("cuda:0"), models.TRUST_NOTHING)
    where = placement.named("cuda", "auto", limits)
    spread = placement.load(folder, spec, where, models.TRUST_NOTHING)
    wanted = (View(skip=2),)
    expected, found = (
        calibrate.views(model, spec.layers, 3, tokens, wanted, collect="distribution")[wanted[0]]
        for model in (whole, spread)
    )
    require_equal(found, expected)
    cache = QuantizedCache(FP8_E4M3, scales.compute(expected, plan_for(whole)))
    variants = {"k, v, q": Variant(cache, with_query=True)}
    assert evaluate.fidelities(spread, variants, 3, tokens) == evaluate.fidelities(whole, variants, 3, tokens)
    assert validate.validate(spread, cache, tokens) == validate.validate(whole, cache, tokens)
    return set(map(str, spread.hf_device_map.values()))


@pytest.mark.gpu
def test_a_gpu_takes_its_turn_with_weights_on_the_cpu_and_the_disk(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", num_hidden_layers=6)
    size = (folder / "model.safetensors").stat().st_size // 1000
    found = spread_is_whole(folder, f"0={size * 2 // 3}KB,cpu={size // 3}KB")
    assert {"0", "disk"} <= found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_two_gpus(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", num_hidden_layers=6)
    size = (folder / "model.safetensors").stat().st_size // 1000
    assert spread_is_whole(folder, f"0={size}KB,1={size * 2}KB") == {"0", "1"}
