"""llm-compressor as an independent truth: its exact observer gives our scales, its default one does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, fake_quantize
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from kvcal import formats, scales
from kvcal.data import TokenSet
from kvcal.kernels import reference
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set

SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
STRATEGIES = [("per_tensor", "tensor"), ("per_head", "attn_head")]


def loaded(folder: Path) -> Any:
    """The tiny model as oneshot wants it: read from a folder whose config it can find again."""
    tiny.save(folder, dtype="float32")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def their_scales(
    folder: Path, tokens: TokenSet, strategy: str, observer: str
) -> dict[int, dict[str, torch.Tensor]]:
    model = loaded(folder)
    rows = [
        {"input_ids": torch.tensor([s]), "attention_mask": torch.ones(1, len(s), dtype=torch.long)}
        for s in tokens.samples
    ]
    oneshot(
        model=model,
        processor=tiny.build_tokenizer(),
        recipe=QuantizationModifier(kv_cache_scheme=SCHEME | {"strategy": strategy, "observer": observer}),
        dataset=DataLoader(rows, batch_size=None),
        pipeline="basic",
    )
    return {
        index: {side: getattr(layer.self_attn, f"{side}_scale").detach() for side in "kv"}
        for index, layer in enumerate(model.model.layers)
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("granularity", "strategy"), STRATEGIES)
def test_scales_equal_those_of_its_exact_observer(tmp_path: Path, granularity: str, strategy: str) -> None:
    tokens = token_set([40] * 6)
    model = tiny.build_model()
    ours = scales.compute(
        run(model, tokens, granularity=granularity), plan_for(model, granularity=granularity)
    )
    theirs = their_scales(tmp_path, tokens, strategy, "static_minmax")
    for index, sides in theirs.items():
        for side, scale in sides.items():
            assert scale.shape == ours.layers[index][side].shape  # type: ignore[index]
            torch.testing.assert_close(ours.layers[index][side], scale, rtol=2e-6, atol=0)  # type: ignore[index]


@pytest.mark.filterwarnings("ignore")
def test_its_default_observer_is_a_moving_average_that_clips(tmp_path: Path) -> None:
    tokens = token_set([40] * 12)
    model = tiny.build_model()
    ours = scales.compute(run(model, tokens), plan_for(model))
    theirs = their_scales(tmp_path, tokens, "tensor", "minmax")
    ratios = [float(theirs[i][s] / ours.layers[i][s]) for i in theirs for s in ("k", "v")]  # type: ignore[index]
    assert max(ratios) < 1.0


@pytest.mark.parametrize(("granularity", "strategy"), STRATEGIES)
def test_rounding_equals_compressed_tensors(granularity: str, strategy: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 50, 16, generator=generator) * torch.tensor([1.0, 40.0, 0.01]).reshape(3, 1, 1)
    scale = (
        torch.tensor([0.013, 0.21, 0.0007]).reshape(3, 1, 1)
        if granularity == "per_head"
        else torch.tensor([0.3])
    )
    ours = reference.quantize_dequantize(x, scale, formats.FP8_E4M3)
    args = QuantizationArgs(**SCHEME, strategy=strategy)
    theirs = fake_quantize(x, scale, torch.zeros_like(scale), args)
    assert torch.equal(ours, theirs)


def test_written_config_is_one_that_compressed_tensors_accepts(exported: Path) -> None:
    section = json.loads((exported / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(section)
    assert config.kv_cache_scheme is not None
    assert config.kv_cache_scheme.strategy == "attn_head"


@pytest.mark.filterwarnings("ignore")
def test_a_w8a8_base_keeps_its_groups_and_weights(
    tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    base, output = tmp_path / "w8a8", tmp_path / "out"
    model = loaded(tmp_path / "plain").bfloat16()
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
    oneshot(model=model, recipe=recipe, pipeline="datafree")
    model.save_pretrained(base)
    tiny.build_tokenizer().save_pretrained(base)
    before = json.loads((base / "config.json").read_text())["quantization_config"]

    done = kvcal("calibrate", "--model", base, "--output", output, "--json", *small)
    assert done.code == 0, done.stderr
    after = json.loads((output / "config.json").read_text())["quantization_config"]
    assert before["config_groups"]
    assert after.pop("kv_cache_scheme")["strategy"] == "tensor"
    before.pop("kv_cache_scheme")
    assert after == before
    assert (output / "model-base.safetensors").samefile(base / "model.safetensors")
    for command in (("check", output), ("evaluate", output, "--samples", "2", "--seq-len", "48")):
        assert kvcal(*command).code == 0
