"""Every fault that the loader contract forbids is planted in a good checkpoint and must be found.

vLLM accepts most of them without a word and serves scale 1.0 (notes of each rule in ``kvcal/check.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvcal import check, folding, recipe, run
from kvcal.errors import UsageError
from kvcal.progress import Narrator
from tests import tiny

Tensors = dict[str, torch.Tensor]
Break = Callable[[Path], Any]
SHARD = "kvcal-scales.safetensors"
WEIGHTS = "model-base.safetensors"
INDEX = "model.safetensors.index.json"
K0 = "model.layers.0.self_attn.k_scale"
V2 = "model.layers.2.self_attn.v_scale"
Q1 = "model.layers.1.self_attn.q_scale"

READABLE = "files are readable"
CONFIG = "config announces the cache as the engine reads it"
CONSUMED = "engine consumes it for this model"
AGREE = "index and shards agree"
PRESENT = "every layer has k, v and q scales"
NAMES = "no scale under another name"
SHAPES = "shapes and dtypes fit the strategy"
VALUES = "values are finite and above zero"
PLAIN = "config announces nothing but the weights"
FORMAT = "engine has the format for this model"
FOLDED = "folded weights are what was written"


def broken(kvcal: Callable[..., Any], folder: Path) -> dict[str, str]:
    """Rules that ``kvcal check`` finds broken, with the message; it must leave with 6 if there are any."""
    outcome = kvcal("check", folder, "--engine", "vllm", "--json")
    faults = {f["rule"]: f["message"] for f in outcome.document["findings"] if not f["ok"]}
    assert outcome.document["ok"] == (not faults)
    assert outcome.code == (6 if faults else 0)
    return faults


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def edit_scales(folder: Path, edit: Callable[[Tensors], Any]) -> None:
    """Rewrite the scale shard, and the index as an honest writer would."""
    tensors = load_file(folder / SHARD)
    edit(tensors)
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})

    def reindex(index: dict[str, Any]) -> None:
        kept = {name: file for name, file in index["weight_map"].items() if file != SHARD}
        index["weight_map"] = kept | dict.fromkeys(tensors, SHARD)

    edit_json(folder / INDEX, reindex)


def write(folder: Path, output: Path, granularity: str | None, deliver: str = "metadata") -> Path:
    changes = {
        "granularity": granularity,
        "deliver": deliver,
        "calibration.samples": 2,
        "calibration.seq_len": 32,
        "evaluation.samples": 1,
        "evaluation.seq_len": 32,
    }
    request = run.Request(str(folder), output=output, device="cpu")
    run.run_calibrate(request, recipe.Recipe().override(changes), Narrator())
    return output


def test_per_head_as_written_passes(kvcal: Callable[..., Any], exported: Path) -> None:
    assert broken(kvcal, exported) == {}


def test_per_tensor_as_written_passes(kvcal: Callable[..., Any], llama_folder: Path, tmp_path: Path) -> None:
    output = write(llama_folder, tmp_path / "out", "per_tensor")
    assert {tuple(t.shape) for t in load_file(output / SHARD).values()} == {(1,)}
    assert broken(kvcal, output) == {}
    edit_scales(output, lambda t: t.update({K0: t[K0].expand(2).reshape(2, 1, 1).contiguous()}))
    assert broken(kvcal, output) == {SHAPES: f"{K0} has shape [2, 1, 1], must be [1] (per_tensor)"}


@pytest.mark.parametrize("granularity", ["per_tensor", "per_head"])
def test_sharded_bf16_base_as_written_passes(
    kvcal: Callable[..., Any], tmp_path: Path, granularity: str
) -> None:
    base = tmp_path / "base"
    tiny.build_model("qwen3").bfloat16().save_pretrained(base, max_shard_size="60KB")
    tiny.build_tokenizer().save_pretrained(base)
    assert len(list(base.glob("*.safetensors"))) > 2
    assert broken(kvcal, write(base, tmp_path / "out", granularity)) == {}


TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str, str]] = {
    "one scale missing": (lambda t: t.pop(V2), PRESENT, "layer 2 has no v_scale; vLLM would serve 1.0"),
    "q_scale missing": (lambda t: t.pop(Q1), PRESENT, "layer 1 has no q_scale"),
    "no q_scale anywhere": (
        lambda t: [t.pop(n) for n in list(t) if n.endswith("q_scale")],
        PRESENT,
        "layer 0 has no q_scale; vLLM would serve 1.0 without a word; layer 1",
    ),
    "only k": (
        lambda t: [t.pop(n) for n in list(t) if not n.endswith("k_scale")],
        PRESENT,
        "layer 0 has no v_scale, q_scale",
    ),
    "none at all": (lambda t: t.clear(), PRESENT, "layer 0 has no k_scale, v_scale, q_scale"),
    "zero": (lambda t: t[K0].view(-1)[1:].zero_(), VALUES, f"{K0} holds 0; a scale must be above 0"),
    "negative": (lambda t: t[V2].neg_(), VALUES, f"{V2} holds -"),
    "NaN": (lambda t: t[Q1].view(-1)[3:4].fill_(float("nan")), VALUES, f"{Q1} holds NaN"),
    "infinity": (lambda t: t[K0].fill_(float("inf")), VALUES, f"{K0} holds infinity"),
    "minus infinity": (lambda t: t[K0].fill_(float("-inf")), VALUES, f"{K0} holds infinity"),
    "k as long as query heads": (
        lambda t: t.update({K0: torch.ones(6, 1, 1)}),
        SHAPES,
        f"{K0} has shape [6, 1, 1], must be [2, 1, 1] (per_head)",
    ),
    "q as short as KV heads": (
        lambda t: t.update({Q1: torch.ones(2, 1, 1)}),
        SHAPES,
        f"{Q1} has shape [2, 1, 1], must be [6, 1, 1] (per_head)",
    ),
    "too short": (
        lambda t: t.update({V2: torch.ones(1, 1, 1)}),
        SHAPES,
        f"{V2} has shape [1, 1, 1], must be [2, 1, 1]",
    ),
    "a scalar per tensor": (lambda t: t.update({K0: torch.ones(1)}), SHAPES, f"{K0} has shape [1], must be"),
    "no dimension": (lambda t: t.update({K0: torch.tensor(1.0)}), SHAPES, f"{K0} has shape [], must be"),
    "flat": (lambda t: t.update({K0: torch.ones(2)}), SHAPES, f"{K0} has shape [2], must be [2, 1, 1]"),
    "empty": (lambda t: t.update({K0: torch.ones(0)}), SHAPES, f"{K0} has shape [0], must be [2, 1, 1]"),
    "layer that is not there": (
        lambda t: t.update({K0.replace("0", "3"): torch.ones(2, 1, 1)}),
        NAMES,
        f"{K0.replace('0', '3')} is no name that this model loads scales from",
    ),
}
# Names that another engine or an older writer would use; each beside a full set of good scales.
OTHER_NAMES = [
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.v_scale",
    "self_attn.attn._k_scale",
    "self_attn.attn.k_scale",
    "self_attn.kv_scale",
    "self_attn.k_scales",
    "self_attn.kscale",
    "self_attn.K_scale",
    "self_attn.k_cache.scale",
    "self_attn.k_proj.output_scale",
    "self_attn.prob_scale",
    "self_attn.k_zero_point",
    "self_attn.v_zero_point",
    "self_attn.q_zero_point",
    "attention.k_scale",
]
for name in OTHER_NAMES:
    TENSOR_FAULTS[name] = (
        lambda t, n=name: t.update({f"model.layers.0.{n}": torch.ones(1)}),
        NAMES,
        f"model.layers.0.{name} is no name that this model loads scales from; expected is {K0}",
    )


@pytest.mark.parametrize(("edit", "rule", "message"), TENSOR_FAULTS.values(), ids=TENSOR_FAULTS)
def test_fault_in_the_scales_is_found(
    edit: Callable[[Tensors], Any], rule: str, message: str, kvcal: Callable[..., Any], exported_copy: Path
) -> None:
    edit_scales(exported_copy, edit)
    faults = broken(kvcal, exported_copy)
    assert list(faults) == [rule]
    assert message in faults[rule]


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float64", "int32", "bool", "uint16", "float8_e4m3fn", "float8_e8m0fnu"]
)
def test_any_dtype_but_float32_is_found(dtype: str, kvcal: Callable[..., Any], exported_copy: Path) -> None:
    edit_scales(exported_copy, lambda t: t.update({V2: torch.ones(2, 1, 1).to(getattr(torch, dtype))}))
    assert broken(kvcal, exported_copy) == {SHAPES: f"{V2} is torch.{dtype}, must be torch.float32"}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_renamed_scale_is_found_missing_and_misnamed(
    name: str, kvcal: Callable[..., Any], exported_copy: Path
) -> None:
    edit_scales(exported_copy, lambda t: t.update({f"model.layers.0.{name}": t.pop(K0)}))
    faults = broken(kvcal, exported_copy)
    assert list(faults) == [PRESENT, NAMES]
    assert faults[PRESENT].startswith("layer 0 has no k_scale; vLLM would serve 1.0 without a word")


def in_scheme(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda section: section["kv_cache_scheme"].update(fields)


CONFIG_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no config_groups": (lambda s: s.pop("config_groups"), 'no "config_groups"; vLLM cannot count heads'),
    "config_groups null": (lambda s: s.update(config_groups=None), 'no "config_groups"'),
    "no kv_cache_scheme": (
        lambda s: s.pop("kv_cache_scheme"),
        "no kv_cache_scheme; vLLM then serves scale 1.0",
    ),
    "kv_cache_scheme null": (lambda s: s.update(kv_cache_scheme=None), "no kv_cache_scheme"),
    "dynamic true": (in_scheme(dynamic=True), "kv_cache_scheme.dynamic is true, must be false"),
    "dynamic local": (in_scheme(dynamic="local"), 'kv_cache_scheme.dynamic is "local", must be false'),
    "dynamic missing": (lambda s: s["kv_cache_scheme"].pop("dynamic"), "dynamic is null, must be false"),
    "num_bits 4": (in_scheme(num_bits=4), "kv_cache_scheme.num_bits is 4, must be 8"),
    "num_bits as text": (in_scheme(num_bits="8"), 'kv_cache_scheme.num_bits is "8", must be 8'),
    "type int": (in_scheme(type="int"), 'kv_cache_scheme.type is "int", must be "float"'),
    "strategy channel": (
        in_scheme(strategy="channel"),
        'kv_cache_scheme.strategy is "channel", must be "tensor" or "attn_head"',
    ),
    "strategy missing": (lambda s: s["kv_cache_scheme"].pop("strategy"), "kv_cache_scheme.strategy is null"),
    "strategy in kvcal's words": (in_scheme(strategy="per_head"), 'strategy is "per_head", must be'),
    "symmetric false": (in_scheme(symmetric=False), "kv_cache_scheme.symmetric is false, must be true"),
    "symmetric 1": (in_scheme(symmetric=1), "kv_cache_scheme.symmetric is 1, must be true"),
}


@pytest.mark.parametrize(("edit", "message"), CONFIG_FAULTS.values(), ids=CONFIG_FAULTS)
def test_fault_in_the_scheme_is_found(
    edit: Callable[[dict[str, Any]], Any], message: str, kvcal: Callable[..., Any], exported_copy: Path
) -> None:
    edit_json(exported_copy / "config.json", lambda c: edit(c["quantization_config"]))
    faults = broken(kvcal, exported_copy)
    assert list(faults) == [CONFIG]
    assert message in faults[CONFIG]


def test_quantization_config_missing_is_found(kvcal: Callable[..., Any], exported_copy: Path) -> None:
    tiny.edit_config(exported_copy, quantization_config=None)
    assert broken(kvcal, exported_copy) == {
        CONFIG: "config.json has no quantization_config; vLLM then refuses the k_scale tensors"
    }


def test_another_quant_method_is_found(kvcal: Callable[..., Any], exported_copy: Path) -> None:
    edit_json(exported_copy / "config.json", lambda c: c["quantization_config"].update(quant_method="awq"))
    faults = broken(kvcal, exported_copy)
    assert list(faults) == [CONFIG, CONSUMED]
    assert "quant_method is 'awq', must be 'compressed-tensors'" in faults[CONFIG]


def test_the_wrong_strategy_for_the_shapes_is_found(kvcal: Callable[..., Any], exported_copy: Path) -> None:
    edit_json(exported_copy / "config.json", lambda c: in_scheme(strategy="tensor")(c["quantization_config"]))
    faults = broken(kvcal, exported_copy)
    assert list(faults) == [SHAPES]
    assert "has shape [2, 1, 1], must be [1] (per_tensor)" in faults[SHAPES]
    assert faults[SHAPES].endswith("; and 6 more")


@pytest.mark.parametrize(
    ("changes", "rule", "message"),
    [
        (
            {"model_type": "gpt2"},
            READABLE,
            "layer 0: the checkpoint has no weights under transformer.h.0.attn",
        ),
        ({"model_type": "jamba"}, READABLE, "model_type 'jamba' cannot be run without weights"),
        ({"num_hidden_layers": 4}, READABLE, "layer 3: the checkpoint has no weights under model.layers.3"),
        (
            {"num_hidden_layers": 2},
            NAMES,
            "model.layers.2.self_attn.k_scale is no name that this model loads",
        ),
        ({"num_key_value_heads": 6}, SHAPES, "has shape [2, 1, 1], must be [6, 1, 1] (per_head)"),
        ({"head_dim": 40}, CONSUMED, "head size 40 is not a multiple of 16"),
        ({"head_dim": 320}, CONSUMED, "head size 320 exceeds 256"),
        ({"num_attention_heads": None}, READABLE, "num_attention_heads must be a positive integer"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_model_that_the_scales_do_not_fit_is_found(
    changes: dict[str, Any], rule: str, message: str, kvcal: Callable[..., Any], exported_copy: Path
) -> None:
    tiny.edit_config(exported_copy, **changes)
    faults = broken(kvcal, exported_copy)
    assert list(faults) == [rule]
    assert message in faults[rule]


def in_index(edit: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda index: edit(index["weight_map"]))


def truncate(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).unlink()  # base weights are hard links
        (folder / name).write_bytes(content[:-16])

    return cut


def duplicate(folder: Path) -> None:
    save_file({K0: load_file(folder / SHARD)[K0]}, folder / "more.safetensors")


def beside_the_index(folder: Path) -> None:
    """The file that transformers would read before any index."""
    save_file(load_file(folder / WEIGHTS), folder / "model.safetensors")


FILE_FAULTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "scale not in the index": (
        in_index(lambda m: m.pop(K0)),
        AGREE,
        f"{K0} lies in {SHARD}, the index places it nowhere",
    ),
    "index points to another shard": (
        in_index(lambda m: m.update({K0: WEIGHTS})),
        READABLE,
        f"{WEIGHTS}: lacks {K0}, which the index places there",
    ),
    "index lists what is not there": (
        in_index(lambda m: m.update({"model.ghost": SHARD})),
        READABLE,
        f"{SHARD}: lacks model.ghost",
    ),
    "index leaves the folder": (
        in_index(lambda m: m.update({K0: "../x.safetensors"})),
        READABLE,
        "shard '../x.safetensors' must be a plain file name",
    ),
    "index without weight_map": (
        lambda f: (f / INDEX).write_text("{}"),
        READABLE,
        "is not a safetensors index (no weight_map)",
    ),
    "index that is not JSON": (lambda f: (f / INDEX).write_text("{"), READABLE, "is not a safetensors index"),
    "no index": (lambda f: (f / INDEX).unlink(), READABLE, "has no model.safetensors and no"),
    "tensor in two shards": (duplicate, AGREE, f"{K0} is in {SHARD} and in more.safetensors; which one is"),
    "weights twice": (beside_the_index, AGREE, "is in model-base.safetensors and in model.safetensors"),
    "scale shard missing": (lambda f: (f / SHARD).unlink(), READABLE, f"shard {SHARD} is missing"),
    "weight shard missing": (lambda f: (f / WEIGHTS).unlink(), READABLE, f"shard {WEIGHTS} is missing"),
    "scale shard truncated": (truncate(SHARD), READABLE, f"{SHARD}: is not a whole safetensors file"),
    "weight shard truncated": (truncate(WEIGHTS), READABLE, f"{WEIGHTS}: is not a whole safetensors file"),
    "scale shard empty": (
        lambda f: (f / SHARD).write_bytes(b""),
        READABLE,
        "is not a whole safetensors file",
    ),
    "a foreign shard": (
        lambda f: (f / "junk.safetensors").write_bytes(b"x" * 64),
        READABLE,
        "junk.safetensors: is not a whole safetensors file",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), READABLE, "has no config.json"),
    "config that is not JSON": (lambda f: (f / "config.json").write_text("{"), READABLE, "cannot be read"),
}


@pytest.mark.parametrize(("plant", "rule", "message"), FILE_FAULTS.values(), ids=FILE_FAULTS)
def test_fault_in_the_files_is_found(
    plant: Callable[[Path], Any], rule: str, message: str, kvcal: Callable[..., Any], exported_copy: Path
) -> None:
    plant(exported_copy)
    faults = broken(kvcal, exported_copy)
    assert list(faults) == [rule]
    assert message in faults[rule]


def test_several_faults_are_all_reported(kvcal: Callable[..., Any], exported_copy: Path) -> None:
    edit_scales(exported_copy, lambda t: (t.pop(V2), t[K0].zero_(), t.update({Q1: torch.ones(2)})))
    edit_json(exported_copy / "config.json", lambda c: c["quantization_config"].pop("config_groups"))
    assert list(broken(kvcal, exported_copy)) == [CONFIG, PRESENT, SHAPES, VALUES]


def test_the_terminal_shows_each_rule_and_the_broken_ones(
    kvcal: Callable[..., Any], exported_copy: Path
) -> None:
    edit_scales(exported_copy, lambda t: t.pop(V2))
    outcome = kvcal("check", exported_copy)
    assert outcome.code == 6
    assert f"FAIL {PRESENT}\n     layer 2 has no v_scale" in outcome.stdout
    assert f"ok   {VALUES}\n" in outcome.stdout
    assert outcome.stderr == f"error: {exported_copy}: 1 of 8 rules are broken\n"


def test_a_folder_or_engine_that_is_not_there_is_bad_usage(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        check.check(tmp_path / "no", "vllm")
    with pytest.raises(UsageError, match="unknown engine 'sglong'"):
        check.check(exported, "sglong")


# Folded checkpoints

K_PROJ = "model.layers.0.self_attn.k_proj.weight"
K_BIAS = "model.layers.0.self_attn.k_proj.bias"
RECORD, TRANSFORMS = Path("kvcal", "folds.json"), Path("kvcal", "folds.safetensors")


def edit_weights(edit: Callable[[Tensors], Any], file: Path = Path("model.safetensors")) -> Break:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / file)
        edit(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return apply


def edit_record(edit: Callable[[dict[str, Any]], Any]) -> Break:
    return lambda folder: edit_json(folder / RECORD, edit)


def edit_transforms(edit: Callable[[Tensors], Any]) -> Break:
    return edit_weights(edit, TRANSFORMS)


def test_a_folded_checkpoint_as_written_passes(kvcal: Callable[..., Any], folded: Path) -> None:
    assert broken(kvcal, folded) == {}
    rules = [finding.rule for finding in check.check(folded, "vllm")]
    assert rules == [READABLE, PLAIN, FORMAT, AGREE, FOLDED]


@pytest.mark.parametrize("granularity", ["per_tensor", "per_head"])
def test_folds_with_scales_are_held_against_both_contracts(
    kvcal: Callable[..., Any],
    planted_folder: Path,
    tmp_path: Path,
    granularity: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folding, "MARGIN", -1e9)  # fold something, whether it pays or not
    output = write(planted_folder, tmp_path / "out", granularity, deliver="both")
    assert broken(kvcal, output) == {}
    rules = [finding.rule for finding in check.check(output, "vllm")]
    assert rules == [READABLE, CONFIG, CONSUMED, AGREE, PRESENT, NAMES, SHAPES, VALUES, FOLDED]
    edit_scales(output, lambda t: (t[K0].zero_(), t.pop(V2)))
    value = load_file(output / WEIGHTS)
    (output / WEIGHTS).unlink()
    folded_name = next(iter(json.loads((output / RECORD).read_text())["tensors"]))
    value[folded_name] += 1
    save_file(value, output / WEIGHTS, metadata={"format": "pt"})
    assert list(broken(kvcal, output)) == [PRESENT, VALUES, FOLDED]


def test_fp8_folded_for_scale_1_passes(
    kvcal: Callable[..., Any], planted_folder: Path, tmp_path: Path
) -> None:
    assert broken(kvcal, write(planted_folder, tmp_path / "out", None, deliver="fold")) == {}


FOLD_FAULTS: dict[str, tuple[Break, str, str]] = {
    "one weight changed": (
        edit_weights(lambda t: t[K_PROJ].view(-1)[5:6].add_(1)),
        FOLDED,
        f"{K_PROJ} is not what was written",
    ),
    "signs": (
        edit_weights(lambda t: t[K_PROJ].neg_()),
        FOLDED,
        f"{K_PROJ} is not what was written",
    ),
    "NaN": (
        edit_weights(lambda t: t[K_PROJ].view(-1)[-1:].fill_(float("nan"))),
        FOLDED,
        f"{K_PROJ} holds NaN or infinity",
    ),
    "infinity": (
        edit_weights(lambda t: t[K_PROJ].view(-1)[-1:].fill_(float("inf"))),
        FOLDED,
        f"{K_PROJ} holds NaN or infinity",
    ),
    "another dtype": (
        edit_weights(lambda t: t.update({K_PROJ: t[K_PROJ].float()})),
        FOLDED,
        f"{K_PROJ} is not what was written",
    ),
    "a folded tensor is gone": (
        edit_weights(lambda t: t.pop(K_PROJ)),
        FOLDED,
        f"{K_PROJ} was folded and is not in the files",
    ),
    "the unfolded weights": (
        edit_weights(lambda t: [t[n].mul_(2) for n in t if n.endswith("k_proj.weight")]),
        FOLDED,
        f"{K_PROJ} is not what was written",
    ),
    "record names what is not there": (
        edit_record(lambda r: r["tensors"].update({K_BIAS: r["tensors"][K_PROJ]})),
        FOLDED,
        f"{K_BIAS} was folded and is not in the files",
    ),
    "record has another hash": (
        edit_record(lambda r: r["tensors"][K_PROJ].update(sha256="0" * 64)),
        FOLDED,
        f"{K_PROJ}: unfolding it by the record does not give the original",
    ),
    "transforms of zero": (
        edit_transforms(lambda t: [tensor.zero_() for tensor in t.values()]),
        FOLDED,
        f"{K_PROJ}: unfolding it by the record does not give the original",
    ),
    "record of a later kvcal": (
        edit_record(lambda r: r.update(version=2)),
        READABLE,
        "folds.json: version 2 of the record, this kvcal reads 1",
    ),
    "record without tensors": (
        edit_record(lambda r: r.pop("tensors")),
        READABLE,
        "folds.json: is no record of folds",
    ),
    "record of rows that are none": (
        edit_record(lambda r: r["tensors"].update({K_PROJ: "x"})),
        READABLE,
        "folds.json: is no record of folds",
    ),
    "record that is not JSON": (
        lambda f: (f / RECORD).write_text("{"),
        READABLE,
        "folds.json: is no record of folds",
    ),
    "record of bytes": (
        lambda f: (f / RECORD).write_bytes(b"\xff"),
        READABLE,
        "folds.json: is no record of folds",
    ),
    "no transforms": (
        lambda f: (f / TRANSFORMS).unlink(),
        READABLE,
        "folds.safetensors: holds no transforms that can be read",
    ),
    "transforms garbage": (
        lambda f: (f / TRANSFORMS).write_bytes(b"x" * 64),
        READABLE,
        "folds.safetensors: holds no transforms that can be read",
    ),
    "a section of config that says nothing": (
        lambda f: tiny.edit_config(f, quantization_config={"quant_method": "compressed-tensors"}),
        PLAIN,
        "config.json has a quantization_config that quantizes nothing; remove it",
    ),
    "no recipe": (
        lambda f: (f / "kvcal" / "recipe.yaml").unlink(),
        FORMAT,
        "recipe.yaml: cannot be read",
    ),
    "a recipe of a later kvcal": (
        lambda f: (f / "kvcal" / "recipe.yaml").write_text("format: int3_per_token_head"),
        FORMAT,
        "unknown format 'int3_per_token_head'",
    ),
    "heads too small for the format": (
        lambda f: tiny.edit_config(f, head_dim=16),
        FORMAT,
        "head size 16 is below 32",
    ),
}


@pytest.mark.parametrize(("plant", "rule", "message"), FOLD_FAULTS.values(), ids=FOLD_FAULTS)
def test_fault_in_a_folded_checkpoint_is_found(
    plant: Break, rule: str, message: str, kvcal: Callable[..., Any], folded_copy: Path
) -> None:
    plant(folded_copy)
    faults = broken(kvcal, folded_copy)
    assert next(iter(faults)) == rule
    assert faults.keys() <= {rule, FOLDED}
    assert message in faults[rule]


# Records that belong to another checkpoint.
FOREIGN_FOLDS: dict[str, Break] = {
    "a tensor that no fold touches": edit_record(
        lambda r: r["tensors"].update({"model.norm.weight": r["tensors"][K_PROJ]})
    ),
    "a tensor that is not there": edit_record(
        lambda r: r["tensors"].update({"model.ghost": r["tensors"][K_PROJ]})
    ),
    "a layer without transform": edit_transforms(lambda t: t.pop("layers.0.key_scale")),
    "transforms of smaller heads": edit_transforms(
        lambda t: t.update({name: tensor[:, :8].contiguous() for name, tensor in t.items()})
    ),
    "transforms of more heads": edit_transforms(
        lambda t: t.update({name: tensor.repeat(2, 1) for name, tensor in t.items()})
    ),
    "a model of fewer layers": lambda f: tiny.edit_config(f, num_hidden_layers=2),
    "a model of other heads": lambda f: tiny.edit_config(f, num_key_value_heads=3),
    "originals that cannot be read": lambda f: (f / "kvcal" / "originals.safetensors").write_bytes(b"x" * 64),
    "a record nested too deeply": lambda f: (f / RECORD).write_text("[" * 100_000),
}


@pytest.mark.parametrize("plant", FOREIGN_FOLDS.values(), ids=FOREIGN_FOLDS)
def test_folds_that_do_not_fit_are_a_finding_and_no_crash(
    plant: Break, kvcal: Callable[..., Any], folded_copy: Path
) -> None:
    plant(folded_copy)
    assert broken(kvcal, folded_copy)
    for flags in ((), ("--rounded",)):
        outcome = kvcal("unfold", folded_copy, "--output", "unfolded", *flags)
        assert outcome.code == 4, outcome.stderr


def test_a_stray_scale_makes_a_folded_checkpoint_one_with_scales(
    kvcal: Callable[..., Any], folded_copy: Path
) -> None:
    edit_weights(lambda t: t.update({K0: torch.ones(1)}))(folded_copy)
    assert list(broken(kvcal, folded_copy)) == [CONFIG, PRESENT]


def test_a_folded_checkpoint_without_its_record_is_one_without_scales(
    kvcal: Callable[..., Any], folded_copy: Path
) -> None:
    (folded_copy / RECORD).unlink()
    assert list(broken(kvcal, folded_copy)) == [CONFIG, PRESENT]


def test_what_an_engine_must_hold_is_what_was_written(exported: Path, folded: Path) -> None:
    model, found, announced = check.scales_of(exported, "vllm")
    assert announced
    tensors = load_file(exported / SHARD)
    assert found == {
        layer.index: {
            side: tensors[f"{layer.module}.{side}_scale"].flatten().tolist() for side in ("k", "v", "q")
        }
        for layer in model.layers
    }
    model, found, announced = check.scales_of(folded, "vllm")
    assert not announced
    assert found == {layer.index: {"k": [1.0], "v": [1.0], "q": [1.0]} for layer in model.layers}


header_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=3
)
headers = st.dictionaries(
    st.sampled_from([K0, "__metadata__", "x"]),
    header_values
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "F8_E8M0", "F4", "C64", "BOOL", "I64", "X"]),
            "shape": st.lists(st.integers(-1, 2**40), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 64), max_size=3),
        }
    ),
)


@settings(deadline=None, max_examples=60)
@given(header=headers, length=st.none() | st.integers(0, 2**64 - 1), body=st.integers(0, 64))
def test_any_shard_gives_findings_and_no_crash(
    header: dict[str, Any],
    length: int | None,
    body: int,
    tmp_path_factory: pytest.TempPathFactory,
    exported: Path,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    folder.mkdir(exist_ok=True)
    encoded = json.dumps(header).encode()
    prefix = (len(encoded) if length is None else length).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(prefix + encoded + bytes(body))
    (folder / "config.json").write_bytes((exported / "config.json").read_bytes())
    assert not all(finding.ok for finding in check.check(folder, "vllm"))
