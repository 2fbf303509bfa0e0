"""The loaders of SGLang and LMDeploy, from their own source text, over checkpoints that kvcal writes.

Neither engine is installed: the functions that decide about scales are cut out of the published wheels with
``ast`` and run on the CPU. Stand-ins are what they only pass through: parallel groups, logging, and modules
that take a weight and do not use it.
"""

from __future__ import annotations

import ast
import builtins
import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig

from kvcal import engines, folders, recipe, run, run_export
from kvcal.engines import SGLANG
from kvcal.errors import PlanRefused
from kvcal.progress import Narrator
from tests import tiny

pytestmark = pytest.mark.slow

# requirement -> platform and SHA-256 of the one wheel that is read, whichever Python runs the tests.
WHEELS = {
    "sglang==0.5.23": (
        "manylinux_2_34_x86_64",
        "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
    ),
    "lmdeploy==0.18.0": (
        "manylinux_2_28_x86_64",
        "e6790a25dcdb0345c160567fdf2ac604fec319389523a8b806834c9d92c8ffe1",
    ),
}

# model type -> file of sglang/srt/models; gpt_neox has none.
MODEL_FILES = {
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3_causal",
    "phi": "phi",
    "phi3": "llama",
    "olmo2": "olmo2",
    "granite": "granite",
    "starcoder2": "starcoder2",
    "cohere2": "commandr",
    "stablelm": "stablelm",
    "exaone4": "exaone4",
}
# Of those that drop scales, the ones that leave a line per name in the log.
LOGS_WHAT_IT_DROPS = {"mixtral", "qwen2"}
FAILS_ON_Q_SCALE = ("gemma2", "gemma3_text", "cohere2")

# model type -> file of lmdeploy/pytorch/models
LMDEPLOY_FILES = {
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "phi3": "phi3",
}


def fetched(requirement: str) -> Path:
    """The pinned wheel from the cache, downloaded with pip if it is not there."""
    platform, digest = WHEELS[requirement]
    cache = folders.cache_folder() / "engine-wheels"
    target = cache / f"{requirement.replace('==', '-')}-{digest[:16]}.whl"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command += ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--abi", "cp311"]
            command += ["--python-version", "3.11", "--platform", platform, "--retries", "1"]
            command += ["--dest", scratch, requirement]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            wheels = list(Path(scratch).glob("*.whl"))
            if done.returncode or not wheels:
                if "after connection broken by" in done.stderr:
                    pytest.skip(f"no network: pip cannot download {requirement}")
                pytest.fail(f"pip cannot download {requirement}: {done.stderr.strip()}")
            os.replace(wheels[0], target)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == digest, f"{target}: SHA-256 is {found}, not that of {requirement}"
    return target


class Log:
    """Takes the place of an engine's logger and remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, message: str, *values: Any) -> None:
        self.lines.append(message % values if values else message)

    warning_once = warning


class Sources:
    """Python files of a wheel, of which single functions and classes are run."""

    def __init__(self, wheel: Path, root: str) -> None:
        self._wheel = zipfile.ZipFile(wheel)
        self._root = root
        self._trees: dict[str, ast.Module] = {}

    def files(self, under: str) -> Iterator[tuple[str, str]]:
        """Name and text of the files of a folder."""
        for name in self._wheel.namelist():
            folder, _, file = name.rpartition("/")
            if folder == f"{self._root}/{under}" and file.endswith(".py"):
                yield file.removesuffix(".py"), self.text(f"{under}/{file}")

    def text(self, path: str) -> str:
        return self._wheel.read(f"{self._root}/{path}").decode()

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(self.text(path))
        return self._trees[path]

    def run(
        self,
        path: str,
        *names: str,
        keep: Callable[[str], bool] | None = None,
        base: type | None = None,
        imports: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> Any:
        """Execute functions, classes and assignments of a file, and return the last one.

        Args:
            path: the file.
            names: what of it is executed.
            keep: which members of classes are executed; all by default.
            base: takes the place of the classes' bases, which otherwise are names in ``given``.
            imports: what imports inside of functions find, whichever module they name.
            given: other globals that the text refers to.
        """
        # Annotations are not evaluated: they name much of the engine.
        nodes = ast.parse("from __future__ import annotations").body
        for name in names:
            (node,) = [n for n in self.tree(path).body if name in _named(n)]
            node = copy.deepcopy(node)
            if isinstance(node, ast.ClassDef):
                if base is not None:
                    node.bases, node.keywords = [ast.Name("Base_", ast.Load())], []
                if keep is not None:
                    node.body = [n for n in node.body if any(map(keep, _named(n)))] or [ast.Pass()]
            nodes.append(ast.fix_missing_locations(node))

        def found(name: str, *arguments: Any) -> Any:
            if name.partition(".")[0] == self._root.partition("/")[0]:
                return SimpleNamespace(**(imports or {}))
            return builtins.__import__(name, *arguments)

        namespace = {
            "__builtins__": {**vars(builtins), "__import__": found},
            "__name__": __name__,
            "torch": torch,
        }
        namespace |= {"Base_": base, **given}
        exec(compile(ast.Module(nodes, []), f"{self._root}/{path}", "exec", dont_inherit=True), namespace)
        return namespace[names[-1]]


def _named(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.fixture(scope="session")
def sglang() -> Sources:
    return Sources(fetched("sglang==0.5.23"), "sglang/srt")


@pytest.fixture(scope="session")
def lmdeploy() -> Sources:
    return Sources(fetched("lmdeploy==0.18.0"), "lmdeploy/pytorch")


Written = Callable[[str], Path]


@pytest.fixture(scope="session")
def for_vllm(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Model type -> a per-head checkpoint for vLLM, whose scales are no powers of two and so all differ."""
    folder, done = tmp_path_factory.mktemp("loaders"), {}

    def write(model_type: str) -> Path:
        if model_type not in done:
            model = tiny.save(folder / f"{model_type}-model", model_type)
            fields = {"samples": 2, "seq_len": 32}
            scales = {"granularity": "per_head", "scale": {"rule": "amax"}}
            texts = {"calibration": fields, "evaluation": fields | {"samples": 1}}
            wanted = recipe.parse(scales | texts, "tests")
            request = run.Request(str(model), output=folder / f"{model_type}-vllm")
            _, done[model_type] = run.run_calibrate(
                request, wanted, Narrator(Console(stderr=True, quiet=True))
            )
        return done[model_type]

    return write


@pytest.fixture(scope="session")
def for_sglang(for_vllm: Written) -> Written:
    """Model type -> the same for SGLang, for models whose scales it drops as well."""
    done = {}

    def write(model_type: str) -> Path:
        if model_type not in done:
            source = for_vllm(model_type)
            output = source.with_name(f"{model_type}-sglang")
            willing = tuple(
                replace(e, families=None, unloaded={}) if e is SGLANG else e for e in engines.ENGINES
            )
            with pytest.MonkeyPatch.context() as patch:
                if model_type not in SGLANG.families:
                    patch.setattr(engines, "ENGINES", willing)
                run_export.run_export(source, "sglang", output, Narrator.silent(), overwrite=False)
            done[model_type] = output
        return done[model_type]

    return write


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of all files, which is what the index names where there is one."""
    tensors = {
        name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()
    }
    index = folder / "model.safetensors.index.json"
    assert not index.exists() or json.loads(index.read_text())["weight_map"].keys() == tensors.keys()
    return tensors


def read_scales(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "kvcal-scales.safetensors")


def is_scale(name: str) -> bool:
    return name.endswith("_scale")


@dataclass
class Weights:
    """An engine's parameters, which count what arrives and leave it at that; scales are real ones."""

    named: dict[str, torch.nn.Parameter]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], engine_name: Callable[[str], str]) -> Weights:
        named = {}
        for name in map(engine_name, filter(lambda n: not is_scale(n), tensors)):
            named[name] = parameter = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
            parameter.arrived = 0
            parameter.weight_loader = _count
            # Of LMDeploy: parts of a weight that is fused in the file.
            parameter.weight_spliter = lambda whole, n=name: [whole] * (3 if ".qkv_proj." in n else 2)
        return cls(named)

    @property
    def untouched(self) -> list[str]:
        """Those of the weights, scales aside, that nothing arrived at."""
        return [name for name, parameter in self.named.items() if not getattr(parameter, "arrived", 1)]


def _count(parameter: Any, *_arguments: Any, **_named: Any) -> None:
    parameter.arrived += 1


def model_stub(folder: Path, named: Mapping[str, torch.nn.Parameter]) -> type:
    """What the models inherit from, as far as ``load_weights`` looks at it."""
    config = AutoConfig.from_pretrained(folder)

    class Stub:
        def __init__(self) -> None:
            self.config = config
            self.model = SimpleNamespace(start_layer=0, end_layer=config.num_hidden_layers)
            self.pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)

        def named_parameters(self, **_flags: Any) -> list[tuple[str, torch.nn.Parameter]]:
            return list(named.items())

    return Stub


# SGLang


def sglang_name(name: str) -> str:
    """Of a weight: Q, K and V, gate and up, and experts are one parameter each."""
    name = re.sub(r"\.experts\.\d+\.(w[13]|gate_proj|up_proj)\.", ".experts.w13_", name)
    name = re.sub(r"\.experts\.\d+\.(w2|down_proj)\.", ".experts.w2_", name)
    return re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name))


def declared_models(sglang: Sources) -> dict[str, list[str]]:
    """Architecture -> the files that offer it; ``EntryClass`` is what the engine's registry collects."""
    declared: dict[str, list[str]] = {}
    for file, text in sglang.files("models"):
        for entry in re.findall(r"^EntryClass = (\w+|\[.*?\])", text, re.MULTILINE | re.DOTALL):
            for architecture in re.findall(r"\w+", entry):
                declared.setdefault(architecture, []).append(file)
    return declared


def loading_class(sglang: Sources, file: str, name: str) -> tuple[str, str]:
    """File and name of the class among the bases of ``name`` that defines ``load_weights``."""
    tree = sglang.tree(f"models/{file}.py")
    imported = {
        alias.name: node.module.rpartition(".")[2]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt.models.")
        for alias in node.names
    }
    here = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in here:
        return loading_class(sglang, imported[name], name)
    if any("load_weights" in _named(member) for member in here[name].body):
        return file, name
    (base,) = [b.id for b in here[name].bases if isinstance(b, ast.Name)]
    return loading_class(sglang, file, base)


@dataclass
class Attention:
    """SGLang's classes about scales, from its own text."""

    layer: Any
    method: Any
    section: Any

    @classmethod
    def of(cls, sglang: Sources, log: Log) -> Attention:
        """``layer`` is its attention, ``method`` what loads scales into it, ``section`` its config."""
        base_method = sglang.run(
            "layers/quantization/kv_cache.py",
            "BaseKVCacheMethod",
            QuantizeMethodBase=object,
            is_fp8_fnuz=lambda: False,
        )
        layer = sglang.run(
            "layers/radix_attention.py",
            "AttentionType",
            "RadixAttention",
            keep=lambda name: name == "__init__" or name.isupper(),
            Enum=Enum,
            nn=torch.nn,
        )
        path = "layers/quantization/compressed_tensors/compressed_tensors.py"
        method = sglang.run(path, "CompressedTensorsKVCacheMethod", BaseKVCacheMethod=base_method)
        others = {name: type(name, (), {}) for name in ("LinearBase", "ParallelLMHead", "FusedMoE")}
        section = sglang.run(
            path,
            "SPARSITY_CONFIG_NAME",
            "CompressedTensorsConfig",
            imports=others | {"RadixAttention": layer},
            QuantizationConfig=object,
            CompressedTensorsKVCacheMethod=method,
            logger=log,
            cast=lambda _type, value: value,
            List=list,
        )
        return cls(layer, method, section)


@dataclass
class Loaded:
    """What is left after SGLang's loader ran.

    Attributes:
        attention: path of the attention module -> SGLang's attention layer.
        weights: its other parameters.
        quant_config: made from the config's section.
        kv_cache: name and type of the cache that ``--kv-cache-dtype auto`` starts.
        log: its warnings.
        method: what loads scales into attention.
    """

    attention: dict[str, Any]
    weights: Weights
    quant_config: Any
    kv_cache: tuple[str | None, torch.dtype]
    log: list[str]
    method: Any


def load_weights_of(sglang: Sources, file: str, name: str, stub: type, log: Log) -> Any:
    """An instance of the class whose ``load_weights`` SGLang runs for architecture ``name``."""
    file, name = loading_class(sglang, file, name)
    utilities = "model_loader/weight_utils.py"
    experts = sglang.run(
        "layers/moe/fused_moe_triton/layer.py",
        "FusedMoE",
        keep=lambda name: name == "make_expert_params_mapping",
        base=object,
    )
    flag = "SGLANG_ENABLE_WEIGHT_LOADER_V2"
    (default,) = re.findall(rf"\b{flag} = EnvBool\((\w+)\)", sglang.text("environ.py"))
    envs = SimpleNamespace(**{flag: SimpleNamespace(get=lambda: default == "True")})
    made = sglang.run(
        f"models/{file}.py",
        name,
        keep=lambda name: "load_weight" in name or name == "packed_modules_mapping",
        base=stub,
        imports={"envs": envs},
        maybe_remap_kv_scale_name=sglang.run(
            utilities, "maybe_remap_kv_scale_name", print_warning_once=log.warning
        ),
        default_weight_loader=sglang.run(utilities, "default_weight_loader"),
        get_layer_id=sglang.run("layers/utils/common.py", "get_layer_id", re=re),
        add_prefix=sglang.run("utils/common.py", "add_prefix"),
        FusedMoE=experts,
        LazyValue=lambda make: make,
        supports_quantized_rl_reload=lambda method: method,
        logger=log,
    )
    return made()


def load_in_sglang(sglang: Sources, folder: Path) -> Loaded:
    """Load a checkpoint as SGLang does: the section, attention, ``load_weights``, what follows."""
    log = Log()
    config, tensors = read_config(folder), read_tensors(folder)
    classes = Attention.of(sglang, log)
    quant_config = classes.section.from_config(config["quantization_config"])
    attention = {
        f"model.layers.{index}.self_attn": classes.layer(
            6, 16, 0.25, 2, index, quant_config=quant_config, prefix=f"model.layers.{index}.self_attn.attn"
        )
        for index in range(config["num_hidden_layers"])
    }
    weights = Weights.of(tensors, sglang_name)
    named = dict(weights.named)
    for path, layer in attention.items():
        named |= {f"{path}.attn.{name}": parameter for name, parameter in layer.named_parameters()}
    (architecture,) = config["architectures"]
    file, stub = MODEL_FILES[config["model_type"]], model_stub(folder, named)
    load_weights_of(sglang, file, architecture, stub, log).load_weights(iter(tensors.items()))
    for layer in attention.values():
        if layer.quant_method is not None:
            layer.quant_method.process_weights_after_loading(layer)
    kv_cache = sglang.run(
        "mem_cache/kv_cache_dtype.py",
        "TORCH_DTYPE_TO_KV_CACHE_STR",
        "configure_kv_cache_dtype",
        _is_hip=False,
        logger=log,
    )(
        server_args_kv_cache_dtype="auto",
        model=SimpleNamespace(quant_config=quant_config),
        model_dtype=torch.bfloat16,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    return Loaded(attention, weights, quant_config, kv_cache, log.lines, classes.method)


def in_attention(loaded: Loaded) -> dict[str, float]:
    """The scales that kernels get, under the names that they have in a checkpoint."""
    held = {}
    for path, layer in loaded.attention.items():
        for side in "kv":
            held[f"{path}.{side}_scale"] = getattr(layer, f"{side}_scale_float")
            assert getattr(layer, f"{side}_scale").item() == held[f"{path}.{side}_scale"]
    return held


def test_the_table_of_model_files_is_that_of_the_engine(sglang: Sources, for_sglang: Written) -> None:
    """Each model type is in the row, and one file alone offers its architecture: the one that is read."""
    assert MODEL_FILES.keys() | {"gpt_neox"} == {*SGLANG.families, *SGLANG.unloaded}
    declared = declared_models(sglang)
    for model_type, file in MODEL_FILES.items():
        (architecture,) = read_config(for_sglang(model_type))["architectures"]
        assert declared[architecture] == [file]
    assert "GPTNeoXForCausalLM" not in declared


@pytest.mark.parametrize("model_type", SGLANG.families)
def test_sglang_hands_each_written_scale_to_attention(
    sglang: Sources, for_vllm: Written, for_sglang: Written, model_type: str
) -> None:
    """Values in the file are values in the attention layer; all differ, so that none can pass for another."""
    folder = for_sglang(model_type)
    written = {name: tensor.item() for name, tensor in read_scales(folder).items()}
    assert len({*written.values(), 1.0}) == 1 + 2 * 3
    heads = read_scales(for_vllm(model_type))
    assert written == {name: heads[name].max().item() for name in written}
    loaded = load_in_sglang(sglang, folder)
    assert in_attention(loaded) == written
    assert not loaded.weights.untouched
    assert loaded.log == []


@pytest.mark.parametrize("model_type", sorted(SGLANG.unloaded.keys() - {"gpt_neox"}))
def test_sglang_drops_or_refuses_what_the_row_says(
    sglang: Sources, for_vllm: Written, for_sglang: Written, tmp_path: Path, model_type: str
) -> None:
    """The same scales reach no attention layer of these models, and ``export`` refuses to write them."""
    row = SGLANG.unloaded[model_type]
    with pytest.raises(PlanRefused, match=re.escape(row)):
        run_export.run_export(
            for_vllm(model_type), "sglang", tmp_path / "refused", Narrator.silent(), overwrite=False
        )
    folder = for_sglang(model_type)
    written = read_scales(folder)
    assert len(written) == 2 * 3
    if row.startswith("fails with KeyError on a k_scale"):
        with pytest.raises(KeyError) as raised:
            load_in_sglang(sglang, folder)
        assert raised.value.args[0] in written
        assert raised.value.args[0].endswith(".k_scale")
        return
    assert row.startswith("drops scales")
    assert "serves 1.0" in row
    loaded = load_in_sglang(sglang, folder)
    assert set(in_attention(loaded).values()) == {1.0}
    assert not loaded.weights.untouched
    logged = [f"Parameter {name} not found in params_dict" for name in written]
    assert sorted(loaded.log) == (sorted(logged) if model_type in LOGS_WHAT_IT_DROPS else [])


def test_a_per_head_calibration_reaches_attention_as_its_largest_head(
    sglang: Sources, exported: Path, tmp_path: Path
) -> None:
    """``export`` reduces it to what SGLang loads; nothing of Q is written, and the scheme turns FP8 on."""
    made = run_export.run_export(exported, "sglang", tmp_path / "out", Narrator.silent(), overwrite=False)
    assert (made.granularity, made.reduced_from) == ("per_tensor", "per_head")
    fine = {name: t for name, t in read_scales(exported).items() if not name.endswith(".q_scale")}
    assert {t.numel() for t in fine.values()} == {2}
    loaded = load_in_sglang(sglang, tmp_path / "out")
    assert in_attention(loaded) == {name: t.max().item() for name, t in fine.items()}
    assert not [name for name in read_tensors(tmp_path / "out") if name.endswith(".q_scale")]
    assert {type(layer.quant_method) for layer in loaded.attention.values()} == {loaded.method}
    assert loaded.quant_config.kv_cache_quant_algo == "FP8"
    assert loaded.kv_cache == (SGLANG.cache_dtype["fp8_e4m3"], torch.float8_e4m3fn)


def test_sglang_ignores_the_form_with_a_scale_per_head(sglang: Sources, exported: Path) -> None:
    """The checkpoint for vLLM loads without an error and without one scale, over a 16-bit cache."""
    assert read_config(exported)["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"
    loaded = load_in_sglang(sglang, exported)
    held = [(layer.quant_method, layer.k_scale, layer.v_scale) for layer in loaded.attention.values()]
    assert held == [(None, None, None)] * 3
    assert loaded.quant_config.kv_cache_quant_algo is None
    assert loaded.kv_cache == (None, torch.bfloat16)
    assert loaded.log[0].startswith("Ignoring compressed-tensors kv_cache_scheme")
    assert not loaded.weights.untouched


@pytest.mark.parametrize("model_type", FAILS_ON_Q_SCALE)
def test_a_q_scale_would_stop_some_models(sglang: Sources, for_vllm: Written, model_type: str) -> None:
    """Why the row has none: these fail on the one that the checkpoint for vLLM has."""
    with pytest.raises(KeyError, match=r"self_attn\.q_scale"):
        load_in_sglang(sglang, for_vllm(model_type))


# LMDeploy


def lmdeploy_name(name: str) -> str:
    """Of a weight: Q, K and V, gate and up, and experts are one parameter each."""
    name = re.sub(r"\.experts\.\d+\.(w[13]|gate_proj|up_proj)\.", ".experts.gate_up.", name)
    name = re.sub(r"\.experts\.\d+\.(w2|down_proj)\.", ".experts.down.", name)
    return re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name))


def load_in_lmdeploy(lmdeploy: Sources, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Run ``load_weights`` of the model file that LMDeploy's map has for the architecture."""
    config = read_config(folder)
    (architecture,) = config["architectures"]
    known: dict[str, Any] = {}
    exec(compile(lmdeploy.text("models/module_map.py"), "module_map.py", "exec"), known)
    package, file, name = known["MODULE_MAP"][architecture].rsplit(".", 2)
    assert (package, file) == ("lmdeploy.pytorch.models", LMDEPLOY_FILES[config["model_type"]])
    weights = Weights.of(tensors, lmdeploy_name)
    loader = "weight_loader/model_weight_loader.py"
    model = lmdeploy.run(
        f"models/{file}.py",
        name,
        keep=lambda name: "load_weight" in name,
        base=model_stub(folder, weights.named),
        load_weight=lmdeploy.run(loader, "default_weight_loader", "load_weight"),
    )()
    model.load_weights(iter(tensors.items()))
    return weights


def lmdeploy_quantization(lmdeploy: Sources, folder: Path) -> Any:
    """LMDeploy's reading of the config's section about quantization."""
    parsed = lmdeploy.run(
        "config.py",
        "_parse_compressed_tensors_config",
        "QuantizationConfig",
        Mapping=Mapping,
        dataclass=dataclass,
        field=field,
    )
    return parsed.from_config(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("model_type", LMDEPLOY_FILES)
def test_lmdeploy_fails_on_a_scale(lmdeploy: Sources, for_sglang: Written, model_type: str) -> None:
    """The weights alone load; the same weights with scales beside them do not."""
    folder = for_sglang(model_type)
    tensors = read_tensors(folder)
    plain = {name: tensor for name, tensor in tensors.items() if not is_scale(name)}
    assert not load_in_lmdeploy(lmdeploy, folder, plain).untouched
    with pytest.raises(KeyError, match=r"self_attn\.k_scale"):
        load_in_lmdeploy(lmdeploy, folder, tensors)
    assert "KeyError on a k_scale" in engines.LMDEPLOY.unread["fp8_e4m3"]


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_lmdeploy_refuses_the_section(
    lmdeploy: Sources, for_vllm: Written, for_sglang: Written, form: str
) -> None:
    folder = {"vllm": for_vllm, "sglang": for_sglang}[form]("llama")
    with pytest.raises(ValueError, match="Only compressed-tensors `pack-quantized` format is supported"):
        lmdeploy_quantization(lmdeploy, folder)
    assert "refuses the config section" in engines.LMDEPLOY.unread["fp8_e4m3"]


def test_lmdeploy_takes_a_checkpoint_without_scales(lmdeploy: Sources, folded: Path, tmp_path: Path) -> None:
    """What ``export`` writes for it has no section and no scale, and loads whole."""
    folder = tmp_path / "out"
    made = run_export.run_export(folded, "lmdeploy", folder, Narrator.silent(), overwrite=False)
    assert made.outcome == "folded"
    tensors = read_tensors(folder)
    assert "quantization_config" not in read_config(folder)
    assert not [name for name in tensors if "scale" in name]
    assert lmdeploy_quantization(lmdeploy, folder).quant_method is None
    assert not load_in_lmdeploy(lmdeploy, folder, tensors).untouched
