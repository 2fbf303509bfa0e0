"""The estimate covers what a pass takes, and layer by layer a pass takes one layer of it."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcal import arch, calibrate, evaluate, memory, models, placement, scales, sources
from kvcal.cache import QuantizedCache
from kvcal.calibrate import View
from kvcal.evaluate import Variant
from kvcal.formats import FP8_E4M3
from kvcal.statistics import Statistics
from tests import tiny
from tests.test_calibrate import plan_for, token_set
from tests.test_layerwise import require_equal

MAPS = ("one", "layerwise")


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are alive, and the most there were."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        """``weights`` were there before, and views of them are nothing new."""
        super().__init__()
        self.now = self.most = 0
        self._known = {weight.untyped_storage()._cdata for weight in weights if not weight.is_meta}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


WIDE = {"hidden_size": 192, "head_dim": 32, "intermediate_size": 512}


def opened(folder: Path, device_map: str, device: str = "cpu") -> tuple[Any, arch.ModelSpec]:
    spec = arch.read(sources.read_config(folder))
    return placement.load(folder, spec, placement.named(device, device_map), models.TRUST_NOTHING), spec


def live_in(model: Any, run: Callable[[], object]) -> int:
    with Live(p for _, p in model.named_parameters()) as live:
        run()
    return live.most


@pytest.mark.parametrize(
    ("family", "device_map", "chunk", "longest"),
    [
        ("llama", "one", None, 150),
        ("gemma2", "layerwise", None, 500),  # whose scores are the most of it
        ("mixtral", "layerwise", 64, 150),
        ("gpt_neox", "one", 64, 150),
    ],
)
def test_passes_take_no_more_than_expected(
    family: str, device_map: str, chunk: int | None, longest: int, tmp_path: Path
) -> None:
    model, spec = opened(tiny.save(tmp_path / "model", family, **WIDE), device_map)
    tokens = replace(token_set([longest, longest - 10, 100]), chunk=chunk)

    def statistics() -> Statistics:
        return calibrate.views(model, spec.layers, 2, tokens, (View(),))[View()]

    expected = memory.estimate(model, spec, tokens, 2, collect="summary")
    most = live_in(model, statistics)
    assert most <= expected.peak - expected.held
    assert most > (expected.peak - expected.held) / 4  # a bound that says something

    plan = plan_for(models.load(tmp_path / "model", spec, torch.device("cpu"), models.TRUST_NOTHING))
    cache = QuantizedCache(FP8_E4M3, scales.compute(statistics(), plan))
    variants = {"k, v": Variant(cache), "k, v, q": Variant(cache, with_query=True)}
    expected = memory.estimate(model, spec, tokens, 2, variants=1 + len(variants))
    most = live_in(model, lambda: evaluate.fidelities(model, variants, 2, tokens))
    assert (expected.peak - expected.held) / 4 < most <= expected.peak - expected.held


def test_layer_by_layer_takes_one_layer_of_many(tmp_path: Path) -> None:
    """Little text and many layers: whatever kept a second layer would show."""
    folder = tiny.save(tmp_path / "model", num_hidden_layers=8, **WIDE)
    model, spec = opened(folder, "layerwise")
    expected = memory.estimate(model, spec, token_set([8]), 1, collect="summary")
    most = live_in(model, lambda: calibrate.views(model, spec.layers, 1, token_set([8]), (View(),)))
    assert expected.layer < most <= expected.peak - expected.held < 2 * expected.layer


def test_what_was_expected_and_what_it_took_are_in_the_records(
    llama_folder: Path, tmp_path: Path, kvcal: Callable[..., Any], small: tuple[str, ...]
) -> None:
    where = ("--device", "cpu", "--device-map", "layerwise", "--output", tmp_path / "out")
    done = kvcal("calibrate", "--model", llama_folder, "--json", *where, *small)
    assert done.code == 0, done.stderr
    told = done.document["memory"]
    assert told["device_map"] == "layerwise"
    assert told["passes"] == json.loads((tmp_path / "out/kvcal/manifest.json").read_text())["memory"]
    assert told["passes"].keys() == {"calibrate", "evaluate"}
    for name, each in told["passes"].items():
        assert each["layer_bytes"] == 4 * sum(
            tensor.numel()
            for key, tensor in load_file(llama_folder / "model.safetensors").items()
            if ".layers.0." in key
        )
        assert each["peak_bytes"] > each["held_bytes"] * 0.9
        assert f"{name}: expects cpu memory of" in done.stderr
    written = (tmp_path / "out/kvcal/report.md").read_text()
    assert "Device map: layerwise." in written
    expected = told["passes"]["calibrate"]["expected_bytes"] / 2**30
    assert re.search(rf"\| calibrate \| [\d.]+ \| [\d.]+ GiB \|  \| {expected:.2f} GiB of cpu \|", written)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 512])
def test_on_a_gpu_layer_by_layer_takes_one_layer_and_activations(chunk: int | None, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "head_dim": 64, "intermediate_size": 4096, "num_attention_heads": 16}
    folder = tiny.save(
        tmp_path / "model", num_hidden_layers=12, num_key_value_heads=4, max_position_embeddings=2048, **sizes
    )
    found = {}
    for device_map in MAPS:
        model, spec = opened(folder, device_map, "cuda")
        tokens = replace(token_set([2048] * 4), chunk=chunk)
        expected = memory.estimate(model, spec, tokens, 1, collect="summary")
        record: dict[str, Any] = {}
        with memory.watched("calibrate", model, expected, record, lambda _: None):
            found[device_map] = calibrate.views(model, spec.layers, 1, tokens, (View(),))[View()]
        taken = record["calibrate"]
        assert taken["held_bytes"] < taken["peak_bytes"] <= taken["expected_bytes"], (device_map, taken)
        if device_map == "layerwise":
            assert taken["held_bytes"] < taken["layer_bytes"]
        del model
        torch.cuda.empty_cache()
    require_equal(found["layerwise"], found["one"])
