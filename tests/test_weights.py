"""Quantized weights are what was asked for, the rest is as it was, and the whole job takes the result."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from kvcal import arch, models, sources, weights
from kvcal.errors import DataError, ModelError, OutputError, PlanRefused, UsageError
from tests import tiny
from tests.test_calibrate import token_set

# Groups of 128 must fill the rows of every linear layer: 128 (hidden, heads x head size) and 256.
GROUPED = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
DENSE = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "starcoder2",
]
TOKENS = token_set([64] * 6 + [40, 20])
SMALL = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
every_scheme = pytest.mark.parametrize("scheme", weights.SCHEMES)
pytestmark = pytest.mark.filterwarnings("ignore")


def spec_of(folder: Path) -> arch.ModelSpec:
    return arch.read(sources.read_config(folder))


def quantize(source: Path, target: Path, scheme: str, **named: Any) -> Path:
    weights.quantize(source, target, scheme, TOKENS, spec_of(source), **named)
    return target


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@dataclass(frozen=True)
class Pair:
    """A plain checkpoint, what it held before, and what was made of it."""

    source: Path
    before: dict[str, str]
    targets: dict[str, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("weights")
    source = tiny.save(folder / "plain", **GROUPED)
    before = digests(source)
    return Pair(source, before, {s: quantize(source, folder / s, s) for s in weights.SCHEMES})


def linears(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [n.removesuffix("_scale") for n in tensors if n.endswith("weight_scale")]


def unpacked(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Float64 weights of packed INT4: eight to a word from the lowest bits up, 8 for zero."""
    packed, scale = tensors[f"{name}_packed"].long(), tensors[f"{name}_scale"].double()
    codes = torch.stack([(packed >> (4 * i)) & 15 for i in range(8)], -1).flatten(-2) - 8
    return codes.double() * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def nearest_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance of float64 ``x`` to the nearest finite E4M3 value, and the gap that it falls into."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = values[values.isfinite()].unique()
    above = torch.searchsorted(grid, x).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    return torch.minimum((x - low).abs(), (high - x).abs()), high - low


def test_fp8_weights_are_the_nearest_ones_of_a_scale_per_row(pair: Pair) -> None:
    plain, made = (load_file(f / "model.safetensors") for f in (pair.source, pair.targets["FP8_DYNAMIC"]))
    assert len(linears(made)) == 3 * 7
    for name in linears(made):
        weight, scale = plain[name].double(), made[f"{name}_scale"].double()
        assert made[name].dtype == torch.float8_e4m3fn
        # The scale is stored in BF16, half a step of which is 2^-8 at most.
        torch.testing.assert_close(scale * 448, weight.abs().amax(1, keepdim=True), rtol=2**-8, atol=0)
        wanted = (weight / scale).clamp(-448, 448)
        best, gap = nearest_e4m3(wanted)
        # compressed-tensors divides in BF16: a weight that close to a tie may fall on its other side.
        excess = (made[name].double() - wanted).abs() - best
        assert float((excess / gap).max()) < 1 / 12
        assert float((excess > 1e-9).double().mean()) < 0.05


def test_int4_weights_decompress_as_they_are_packed(pair: Pair) -> None:
    plain, made = (load_file(f / "model.safetensors") for f in (pair.source, pair.targets["W4A16"]))
    model = AutoModelForCausalLM.from_pretrained(
        pair.targets["W4A16"], quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    theirs = model.state_dict()
    assert len(linears(made)) == 3 * 7
    for name in linears(made):
        ours = unpacked(made, name)
        assert made[f"{name}_scale"].shape == (ours.shape[0], ours.shape[1] // 128)
        assert torch.equal(ours.to(theirs[name].dtype), theirs[name])
        assert float((ours - plain[name].double()).norm() / plain[name].double().norm()) < 0.2


def test_gptq_keeps_the_outputs_better_than_rounding_to_nearest(pair: Pair) -> None:
    made = load_file(pair.targets["W4A16"] / "model.safetensors")
    cpu = torch.device("cpu")
    model = models.load(pair.source, spec_of(pair.source), cpu, models.TRUST_NOTHING)
    held_out = token_set([64] * 4, seed=1).batches(4)
    ids = next(iter(held_out)).input_ids

    def hidden() -> torch.Tensor:
        with torch.inference_mode():
            return model.model(ids).last_hidden_state.double()

    def error(replaced: Callable[[str, torch.Tensor], torch.Tensor]) -> float:
        for name in linears(made):
            model.get_parameter(name).data = replaced(name, plain[name].double()).float()
        return float((hidden() - reference).norm() / reference.norm())

    def rounded(_: str, weight: torch.Tensor) -> torch.Tensor:
        groups = weight.reshape(weight.shape[0], -1, 128)
        scale = groups.abs().amax(-1, keepdim=True) / 7.5
        return ((groups / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)

    reference, plain = hidden(), {n: model.get_parameter(n).data.clone() for n in linears(made)}
    assert error(lambda name, _: unpacked(made, name)) < error(rounded)


@every_scheme
def test_the_folder_is_complete_and_the_source_as_it_was(pair: Pair, scheme: str) -> None:
    target = pair.targets[scheme]
    assert digests(pair.source) == pair.before
    after = digests(target)
    assert [n for n in SMALL if after[n] != pair.before[n]] == []
    assert {p.stat().st_mode & 0o777 for p in target.iterdir()} == {target.stat().st_mode & 0o666}
    before, config = (json.loads((f / "config.json").read_text()) for f in (pair.source, target))
    section = config.pop("quantization_config")
    assert config == before
    assert section["quant_method"] == "compressed-tensors"
    assert section["ignore"] == ["lm_head"]
    _assert_loads(pair.source, target)


def _assert_loads(source: Path, target: Path) -> None:
    """Into transformers without a gap, and with everything that is not quantized bit for bit as it was."""
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
    assert model.lm_head.weight.dtype == torch.bfloat16
    plain, made = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    changed = set(linears(made))
    assert changed
    for name in plain.keys() - changed:
        assert torch.equal(plain[name], made[name]), name


@pytest.mark.parametrize("family", DENSE)
def test_fp8_of_every_dense_family_loads(tmp_path: Path, family: str) -> None:
    source = tiny.save(tmp_path / "plain", family)
    _assert_loads(source, quantize(source, tmp_path / "fp8", "FP8_DYNAMIC"))


@pytest.mark.slow
@pytest.mark.parametrize("family", DENSE)
def test_int4_of_every_dense_family_loads(tmp_path: Path, family: str) -> None:
    source = tiny.save(tmp_path / "plain", family, **GROUPED)
    _assert_loads(source, quantize(source, tmp_path / "int4", "W4A16"))


@every_scheme
def test_a_second_run_gives_the_same_files_and_leaves_nothing_else(
    pair: Pair,
    scheme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from llmcompressor import active_session

    here, target = tmp_path / "here", tmp_path / "made" / "again"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)

    def state() -> tuple[Any, ...]:
        session = active_session()
        return (
            dict(os.environ),
            torch.get_rng_state().tolist(),
            tqdm.tqdm.__init__,
            sys.stdout,
            id(session),
            session.lifecycle.recipe.modifiers,
        )

    before = state()
    capfd.readouterr()
    told: list[str] = []
    quantize(pair.source, target, scheme, say=told.append)
    streams = capfd.readouterr()
    assert streams.out == ""
    assert "Compressing" not in streams.err  # nor do other bars of theirs come through
    assert state() == before
    assert told == []
    assert list(here.iterdir()) == []
    assert digests(target) == digests(pair.targets[scheme])


@pytest.mark.slow
def test_nothing_reaches_stdout_when_it_is_imported_first_by_us(pair: Pair, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from kvcal import arch, sources, weights
from kvcal.data import TokenSet
source = Path({str(pair.source)!r})
tokens = TokenSet(tuple(tuple(range(40)) for _ in range(4)))
for scheme in weights.SCHEMES:
    weights.quantize(source, Path(scheme), scheme, tokens, arch.read(sources.read_config(source)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert "llmcompressor" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(weights.SCHEMES)


@every_scheme
def test_the_whole_job_takes_the_result(
    pair: Pair, scheme: str, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    base, output = pair.targets[scheme], tmp_path / "out"
    done = kvcal("calibrate", "--model", base, "--output", output, "--format", "fp8", "--json", *small)
    assert done.code == 0, done.stderr
    before, after = (json.loads((f / "config.json").read_text()) for f in (base, output))
    assert after["quantization_config"].pop("kv_cache_scheme")["strategy"] == "tensor"
    assert before["quantization_config"].pop("kv_cache_scheme") is None
    assert after == before
    assert (output / "model-base.safetensors").samefile(base / "model.safetensors")
    assert kvcal("check", output).code == 0


def test_layers_for_which_gptq_fails_are_named(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, out: tuple[torch.Tensor, torch.Tensor], **__: Any) -> None:
        out[1].fill_(1)  # its way to say that a matrix is not positive definite

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails)
    told: list[str] = []
    quantize(pair.source, tmp_path / "int4", "W4A16", say=told.append)
    assert len(told) == 1
    assert "21 layers (model.layers.0.self_attn.q_proj first)" in told[0]


# What is refused, and that nothing was loaded for it.


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(models, "load", load)


@pytest.mark.usefixtures("unloaded")
class TestRefused:
    def test_rows_that_groups_do_not_fill(self, tmp_path: Path) -> None:
        changes = GROUPED | {"intermediate_size": 192}
        source = tiny.save(tmp_path / "plain", **changes)
        with pytest.raises(PlanRefused, match="down_proj.weight has 192 input .*128 do not divide.* 2 more"):
            quantize(source, tmp_path / "int4", "W4A16")
        assert not (tmp_path / "int4").exists()

    def test_rows_shorter_than_a_group(self, tmp_path: Path) -> None:
        source = tiny.save(tmp_path / "plain", **GROUPED | {"intermediate_size": 64})
        with pytest.raises(PlanRefused, match="down_proj.weight has 64 input features"):
            quantize(source, tmp_path / "int4", "W4A16")

    @pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
    def test_experts(self, tmp_path: Path, family: str) -> None:
        source = tiny.save(tmp_path / "plain", family)
        with pytest.raises(PlanRefused, match=f"{family}'s experts"):
            quantize(source, tmp_path / "fp8", "FP8_DYNAMIC")

    @every_scheme
    def test_weights_that_are_quantized_already(self, pair: Pair, tmp_path: Path, scheme: str) -> None:
        base = pair.targets["W4A16"]
        with pytest.raises(PlanRefused, match=r"W4A16: .* quantized already \(compressed-tensors\)"):
            quantize(base, tmp_path / "again", scheme)

    def test_an_unknown_scheme(self, pair: Pair, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="'W8A8'; known: FP8_DYNAMIC, W4A16"):
            quantize(pair.source, tmp_path / "int8", "W8A8")

    def test_a_scheme_that_needs_text_without_it(self, pair: Pair, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="W4A16 need calibration samples"):
            weights.quantize(pair.source, tmp_path / "int4", "W4A16", None, spec_of(pair.source))

    def test_no_llm_compressor(self, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "llmcompressor" else find(name)
        )
        with pytest.raises(UsageError, match=r"pip install 'kvcal\[llm-compressor\]'"):
            quantize(pair.source, tmp_path / "fp8", "FP8_DYNAMIC")

    def test_a_target_that_holds_files(self, pair: Pair) -> None:
        with pytest.raises(OutputError, match="exists"):
            quantize(pair.source, pair.targets["W4A16"], "FP8_DYNAMIC")
        with pytest.raises(OutputError, match="exists"):
            quantize(pair.source, pair.source, "FP8_DYNAMIC")

    def test_a_truncated_shard(self, pair: Pair, tmp_path: Path) -> None:
        source = Path(shutil.copytree(pair.source, tmp_path / "plain"))
        shard = source / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(ModelError, match="not a whole safetensors file"):
            quantize(source, tmp_path / "fp8", "FP8_DYNAMIC")


def test_data_free_needs_no_text(pair: Pair, tmp_path: Path) -> None:
    weights.quantize(pair.source, tmp_path / "fp8", "FP8_DYNAMIC", None, spec_of(pair.source))
    assert digests(tmp_path / "fp8") == digests(pair.targets["FP8_DYNAMIC"])


def test_a_failure_says_whose_it_is_and_leaves_no_target(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llmcompressor

    def fails(**_: Any) -> None:
        raise RuntimeError("cannot be traced\nat length")

    monkeypatch.setattr(llmcompressor, "oneshot", fails)
    with pytest.raises(ModelError, match="llm-compressor cannot make W4A16 of it: cannot be traced$"):
        quantize(pair.source, tmp_path / "int4", "W4A16")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_stays_an_os_error(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llmcompressor

    def fails(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(llmcompressor, "oneshot", fails)
    with pytest.raises(OSError, match="No space"):
        quantize(pair.source, tmp_path / "fp8", "FP8_DYNAMIC")
    assert list(tmp_path.iterdir()) == []


def test_a_layer_that_was_passed_over_is_not_accepted(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcompressor.modifiers import quantization

    real = quantization.QuantizationModifier

    def blind(**named: Any) -> Any:
        return real(**named | {"ignore": [*named["ignore"], "re:.*layers.1.*up_proj"]})

    monkeypatch.setattr(quantization, "QuantizationModifier", blind)
    with pytest.raises(ModelError, match="left model.layers.1.mlp.up_proj.weight as it was"):
        quantize(pair.source, tmp_path / "fp8", "FP8_DYNAMIC")
    assert list(tmp_path.iterdir()) == []


def test_norms_that_were_rounded_on_the_way_are_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.save(tmp_path / "plain", "gemma2")
    real = weights._replaced

    def all_but_norms(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
        left = name == "norm_calibration_context"
        return contextlib.nullcontext() if left else real(owner, name, value)

    monkeypatch.setattr(weights, "_replaced", all_but_norms)
    with pytest.raises(ModelError, match="changed model.layers.0.input_layernorm.weight, which is not"):
        quantize(source, tmp_path / "fp8", "FP8_DYNAMIC")
