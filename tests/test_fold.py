"""``--deliver fold`` and ``kvcal unfold`` on tiny models: files, exactness, reversal, and what is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvcal.transforms.record import Transforms
from tests import planted, tiny

Kvcal = Callable[..., Any]
# Two samples judge, so that a fold is kept on a tiny model too.
SMALL = ("--samples", "6", "--evaluation-samples", "2", "--seq-len", "48", "--batch-size", "2")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: t for path in sorted(folder.glob("*.safetensors")) for k, t in load_file(path).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(bits(a[k]), bits(b[k])) for k in a)


def recipe_file(folder: Path, **folds: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"format": "int8_per_token_head", "folds": folds, "gates": {}}))
    return path


def with_unbalanced_keys(folder: Path, *, factor: float = 64.0) -> Path:
    """K of one RoPE pair large and Q small, as an exact rewrite: something that a fold is there to undo."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        for side, by in (("k_proj", factor), ("q_proj", 1 / factor), ("qkv_proj", 1.0)):
            if f"self_attn.{side}." in name and by != 1.0:
                rows = tensor.view(-1, 32, *tensor.shape[1:])
                rows[:, [1, 17]] *= by
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def unbalanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_unbalanced_keys(tiny.save(tmp_path_factory.mktemp("models") / "llama", head_dim=32))


@pytest.fixture(scope="module")
def folded(unbalanced: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that INT8 needed a fold for; copied by tests that change it."""
    from rich.console import Console

    from kvcal import recipe, run
    from kvcal.progress import Narrator

    fields = {"samples": 6, "seq_len": 48}
    wanted = recipe.parse(
        {"format": "int8_per_token_head", "calibration": fields, "evaluation": fields | {"samples": 2}},
        "tests",
    )
    request = run.Request(str(unbalanced), output=tmp_path_factory.mktemp("folded") / "tiny")
    _, folder = run.run_calibrate(request, wanted, Narrator(Console(stderr=True, quiet=True)))
    return folder


@pytest.fixture
def folded_copy(folded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folded, tmp_path / "folded"))


def test_a_folded_checkpoint_is_plain_and_says_the_same(folded: Path, unbalanced: Path) -> None:
    config, base = (json.loads((f / "config.json").read_text()) for f in (folded, unbalanced))
    assert config == base
    assert "quantization_config" not in config
    assert all_tensors(folded).keys() == all_tensors(unbalanced).keys()
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        a, b = (
            AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(ids).logits
            for f in (folded, unbalanced)
        )
    assert torch.equal(a, b)


def test_the_report_has_both_numbers_and_the_proof(folded: Path) -> None:
    report = json.loads((folded / "kvcal" / "report.json").read_text())
    folds = report["folds"]
    assert report["deliver"] == "fold"
    assert report["fidelity_fp8_attention"] is None
    assert report["fidelity"]["kl_mean"] < 0.2 * folds["before"]["fidelity"]["kl_mean"]
    assert folds["judging"]["kl_after"] < folds["judging"]["kl_before"]
    assert any(name.startswith("key_scale power_of_two") for name in folds["kept"])
    assert folds["proof"]["block_error"] < 1e-10
    assert 0 <= folds["proof"]["kl"] <= folds["proof"]["allowed_kl"]
    assert folds["reversible"]
    assert report["serve"].endswith("--kv-cache-dtype int8_per_token_head")
    assert "| key_scale power_of_two x1 |" in (folded / "kvcal" / "report.md").read_text()


def test_evaluate_and_validate_again_give_what_the_report_says(folded: Path, kvcal: Kvcal) -> None:
    report = json.loads((folded / "kvcal" / "report.json").read_text())
    again = kvcal("evaluate", folded, "--json").document
    assert again["fidelity"] == pytest.approx(report["fidelity"], rel=1e-5)
    assert again["fidelity_fp8_attention"] is None
    validated = kvcal("validate", folded, "--json").document
    assert validated["mean"] == pytest.approx(report["attention_error"]["mean"], rel=1e-5)


def test_unfold_restores_every_bit(folded: Path, unbalanced: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    done = kvcal("unfold", folded, "--output", tmp_path / "again", "--json")
    assert done.code == 0, done.stderr
    record = json.loads((folded / "kvcal" / "folds.json").read_text())
    assert sorted(record["tensors"]) == done.document["restored"]
    assert done.document["rounded"] == []
    assert not same(all_tensors(folded), all_tensors(unbalanced))
    assert same(all_tensors(tmp_path / "again"), all_tensors(unbalanced))
    assert not (tmp_path / "again" / "kvcal").exists()


@pytest.mark.parametrize("deliver", ["fold", "both"])
def test_fp8_takes_folds_too(deliver: str, unbalanced: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    base = planted.plant(unbalanced, tmp_path / "planted")
    out = tmp_path / "out"
    done = kvcal("calibrate", "--model", base, "--deliver", deliver, "--output", out, *SMALL, "--json")
    assert done.code == 0, done.stderr
    folds = done.document["folds"]
    assert "value_scale" in folds["kept"]
    before = folds["before"]["fidelity_fp8_attention"]["kl_mean"]
    if deliver == "fold":
        assert done.document["fidelity_fp8_attention"]["kl_mean"] < 0.2 * before
    names = {n for n in all_tensors(out) if n.endswith("_scale")}
    assert len(names) == (9 if deliver == "both" else 0)
    assert kvcal("check", out).code == 0
    assert kvcal("unfold", out, "--output", tmp_path / "again").code == 0
    assert same(all_tensors(tmp_path / "again"), all_tensors(base))
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_large_key_biases_cost_int8_a_tenth_after_folding(tmp_path: Path, kvcal: Kvcal) -> None:
    """Qwen2 has biases of K in the hundreds; without folds every other channel drowns in their scale."""
    tiny.save_with_key_biases(tmp_path / "model")
    done = kvcal(
        "calibrate",
        "--model",
        tmp_path / "model",
        "--format",
        "int8_per_token_head",
        "--output",
        tmp_path / "out",
        *SMALL,
        "--json",
    )
    assert done.code == 0, done.stderr
    before = done.document["folds"]["before"]["fidelity"]["kl_mean"]
    assert done.document["fidelity"]["kl_mean"] * 10 < before
    options = ("--format", "int4_per_token_head", "--samples", "4", "--seq-len", "48", "--json")
    benched = kvcal("bench", "folds", "--model", tmp_path / "model", *options)
    assert benched.code == 0
    assert "mostly one constant vector, which a Hadamard rotation spreads" in " ".join(benched.stderr.split())


def test_shards_without_a_folded_tensor_are_linked_and_the_others_rewritten(
    unbalanced: Path, tmp_path: Path, kvcal: Kvcal
) -> None:
    tensors = all_tensors(unbalanced)
    base = Path(shutil.copytree(unbalanced, tmp_path / "sharded"))
    (base / "model.safetensors").unlink()
    shards = {"model-1.safetensors": [n for n in tensors if "self_attn" in n]}
    shards["model-2.safetensors"] = [n for n in tensors if "self_attn" not in n]
    for file, names in shards.items():
        save_file({n: tensors[n] for n in names}, base / file, {"format": "pt"})
    weight_map = {n: file for file, names in shards.items() for n in names}
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    before = {file: (base / file).read_bytes() for file in shards}
    done = kvcal(
        "calibrate", "--model", base, "--format", "int8_per_token_head", "--output", tmp_path / "out", *SMALL
    )
    assert done.code == 0, done.stderr
    assert os.path.samefile(base / "model-2.safetensors", tmp_path / "out" / "model-2.safetensors")
    assert not os.path.samefile(base / "model-1.safetensors", tmp_path / "out" / "model-1.safetensors")
    assert {file: (base / file).read_bytes() for file in shards} == before
    assert same(
        {n: t for n, t in all_tensors(tmp_path / "out").items() if "_proj" not in n},
        {n: t for n, t in tensors.items() if "_proj" not in n},
    )


def test_free_scales_are_written_but_not_restored(unbalanced: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    out = tmp_path / "out"
    recipe = recipe_file(tmp_path, scales="free", transforms=["key_scale"])
    done = kvcal("calibrate", "--model", unbalanced, "--recipe", recipe, "--output", out, *SMALL, "--json")
    assert done.code == 0, done.stderr
    assert not done.document["folds"]["reversible"]
    refused = kvcal("unfold", out, "--output", tmp_path / "again")
    assert refused.code == 4
    assert "was rounded by the fold and cannot be restored bit for bit; pass --rounded" in refused.stderr
    assert not (tmp_path / "again").exists()
    rounded = kvcal("unfold", out, "--output", tmp_path / "again", "--rounded", "--json")
    assert rounded.code == 0
    assert rounded.document["rounded"]
    for name, tensor in all_tensors(unbalanced).items():
        torch.testing.assert_close(all_tensors(tmp_path / "again")[name], tensor, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("transform", ["value_hadamard", "value_random_hadamard", "value_balanced"])
def test_maps_of_v_that_pay_are_folded(transform: str, tmp_path: Path, kvcal: Kvcal) -> None:
    """One channel of V 200 times larger and undone behind: exactly what a Hadamard transform spreads."""
    model = tiny.build_model("llama", head_dim=32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.view(2, 32, -1)[:, 5] *= 128
            layer.self_attn.o_proj.weight.view(-1, 6, 32)[:, :, 5] /= 128
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    recipe = recipe_file(tmp_path, transforms=[transform])
    done = kvcal(
        "calibrate",
        "--model",
        tmp_path / "model",
        "--recipe",
        recipe,
        "--output",
        tmp_path / "out",
        *SMALL,
        "--json",
    )
    assert done.code == 0, done.stderr
    assert done.document["folds"]["kept"] == [transform]
    assert (
        done.document["fidelity"]["kl_mean"] < 0.7 * done.document["folds"]["before"]["fidelity"]["kl_mean"]
    )
    assert kvcal("check", tmp_path / "out").code == 0


def test_offsets_reach_the_channels_that_rope_leaves_alone(tmp_path: Path, kvcal: Kvcal) -> None:
    model = tiny.build_model("phi", head_dim=32, hidden_size=192)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.view(2, 32)[:, 20:24] = 40.0
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    recipe = recipe_file(tmp_path, transforms=["key_offset"])
    done = kvcal(
        "calibrate",
        "--model",
        tmp_path / "model",
        "--recipe",
        recipe,
        "--output",
        tmp_path / "out",
        *SMALL,
        "--json",
    )
    assert done.code == 0, done.stderr
    assert done.document["folds"]["kept"] == ["key_offset"]
    assert (
        done.document["fidelity"]["kl_mean"] < 0.2 * done.document["folds"]["before"]["fidelity"]["kl_mean"]
    )


def break_value(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] *= 1.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def break_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def break_scale(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def break_config(folder: Path) -> None:
    tiny.edit_config(folder, quantization_config={"quant_method": "compressed-tensors"})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (break_value, "layers.1.self_attn.k_proj.weight is not what was written"),
        (break_nan, "layers.1.self_attn.q_proj.weight holds NaN or infinity"),
        (break_scale, "has no quantization_config; vLLM then refuses the k_scale tensors"),
        (break_config, "quantization_config that quantizes nothing"),
    ],
)
def test_check_sees_what_was_done_to_a_folded_checkpoint(
    fault: Callable[[Path], None], message: str, folded_copy: Path, kvcal: Kvcal
) -> None:
    assert kvcal("check", folded_copy).code == 0
    fault(folded_copy)
    done = kvcal("check", folded_copy, "--json")
    assert done.code == 6
    assert message in done.stdout


def test_unfold_does_not_pass_off_changed_weights_as_the_original(
    folded_copy: Path, tmp_path: Path, kvcal: Kvcal
) -> None:
    break_value(folded_copy)
    done = kvcal("unfold", folded_copy, "--output", tmp_path / "again")
    assert done.code == 4
    assert "layers.1.self_attn.k_proj.weight" in done.stderr
    assert not (tmp_path / "again").exists()


def test_unfold_refuses_what_was_never_folded(exported: Path, tmp_path: Path, kvcal: Kvcal) -> None:
    done = kvcal("unfold", exported, "--output", tmp_path / "again")
    assert done.code == 4
    assert "holds no record of folds" in done.stderr
    assert kvcal("unfold", tmp_path / "nowhere", "--output", tmp_path / "again").code == 2


def test_half_precision_weights_that_would_leave_their_range_are_refused(
    tmp_path: Path, kvcal: Kvcal
) -> None:
    """FP16 has 5 bits of exponent: scaling a large weight up overflows, a small one down loses bits."""
    base = with_unbalanced_keys(tiny.save(tmp_path / "model", head_dim=32, dtype="float16"), factor=2.0**12)
    done = kvcal(
        "calibrate",
        "--model",
        base,
        "--format",
        "int8_per_token_head",
        "--output",
        tmp_path / "out",
        *SMALL,
        "--json",
    )
    assert done.code in (0, 4), done.stderr
    if done.code == 0:
        again = kvcal("unfold", tmp_path / "out", "--output", tmp_path / "again")
        assert (again.code == 0) == done.document["folds"]["reversible"]
    else:
        assert "leaves the range" in done.stderr


def test_already_quantized_weights_are_refused_with_the_right_order(copied: Path, kvcal: Kvcal) -> None:
    tiny.edit_config(
        copied, quantization_config={"quant_method": "compressed-tensors", "config_groups": {"g": {}}}
    )
    done = kvcal("plan", "--model", copied, "--deliver", "fold")
    assert done.code == 3
    assert "folding would round them a second time" in done.stderr
    assert "fold into the unquantized model first and quantize its weights after that" in done.stderr


@pytest.mark.parametrize("transform", ["key_hadamard", "key_offset"])
def test_what_only_works_online_is_never_exported(
    transform: str, copied: Path, tmp_path: Path, kvcal: Kvcal
) -> None:
    done = kvcal(
        "plan",
        "--model",
        copied,
        "--recipe",
        recipe_file(tmp_path, transforms=[transform]),
        "--format",
        "fp8",
        "--deliver",
        "fold",
    )
    assert done.code == 3
    assert f"{transform} cannot be folded into llama exactly" in done.stderr
    assert "vllm ignores what it would have to do online" in done.stderr


def test_bench_folds_compares_what_can_be_folded_and_what_cannot(unbalanced: Path, kvcal: Kvcal) -> None:
    done = kvcal(
        "bench",
        "folds",
        "--model",
        unbalanced,
        "--format",
        "int4_per_token_head",
        "--samples",
        "6",
        "--seq-len",
        "48",
        "--json",
    )
    assert done.code == 0, done.stderr
    rows = {(r["transform"], r["where"]): r["kl_mean"] for r in done.document}
    assert {
        ("none", ""),
        ("key_scale power_of_two", "weights"),
        ("key_scale free", "weights"),
        ("key_turn", "weights"),
        ("key_hadamard", "online"),
        ("key_offset", "online"),
    } <= rows.keys()
    assert rows["key_scale power_of_two", "weights"] < 0.5 * rows["none", ""]


def test_the_record_of_folds_reads_itself(folded: Path) -> None:
    transforms = Transforms.load(folded / "kvcal" / "folds.safetensors")
    assert transforms.layers.keys() == {0, 1, 2}
    assert transforms.powers_of_two
    scale = transforms.layers[0].key_scale
    assert scale is not None
    assert torch.equal(scale[:, 1], scale[:, 17])
    assert float(scale[0, 1]) >= 16


@pytest.mark.parametrize(
    ("scheme", "deliver"), [("FP8_DYNAMIC", "both"), ("FP8_DYNAMIC", "fold"), ("W4A16", "both")]
)
def test_weights_are_quantized_after_the_fold(
    scheme: str, deliver: str, tmp_path: Path, kvcal: Kvcal
) -> None:
    """The right order: fold, quantize the weights, collect KV statistics."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
    base = planted.plant(tiny.save(tmp_path / "model", **sizes), tmp_path / "planted")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"deliver": deliver, "weights": {"scheme": scheme}, "gates": {}}))
    out = tmp_path / "out"
    done = kvcal("calibrate", "--model", base, "--recipe", recipe, "--output", out, *SMALL, "--json")
    assert done.code == 0, done.stderr
    assert done.document["weights"] == scheme
    if deliver == "fold":  # with scales of its own the engine needs no help with planted values
        assert "value_scale" in done.document["folds"]["kept"]
        assert max(layer["v"]["amax"] for layer in done.document["layers"]) < 448
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["config_groups"]
    assert (section.get("kv_cache_scheme") is not None) == (deliver == "both")
    tensors = all_tensors(out)
    assert any(n.endswith(("weight_scale", "weight_packed")) for n in tensors)
    assert len([n for n in tensors if n.endswith("self_attn.k_scale")]) == (3 if deliver == "both" else 0)
    checked = kvcal("check", out, "--json")
    assert checked.code == 0, checked.stdout
    assert kvcal("evaluate", out, "--json").code == 0
    unfolded = kvcal("unfold", out, "--output", tmp_path / "again")
    assert unfolded.code == 4
    assert "its weights were quantized after the fold" in unfolded.stderr
