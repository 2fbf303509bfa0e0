"""Layer by layer is bit-equal to the whole model, and never holds more than one layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from kvcal import arch, calibrate, evaluate, models, placement, scales, sources, validate
from kvcal.cache import QuantizedCache
from kvcal.calibrate import View
from kvcal.errors import ModelError
from kvcal.evaluate import Variant
from kvcal.formats import FP8_E4M3
from kvcal.layerwise import Layerwise
from kvcal.statistics import Statistics
from tests import tiny
from tests.test_calibrate import MIXED, plan_for, token_set

CPU = torch.device("cpu")
# Kinds of masks and positions, weights stored otherwise than the model has them, other paths of modules.
SEVERAL = ("llama", "mixtral", "gemma2", "gemma3_text", "cohere2", "gpt_neox")
LAYERWISE = placement.named("cpu", "layerwise")


def both(folder: Path) -> tuple[Any, Layerwise, arch.ModelSpec]:
    spec = arch.read(sources.read_config(folder))
    whole = models.load(folder, spec, CPU, models.TRUST_NOTHING)
    return whole, placement.load(folder, spec, LAYERWISE, models.TRUST_NOTHING), spec


def require_equal(found: Statistics, expected: Statistics) -> None:
    assert found.layers.keys() == expected.layers.keys()
    for index, sides in expected.layers.items():
        for side, seen in sides.items():
            for name, value in seen.tensors().items():
                assert torch.equal(found.layers[index][side].tensors()[name], value), (index, side, name)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_statistics_are_those_of_the_whole_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Padded batches too: masks, positions and their kinds are the model's own."""
    whole, streamed, spec = both(tiny.save(tmp_path / "model", family))
    wanted = (View(), View(before_rope=True, skip=3))
    plain, found = (
        calibrate.views(model, spec.layers, 3, token_set(MIXED), wanted, collect="distribution")
        for model in (whole, streamed)
    )
    for view in wanted:
        require_equal(found[view], plain[view])


@pytest.mark.parametrize("family", SEVERAL)
def test_fidelity_is_that_of_the_whole_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    whole, streamed, _ = both(tiny.save(tmp_path / "model", family))
    tokens = token_set(MIXED)
    resolved = plan_for(whole, granularity="per_head")
    cache = QuantizedCache(FP8_E4M3, scales.compute(calibrate.calibrate(whole, resolved, tokens), resolved))
    variants = {"k, v": Variant(cache), "k, v, q": Variant(cache, with_query=True)}
    told: list[float] = []
    plain = evaluate.fidelities(whole, variants, 3, tokens)
    found = evaluate.fidelities(streamed, variants, 3, tokens, on_tokens=told.append)
    assert found == plain
    assert plain["k, v"].kl_mean > 0
    assert sum(told) == pytest.approx(tokens.tokens)
    assert validate.validate(streamed, cache, tokens) == validate.validate(whole, cache, tokens)


def test_a_layer_is_read_when_its_turn_comes_and_dropped_after_it(tmp_path: Path) -> None:
    _, streamed, _ = both(tiny.save(tmp_path / "model"))
    layers = streamed._model.model.layers
    held = []
    for step in streamed.steps(list(token_set(MIXED).batches(3))):
        step.run()
        held.append([not any(p.is_meta for p in layer.parameters()) for layer in layers])
        assert not any(p.is_meta for p in layers[held[-1].index(True)].parameters())
    assert held == [[i == index for i in range(3)] for index in range(3) for _ in range(3)]
    assert all(p.is_meta for p in layers.parameters())


def test_a_step_that_fails_leaves_no_layer_behind(tmp_path: Path) -> None:
    _, streamed, _ = both(tiny.save(tmp_path / "model"))
    layers = streamed._model.model.layers
    steps = streamed.steps(list(token_set([20]).batches(1)))
    next(steps).run()
    steps.close()
    assert all(p.is_meta for p in layers.parameters())
    assert not any("forward" in layer.__dict__ for layer in layers)


def test_a_model_that_works_between_its_layers_is_refused(tmp_path: Path) -> None:
    _, streamed, spec = both(tiny.save(tmp_path / "model"))
    streamed._layers[1].register_forward_pre_hook(lambda _m, args: (args[0] * 2, *args[1:]))
    with pytest.raises(ModelError, match=r"does more between its layers .* use --device-map auto"):
        calibrate.views(streamed, spec.layers, 1, token_set([20]), (View(),))


def test_a_model_that_leaves_out_layers_is_refused(tmp_path: Path) -> None:
    _, streamed, spec = both(tiny.save(tmp_path / "model"))
    streamed.config.num_hidden_layers = 2
    with pytest.raises(ModelError, match=r"ran 2 of its 3 layers; use --device-map auto"):
        calibrate.views(streamed, spec.layers, 1, token_set([20]), (View(),))


def test_layers_that_return_tuples_get_theirs_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tokens = tiny.save(tmp_path / "model"), token_set(MIXED)
    whole, _, spec = both(folder)
    expected = calibrate.views(whole, spec.layers, 2, tokens, (View(),))[View()]
    plain = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda self, *a, **n: (plain(self, *a, **n), "more"))
    monkeypatch.setattr(LlamaModel, "forward", _over_tuples(LlamaModel.forward))
    streamed = placement.load(folder, spec, LAYERWISE, models.TRUST_NOTHING)
    require_equal(calibrate.views(streamed, spec.layers, 2, tokens, (View(),))[View()], expected)


def _over_tuples(forward: Any) -> Any:
    """The model's forward with each layer's output unpacked, as older modeling code does."""

    def unpacked(self: Any, *args: Any, **named: Any) -> Any:
        call = torch.nn.Module.__call__

        def first(module: torch.nn.Module, *a: Any, **n: Any) -> Any:
            out = call(module, *a, **n)
            if isinstance(module, LlamaDecoderLayer):
                assert out[1:] == ("more",)
                return out[0]
            return out

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LlamaDecoderLayer, "__call__", first)
            return forward(self, *args, **named)

    return unpacked


@pytest.mark.parametrize("device_map", ["layerwise", "auto"])
def test_a_nan_weight_is_named(device_map: str, copied: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(copied / "model.safetensors")
    tensors[name][3, 5] = torch.nan
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    spec = arch.read(sources.read_config(copied))
    limits = "cpu=300KB" if device_map == "auto" else None
    where = placement.named("cpu", device_map, limits)

    def run() -> None:
        model = placement.load(copied, spec, where, models.TRUST_NOTHING)
        calibrate.views(model, spec.layers, 2, token_set([20]), (View(),))

    with pytest.raises(ModelError, match=f"layer 1: {name} holds NaN"):
        run()
