"""A checkpoint is written whole or not at all, and the base model stays as it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvcal import (
    check,
    evaluate,
    folding,
    formats,
    gates,
    manifest,
    markdown,
    measure,
    models,
    report,
    scales,
    statistics,
)
from kvcal.errors import ModelError, OutputError
from kvcal.export import bundle, folded
from kvcal.transforms import proof, record
from tests import tiny
from tests.conftest import Outcome

SCALE = "model.layers.0.self_attn.k_scale"
BUNDLE = bundle.Bundle({SCALE: torch.ones(1)}, {"quant_method": "compressed-tensors", "config_groups": {}})

Kvcal = Callable[..., Outcome]


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of change of every file below a folder."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def shard(folder: Path) -> Path:
    """Split the single weight file of a checkpoint in two."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def like_the_hub_cache(folder: Path) -> Path:
    """Files as links into a folder of blobs, as huggingface_hub keeps them."""
    blobs = folder.with_name("blobs")
    blobs.mkdir()
    for index, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(index))
        path.symlink_to(Path("..") / "blobs" / str(index))
    return folder


@pytest.fixture(params=["single", "sharded", "linked", "sharded and linked"])
def base(request: pytest.FixtureRequest, copied: Path) -> Path:
    """A base model in each way its weights may lie there."""
    if "sharded" in request.param:
        shard(copied)
    return like_the_hub_cache(copied) if "linked" in request.param else copied


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor where the folder's index says it is."""
    weight_map = models.weight_map(folder)
    files = {file: load_file(folder / file) for file in set(weight_map.values())}
    return {name: files[file][name] for name, file in weight_map.items()}


def write(base: Path, output: Path) -> None:
    """Export without a calibration before it."""
    with bundle.staging(output, overwrite=False, base=base) as stage:
        bundle.write(BUNDLE, base, stage.folder)
        stage.commit()


def test_weights_are_hard_links_and_the_base_is_as_it_was(base: Path, tmp_path: Path):
    before, weights, output = contents(base), stored(base), tmp_path / "out"
    write(base, output)
    assert contents(base) == before
    assert not list(tmp_path.glob(".*"))

    originals = {path.resolve().stat().st_ino for path in base.glob("*.safetensors")}
    copies = {path.stat().st_ino for path in output.glob("*.safetensors")}
    assert originals < copies
    assert len(copies - originals) == 1
    assert not any(path.is_symlink() for path in output.rglob("*"))
    found = stored(output)
    assert found.keys() == weights.keys() | {SCALE}
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_only_config_index_and_one_shard_are_new(base: Path, tmp_path: Path):
    write(base, tmp_path / "out")
    known = {digest for digest, _ in contents(base).values()}
    new = {name for name, (digest, _) in contents(tmp_path / "out").items() if digest not in known}
    assert new == {"config.json", "model.safetensors.index.json", bundle.SCALE_SHARD}
    small_files = {name for name in names(base) if ".safetensors" not in name}
    assert small_files <= set(names(tmp_path / "out"))


def test_transformers_loads_the_same_weights(base: Path, tmp_path: Path):
    write(base, tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    del config.quantization_config
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", config=config, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) == {SCALE}
    expected = AutoModelForCausalLM.from_pretrained(base, dtype="auto").state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_run_leaves_its_records(llama_folder: Path, kvcal: Kvcal, small: tuple[str, ...], tmp_path: Path):
    assert kvcal("calibrate", "--model", llama_folder, "--output", "out", *small).code == 0
    assert names(tmp_path / "out" / "kvcal") == [
        "manifest.json",
        "plan.json",
        "recipe.yaml",
        "report.html",
        "report.json",
        "report.md",
        "samples.json",
        "scales.safetensors",
        "statistics.safetensors",
    ]


@pytest.mark.parametrize("flags", [(), ("--deliver", "both")], ids=["metadata", "both"])
def test_scales_are_recorded_where_they_are_written(
    flags: tuple[str, ...], llama_folder: Path, kvcal: Kvcal, small: tuple[str, ...], tmp_path: Path
):
    assert kvcal("calibrate", "--model", llama_folder, "--output", "out", *small, *flags).code == 0
    assert (tmp_path / "out" / "kvcal" / "scales.safetensors").exists()
    assert (tmp_path / "out" / bundle.SCALE_SHARD).exists()
    assert "quantization_config" in read_json(tmp_path / "out" / "config.json")


@pytest.mark.parametrize(
    "flags",
    [("--deliver", "fold"), *(("--format", f.name) for f in formats.FORMATS if f.dynamic)],
    ids=lambda flags: flags[1],
)
def test_a_folded_checkpoint_is_as_plain_as_its_base(
    flags: tuple[str, ...], planted_folder: Path, kvcal: Kvcal, small: tuple[str, ...], tmp_path: Path
):
    before = contents(planted_folder)
    outcome = kvcal("calibrate", "--model", planted_folder, "--output", "out", *small, *flags)
    assert outcome.code == 0, outcome.stderr
    assert contents(planted_folder) == before
    assert set(names(tmp_path / "out")) == set(names(planted_folder)) | {"kvcal"}
    assert names(tmp_path / "out" / "kvcal") == [
        "folds.json",
        "folds.safetensors",
        "manifest.json",
        "plan.json",
        "recipe.yaml",
        "report.html",
        "report.json",
        "report.md",
        "samples.json",
        "statistics.safetensors",
    ]
    written = read_json(tmp_path / "out" / "config.json")
    assert written == read_json(planted_folder / "config.json")
    assert stored(tmp_path / "out").keys() == stored(planted_folder).keys()
    kept = read_json(tmp_path / "out" / "kvcal" / "report.json")["folds"]["kept"]
    linked = (tmp_path / "out" / "model.safetensors").samefile(planted_folder / "model.safetensors")
    assert linked == (not kept)


def test_config_keeps_all_other_keys(copied: Path, tmp_path: Path):
    tiny.edit_config(copied, own_key={"kept": [1, False]})
    before = read_json(copied / "config.json")
    write(copied, tmp_path / "out")
    after = read_json(tmp_path / "out" / "config.json")
    assert after.pop("quantization_config") == BUNDLE.quantization
    assert after == before


def test_an_existing_quantization_config_keeps_its_groups(
    copied: Path, kvcal: Kvcal, small: tuple[str, ...], tmp_path: Path
):
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head"], "own": 1}
    tiny.edit_config(copied, quantization_config=section)
    assert kvcal("calibrate", "--model", copied, "--output", "out", *small).code == 0
    found = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert found.pop("kv_cache_scheme")["type"] == "float"
    assert found == section


def test_the_scale_shard_can_be_read_by_whoever_may_read_the_rest(copied: Path, tmp_path: Path):
    write(copied, tmp_path / "out")
    mode = (tmp_path / "out" / bundle.SCALE_SHARD).stat().st_mode
    assert stat.S_IMODE(mode) == stat.S_IMODE((tmp_path / "out" / "config.json").stat().st_mode)


def test_further_chat_templates_come_along(copied: Path, tmp_path: Path):
    (copied / "additional_chat_templates").mkdir()
    (copied / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    write(copied, tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").is_file()


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_links_are_impossible_weights_are_copied(
    number: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    before, weights = contents(base), stored(base)
    write(base, tmp_path / "out")
    assert contents(base) == before
    found = stored(tmp_path / "out")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


# --- weights that change


def rewriting(base: Path, output: Path, wanted: bundle.Bundle) -> None:
    with bundle.staging(output, overwrite=False, base=base) as stage:
        bundle.write(wanted, base, stage.folder)
        stage.commit()


NORM, K1 = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"


def test_named_tensors_are_rewritten_and_the_others_left_alone(base: Path, tmp_path: Path):
    before, weights, asked = contents(base), stored(base), []

    def double(name: str, tensor: torch.Tensor) -> torch.Tensor:
        asked.append(name)
        return 2 * tensor

    wanted = bundle.Bundle({}, None, frozenset({NORM, K1, "model.ghost"}), double)
    rewriting(base, tmp_path / "out", wanted)
    assert sorted(asked) == [K1, NORM]  # each once, and what the base lacks not at all
    assert contents(base) == before
    found = stored(tmp_path / "out")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], 2 * tensor if name in asked else tensor)
    assert read_json(tmp_path / "out" / "config.json") == read_json(base / "config.json")


def test_shards_without_a_rewritten_tensor_are_still_links(copied: Path, tmp_path: Path):
    shard(copied)
    wanted = bundle.Bundle({}, None, frozenset({NORM}), lambda _, tensor: tensor + 1)
    rewriting(copied, tmp_path / "out", wanted)
    changed = models.weight_map(copied)[NORM]
    for path in copied.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).samefile(path) == (path.name != changed)


def test_scales_can_go_with_rewritten_weights(base: Path, tmp_path: Path):
    wanted = bundle.Bundle(BUNDLE.tensors, BUNDLE.quantization, frozenset({NORM}), lambda _, t: -t)
    rewriting(base, tmp_path / "out", wanted)
    before, found = stored(base), stored(tmp_path / "out")
    assert found.keys() == before.keys() | {SCALE}
    assert torch.equal(found[NORM], -before[NORM])
    assert not (
        tmp_path / "out" / "model.safetensors"
    ).exists()  # transformers would read it before any index


def test_without_scales_a_single_file_needs_no_index(copied: Path, tmp_path: Path):
    rewriting(copied, tmp_path / "out", bundle.Bundle({}, None))
    assert names(tmp_path / "out") == sorted([*names(copied), "kvcal"])
    assert (tmp_path / "out" / "model.safetensors").samefile(copied / "model.safetensors")


def test_pickled_weights_are_rewritten_as_they_are_converted(copied: Path, tmp_path: Path):
    weights = load_file(copied / "model.safetensors")
    torch.save(weights, copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    before = contents(copied)
    wanted = bundle.Bundle({}, None, frozenset({NORM, "model.ghost"}), lambda _, t: 2 * t)
    rewriting(copied, tmp_path / "out", wanted)
    assert contents(copied) == before
    found = stored(tmp_path / "out")
    assert found.keys() == weights.keys()
    assert all(torch.equal(t, 2 * weights[n] if n == NORM else weights[n]) for n, t in found.items())


# --- failures

_MEASURING: dict[str, tuple[Any, str]] = {
    "tokenizer": (models, "load_tokenizer"),
    "load": (models, "load"),
    "calibrate": (measure.calibrate, "calibrate"),
    "compute": (scales, "compute"),
    "validate": (measure.validate, "validate"),
    "evaluate": (evaluate, "evaluations"),
    "gates": (gates, "apply"),
}
_WRITING: dict[str, tuple[Any, str]] = {
    "link": (bundle, "_link_or_copy"),
    "copy": (shutil, "copyfile"),
    "save_file": (bundle, "save_file"),
    "write_json": (bundle, "write_json"),
    "check": (check, "check"),
    "build": (report, "build"),
    "statistics": (statistics, "save_file"),
    "scales": (scales, "save_file"),
    "manifest": (manifest, "build"),
    "markdown": (markdown, "render"),
    "rename": (os, "rename"),
}
STEPS = _MEASURING | _WRITING
_FOLDING: dict[str, tuple[Any, str]] = {
    "split": (folding, "split"),
    "choose": (folding, "choose"),
    "block errors": (proof, "block_errors"),
    "rounded again": (proof, "rounded_again"),
    "prove written": (measure, "prove_written"),
}
_WRITING_FOLDS: dict[str, tuple[Any, str]] = {
    "read shard": (bundle, "load_file"),
    "rewrite": (folded.Folding, "_rewrite"),
    "save shard": (bundle, "save_file"),
    "transforms": (record, "save_file"),
    "record": (folded, "write_json"),
}
FOLD_STEPS = _FOLDING | _WRITING_FOLDS
FAULTS = {
    "bug": (RuntimeError("planted"), 1),
    "disk": (OSError(errno.EIO, "Input/output error"), 7),
    "Ctrl-C": (KeyboardInterrupt(), 130),
}


@pytest.mark.parametrize(
    ("step", "fault"),
    [(step, "bug") for step in _MEASURING]
    + [(step, fault) for step in _WRITING for fault in ("disk", "Ctrl-C")],
)
def test_a_failure_at_any_step_leaves_base_and_output_as_they_were(
    step: str,
    fault: str,
    llama_folder: Path,
    kvcal: Kvcal,
    small: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    leaves_nothing(STEPS[step], fault, llama_folder, kvcal, small, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("step", "fault"),
    [(step, "bug") for step in _FOLDING]
    + [(step, fault) for step in _WRITING_FOLDS for fault in ("disk", "Ctrl-C")],
)
def test_a_failure_while_weights_are_folded_leaves_base_and_output_as_they_were(
    step: str,
    fault: str,
    planted_folder: Path,
    kvcal: Kvcal,
    small: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    flags = (*small, "--format", "int8_per_token_head")
    leaves_nothing(FOLD_STEPS[step], fault, planted_folder, kvcal, flags, tmp_path, monkeypatch)


def leaves_nothing(
    step: tuple[Any, str],
    fault: str,
    base: Path,
    kvcal: Kvcal,
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = contents(base)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("work")
    error, code = FAULTS[fault]

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(*step, fail)
        outcome = kvcal("calibrate", "--model", base, "--output", "out", "--overwrite", *flags)
    assert outcome.code == code, outcome.stderr
    assert sum(line.startswith("error:") for line in outcome.stderr.splitlines()) == 1
    assert contents(base) == before
    left = set() if fault == "disk" else {".out.kvcal-state"}  # what --resume goes on from
    assert set(names(tmp_path)) - left == {"out"}
    assert names(tmp_path / "out") == ["precious"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=repr)
def test_a_replaced_output_comes_back_if_the_second_rename_fails(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("work")
    rename, calls = os.rename, []

    def fail_once(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(type(error)), bundle.staging(tmp_path / "out", overwrite=True) as stage:
        stage.commit()
    assert (tmp_path / "out" / "precious").read_text() == "work"
    assert names(tmp_path) == ["out"]


def test_overwrite_replaces_after_success(
    llama_folder: Path, kvcal: Kvcal, small: tuple[str, ...], tmp_path: Path
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("work")
    assert kvcal("calibrate", "--model", llama_folder, "--output", "out", "--overwrite", *small).code == 0
    assert "config.json" in names(tmp_path / "out")
    assert "old" not in names(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_an_output_that_is_a_link_is_replaced_and_its_target_kept(tmp_path: Path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").write_text("work")
    (tmp_path / "out").symlink_to("target")
    with bundle.staging(tmp_path / "out", overwrite=True) as stage:
        stage.commit()
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "target" / "precious").read_text() == "work"


def test_an_output_that_appeared_meanwhile_is_not_replaced(tmp_path: Path):
    def work() -> None:
        with bundle.staging(tmp_path / "out", overwrite=False) as stage:
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "precious").write_text("work")
            stage.commit()

    with pytest.raises(OutputError, match="exists"):
        work()
    assert (tmp_path / "out" / "precious").read_text() == "work"
    assert names(tmp_path) == ["out"]


def test_parents_that_were_made_for_nothing_go_again(tmp_path: Path):
    def fail() -> None:
        with bundle.staging(tmp_path / "a" / "b" / "out", overwrite=False):
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert names(tmp_path) == []


def test_a_failed_gate_leaves_records_and_no_checkpoint(
    llama_folder: Path, kvcal: Kvcal, small: tuple[str, ...], tmp_path: Path
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("work")
    (tmp_path / "strict.yaml").write_text("gates: {kl_mean: 1.0e-9}\n")
    command = (
        "calibrate",
        "--model",
        llama_folder,
        "--recipe",
        "strict.yaml",
        "--output",
        "out",
        "--overwrite",
    )
    for _ in range(2):  # records of an earlier failure are replaced
        outcome = kvcal(*command, *small)
        assert outcome.code == 5
        error = outcome.stderr.splitlines()[-1]
        assert error.startswith("error: kl_mean is ")
        assert "must be at most 1e-09; no checkpoint was written, records are in" in error
        assert names(tmp_path) == ["out", "out.failed", "strict.yaml"]
        assert names(tmp_path / "out") == ["precious"]
        assert not list((tmp_path / "out.failed").rglob("config.json"))
        found = read_json(tmp_path / "out.failed" / "report.json")
        assert found["verdict"] == "fail"
        assert [gate["passed"] for gate in found["gates"]] == [False]


# --- bases that carry scales already


def test_an_output_serves_as_base_and_gets_no_scales_twice(
    base: Path, kvcal: Kvcal, small: tuple[str, ...], tmp_path: Path
):
    kvcal("calibrate", "--model", base, "--output", "first", *small)
    before = contents(tmp_path / "first")
    outcome = kvcal(
        "calibrate", "--model", "first", "--output", "second", "--granularity", "per_head", *small
    )
    assert outcome.code == 0, outcome.stderr
    assert contents(tmp_path / "first") == before
    first, second = stored(tmp_path / "first"), stored(tmp_path / "second")
    assert first.keys() == second.keys()
    assert second[SCALE].shape == (2, 1, 1)
    assert len(list((tmp_path / "second").glob("*.safetensors"))) == len(list(base.glob("*.safetensors"))) + 1
    section = read_json(tmp_path / "second" / "config.json")["quantization_config"]
    assert section["kv_cache_scheme"]["strategy"] == "attn_head"


def test_a_base_with_scales_among_its_weights_is_refused_by_name(
    copied: Path, kvcal: Kvcal, small: tuple[str, ...], tmp_path: Path
):
    tensors = load_file(copied / "model.safetensors") | {SCALE: torch.ones(1)}
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    outcome = kvcal("calibrate", "--model", copied, "--output", "out", *small)
    assert outcome.code == 4
    error = outcome.stderr.splitlines()[-1]
    assert f"model.safetensors: already carries {SCALE}; calibrate the checkpoint it was made from" in error
    assert names(tmp_path) == ["model"]


def test_what_the_index_leaves_out_is_exported_all_the_same(copied: Path, tmp_path: Path):
    shard(copied)
    index = read_json(copied / "model.safetensors.index.json")
    del index["weight_map"]["model.norm.weight"]
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    write(copied, tmp_path / "out")
    assert "model.norm.weight" in stored(tmp_path / "out")


def test_two_shards_that_would_get_one_name_are_refused_and_neither_is_overwritten(
    copied: Path, tmp_path: Path
):
    other = {"other": torch.zeros(3)}
    save_file(other, copied / "model-base.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(load_file(copied / "model.safetensors"), "model.safetensors")
    weight_map["other"] = "model-base.safetensors"
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    before = contents(copied)
    with pytest.raises(ModelError, match=r"two shards that would be model-base\.safetensors"):
        write(copied, tmp_path / "out")
    assert contents(copied) == before


def test_a_big_base_is_linked_without_being_read(copied: Path, tmp_path: Path):
    size = 10 * 10**9
    tensors = {
        f"model.layers.{layer}.weight": {
            "dtype": "BF16",
            "shape": [size // 20],
            "data_offsets": [layer * size // 10, (layer + 1) * size // 10],
        }
        for layer in range(10)
    }
    header = json.dumps(tensors).encode()
    big = copied / "model.safetensors"
    big.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(big, 8 + len(header) + size)

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write(copied, tmp_path / "out")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 200 * 1024  # kilobytes
    assert (tmp_path / "out" / "model-base.safetensors").samefile(big)
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] > size
    assert len(index["weight_map"]) == 11


def test_the_manifest_knows_the_files_that_were_written(exported: Path):
    manifest = json.loads((exported / "kvcal" / "manifest.json").read_text())
    assert sorted(manifest["sha256"]) == [
        "config.json",
        "kvcal-scales.safetensors",
        "model.safetensors.index.json",
    ]
    for name, digest in manifest["sha256"].items():
        assert hashlib.sha256((exported / name).read_bytes()).hexdigest() == digest
