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
from llmcompressor.observers import Observer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import kvcal.observers  # noqa: F401  (registers them)
from kvcal import calibrate, formats, objectives, scales
from kvcal.data import TokenSet
from kvcal.errors import StatisticsError, UsageError
from kvcal.formats import KVFormat
from kvcal.kernels import reference
from kvcal.recipe import Objective, Side
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set

SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
CACHE_SIDES: tuple[Side, ...] = ("k", "v")
STRATEGIES = [("per_tensor", "tensor"), ("per_head", "attn_head")]


def loaded(folder: Path) -> Any:
    """The tiny model as oneshot wants it: read from a folder whose config it can find again."""
    tiny.save(folder, dtype="float32")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def their_scales(
    folder: Path,
    tokens: TokenSet,
    strategy: str,
    observer: str,
    scheme: dict[str, Any] = SCHEME,
    **options: Any,
) -> dict[int, dict[str, torch.Tensor]]:
    """Scales of a run of llm-compressor; ``options`` go to its observer."""
    model = loaded(folder)
    scheme = scheme | {"strategy": strategy, "observer": observer, "observer_kwargs": options}
    rows = [
        {"input_ids": torch.tensor([s]), "attention_mask": torch.ones(1, len(s), dtype=torch.long)}
        for s in tokens.samples
    ]
    oneshot(
        model=model,
        processor=tiny.build_tokenizer(),
        recipe=QuantizationModifier(kv_cache_scheme=scheme),
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


# kvcal's ranges behind its recipes

INT8_SCHEME = SCHEME | {"type": "int"}


def our_scales(
    tokens: TokenSet, granularity: str, objective: Objective, fmt: KVFormat, **options: Any
) -> dict[int, dict[Side, torch.Tensor]]:
    """kvcal's own calibration and the same rule, with nothing of llm-compressor."""
    model = tiny.build_model()
    resolved = plan_for(model, granularity=granularity)
    statistics = calibrate.calibrate(model, resolved, tokens, collect="distribution")
    found: dict[int, dict[Side, torch.Tensor]] = {}
    for index, sides in statistics.layers.items():
        for side in CACHE_SIDES:
            _, high = objectives.ranges(
                sides[side], resolved.granularity, fmt, objective, symmetric=True, **options
            )
            found.setdefault(index, {})[side] = high / fmt.max
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("granularity", "strategy"), STRATEGIES)
@pytest.mark.parametrize(
    ("observer", "objective", "options"),
    [
        ("kvcal_percentile", "percentile", {}),
        ("kvcal_percentile", "percentile", {"percentile": 99.0}),
        ("kvcal_mse", "mse", {}),
    ],
)
@pytest.mark.parametrize(
    ("scheme", "fmt"), [(SCHEME, formats.FP8_E4M3), (INT8_SCHEME, formats.INT8)], ids=["fp8", "int8"]
)
def test_an_observer_of_kvcal_gives_the_scales_of_kvcal(
    tmp_path: Path,
    granularity: str,
    strategy: str,
    observer: str,
    objective: Objective,
    options: dict[str, float],
    scheme: dict[str, Any],
    fmt: KVFormat,
) -> None:
    tokens = token_set([40, 23, 40, 31])
    ours = our_scales(tokens, granularity, objective, fmt, **options)
    theirs = their_scales(tmp_path, tokens, strategy, observer, scheme, **options)
    for index, sides in theirs.items():
        for side in CACHE_SIDES:
            assert sides[side].shape == ours[index][side].shape
            torch.testing.assert_close(sides[side], ours[index][side], rtol=1e-5, atol=0)


def observed(observer: str, batches: list[torch.Tensor], **fields: Any) -> torch.Tensor:
    """Scale after ``(batch, heads, tokens, head_dim)`` each."""
    args = QuantizationArgs(**SCHEME | {"strategy": "attn_head"} | fields)
    found = Observer.load_from_registry(observer, base_name="k", args=args)
    for batch in batches:
        found(batch)
    scale: torch.Tensor = found.get_qparams()["scale"]
    assert not found.has_statistics
    return scale


@pytest.mark.parametrize("observer", ["kvcal_percentile", "kvcal_mse"])
def test_neither_order_nor_batches_matter(observer: str) -> None:
    generator = torch.Generator().manual_seed(5)
    size = torch.tensor([1.0, 30.0, 0.02]).reshape(3, 1, 1)
    batches = [torch.randn(2, 3, n, 16, generator=generator) * size * n for n in (3, 7, 20)]
    forward, backward = observed(observer, batches), observed(observer, batches[::-1])
    alone = observed(observer, [row.unsqueeze(0) for batch in batches for row in batch])
    assert forward.shape == (3, 1, 1)
    assert torch.equal(forward, backward)
    assert torch.equal(forward, alone)


def test_a_percentile_leaves_outliers_out_and_mse_weighs_them() -> None:
    x = torch.randn(1, 2, 2000, 16, generator=torch.Generator().manual_seed(1))
    x[0, 1, 7, 3] = 60.0
    everything = observed("static_minmax", [x])
    for observer in ("kvcal_percentile", "kvcal_mse"):
        int4 = observed(observer, [x], type="int", num_bits=4)
        assert float(int4[1]) < 0.2 * float(everything[1] * 448 / 7.5)
    whole = observed("kvcal_percentile", [x], observer_kwargs={"percentile": 100.0})
    assert float(whole[1]) == pytest.approx(float(everything[1]), rel=1e-2)


@pytest.mark.parametrize("observer", ["kvcal_percentile", "kvcal_mse"])
def test_an_asymmetric_range_leaves_outliers_out_too(observer: str) -> None:
    x = torch.randn(1, 1, 4000, 16, generator=torch.Generator().manual_seed(1)) + 1.5
    x[0, 0, 7, :2] = torch.tensor([-58.5, 61.5])
    fields: dict[str, Any] = {"type": "int", "num_bits": 4, "symmetric": False, "strategy": "tensor"}
    assert 4 < 15 * float(observed(observer, [x], **fields)) < 12
    assert 15 * float(observed("static_minmax", [x], **fields)) == pytest.approx(120)


def test_observers_refuse_what_they_are_not_for() -> None:
    args = QuantizationArgs(**SCHEME | {"strategy": "tensor"})
    with pytest.raises(
        UsageError, match="kvcal's observers are for K, V and Q in attention, not for 'weight'"
    ):
        Observer.load_from_registry("kvcal_mse", base_name="weight", args=args)
    for options, reason in (
        ({"percentile": 50.0}, "percentile is 50; it must be above 50 and at most 100"),
        ({"averaging_constant": 0.1}, "observer kvcal_percentile has no option averaging_constant"),
    ):
        with pytest.raises(UsageError, match=reason):
            observed("kvcal_percentile", [], observer_kwargs=options)
    with pytest.raises(UsageError, match="observer kvcal_mse has no option percentile"):
        observed("kvcal_mse", [], observer_kwargs={"percentile": 99.0})
    with pytest.raises(UsageError, match="unknown format 'int7'"):
        observed("kvcal_mse", [], type="int", num_bits=7)
    for value, observer in ((float("nan"), "kvcal_mse"), (float("inf"), "kvcal_percentile")):
        with pytest.raises(StatisticsError, match="K holds NaN or infinity"):
            observed(observer, [torch.full((1, 2, 3, 4), value)])


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
