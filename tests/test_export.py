"""Checkpoints for every engine: what is in the files, what an engine must not find there, and verdicts."""

from __future__ import annotations

import html
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvcal import (
    arch,
    check,
    engines,
    formats,
    granularity,
    plan,
    recipe,
    run,
    run_export,
    sources,
    tensor_parallel,
)
from kvcal.arch import ModelSpec
from kvcal.capture import AttentionCall, intercept
from kvcal.engine_spec import Deliver, EngineSpec
from kvcal.errors import CheckFailed, ModelError, OutputError, PlanRefused, UsageError
from kvcal.export import kernel
from kvcal.formats import FP8_E4M3, KVFormat
from kvcal.kernels import reference
from kvcal.progress import Narrator
from tests import tiny
from tests.test_check import SHARD, edit_json, edit_scales, write
from tests.test_engines import CONFIG

WITH_SCALES = [e.name for e in engines.ENGINES if "fp8_e4m3" in e.loads_scales and not e.standalone]
WITHOUT_SCALES = [e.name for e in engines.ENGINES if "fp8_e4m3" not in e.loads_scales]
SUFFIXES = {
    "vllm": {"k": "k_scale", "v": "v_scale", "q": "q_scale"},
    "vllm-modelopt": {"k": "k_proj.k_scale", "v": "v_proj.v_scale", "q": "q_scale"},
    "sglang": {"k": "k_scale", "v": "v_scale"},
    "tgi": {"k": "k_scale", "v": "v_scale"},
    "transformers": {"k": "k_scale", "v": "v_scale"},
}


@pytest.fixture(scope="module")
def folder_for(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The per-head checkpoint, exported for an engine; tests that change files copy it first."""
    written: dict[str, Path] = {}

    def of(engine: str) -> Path:
        if engine not in written:
            output = tmp_path_factory.mktemp(engine) / "checkpoint"
            run_export.run_export(exported, engine, output, Narrator.silent(), overwrite=False)
            written[engine] = output
        return written[engine]

    return of


def recorded(exported: Path) -> dict[str, torch.Tensor]:
    return load_file(exported / "kvcal" / "scales.safetensors")


def broken(folder: Path, engine: str) -> dict[str, str]:
    return {f.rule: f.message for f in check.check(folder, engine) if not f.ok}


class TestFiles:
    @pytest.mark.parametrize("engine", WITH_SCALES)
    def test_every_scale_is_under_the_name_that_the_engine_reads(
        self, engine: str, exported: Path, folder_for: Callable[[str], Path]
    ) -> None:
        found = load_file(folder_for(engine) / SHARD)
        fine = recorded(exported)
        per_head = "per_head" in engines.get(engine).granularities
        expected = {
            f"model.layers.{i}.self_attn.{suffix}": fine[f"layers.{i}.{side}"]
            if per_head
            else fine[f"layers.{i}.{side}"].max()
            for i in range(3)
            for side, suffix in SUFFIXES[engine].items()
        }
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name].flatten(), value.flatten())
        shape = () if engine == "vllm-modelopt" else (2, 1, 1) if per_head else (1,)
        assert found[f"model.layers.0.self_attn.{SUFFIXES[engine]['v']}"].shape == shape

    @pytest.mark.parametrize("engine", WITH_SCALES)
    def test_weights_are_those_of_the_checkpoint(
        self, engine: str, exported: Path, folder_for: Callable[[str], Path]
    ) -> None:
        def weights(folder: Path) -> dict[str, torch.Tensor]:
            shards = [path for path in folder.glob("*.safetensors") if path.name != SHARD]
            return {name: tensor for path in shards for name, tensor in load_file(path).items()}

        before, after = weights(exported), weights(folder_for(engine))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

    @pytest.mark.parametrize("engine", [e for e in WITH_SCALES if e != "vllm-modelopt"])
    def test_the_compressed_tensors_section(self, engine: str, folder_for: Callable[[str], Path]) -> None:
        section = json.loads((folder_for(engine) / "config.json").read_text())["quantization_config"]
        strategy = "attn_head" if "per_head" in engines.get(engine).granularities else "tensor"
        assert section["quant_method"] == "compressed-tensors"
        assert section["config_groups"] == {}
        assert section["kv_cache_scheme"] == {
            "num_bits": 8,
            "type": "float",
            "strategy": strategy,
            "symmetric": True,
            "dynamic": False,
        }

    def test_the_modelopt_section(self, folder_for: Callable[[str], Path]) -> None:
        section = json.loads((folder_for("vllm-modelopt") / "config.json").read_text())["quantization_config"]
        assert section == {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["*"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        }

    @pytest.mark.parametrize("engine", [*WITH_SCALES, "kernel"])
    def test_keeps_the_contract(self, engine: str, folder_for: Callable[[str], Path]) -> None:
        assert broken(folder_for(engine), engine) == {}

    def test_an_export_can_be_exported_again(self, folder_for: Callable[[str], Path], tmp_path: Path) -> None:
        """Per tensor now, which is all that is left; no trace of the engine in between."""
        run_export.run_export(
            folder_for("vllm-modelopt"), "sglang", tmp_path / "again", Narrator.silent(), overwrite=False
        )
        once, twice = load_file(folder_for("sglang") / SHARD), load_file(tmp_path / "again" / SHARD)
        assert once.keys() == twice.keys()
        assert all(torch.equal(once[name], twice[name]) for name in once)
        sections = [
            json.loads((folder / "config.json").read_text())["quantization_config"]
            for folder in (folder_for("sglang"), tmp_path / "again")
        ]
        assert sections[0] == sections[1]

    def test_kernel_vectors(self, exported: Path, folder_for: Callable[[str], Path]) -> None:
        folder = folder_for("kernel")
        found, fine = load_file(folder / "kvcal-kernel.safetensors"), recorded(exported)
        assert {path.name for path in folder.iterdir()} == {
            "kvcal",
            "kvcal-kernel.json",
            "kvcal-kernel.safetensors",
        }
        assert found.keys() == {f"layers.{i}.{side}_scale" for i in range(3) for side in ("k", "v", "q")}
        for name, vector in found.items():
            assert torch.equal(vector, fine[name.removesuffix("_scale")].flatten())
        layout = json.loads((folder / "kvcal-kernel.json").read_text())
        assert layout["layers"]["2"] == {
            "module": "model.layers.2.self_attn",
            "heads": 6,
            "kv_heads": 2,
            "head_dim": 16,
        }

    def test_a_scale_per_tensor_is_written_for_every_head_of_a_kernel(
        self, folder_for: Callable[[str], Path], tmp_path: Path
    ) -> None:
        run_export.run_export(
            folder_for("sglang"), "kernel", tmp_path / "k", Narrator.silent(), overwrite=False
        )
        found = load_file(tmp_path / "k" / "kvcal-kernel.safetensors")
        assert [found[f"layers.0.{side}_scale"].shape[0] for side in "kvq"] == [2, 2, 6]
        assert all(len(vector.unique()) == 1 for vector in found.values())


class TestFolded:
    @pytest.mark.parametrize("engine", ["lmdeploy", "llamacpp"])
    def test_engines_without_scales_get_the_weights_alone(
        self, engine: str, folded: Path, tmp_path: Path
    ) -> None:
        found = run_export.run_export(folded, engine, tmp_path / "out", Narrator.silent(), overwrite=False)
        assert found.outcome == "folded"
        assert found.granularity is None
        assert found.notices == [
            f"{engines.get(engine).title}: {engines.get(engine).approximations['int8_per_token_head']}"
        ]
        assert broken(tmp_path / "out", engine) == {}
        assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
        ours = {path.name: path for path in (tmp_path / "out").glob("*.safetensors")}
        for path in folded.glob("*.safetensors"):
            theirs = load_file(path)
            assert all(torch.equal(t, load_file(ours[path.name])[n]) for n, t in theirs.items())

    @pytest.mark.parametrize("engine", WITHOUT_SCALES)
    def test_calibrated_for_them_in_one_run(
        self, engine: str, planted_folder: Path, tmp_path: Path, kvcal: Callable[..., Any]
    ) -> None:
        fmt = next(iter(engines.get(engine).cache_dtype))
        arguments = ["--model", planted_folder, "--engine", engine, "--format", fmt, "--samples", 4]
        arguments += ["--seq-len", 48, "--evaluation-samples", 2, "--output", tmp_path / "out", "--json"]
        outcome = kvcal("calibrate", *arguments)
        assert outcome.code == 0, outcome.stderr
        document = json.loads(outcome.stdout)
        assert document["deliver"] == "fold"
        assert document["engine"]["name"] == engine
        assert engines.get(engine).cache_dtype[fmt] in document["serve"] + str(document["before_serving"])
        assert broken(tmp_path / "out", engine) == {}


@pytest.fixture(scope="module")
def nvfp4(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for TensorRT-LLM's NVFP4 cache."""
    fields = {"samples": 4, "seq_len": 48}
    wanted = recipe.parse(
        {
            "engine": "trtllm",
            "format": "nvfp4",
            "scale": {"rule": "amax", "headroom": 1.0},
            "calibration": fields,
            "evaluation": fields | {"samples": 2},
        },
        "tests",
    )
    output = tmp_path_factory.mktemp("nvfp4") / "trtllm"
    run.run_calibrate(run.Request(str(llama_folder), output=output), wanted, Narrator())
    return output


class TestNvfp4:
    """Two conventions: TensorRT-LLM takes ``amax / 448``, a kernel here ``amax / 2688``."""

    def test_names_values_and_a_config_that_says_nothing(self, nvfp4: Path) -> None:
        found = load_file(nvfp4 / SHARD)
        assert found.keys() == {
            f"model.layers.{i}.self_attn.{side}_proj.{side}_scale" for i in range(3) for side in ("k", "v")
        }
        statistics = load_file(nvfp4 / "kvcal" / "statistics.safetensors")
        for name, scale in found.items():
            layer, side = name.split(".")[2], name.split(".")[-1][0]
            ends = (statistics[f"layers.{layer}.{side}.{end}"].double() for end in ("minimum", "maximum"))
            amax = max(end.abs().max() for end in ends)
            assert scale.shape == (1,)
            assert float(scale) == pytest.approx(float(amax) / 448, rel=1e-6)
        assert "quantization_config" not in json.loads((nvfp4 / "config.json").read_text())
        assert broken(nvfp4, "trtllm") == {}

    def test_the_other_convention_is_a_sixth_of_it(self, nvfp4: Path, tmp_path: Path) -> None:
        run_export.run_export(nvfp4, "kernel", tmp_path / "k", Narrator.silent(), overwrite=False)
        vectors, found = load_file(tmp_path / "k" / "kvcal-kernel.safetensors"), load_file(nvfp4 / SHARD)
        for i in range(3):
            expected = found[f"model.layers.{i}.self_attn.k_proj.k_scale"].double() / 6
            assert torch.allclose(vectors[f"layers.{i}.k_scale"].double(), expected, rtol=1e-6)
        assert json.loads((tmp_path / "k" / "kvcal-kernel.json").read_text())["reach"] == 2688
        assert broken(tmp_path / "k", "kernel") == {}

    @pytest.mark.parametrize("fault", ["missing", "zero", "NaN", "BF16", "too many", "another name", "twice"])
    def test_a_planted_fault_is_found(self, fault: str, nvfp4: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(nvfp4, tmp_path / "copy"))
        plant, rule = FAULTS[fault]
        plant(folder)
        assert any(rule in found for found in broken(folder, "trtllm"))

    def test_a_section_about_the_cache_is_found(self, nvfp4: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(nvfp4, tmp_path / "copy"))
        section = {"quant_method": "compressed-tensors", "config_groups": {}}
        edit_json(folder / "config.json", lambda c: c.update(quantization_config=section))
        assert "config.json has a quantization_config" in " ".join(broken(folder, "trtllm").values())

    def test_validates_and_evaluates_as_the_kernel_would_store_it(
        self, nvfp4: Path, kvcal: Callable[..., Any]
    ) -> None:
        found = json.loads(kvcal("validate", nvfp4, "--seq-len", 32, "--json").stdout)
        assert 0 < found["mean"] < 0.3
        assert found["layers"][0]["attention"] is None
        evaluated = json.loads(kvcal("evaluate", nvfp4, "--seq-len", 32, "--json").stdout)
        assert evaluated["fidelity"]["kl_mean"] > 0
        assert evaluated["fidelity_fp8_attention"] is None

    def test_what_is_not_measured_is_refused(self, nvfp4: Path, llama_folder: Path, tmp_path: Path) -> None:
        model = arch.read(json.loads((llama_folder / "config.json").read_text()))
        for change, message in (
            ({"deliver": "fold"}, "folds are not measured for nvfp4"),
            ({"scale.objective": "mse"}, "scale.objective mse is not measured for nvfp4"),
            ({"granularity": "per_head"}, "takes no per_head scales"),
        ):
            with pytest.raises(PlanRefused, match=message):
                plan.resolve(
                    recipe.Recipe().override({"engine": "trtllm", "format": "nvfp4"} | change), model
                )
        with pytest.raises(PlanRefused, match="vllm 0.33 has no nvfp4 cache"):
            run_export.run_export(nvfp4, "vllm", tmp_path / "out", Narrator.silent(), overwrite=False)


class TestTransformers:
    """Loaded by the library itself, as ``vllm`` and ``transformers`` checkpoints differ in Q alone."""

    @pytest.mark.parametrize("granularity_name", ["per_tensor", "per_head"])
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3"])
    def test_gives_exactly_our_rounding(self, family: str, granularity_name: str, tmp_path: Path) -> None:
        base = tiny.save(tmp_path / "base", family)
        fields = {"samples": 4, "seq_len": 48}
        wanted = recipe.parse(
            {
                "engine": "transformers",
                "granularity": granularity_name,
                "calibration": fields,
                "evaluation": fields | {"samples": 2},
            },
            "tests",
        )
        _, folder = run.run_calibrate(run.Request(str(base), output=tmp_path / "out"), wanted, Narrator())
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
        assert {key: list(value) for key, value in info.items() if value} == {}
        plain = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        found = load_file(folder / "kvcal" / "scales.safetensors")

        def rounded(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            k, v = (
                reference.quantize_dequantize(x, found[f"layers.{call.layer}.{side}"], FP8_E4M3)
                for side, x in (("k", call.key), ("v", call.value))
            )
            return call.query, k, v

        ids = torch.arange(3, 43).unsqueeze(0)
        with torch.inference_mode():
            theirs = model.eval()(ids, use_cache=True).logits
            with intercept(plain, rounded):
                ours = plain(ids, use_cache=True).logits
            unrounded = plain(ids).logits
        assert torch.equal(theirs, ours)
        assert not torch.equal(theirs, unrounded)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (
        lambda f: edit_scales(f, lambda t: t.pop(sorted(t)[0])),
        "scales",
    ),
    "zero": (lambda f: edit_scales(f, lambda t: t[sorted(t)[0]].zero_()), "values are finite and above zero"),
    "NaN": (
        lambda f: edit_scales(f, lambda t: t[sorted(t)[-1]].fill_(torch.nan)),
        "values are finite and above zero",
    ),
    "BF16": (
        lambda f: edit_scales(f, lambda t: t.update({sorted(t)[0]: t[sorted(t)[0]].bfloat16()})),
        "shapes and dtypes fit the strategy",
    ),
    "too many": (
        lambda f: edit_scales(f, lambda t: t.update({sorted(t)[0]: torch.ones(7)})),
        "shapes and dtypes fit the strategy",
    ),
    "another name": (
        lambda f: edit_scales(f, lambda t: t.update({"model.layers.0.self_attn.kv_scale": torch.ones(1)})),
        "no scale under another name",
    ),
    "dynamic": (
        lambda f: edit_json(
            f / "config.json", lambda c: c["quantization_config"]["kv_cache_scheme"].update(dynamic=True)
        ),
        "config announces the cache as the engine reads it",
    ),
    "INT8": (
        lambda f: edit_json(
            f / "config.json", lambda c: c["quantization_config"]["kv_cache_scheme"].update(type="int")
        ),
        "config announces the cache as the engine reads it",
    ),
    "no scheme": (
        lambda f: edit_json(f / "config.json", lambda c: c["quantization_config"].pop("kv_cache_scheme")),
        "config announces the cache as the engine reads it",
    ),
    "no section": (
        lambda f: edit_json(f / "config.json", lambda c: c.pop("quantization_config")),
        "config announces the cache as the engine reads it",
    ),
    "another method": (
        lambda f: edit_json(f / "config.json", lambda c: c["quantization_config"].update(quant_method="awq")),
        "config announces the cache as the engine reads it",
    ),
    "twice": (
        lambda f: save_file(load_file(f / SHARD), f / "more.safetensors"),
        "index and shards agree",
    ),
}


class TestContract:
    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("engine", WITH_SCALES)
    def test_a_planted_fault_is_found(
        self, engine: str, fault: str, folder_for: Callable[[str], Path], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(folder_for(engine), tmp_path / "copy"))
        plant, rule = FAULTS[fault]
        plant(folder)
        assert any(rule in found for found in broken(folder, engine))

    def test_modelopt_without_an_algorithm(self, folder_for: Callable[[str], Path], tmp_path: Path) -> None:
        folder = Path(shutil.copytree(folder_for("vllm-modelopt"), tmp_path / "copy"))
        edit_json(folder / "config.json", lambda c: c["quantization_config"].pop("quant_algo"))
        (message,) = broken(folder, "vllm-modelopt").values()
        assert message.startswith('quantization_config has no "quant_algo"')

    @pytest.mark.parametrize("engine", ["sglang", "tgi"])
    def test_one_number_per_layer_is_all_that_they_take(self, engine: str, exported: Path) -> None:
        """What was written for vLLM, per head and with scales of Q."""
        found = broken(exported, engine)
        assert "kv_cache_scheme.strategy" in found["config announces the cache as the engine reads it"]
        assert "q_scale" in found["no scale under another name"]

    @pytest.mark.parametrize("engine", ["lmdeploy", "llamacpp"])
    def test_a_scale_has_no_place(self, engine: str, exported: Path) -> None:
        message = broken(exported, engine)["no scale that the engine has no place for"]
        assert "loads no scales" in message

    def test_a_scheme_without_scales_has_no_place_either(self, folded_copy: Path) -> None:
        scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float"}}
        edit_json(folded_copy / "config.json", lambda c: c.update(quantization_config=scheme))
        message = broken(folded_copy, "lmdeploy")["no scale that the engine has no place for"]
        assert message == "config.json has a kv_cache_scheme, which LMDeploy does not read"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop("layers.1.v_scale"), "layers.1.v_scale is missing"),
            (lambda t: t.update({"layers.9.k_scale": torch.ones(2)}), "layers.9.k_scale is no name"),
            (lambda t: t["layers.0.k_scale"].zero_(), "layers.0.k_scale holds a scale that is not finite"),
            (lambda t: t.update({"layers.0.q_scale": torch.ones(2)}), "torch.float32 [2], must be"),
            (lambda t: t.update({"layers.0.k_scale": torch.ones(2).half()}), "torch.float16 [2]"),
        ],
    )
    def test_faults_in_vectors_for_kernels(
        self,
        change: Callable[[dict[str, torch.Tensor]], Any],
        message: str,
        folder_for: Callable[[str], Path],
        tmp_path: Path,
    ) -> None:
        folder = Path(shutil.copytree(folder_for("kernel"), tmp_path / "copy"))
        tensors = load_file(folder / "kvcal-kernel.safetensors")
        change(tensors)
        save_file(tensors, folder / "kvcal-kernel.safetensors")
        assert message in broken(folder, "kernel")["scales are those of the layout"]

    def test_vectors_that_are_not_there(self, exported: Path, tmp_path: Path) -> None:
        assert "cannot be read" in broken(exported, "kernel")["scales are those of the layout"]
        with pytest.raises(UsageError, match="no such folder"):
            check.check(tmp_path / "none", "kernel")


class TestRefusals:
    @pytest.mark.parametrize("engine", ["trtllm", "lmdeploy"])
    def test_scales_that_nobody_would_read(self, engine: str, exported: Path, tmp_path: Path) -> None:
        with pytest.raises(PlanRefused, match=f"calibrate again with --engine {engine} --deliver fold"):
            run_export.run_export(exported, engine, tmp_path / "out", Narrator.silent(), overwrite=False)
        assert not (tmp_path / "out").exists()

    def test_a_format_that_the_engine_lacks(self, folded: Path, tmp_path: Path) -> None:
        with pytest.raises(PlanRefused, match="has no int8_per_token_head cache; the nearest it has is fp8"):
            run_export.run_export(folded, "trtllm", tmp_path / "out", Narrator.silent(), overwrite=False)

    def test_folds_are_no_matter_of_a_kernel(self, planted_folder: Path, tmp_path: Path) -> None:
        folder = write(planted_folder, tmp_path / "fp8", None, "fold")
        with pytest.raises(PlanRefused, match="kernel has no weights to fold into"):
            run_export.run_export(folder, "kernel", tmp_path / "out", Narrator.silent(), overwrite=False)

    def test_what_kvcal_did_not_write(self, llama_folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="holds no kvcal records"):
            run_export.run_export(
                llama_folder, "sglang", tmp_path / "out", Narrator.silent(), overwrite=False
            )
        with pytest.raises(UsageError, match="no such folder"):
            run_export.run_export(
                tmp_path / "none", "sglang", tmp_path / "out", Narrator.silent(), overwrite=False
            )

    def test_an_output_that_is_there(self, exported: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("x")
        with pytest.raises(OutputError, match="pass --overwrite"):
            run_export.run_export(exported, "sglang", tmp_path / "out", Narrator.silent(), overwrite=False)
        run_export.run_export(exported, "sglang", tmp_path / "out", Narrator.silent(), overwrite=True)
        assert not (tmp_path / "out" / "mine").exists()

    def test_scales_that_are_broken_are_not_exported(self, exported_copy: Path, tmp_path: Path) -> None:
        path = exported_copy / "kvcal" / "scales.safetensors"
        tensors = load_file(path)
        tensors["layers.0.k"].fill_(torch.nan)
        save_file(tensors, path)
        with pytest.raises(CheckFailed, match="holds NaN"):
            run_export.run_export(
                exported_copy, "sglang", tmp_path / "out", Narrator.silent(), overwrite=False
            )
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("engine", ["sglang", "vllm-modelopt"])
    def test_a_base_of_another_kind_cannot_carry_the_section(
        self, engine: str, exported_copy: Path, tmp_path: Path
    ) -> None:
        """Weights in compressed-tensors suit SGLang, which reads that; the ModelOpt form would mix two."""
        groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}
        edit_json(
            exported_copy / "config.json", lambda c: c["quantization_config"].update(config_groups=groups)
        )
        if engine == "sglang":
            run_export.run_export(exported_copy, engine, tmp_path / "out", Narrator.silent(), overwrite=False)
            section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
            assert section["config_groups"] == groups
            assert section["kv_cache_scheme"]["strategy"] == "tensor"
        else:
            with pytest.raises(PlanRefused, match="cannot carry a KV scheme for vllm-modelopt"):
                run_export.run_export(
                    exported_copy, engine, tmp_path / "out", Narrator.silent(), overwrite=False
                )


class TestReport:
    """What was measured stays; serve line, engine, rules and scales are those of the export."""

    @pytest.mark.parametrize("engine", ["sglang", "vllm-modelopt", "lmdeploy", "kernel"])
    def test_it_is_about_the_engine_that_it_was_written_for(
        self, engine: str, exported: Path, folded: Path, folder_for: Callable[[str], Path], tmp_path: Path
    ) -> None:
        source, folder = exported, tmp_path / "out"
        if engine == "lmdeploy":
            source = folded
            run_export.run_export(source, engine, folder, Narrator.silent(), overwrite=False)
        else:
            folder = folder_for(engine)
        was, now = (json.loads((each / "kvcal" / "report.json").read_text()) for each in (source, folder))
        record = json.loads((folder / "kvcal" / "export.json").read_text())
        plan = json.loads((folder / "kvcal" / "plan.json").read_text())
        assert now["serve"] == shlex.join(record["serve"])
        assert (now["before_serving"], now["engine"]) == (record["before"], plan["engine"])
        assert now["engine"]["name"] == engine
        assert {each["rule"] for each in now["checks"]} == {f.rule for f in check.check(folder, engine)}
        measured = was.keys() - {"serve", "before_serving", "engine", "checks", "layers"}
        assert all(now[key] == was[key] for key in measured)
        text = (folder / "kvcal" / "report.md").read_text()
        assert f"for {engine} {engines.get(engine).version}" in text
        assert "from a calibration for vllm, which was measured" in text
        assert "vllm serve" not in text or engine == "vllm-modelopt"
        assert (f"```\n{now['serve']}\n```" in text) == bool(now["serve"])
        page = html.unescape((folder / "kvcal" / "report.html").read_text())
        assert (now["serve"] in page) if now["serve"] else "<pre" not in page

    def test_its_scales_are_those_that_are_written(self, folder_for: Callable[[str], Path]) -> None:
        folder = folder_for("sglang")
        layers = json.loads((folder / "kvcal" / "report.json").read_text())["layers"]
        written = load_file(folder / SHARD)
        for layer in layers:
            for side in ("k", "v"):
                (scale,) = layer[side]["scale"]
                assert scale == float(written[f"model.layers.{layer['index']}.self_attn.{side}_scale"])

    def test_records_that_are_not_whole(self, exported_copy: Path, tmp_path: Path) -> None:
        edit_json(exported_copy / "kvcal" / "report.json", lambda report: report.pop("stages"))
        with pytest.raises(ModelError, match="its records are not whole: KeyError\\('stages'"):
            run_export.run_export(
                exported_copy, "sglang", tmp_path / "out", Narrator.silent(), overwrite=False
            )
        assert not (tmp_path / "out").exists()


def test_calibrate_writes_vectors_beside_the_model(
    llama_folder: Path, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    """As export writes them alone; the model is there for evaluation, and is what it was."""
    output = tmp_path / "out"
    done = kvcal(
        "calibrate", "--model", llama_folder, "--engine", "kernel", "--output", output, "--json", *small
    )
    assert done.code == 0, done.stderr
    assert done.document["serve"] == ""
    assert "```" not in (output / "kvcal" / "report.md").read_text()
    assert (output / "model.safetensors").read_bytes() == (llama_folder / "model.safetensors").read_bytes()
    assert sources.read_config(output) == sources.read_config(llama_folder)
    hashed = json.loads((output / "kvcal" / "manifest.json").read_text())["sha256"]
    assert {kernel.TENSORS, kernel.LAYOUT} <= hashed.keys()
    assert kvcal("check", output, "--engine", "kernel").code == 0
    again = kvcal("evaluate", output, "--samples", "2", "--seq-len", "48", "--json")
    assert again.document["fidelity"] == pytest.approx(done.document["fidelity"])


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base whose weights are in FP8, and its calibration."""
    folder = tmp_path_factory.mktemp("fp8")
    base = tiny.in_fp8(tiny.save(folder / "base"))
    return base, write(base, folder / "out", None)


class TestFp8Weights:
    """A base of ``quant_method: fp8``, which transformers takes back to 16 bits on a CPU."""

    def test_scales_lie_beside_weights_and_config_as_they_were(self, calibrated: tuple[Path, Path]) -> None:
        base, out = calibrated
        config = json.loads((base / "config.json").read_text())
        assert json.loads((out / "config.json").read_text()) == config
        before, after = load_file(base / "model.safetensors"), load_file(out / "model-base.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
        scales, fine = load_file(out / SHARD), recorded(out)
        assert scales.keys() == {
            f"model.layers.{i}.self_attn.{side}_scale" for i in range(3) for side in ("k", "v", "q")
        }
        for name, scale in scales.items():
            layer, side = name.split(".")[2], name.split(".")[-1][0]
            assert torch.equal(scale, fine[f"layers.{layer}.{side}"])
            assert scale.shape == (1,)
        assert broken(out, "vllm") == {}

    @pytest.mark.parametrize("fault", ["missing", "zero", "NaN", "BF16", "too many", "another name", "twice"])
    def test_a_planted_fault_is_found(
        self, fault: str, calibrated: tuple[Path, Path], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(calibrated[1], tmp_path / "copy"))
        plant, rule = FAULTS[fault]
        plant(folder)
        assert any(rule in found for found in broken(folder, "vllm"))

    def test_only_per_tensor_only_vllm_and_no_folds(self, calibrated: tuple[Path, Path]) -> None:
        base, out = calibrated
        model = arch.read(json.loads((base / "config.json").read_text()))
        for wanted, message in (
            ({"granularity": "per_head"}, "reads scales per_tensor alone"),
            ({"deliver": "fold"}, "base weights are quantized already"),
            ({"engine": "sglang"}, "'fp8' cannot carry a KV scheme for sglang"),
        ):
            with pytest.raises(PlanRefused, match=message):
                plan.resolve(recipe.Recipe().override(wanted), model)
        with pytest.raises(PlanRefused, match="cannot carry a KV scheme for tgi"):
            run_export.run_export(out, "tgi", out.with_name("tgi"), Narrator.silent(), overwrite=False)


@pytest.fixture(scope="module", params=[True, False], ids=["inline", "own file"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in ModelOpt's FP8."""
    folder = tiny.save(tmp_path_factory.mktemp("modelopt") / "base")
    return tiny.in_modelopt_fp8(folder, inline=request.param)


class TestOtherWeights:
    """Scales of the unquantized model beside quantized weights of the same model."""

    def test_modelopt(self, base: Path, exported: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        done = run_export.run_export(
            exported, "vllm-modelopt", out, Narrator.silent(), overwrite=False, base=base
        )
        assert str(base) in done.notices[0]
        weights = (base / "model.safetensors", out / "model-base.safetensors")
        assert weights[0].read_bytes() == weights[1].read_bytes()
        written, fine = load_file(out / SHARD), recorded(exported)
        assert len(written) == 9
        for layer in range(3):
            for side, suffix in SUFFIXES["vllm-modelopt"].items():
                expected = fine[f"layers.{layer}.{side}"].max()
                assert torch.equal(written[f"model.layers.{layer}.self_attn.{suffix}"], expected)
        assert json.loads((out / "config.json").read_text())["quantization_config"] == {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["lm_head"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        }
        own = json.loads((out / "hf_quant_config.json").read_text())
        assert own["producer"]["name"] == "modelopt"
        assert own["quantization"] == {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        }
        assert broken(out, "vllm-modelopt") == {}

    @pytest.mark.parametrize("algorithm", [None, "NVFP4"])
    def test_two_files_that_disagree_are_found(
        self, algorithm: str | None, base: Path, exported: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        run_export.run_export(exported, "vllm-modelopt", out, Narrator.silent(), overwrite=False, base=base)
        edit_json(
            out / "hf_quant_config.json", lambda d: d["quantization"].update(kv_cache_quant_algo=algorithm)
        )
        assert "as in config.json" in "".join(broken(out, "vllm-modelopt").values())

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_other_engines_say_who_reads_it(
        self, engine: str, base: Path, exported: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(PlanRefused, match=f"'modelopt' cannot carry .* {engine}; vllm-modelopt read it"):
            run_export.run_export(
                exported, engine, tmp_path / "out", Narrator.silent(), overwrite=False, base=base
            )

    def test_layers_of_different_algorithms(self, base: Path, exported: Path, tmp_path: Path) -> None:
        mixed = Path(shutil.copytree(base, tmp_path / "mixed"))
        tiny.edit_config(mixed, quantization_config=None)
        own = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
        edit_json(mixed / "hf_quant_config.json", lambda d: d.update(quantization=own))
        with pytest.raises(PlanRefused, match="MIXED_PRECISION by layer is not handled"):
            run_export.run_export(
                exported, "vllm-modelopt", tmp_path / "out", Narrator.silent(), overwrite=False, base=mixed
            )

    @pytest.mark.parametrize("document", ["[]", "{", "{}", '{"quantization": {"quant_algo": null}}'])
    def test_a_document_that_says_nothing(
        self, document: str, base: Path, exported: Path, tmp_path: Path
    ) -> None:
        silent = Path(shutil.copytree(base, tmp_path / "silent"))
        tiny.edit_config(silent, quantization_config=None)
        (silent / "hf_quant_config.json").write_text(document)
        with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
            run_export.run_export(
                exported, "vllm-modelopt", tmp_path / "out", Narrator.silent(), overwrite=False, base=silent
            )

    def test_compressed_tensors(self, exported: Path, tmp_path: Path) -> None:
        base = tiny.save(tmp_path / "base")
        groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}}
        section = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
        tiny.edit_config(base, quantization_config=section)
        out = tmp_path / "out"
        run_export.run_export(exported, "vllm", out, Narrator.silent(), overwrite=False, base=base)
        written = json.loads((out / "config.json").read_text())["quantization_config"]
        assert written.pop("kv_cache_scheme")["strategy"] == "attn_head"
        assert written == section
        assert broken(out, "vllm") == {}

    def test_fp8_takes_one_scale_per_layer(self, exported: Path, tmp_path: Path) -> None:
        base, out = tiny.in_fp8(tiny.save(tmp_path / "base")), tmp_path / "out"
        done = run_export.run_export(exported, "vllm", out, Narrator.silent(), overwrite=False, base=base)
        assert (done.granularity, done.reduced_from) == ("per_tensor", "per_head")
        assert {tensor.shape for tensor in load_file(out / SHARD).values()} == {(1,)}
        assert broken(out, "vllm") == {}

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_hidden_layers": 2}, "has 2 attention layers, the calibration 3"),
            ({"num_key_value_heads": 3}, r"layer 0 is LayerSpec\(.*kv_heads=3"),
        ],
    )
    def test_another_model(
        self, fields: dict[str, int], message: str, exported: Path, tmp_path: Path
    ) -> None:
        base = tiny.save(tmp_path / "base", **fields)
        with pytest.raises(PlanRefused, match=message):
            run_export.run_export(
                exported, "vllm", tmp_path / "out", Narrator.silent(), overwrite=False, base=base
            )

    def test_no_checkpoint_at_all(self, exported: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="is no checkpoint"):
            run_export.run_export(
                exported, "vllm", tmp_path / "out", Narrator.silent(), overwrite=False, base=tmp_path
            )

    def test_folds_stay_in_their_weights(self, folded: Path, exported: Path, tmp_path: Path) -> None:
        with pytest.raises(PlanRefused, match="folded into its weights"):
            run_export.run_export(
                folded, "vllm", tmp_path / "out", Narrator.silent(), overwrite=False, base=exported
            )

    def test_the_command(self, exported: Path, tmp_path: Path, kvcal: Callable[..., Any]) -> None:
        base = tiny.in_modelopt_fp8(tiny.save(tmp_path / "base"), inline=True)
        out = tmp_path / "out"
        done = kvcal("export", exported, "--engine", "vllm-modelopt", "--base", base, "--output", out)
        assert done.code == 0, done.stderr
        assert kvcal("check", out, "--engine", "vllm-modelopt").code == 0


def verdict(
    engine: str, fmt: str, deliver: Deliver, gran: str | None, **fields: Any
) -> tuple[str, str | None]:
    found = engines.get(engine).verdict(
        arch.read(CONFIG | fields), formats.get(fmt), granularity.get(gran) if gran else None, deliver
    )
    return found.outcome, found.alternative


QWEN2, PHI3, NEOX = ({"model_type": name} for name in ("qwen2", "phi3", "gpt_neox"))


class TestVerdicts:
    @pytest.mark.parametrize(
        ("engine", "fmt", "deliver", "gran", "model", "expected"),
        [
            ("vllm", "fp8", "metadata", "per_head", {}, ("consumed", None)),
            ("vllm", "fp8", "fold", None, {}, ("folded", None)),
            ("vllm", "int4_per_token_head", "fold", None, {}, ("folded", None)),
            ("vllm", "int8", "fold", None, {}, ("refused", "--format int8_per_token_head --deliver fold")),
            ("sglang", "fp8", "metadata", "per_head", {}, ("refused", "--granularity per_tensor")),
            ("sglang", "fp8", "metadata", "per_tensor", {}, ("consumed", None)),
            ("sglang", "fp8", "metadata", "per_tensor", QWEN2, ("ignored", "--deliver fold")),
            ("sglang", "fp8", "fold", None, QWEN2, ("folded", None)),
            ("trtllm", "fp8", "metadata", "per_tensor", {}, ("ignored", "--deliver fold")),
            ("trtllm", "fp8", "metadata", "per_head", {}, ("ignored", "--deliver fold")),
            ("trtllm", "fp8", "fold", None, {}, ("folded", None)),
            ("trtllm", "nvfp4", "metadata", "per_tensor", {}, ("consumed", None)),
            ("trtllm", "nvfp4", "metadata", "per_tensor", PHI3, ("ignored", None)),
            ("tgi", "fp8", "metadata", "per_tensor", {}, ("consumed", None)),
            ("lmdeploy", "fp8", "both", "per_tensor", {}, ("ignored", "--deliver fold")),
            ("llamacpp", "fp8", "fold", None, {}, ("refused", "--format int8_per_token_head --deliver fold")),
            ("vllm-modelopt", "fp8", "metadata", "per_tensor", PHI3, ("ignored", "--deliver fold")),
            ("transformers", "fp8", "metadata", "per_head", NEOX, ("ignored", "--deliver fold")),
        ],
    )  # fmt: skip
    def test_what_becomes_of_it(
        self,
        engine: str,
        fmt: str,
        deliver: Deliver,
        gran: str | None,
        model: dict[str, Any],
        expected: tuple[str, str | None],
    ) -> None:
        assert verdict(engine, fmt, deliver, gran, **model) == expected

    @pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda e: e.name)
    @pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt_neox"])
    def test_a_verdict_is_good_if_and_only_if_the_plan_is_made(self, engine: EngineSpec, family: str) -> None:
        model = arch.read(CONFIG | {"model_type": family})
        for fmt in formats.FORMATS:
            for deliver in get_args(Deliver):
                self.agrees(engine, model, fmt, deliver)

    def agrees(self, engine: EngineSpec, model: ModelSpec, fmt: KVFormat, deliver: Deliver) -> None:
        static = not fmt.dynamic and deliver != "fold"
        gran = granularity.get("per_tensor") if static else None
        found = engine.verdict(model, fmt, gran, deliver)
        wanted = {"engine": engine.name, "format": fmt.name, "deliver": deliver}
        try:
            plan.resolve(recipe.Recipe().override(wanted), model)
            planned = True
        except PlanRefused:
            planned = False
        if engine.standalone and deliver != "metadata":
            assert not planned
        else:
            assert planned == (found.outcome in ("consumed", "folded"))
        assert bool(found.reasons)

    def test_alternatives_work(self) -> None:
        """Each is a way that the same engine takes."""
        model = arch.read(CONFIG)
        for engine in engines.ENGINES:
            for fmt in formats.FORMATS:
                found = engine.verdict(model, fmt, None, "fold")
                if found.alternative is not None:
                    option, name, *rest = found.alternative.split()
                    assert option == "--format"
                    other = formats.get(name)
                    if rest:
                        assert rest == ["--deliver", "fold"]
                        assert engine.verdict(model, other, None, "fold").outcome == "folded"
                    else:
                        per_tensor = granularity.get("per_tensor")
                        assert engine.verdict(model, other, per_tensor, "metadata").outcome == "consumed"

    def test_the_command_names_every_engine(self, llama_folder: Path, kvcal: Callable[..., Any]) -> None:
        outcome = kvcal("plan", "--model", llama_folder, "--engine", "all", "--json")
        rows = {row["engine"]: row for row in json.loads(outcome.stdout)}
        assert list(rows) == engines.names()
        assert rows["vllm"]["verdict"] == "consumed"
        assert rows["trtllm"] | {"reasons": []} == {
            "engine": "trtllm",
            "version": engines.get("trtllm").version,
            "deliver": "fold",
            "verdict": "folded",
            "reasons": [],
            "alternative": None,
        }
        shown = kvcal("plan", "--model", llama_folder, "--engine", "all", "--format", "int8_per_token_head")
        assert shown.code == 0
        assert max(map(len, shown.stdout.splitlines())) <= 80
        assert "folded" in shown.stdout


class TestCommands:
    def test_engines_lists_what_each_loads(self, kvcal: Callable[..., Any]) -> None:
        rows = {row["name"]: row for row in json.loads(kvcal("engines", "--json").stdout)}
        assert rows["sglang"]["static_scales"]["names"] == [
            "<attention module>.k_scale",
            "<attention module>.v_scale",
        ]
        shown = kvcal("engines")
        assert shown.code == 0
        assert max(map(len, shown.stdout.splitlines())) <= 80
        for engine in engines.ENGINES:
            assert engine.title in shown.stdout

    def test_export_says_what_it_did(self, exported: Path, tmp_path: Path, kvcal: Callable[..., Any]) -> None:
        outcome = kvcal("export", exported, "--engine", "sglang", "--output", tmp_path / "out")
        assert outcome.code == 0
        assert "consumed by sglang 0.5.23: per_tensor scales" in outcome.stdout
        assert "per_head scales became per_tensor" in outcome.stdout
        assert "--kv-cache-dtype fp8_e4m3" in outcome.stdout
        record = json.loads((tmp_path / "out" / "kvcal" / "export.json").read_text())
        fine = recorded(exported)
        ratio = max(float(t.max() / t.min()) for name, t in fine.items() if not name.endswith("q"))
        assert record["largest_reduction"] == pytest.approx(ratio)
        assert (record["from"], record["reduced_from"]) == ("vllm", "per_head")

    def test_a_folder_may_be_called_like_a_blank_of_the_command(self, exported: Path, tmp_path: Path) -> None:
        output = tmp_path / "MODEL DTYPE $dtype FOLDER"
        found = run_export.run_export(exported, "tgi", output, Narrator.silent(), overwrite=False)
        assert found.serve[2] == str(output)

    def test_the_usual_output_is_named_after_the_engine(
        self, exported: Path, tmp_path: Path, kvcal: Callable[..., Any]
    ) -> None:
        folder = Path(shutil.copytree(exported, tmp_path / "here"))
        outcome = kvcal("export", folder, "--engine", "tgi", "--json")
        assert json.loads(outcome.stdout)["folder"] == str(tmp_path / "here-tgi")
        assert broken(tmp_path / "here-tgi", "tgi") == {}

    @pytest.mark.parametrize("engine", ["sglang", "transformers", "vllm-modelopt"])
    def test_an_export_can_be_validated_and_evaluated(
        self, engine: str, folder_for: Callable[[str], Path], kvcal: Callable[..., Any]
    ) -> None:
        for command in ("validate", "evaluate"):
            outcome = kvcal(command, folder_for(engine), "--seq-len", 32, "--json")
            assert outcome.code == 0, outcome.stderr

    def test_only_vllm_is_asked_live(
        self, folder_for: Callable[[str], Path], kvcal: Callable[..., Any]
    ) -> None:
        outcome = kvcal("check", folder_for("sglang"), "--engine", "sglang", "--live")
        assert outcome.code == UsageError.exit_code
        assert "--live cannot start sglang; it can start vllm, vllm-modelopt" in outcome.stderr


class TestTensorParallel:
    def test_heads_are_dealt_out_in_runs(self, exported: Path) -> None:
        fine = recorded(exported)
        rows = tensor_parallel.shares(exported, "vllm", 2)
        assert [(row.layer, row.rank) for row in rows] == [(i, r) for i in range(3) for r in range(2)]
        for row in rows:
            assert (row.first_head, row.stop_head) == (row.rank, row.rank + 1)
            assert row.scales["k"] == [float(fine[f"layers.{row.layer}.k"][row.rank])]
            group = fine[f"layers.{row.layer}.q"].flatten()[3 * row.rank : 3 * row.rank + 3]
            assert row.scales["q"] == [float(group.max())]

    def test_heads_are_copied_to_more_ranks_than_there_are(self, exported: Path) -> None:
        rows = tensor_parallel.shares(exported, "vllm", 4)
        assert [row.first_head for row in rows[:4]] == [0, 0, 1, 1]
        assert rows[0].scales == rows[1].scales != rows[2].scales

    def test_one_scale_goes_to_every_rank(self, folder_for: Callable[[str], Path]) -> None:
        first, second = tensor_parallel.shares(folder_for("sglang"), "sglang", 2)[:2]
        assert first.scales == second.scales
        assert len(first.scales["k"]) == 1

    def test_ranks_that_no_engine_would_take(self, exported: Path) -> None:
        with pytest.raises(UsageError, match="2 KV heads cannot be dealt out to 3 ranks"):
            tensor_parallel.shares(exported, "vllm", 3)

    @pytest.mark.parametrize("engine", ["kernel", "llamacpp"])
    def test_nothing_to_deal_out(self, engine: str, folder_for: Callable[[str], Path], folded: Path) -> None:
        folder = folder_for("kernel") if engine == "kernel" else folded
        with pytest.raises(UsageError, match=f"{engine} deals out none"):
            tensor_parallel.shares(folder, engine, 2)

    def test_the_command_shows_them(self, exported: Path, kvcal: Callable[..., Any]) -> None:
        outcome = kvcal("check", exported, "--tensor-parallel", 2, "--json")
        document = json.loads(outcome.stdout)
        assert document["ok"]
        assert len(document["ranks"]) == 6
        shown = kvcal("check", exported, "--tensor-parallel", 2).stdout
        assert "scales by rank" in shown
        assert "ranks" not in json.loads(kvcal("check", exported, "--json").stdout)
