"""Every input that cannot work leaves with one line, its exit code, and nothing written."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcal import formats
from kvcal.export import bundle
from tests import tiny
from tests.conftest import Outcome

USAGE, PLAN, INPUT, OUTPUT, INTERRUPTED = 2, 3, 4, 7, 130
STATE = ".out.kvcal-state"
K1 = "model.layers.1.self_attn.k_proj.weight"
NAN, INF = float("nan"), float("inf")

Break = Callable[[Path], Any]

FOLDS = [
    ("--deliver", "fold"),
    *(("--format", f.name) for f in formats.FORMATS if f.dynamic),
]


def tree(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Everything below a folder: size and time of change of each file."""
    return {
        str(p.relative_to(folder)): None if p.is_dir() else (p.lstat().st_size, p.lstat().st_mtime_ns)
        for p in folder.rglob("*")
    }


def one_line_error(outcome: Outcome, code: int) -> str:
    """The error's only line."""
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("error:")]
    assert outcome.code == code, outcome.stderr
    assert len(lines) == 1
    assert outcome.stderr.endswith(lines[0] + "\n")
    assert "Traceback" not in outcome.stderr
    assert "a bug in kvcal" not in lines[0]
    return lines[0]


@pytest.fixture
def planted_copy(planted_folder: Path, tmp_path: Path) -> Path:
    """A model with outliers to break."""
    return Path(shutil.copytree(planted_folder, tmp_path / "planted"))


@pytest.fixture
def refused(
    kvcal: Callable[..., Outcome], small: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Calibrate, see it refused with nothing written, and give back the error's line."""
    # Handlers of libraries may still hold the stderr of an earlier test.
    monkeypatch.setattr(logging, "raiseExceptions", False)

    def run(code: int, model: Any, *flags: Any, output: Path = tmp_path / "new" / "out") -> str:
        before = tree(tmp_path)
        outcome = kvcal("calibrate", "--model", model, "--output", output, *small, *flags)
        line = one_line_error(outcome, code)
        after = tree(tmp_path)
        if code == INTERRUPTED:  # what --resume goes on from may be left
            after = {path: what for path, what in after.items() if STATE not in path}
        assert after == before
        return line

    return run


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    """Breaks the weight file by changing its tensors."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def poke(name: str, value: float) -> Break:
    return weights(lambda tensors: tensors[name].view(-1)[-1:].fill_(value))


def scaled(name: str, by: float) -> Break:
    return weights(lambda tensors: tensors[name].mul_(by))


def without(name: str) -> Break:
    return weights(lambda tensors: tensors.pop(name))


def config(**changes: Any) -> Break:
    return lambda folder: tiny.edit_config(folder, **changes)


def written(name: str, content: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content)


def removed(*names: str) -> Break:
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name: str, keep: int) -> Break:
    return lambda folder: os.truncate(folder / name, keep)


def sharded(folder: Path) -> dict[str, Any]:
    """Split the weights into two shards; gives back the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {
        name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def lying_index(change: Callable[[dict[str, str]], Any]) -> Break:
    def apply(folder: Path) -> None:
        index = sharded(folder)
        change(index["weight_map"])
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


def other_shard(weight_map: dict[str, str]) -> None:
    weight_map[K1] = next(file for file in weight_map.values() if file != weight_map[K1])


def shard(then: Break) -> Break:
    def apply(folder: Path) -> None:
        sharded(folder)
        then(folder)

    return apply


def twice(folder: Path) -> None:
    """Put a tensor of the first shard into the second too."""
    index = sharded(folder)
    name = next(iter(index["weight_map"]))
    other = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(other) | {name: torch.zeros(2)}, other, metadata={"format": "pt"})


def foreign_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {symbol: index + 1000 for symbol, index in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


SHARD_2 = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

# name -> what is done to a good model, exit code, words of the error
MODELS: dict[str, tuple[Break, int, tuple[str, ...]]] = {
    "no attention layers": (config(model_type="mamba"), PLAN, ("mamba", "no attention layer")),
    "unknown family": (
        config(model_type="nonsense"),
        PLAN,
        ("'nonsense'", "the families that it knows", "llama"),
    ),
    "head size": (config(head_dim=20), PLAN, ("head size 20", "multiple of 16", "16-bit cache")),
    "quantized base": (config(quantization_config={"quant_method": "gptq"}), PLAN, ("gptq", "unquantized")),
    "shard missing": (shard(removed(SHARD_2)), INPUT, (SHARD_2, "missing", "download")),
    "shard truncated": (shard(cut(SHARD_2, 40_000)), INPUT, (SHARD_2, "not a whole", "download it again")),
    "shard empty": (shard(cut(SHARD_2, 0)), INPUT, (SHARD_2, "not a whole", "download it again")),
    "truncated": (cut("model.safetensors", 300_000), INPUT, ("model.safetensors", "not a whole")),
    "truncated header": (cut("model.safetensors", 100), INPUT, ("model.safetensors", "not a whole")),
    "no safetensors": (written("model.safetensors", b"\x80\x02}q\x00."), INPUT, ("not a whole",)),
    "index names a tensor that is nowhere": (
        lying_index(lambda m: m.update(nothing=SHARD_2)),
        INPUT,
        (SHARD_2, "lacks nothing"),
    ),
    "index names the other shard": (lying_index(other_shard), INPUT, (".safetensors: lacks", K1)),
    "index leaves the folder": (
        lying_index(lambda m: m.update(x="../x")),
        INPUT,
        ("'../x'", "plain file name"),
    ),
    "index empty": (lying_index(lambda m: m.clear()), INPUT, (INDEX, "empty")),
    "index of numbers": (lying_index(lambda m: m.update(x=3)), INPUT, (INDEX, "file names")),
    "index garbage": (shard(written(INDEX, b"[1")), INPUT, (INDEX, "not a safetensors index")),
    "tensor in two shards": (twice, INPUT, (SHARD_2, "model-00001-of-00002.safetensors too")),
    "no weights": (removed("model.safetensors"), INPUT, ("has no model.safetensors",)),
    "NaN in q": (poke(K1.replace("k_proj", "q_proj"), NAN), INPUT, ("layer 1", "q_proj.weight", "NaN")),
    "NaN in k": (poke(K1, NAN), INPUT, ("layer 1", K1, "NaN")),
    "infinity in v": (poke(K1.replace("k_proj", "v_proj"), INF), INPUT, ("layer 1", "v_proj.weight")),
    "NaN in an MLP": (poke("model.layers.2.mlp.down_proj.weight", NAN), INPUT, ("layer 2", "mlp.down_proj")),
    "infinity in a norm": (poke("model.norm.weight", -INF), INPUT, ("model.norm.weight", "infinity")),
    "NaN in lm_head": (poke("lm_head.weight", NAN), INPUT, ("lm_head.weight", "NaN")),
    "NaN in an unused embedding": (poke("model.embed_tokens.weight", NAN), INPUT, ("embed_tokens.weight",)),
    "k empty": (scaled(K1, 0.0), INPUT, ("layer 1", "K is zero for every token")),
    "q_proj missing": (
        without(K1.replace("k_proj", "q_proj")),
        INPUT,
        ("layer 1", "q_proj.weight is missing"),
    ),
    "norm missing": (without("model.norm.weight"), INPUT, ("model.norm.weight is missing",)),
    "lm_head missing": (without("lm_head.weight"), INPUT, ("lm_head.weight is missing",)),
    "one layer too few": (
        config(num_hidden_layers=4),
        INPUT,
        ("layer 3", "no weights under model.layers.3", "another model"),
    ),
    "one layer too many": (config(num_hidden_layers=2), INPUT, ("layer 2", "no place", "another model?")),
    "bias without a place": (
        weights(lambda t: t.update({K1.replace("weight", "bias"): torch.zeros(32)})),
        INPUT,
        ("layer 1", "k_proj.bias", "no place"),
    ),
    "vocabulary": (config(vocab_size=300), INPUT, ("[263, 96]", "[300, 96]")),
    "KV heads": (config(num_key_value_heads=3), INPUT, ("layer 0", "[32, 96]", "[48, 96]")),
    "hidden size": (config(hidden_size=48), INPUT, ("has shape", "config.json wants")),
    "no config": (removed("config.json"), INPUT, ("has no config.json",)),
    "config of no object": (written("config.json", b"[]"), INPUT, ("must hold a JSON object",)),
    "config cut": (cut("config.json", 100), INPUT, ("config.json", "cannot be read")),
    "config of bytes": (written("config.json", b"\xff\xfe\x00"), INPUT, ("config.json", "cannot be read")),
    "heads as text": (config(num_attention_heads="6"), INPUT, ("num_attention_heads", "'6'")),
    "no architecture": (config(architectures=None), INPUT, ("architectures", "LlamaForCausalLM")),
    "layer_types": (config(layer_types=["full_attention"]), INPUT, ("layer_types", "3 layers")),
    "rope kind": (config(rope_parameters={"rope_type": "nonsense"}), INPUT, ("cannot build", "nonsense")),
    "activation": (config(hidden_act="nonsense"), INPUT, ("cannot build", "nonsense")),
    "epsilon": (config(rms_norm_eps="x"), INPUT, ("config.json", "rms_norm_eps")),
    "padding id": (config(pad_token_id=999), INPUT, ("cannot be loaded", "adding_idx")),
    "tokenizer missing": (
        removed("tokenizer.json", "tokenizer_config.json"),
        INPUT,
        ("has no tokenizer that can be loaded",),
    ),
    "tokenizer broken": (
        written("tokenizer.json", b'{"x": 1}'),
        INPUT,
        ("has no tokenizer that can be loaded",),
    ),
    "tokenizer cut": (cut("tokenizer.json", 99), INPUT, ("has no tokenizer that can be loaded",)),
    "pickled": (pickled, INPUT, ("pickled", "--allow-pickle", "safetensors")),
    "context shorter than any sample": (config(max_position_embeddings=4), PLAN, ("context",)),
    "logits beyond any perplexity": (scaled("lm_head.weight", 1e6), INPUT, ()),
    "logits beyond float32": (scaled("model.layers.1.self_attn.q_proj.weight", 1e37), INPUT, ("layer 1",)),
    "tokens beyond the vocabulary": (foreign_tokenizer, INPUT, ("token",)),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_used_is_refused(case: str, copied: Path, refused: Callable[..., str]):
    damage, code, words = MODELS[case]
    damage(copied)
    line = refused(code, copied)
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nobody/nothing", ("nobody/nothing", "hub")),
        ("no-such-folder", ("not a model folder", "'demo'")),
        ("./no/such", ("not a model folder",)),
        ("x" * 5000, ("not a model folder",)),
        ("x" * 300 + "/" + "y" * 300, ("hub",)),
        ("nothing.gguf", ("no such GGUF file",)),
    ],
    ids=["hub id", "name", "path", "long name", "long hub id", "gguf"],
)
def test_an_unknown_model_is_refused(model: str, words: tuple[str, ...], refused: Callable[..., str]):
    line = refused(INPUT, model)
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(
    "content", [b"", b"no gguf at all", b"GGUF\x03\0\0\0" + b"\xff" * 64], ids=["empty", "text", "garbage"]
)
def test_a_gguf_file_that_is_none_is_refused_and_the_cache_stays_clean(
    content: bytes, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    cache = tmp_path / "cache"
    (cache / "gguf").mkdir(parents=True)
    monkeypatch.setenv("KVCAL_CACHE", str(cache))
    (tmp_path / "x.gguf").write_bytes(content)
    assert "x.gguf: cannot be converted" in refused(INPUT, tmp_path / "x.gguf")


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVCAL_CACHE", str(tmp_path / "file"))
    (tmp_path / "x.gguf").touch()
    assert "set KVCAL_CACHE" in refused(INPUT, tmp_path / "x.gguf")


# name of the file -> its content, words of the error
DATASETS: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "empty text": ("d.txt", b"", ("d.txt", "no text")),
    "blank text": ("d.txt", b" \n\n \n", ("d.txt", "no text")),
    "too short text": ("d.txt", b"Hi.", ("d.txt",)),
    "text of bytes": ("d.txt", b"\xff\xfe\x00" * 99, ("d.txt", "UTF-8")),
    "empty rows": ("d.jsonl", b"", ("d.jsonl",)),
    "rows without text": ("d.jsonl", b'{"text": ""}\n' * 9, ("d.jsonl", "no text")),
    "too short rows": (
        "d.jsonl",
        b"".join(b'{"text": "%d"}\n' % n for n in range(99)),
        ("d.jsonl", "8 tokens or more"),
    ),
    "wrong column": ("d.jsonl", b'{"body": "x"}\n' * 9, ("no column text", "body", "--dataset-column")),
    "column of numbers": ("d.jsonl", b'{"text": 5}\n' * 9, ("'text' holds int",)),
    "broken rows": ("d.jsonl", b'{"text": "a"}\n{"text"\n', ("d.jsonl", "cannot be read")),
    "no parquet": ("d.parquet", b"PAR1 not", ("d.parquet", "cannot be read")),
}


@pytest.mark.parametrize("case", DATASETS)
def test_a_dataset_that_cannot_be_used_is_refused(
    case: str, tmp_path: Path, llama_folder: Path, refused: Callable[..., str]
):
    name, content, words = DATASETS[case]
    (tmp_path / name).write_bytes(content)
    line = refused(INPUT, llama_folder, "--dataset", tmp_path / name)
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--dataset", "no.txt"), ("no.txt: no such file",)),
        (("--dataset", "no.jsonl"), ("no.jsonl: no such file",)),
        (("--dataset", "nobody/nothing"), ("nobody/nothing", "cannot be read")),
    ],
    ids=["txt", "jsonl", "hub id"],
)
def test_a_missing_dataset_is_refused(
    flags: tuple[str, ...], words: tuple[str, ...], llama_folder: Path, refused: Callable[..., str]
):
    line = refused(INPUT, llama_folder, *flags)
    assert [word for word in words if word not in line] == [], line


def test_the_asked_column_must_be_there(tmp_path: Path, llama_folder: Path, refused: Callable[..., str]):
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n' * 9)
    line = refused(INPUT, llama_folder, "--dataset", tmp_path / "d.jsonl", "--dataset-column", "body")
    assert "no column 'body'" in line
    assert "its columns are text" in line


def test_a_head_that_is_always_zero_is_flagged_and_no_obstacle(
    copied: Path, kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    weights(lambda tensors: tensors[K1][:16].zero_())(copied)
    outcome = kvcal("calibrate", "--model", copied, "--output", "out", *small, "--json")
    assert outcome.code == 0, outcome.stderr
    assert "has a head that is always zero" in outcome.document["layers"][1]["k"]["flags"]


@pytest.mark.parametrize("flags", FOLDS, ids=" ".join)
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_head_that_is_always_zero_is_no_obstacle_to_folds(
    side: str,
    flags: tuple[str, ...],
    planted_copy: Path,
    kvcal: Callable[..., Outcome],
    small: tuple[str, ...],
):
    name = K1.replace("k_proj", f"{side}_proj")
    weights(lambda tensors: tensors[name][:32].zero_())(planted_copy)
    outcome = kvcal("calibrate", "--model", planted_copy, "--output", "out", *small, *flags, "--json")
    assert outcome.code == 0, outcome.stderr
    assert "has a head that is always zero" in outcome.document["layers"][1][side]["flags"]
    assert kvcal("unfold", "out", "--output", "again").code == 0
    before, after = (load_file(f / "model.safetensors") for f in (planted_copy, Path("again")))
    assert all(torch.equal(before[name], after[name]) for name in before)


FOLDED_MODELS: dict[str, tuple[Break, int, tuple[str, ...]]] = {
    "quantized base": (
        config(quantization_config={"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}),
        PLAN,
        ("quantized already (compressed-tensors)", "unquantized model first"),
    ),
    "head size": (config(head_dim=16), PLAN, ("head size 16 is below 32", "use fp8")),
    "NaN in k": (poke(K1, NAN), INPUT, ("layer 1", K1, "NaN")),
    "infinity in the output projection": (
        poke(K1.replace("k_proj", "o_proj"), INF),
        INPUT,
        ("layer 1", "o_proj.weight", "infinity"),
    ),
    "NaN in an MLP": (poke("model.layers.2.mlp.down_proj.weight", NAN), INPUT, ("layer 2", "mlp.down_proj")),
    "K empty": (scaled(K1, 0.0), INPUT, ("layer 1", "K is zero for every token")),
    "truncated": (cut("model.safetensors", 300_000), INPUT, ("model.safetensors", "not a whole")),
}


@pytest.mark.parametrize("case", FOLDED_MODELS)
def test_a_model_that_cannot_be_folded_is_refused(case: str, planted_copy: Path, refused: Callable[..., str]):
    damage, code, words = FOLDED_MODELS[case]
    damage(planted_copy)
    line = refused(code, planted_copy, "--format", "int8_per_token_head")
    assert all(word in line for word in words), line


def test_chats_need_a_template(tmp_path: Path, copied: Path, refused: Callable[..., str]):
    (copied / "chat_template.jinja").unlink()
    turn = {"role": "user", "content": "What is a cache?"}
    rows = (json.dumps({"messages": [turn] * turns}) for turns in range(1, 30))
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    assert "no chat template" in refused(INPUT, copied, "--dataset", tmp_path / "d.jsonl")


def test_samples_longer_than_the_context_are_cut_and_this_is_said(
    copied: Path, kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    tiny.edit_config(copied, max_position_embeddings=32)
    outcome = kvcal("calibrate", "--model", copied, "--output", "out", *small)
    assert outcome.code == 0, outcome.stderr
    said = " ".join(outcome.stderr.split())
    assert "calibration: samples are cut from 48 to 32 tokens, the model's context" in said
    assert "evaluation: samples are cut from 48 to 32 tokens" in said
    manifest = json.loads(Path("out/kvcal/manifest.json").read_text())
    assert manifest["calibration"]["tokens"] == 4 * 32


def test_fewer_samples_than_asked_are_used_and_this_is_said(
    tmp_path: Path, llama_folder: Path, kvcal: Callable[..., Outcome]
):
    (tmp_path / "d.txt").write_text(tiny.text(120))
    flags = ("--dataset", "d.txt", "--samples", "5000", "--evaluation-samples", "2", "--seq-len", "256")
    outcome = kvcal("calibrate", "--model", llama_folder, "--output", "out", "--batch-size", "16", *flags)
    assert outcome.code == 0, outcome.stderr
    manifest = json.loads((tmp_path / "out/kvcal/manifest.json").read_text())
    assert 0 < manifest["calibration"]["samples"] < 5000
    said = " ".join(outcome.stderr.split())
    assert f"{manifest['calibration']['samples']} samples of at most 256 tokens, fewer than the 5000" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--format", "int7"), ("format", "'int7'", "fp8_e4m3", "int4_per_token_head")),
        (("--deliver", "post"), ("deliver", "'post'", "'metadata', 'fold' or 'both'")),
        (("--granularity", "per_moon"), ("per_moon", "per_head")),
        (("--samples", "0"), ("calibration.samples", "0")),
        (("--seq-len", "3"), ("seq_len", "3")),
        (("--recipe", "nothing"), ("nothing", "fp8-per-head")),
        (("--recipe", "no.yaml"), ("no.yaml", "cannot be read")),
        (("--device", "tpu"), ("'tpu'", "cpu, cuda or cuda:N")),
        (("--device", "meta"), ("'meta'", "cpu, cuda or cuda:N")),
        (("--device", "cuda:99"), ("'cuda:99'", "CUDA devices")),
        (("--nonsense",), ("--nonsense",)),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_flags_that_cannot_be_meant_are_bad_usage(
    flags: tuple[str, ...], words: tuple[str, ...], llama_folder: Path, refused: Callable[..., str]
):
    line = refused(USAGE, llama_folder, *flags)
    assert [word for word in words if word not in line] == [], line


def test_with_json_the_error_is_a_document_too(tmp_path: Path, kvcal: Callable[..., Outcome]):
    outcome = kvcal("calibrate", "--model", "no-such-folder", "--output", "out", "--json")
    line = one_line_error(outcome, INPUT)
    assert outcome.document["error"] == {"message": line.removeprefix("error: "), "exit_code": INPUT}


# --- the output folder


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """An output folder that holds somebody's work."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "precious").write_text("work")
    return folder


def test_an_existing_output_is_left_alone(taken: Path, llama_folder: Path, refused: Callable[..., str]):
    assert "pass --overwrite" in refused(OUTPUT, llama_folder, output=taken)


def test_an_empty_folder_is_no_obstacle(
    tmp_path: Path, llama_folder: Path, kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    (tmp_path / "out").mkdir()
    assert kvcal("calibrate", "--model", llama_folder, "--output", "out", *small).code == 0


@pytest.mark.parametrize("flags", [(), ("--overwrite",)], ids=["plain", "overwrite"])
@pytest.mark.parametrize("where", ["file", "file/out", "file/new/out", "dangling", "o" * 300])
def test_an_output_that_cannot_be_a_folder_is_refused(
    where: str, flags: tuple[str, ...], tmp_path: Path, llama_folder: Path, refused: Callable[..., str]
):
    (tmp_path / "file").write_text("work")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "another --output" in refused(OUTPUT, llama_folder, *flags, output=tmp_path / where)


@pytest.mark.parametrize("where", ["/proc/kvcal-out", "/proc/new/kvcal-out", "/sys/kvcal-out", "/"])
def test_a_place_where_nobody_may_write_is_refused(
    where: str, llama_folder: Path, refused: Callable[..., str]
):
    assert "another --output" in refused(OUTPUT, llama_folder, "--overwrite", output=Path(where))


def test_a_missing_permission_is_named(
    llama_folder: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "no permission to write; choose another --output" in refused(OUTPUT, llama_folder)


@pytest.mark.parametrize(
    "where",
    [
        ".",
        "model",
        "model/..",
    ],
)
def test_overwrite_replaces_neither_the_model_nor_the_current_folder(
    where: str, tmp_path: Path, copied: Path, refused: Callable[..., str]
):
    assert "choose another --output" in refused(OUTPUT, copied, "--overwrite", output=tmp_path / where)


def test_a_copy_that_does_not_fit_is_refused_before_it_is_begun(
    llama_folder: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    line = refused(OUTPUT, llama_folder)
    assert "a copy of the weights" in line
    assert "needs none" in line


@pytest.mark.parametrize(
    "full",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))],
    ids=["full", "quota"],
)
def test_a_full_disk_is_named(
    full: OSError, llama_folder: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any, **__: Any) -> None:
        raise full

    monkeypatch.setattr(bundle, "save_file", refuse)
    assert "the disk is full; nothing was left behind" in refused(OUTPUT, llama_folder)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 1 MB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)


@pytest.mark.parametrize("pages", [0, 1, 2, 4, 6, 8, 10, 14])
def test_a_disk_that_really_fills_up_keeps_nothing_of_the_run(
    pages: int, disk: Path, llama_folder: Path, refused: Callable[..., str]
):
    model = Path(shutil.copytree(llama_folder, disk / "model"))
    free = shutil.disk_usage(disk).free
    (disk / "ballast").write_bytes(b"\1" * (free - 4096 * pages))
    assert "the disk is full" in refused(OUTPUT, model, output=disk / "out")
    assert shutil.disk_usage(disk).free == 4096 * pages


def test_another_disk_without_room_for_a_copy_is_refused(
    disk: Path, llama_folder: Path, refused: Callable[..., str]
):
    (disk / "ballast").write_bytes(b"\1" * 700_000)
    assert "a copy of the weights" in refused(OUTPUT, llama_folder, output=disk / "out")


def test_another_disk_with_room_gets_a_copy(
    disk: Path, llama_folder: Path, kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    assert kvcal("calibrate", "--model", llama_folder, "--output", disk / "out", *small).code == 0
    copy = disk / "out" / "model-base.safetensors"
    assert copy.read_bytes() == (llama_folder / "model.safetensors").read_bytes()


def test_a_read_only_disk_is_refused(disk: Path, llama_folder: Path, refused: Callable[..., str]):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert "no permission to write" in refused(OUTPUT, llama_folder, output=disk / "out")


# --- two runs at once


def partial(output: Path, owner: str | None) -> Path:
    """What a run that is writing ``output``, or died over it, has there."""
    folder = output.with_name(f".{output.name}.kvcal-partial")
    (folder / "checkpoint").mkdir(parents=True)
    if owner is not None:
        (folder / "owner").write_text(owner)
    return folder


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_second_run_to_one_output_is_refused_while_the_first_works(
    tmp_path: Path, llama_folder: Path, refused: Callable[..., str]
):
    output = tmp_path / "out"
    with bundle.staging(output, overwrite=False) as stage:
        line = refused(OUTPUT, llama_folder, output=output)
        assert stage.records.is_dir()
    assert f"{output} is being written by another run; wait, or remove" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "owner",
    [None, "", "garbage", f"another-host {dead_pid()}", f"{socket.gethostname()} {os.getpid()}", "\0 " * 9]
    + [f"{socket.gethostname()} {pid}" for pid in (-1, 10**30)],
    ids=["none", "empty", "garbage", "another host", "alive", "bytes", "negative", "no pid"],
)
def test_a_folder_of_a_run_that_may_live_is_not_touched(
    owner: str | None, tmp_path: Path, llama_folder: Path, refused: Callable[..., str]
):
    folder = partial(tmp_path / "out", owner)
    assert f"remove {folder} if it is dead" in refused(OUTPUT, llama_folder, output=tmp_path / "out")


def test_a_folder_of_a_dead_run_is_reclaimed(
    tmp_path: Path, llama_folder: Path, kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    partial(tmp_path / "out", f"{socket.gethostname()} {dead_pid()}")
    assert kvcal("calibrate", "--model", llama_folder, "--output", "out", *small).code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_dead_run_was_replacing_comes_back(
    tmp_path: Path, llama_folder: Path, kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    folder = partial(tmp_path / "out", f"{socket.gethostname()} {dead_pid()}")
    (folder / "replaced").mkdir()
    (folder / "replaced" / "precious").write_text("work")
    outcome = kvcal("calibrate", "--model", llama_folder, "--output", "out", *small)
    assert "pass --overwrite" in one_line_error(outcome, OUTPUT)
    assert list(tree(tmp_path)) == ["out", "out/precious"]


# --- what could run code


def test_pickled_weights_are_loaded_on_request_and_leave_as_safetensors(
    copied: Path, kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    expected = load_file(copied / "model.safetensors")
    pickled(copied)
    outcome = kvcal("calibrate", "--model", copied, "--output", "out", "--allow-pickle", *small)
    assert outcome.code == 0, outcome.stderr
    found = load_file("out/pytorch_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert kvcal("check", "out").code == 0


def test_allowing_pickles_does_not_keep_safetensors_from_being_read(
    llama_folder: Path, kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    outcome = kvcal("calibrate", "--model", llama_folder, "--output", "out", "--allow-pickle", *small)
    assert outcome.code == 0, outcome.stderr


class _Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("flags", [(), ("--allow-pickle",)], ids=["plain", "allow-pickle"])
def test_a_pickle_that_runs_code_does_not_get_to(
    flags: tuple[str, ...], tmp_path: Path, copied: Path, refused: Callable[..., str]
):
    (copied / "model.safetensors").unlink()
    torch.save({K1: _Bomb(tmp_path / "marker")}, copied / "pytorch_model.bin")
    refused(INPUT, copied, *flags)
    assert not (tmp_path / "marker").exists()


@pytest.fixture
def with_code(tmp_path: Path, copied: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model folder that brings code, and the marker that appears when it runs."""
    marker = tmp_path / "marker"
    (copied / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        f"open({str(marker)!r}, 'w').close()\n"
        "class OwnConfig(LlamaConfig): pass\n"
        "class OwnModel(LlamaForCausalLM): config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    tiny.edit_config(copied, auto_map=classes)
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    (copied / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return copied, marker


def test_code_of_the_model_does_not_run_unasked(
    with_code: tuple[Path, Path], kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    folder, marker = with_code
    kvcal("calibrate", "--model", folder, "--output", "out", *small)
    kvcal("evaluate", "out")
    assert not marker.exists()


def test_code_of_an_unknown_family_does_not_run_even_to_be_refused(
    with_code: tuple[Path, Path], refused: Callable[..., str]
):
    folder, _ = with_code
    tiny.edit_config(folder, model_type="own")
    refused(PLAN, folder)


def test_code_of_the_model_runs_on_request(
    with_code: tuple[Path, Path], kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    folder, marker = with_code
    outcome = kvcal("calibrate", "--model", folder, "--output", "out", "--trust-remote-code", *small)
    assert outcome.code == 0, outcome.stderr
    assert marker.exists()


# --- interruption

# Calibrates slowly, and says when it has begun.
_SLOW = """
import sys, time
from kvcal import cli, data
batches = data.TokenSet.batches
def slow(*args):
    for batch in batches(*args):
        yield batch
        print("calibrating", flush=True)
        time.sleep(0.5)
data.TokenSet.batches = slow
cli.main()
"""


def test_an_interrupted_run_leaves_nothing_and_an_existing_output_as_it_was(
    taken: Path, tmp_path: Path, llama_folder: Path
):
    before = tree(tmp_path)
    command = [sys.executable, "-c", _SLOW, "calibrate", "--model", llama_folder, "--output", taken]
    command += ["--overwrite", "--samples", "400", "--seq-len", "48"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "calibrating\n"
    assert (tmp_path / ".out.kvcal-partial").is_dir()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    line = one_line_error(Outcome(process.returncode, "", errors), INTERRUPTED)
    assert line == "error: interrupted; nothing was left behind"
    assert tree(tmp_path) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize(
    ("where", "left"),
    [
        ("kvcal.sources.locate", "nothing was left behind"),
        ("kvcal.calibrate._require_sound", "nothing was left behind"),
        ("kvcal.export.bundle.save_file", "the same command with --resume goes on from "),
    ],
)
def test_a_signal_at_any_time_ends_the_run_the_same_way(
    where: str,
    left: str,
    number: signal.Signals,
    taken: Path,
    llama_folder: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(where, lambda *_, **__: os.kill(os.getpid(), number))
    line = refused(INTERRUPTED, llama_folder, "--overwrite", output=taken)
    assert line.startswith(f"error: interrupted; {left}")
