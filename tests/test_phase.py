"""Logit errors by RoPE band and distance, against a float64 computation from the definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal import capture, formats, phase, scales
from kvcal.cache import QuantizedCache
from kvcal.errors import PlanRefused, StatisticsError
from kvcal.formats import FP8_E4M3
from tests import tiny
from tests.test_calibrate import token_set
from tests.test_evaluate import through_e4m3
from tests.test_latent import calls_of
from tests.transforms.drawn import spec_of

Kvcal = Callable[..., Any]


def distorted(model: Any) -> scales.Scales:
    """Scales that differ by layer and head, some so small that values clip."""
    generator = torch.Generator().manual_seed(3)
    found: dict[int, Any] = {}
    for layer in spec_of(model).layers:
        sizes = {side: (layer.heads_of(side), 1, 1) for side in ("k", "v", "q")}
        found[layer.index] = {s: 2.0**-9 * (1 + torch.rand(n, generator=generator)) for s, n in sizes.items()}
    return scales.Scales(found)


# Family and changes -> channels of each pair from high to low frequency, and those without rotation.
def half(pairs: int, first: int = 0) -> list[tuple[int, int]]:
    return [(first + p, first + p + pairs) for p in range(pairs)]


def neighbours(pairs: int, first: int = 0) -> list[tuple[int, int]]:
    return [(first + 2 * p, first + 2 * p + 1) for p in range(pairs)]


MODELS: dict[str, tuple[str, list[tuple[int, int]], int]] = {
    "half": ("llama", half(8), 16),
    "interleaved, one layer without RoPE": ("cohere2", neighbours(8), 16),
    "in part": ("gpt_neox", half(2), 16),
    "windows and softcap": ("gemma2", half(8), 16),
    "latent, half": ("deepseek_v3", half(4, 40), 48),
    "latent, interleaved": ("deepseek_v2", neighbours(4, 40), 48),
}


@pytest.mark.parametrize("name", MODELS)
def test_errors_are_those_of_the_definition(name: str) -> None:
    family, pairs, size = MODELS[name]
    model, tokens = tiny.build_model(family), token_set([43, 29])
    spec, of = spec_of(model), distorted(model)
    found = phase.measure(model, spec.layers, QuantizedCache(FP8_E4M3, of), tokens, 3)

    edges = [round(len(pairs) * n / min(3, len(pairs))) for n in range(min(3, len(pairs)) + 1)]
    groups = [[c for pair in pairs[a:b] for c in pair] for a, b in itertools.pairwise(edges)]
    still = sorted(set(range(size)) - {c for pair in pairs for c in pair})
    groups += [still] if still else []
    rotating = [layer.index for layer in spec.layers if layer.rope != "none"]
    assert [each.layers for each in found.layers] == [(i,) for i in rotating]
    assert len(rotating) == (2 if family == "cohere2" else 3)
    assert found.distances == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63)]

    calls = [calls_of(model, torch.tensor([sample])) for sample in tokens.samples]
    total = torch.zeros(len(groups), 2, dtype=torch.float64)
    for each in found.layers:
        index = each.layers[0]
        energy, count = torch.zeros(len(groups), 7).double(), torch.zeros(7)
        products = torch.zeros(len(groups), 2, dtype=torch.float64)
        for call in (of_sample[index] for of_sample in calls):
            error, q = error_of(call, of).double(), call.query[0].double()
            error = error.repeat_interleave(len(q) // len(error), 0)
            by_channel = q.unsqueeze(2) * error.unsqueeze(1) * call.scaling  # (heads, i, j, channel)
            parts = torch.stack([by_channel[..., g].sum(-1) for g in groups])
            for i in range(q.shape[1]):
                for j in range(i + 1):
                    if call.window is not None and i - j >= call.window:
                        continue
                    where = 0 if i == j else int(math.log2(i - j)) + 1
                    each_head = parts[:, :, i, j]
                    energy[:, where] += each_head.square().sum(-1)
                    count[where] += len(q)
                    products[:, 0] += (each_head * each_head.sum(0)).sum(-1)
                    products[:, 1] += (each_head.sum(0) - each_head).square().sum(-1)
        total += products
        for band, expected in zip(each.bands, (energy / count).sqrt(), strict=True):
            seen = [rms for rms in band.rms if rms is not None]
            assert seen == pytest.approx(expected[count > 0].tolist(), rel=1e-4)
        assert_shares(each.bands, products)
    (pooled,) = found.pooled
    assert pooled.layers == tuple(rotating)
    assert_shares(pooled.bands, total)
    assert sum(band.share for band in pooled.bands) == pytest.approx(1)
    for band, channels in zip(pooled.bands, groups, strict=True):
        assert band.bits == pytest.approx(8 * len(channels) / size)
        assert band.left_evenly == pytest.approx(4 ** -(8 * len(channels) / size))


def error_of(call: capture.AttentionCall, of: scales.Scales) -> torch.Tensor:
    """Of the cached key, or of latent and rotary key: ``(kv_heads, tokens, channels)``."""
    parts = [("k", call.key)] if call.expansion is None else [("k", call.key), ("v", call.value)]
    errors = [through_e4m3(x, of.layers[call.layer][side]) - x for side, x in parts]  # type: ignore[index]
    return torch.cat(errors, -1)[0]


def assert_shares(bands: list[phase.BandError], products: torch.Tensor) -> None:
    everything = float(products[:, 0].sum())
    assert [band.share for band in bands] == pytest.approx((products[:, 0] / everything).tolist(), abs=1e-5)
    assert [band.left for band in bands] == pytest.approx((products[:, 1] / everything).tolist(), abs=1e-5)


def test_bands_go_from_short_waves_to_long_ones() -> None:
    model = tiny.build_model("llama")
    cache = QuantizedCache(FP8_E4M3, distorted(model))
    found = phase.measure(model, spec_of(model).layers, cache, token_set([20]), 4)
    bands = found.layers[0].bands
    assert [band.pairs for band in bands] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    waves = [2 * math.pi * 10000.0 ** (2 * pair / 16) for pair in range(8)]
    for band in bands:
        assert band.pairs is not None
        assert band.wavelengths == pytest.approx([waves[pair] for pair in band.pairs], rel=1e-3)
    single = phase.measure(model, spec_of(model).layers, cache, token_set([20]), 100)
    assert [band.pairs for band in single.layers[0].bands] == [(pair, pair) for pair in range(8)]


def test_layers_of_another_base_have_other_waves() -> None:
    model = tiny.build_model("gemma3_text")
    cache = QuantizedCache(FP8_E4M3, distorted(model))
    found = phase.measure(model, spec_of(model).layers, cache, token_set([20]), 2)
    local, full = (found.layers[i].bands[-1].wavelengths for i in (0, 2))
    (pooled,) = found.pooled
    assert local is not None
    assert full is not None
    assert full[1] > 10 * local[1]
    assert pooled.bands[-1].wavelengths == (min(local[0], full[0]), full[1])


def test_a_long_sample_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny.build_model("gemma2"), token_set([61])
    cache = QuantizedCache(FP8_E4M3, distorted(model))
    whole = phase.measure(model, spec_of(model).layers, cache, tokens, 3).pooled[0].bands
    monkeypatch.setattr(phase, "_QUERIES", 7)
    parts = phase.measure(model, spec_of(model).layers, cache, tokens, 3).pooled[0].bands
    for a, b in zip(whole, parts, strict=True):
        assert (a.share, a.left) == pytest.approx((b.share, b.left))
        assert a.rms == pytest.approx(b.rms)


class Loud(QuantizedCache):
    """Gives back K with an error in one pair of channels alone, or nearly."""

    def give_back(self, layer: int, q: Any, k: Any, v: Any, *, with_query: bool = False) -> Any:
        error = torch.full_like(k, 1e-4)
        error[..., [5, 13]] = 1.0
        return q, k + error, v


def test_a_band_pays_if_nearly_all_of_the_error_is_its_own() -> None:
    model = tiny.build_model("llama")
    tokens, layers = token_set([40]), spec_of(model).layers
    loud = phase.measure(model, layers, Loud(FP8_E4M3, scales.Scales({})), tokens, 8).pooled[0]
    assert [band.pays for band in loud.bands] == [pair == 5 for pair in range(8)]
    assert loud.best.pairs == (5, 5)
    assert loud.best.share > 0.99
    even = phase.measure(model, layers, QuantizedCache(FP8_E4M3, distorted(model)), tokens, 8).pooled[0]
    assert not any(band.pays for band in even.bands)
    # 8 of 16 bits more for an eighth of the channels cost one bit per element, which halves every step.
    assert {band.left_evenly for band in even.bands} == {0.25}


@pytest.mark.parametrize("name", ["fp8_per_token_head", "int8_per_token_head"])
def test_formats_scaled_by_the_engine_are_measured_too(name: str) -> None:
    fmt = formats.get(name)
    model = tiny.build_model("llama", head_dim=32)
    found = phase.measure(model, spec_of(model).layers, QuantizedCache(fmt), token_set([30]), 4)
    assert sum(band.share for band in found.pooled[0].bands) == pytest.approx(1)
    assert {band.bits for band in found.pooled[0].bands} == {2.0}


def test_what_has_no_bands_is_refused_by_name() -> None:
    layers = spec_of(tiny.build_model("llama")).layers
    none = spec_of(
        tiny.build_model("cohere2", sliding_window=None, layer_types=["full_attention"] * 3)
    ).layers
    for chosen, name, why in (
        (none, "fp8", "no layer of this model rotates its keys"),
        (layers, "int4_per_token_head", "mixes all channels before it rounds"),
        (layers, "fp8_latent_bf16_rope", "keeps the rotary key in 16 bits already"),
    ):
        with pytest.raises(PlanRefused, match=why):
            phase.refuse(chosen, formats.get(name))
    phase.refuse(layers, FP8_E4M3)


def test_a_cache_without_errors_has_no_shares() -> None:
    model = tiny.build_model("llama")
    exact = QuantizedCache(FP8_E4M3, distorted(model), skipped=(0, 1, 2))
    with pytest.raises(StatisticsError, match="layer 0: K has no error"):
        phase.measure(model, spec_of(model).layers, exact, token_set([20]), 2)


def test_the_command_prints_and_writes_the_same(llama_folder: Path, kvcal: Kvcal) -> None:
    options = ("--model", llama_folder, "--samples", "4", "--seq-len", "48", "--bands", "2")
    shown, written = kvcal("bench", "phase", *options), kvcal("bench", "phase", *options, "--json")
    assert (shown.code, written.code) == (0, 0), shown.stderr
    document = written.document
    assert document["format"] == "fp8_e4m3"
    assert document["distances"][-1] == [32, 63]
    assert [each["layers"] for each in document["layers"]] == [[0], [1], [2]]
    (pooled,) = document["pooled"]
    assert pooled["layers"] == [0, 1, 2]
    assert "0 of 2 here" in pooled["statement"]
    assert " ".join(pooled["statement"].split()) in " ".join(shown.stdout.split())
    for band in pooled["bands"]:
        assert f"{100 * band['share']:.1f} %" in shown.stdout


def test_the_command_takes_latents_and_other_benchmarks_refuse_them(tmp_path: Path, kvcal: Kvcal) -> None:
    options = ("--model", tiny.save(tmp_path, "deepseek_v2"), "--samples", "4", "--seq-len", "48", "--json")
    done = kvcal("bench", "phase", *options, "--engine", "kernel")
    assert done.code == 0, done.stderr
    bands = done.document["pooled"][0]["bands"]
    assert [band["pairs"] for band in bands] == [[0, 0], [1, 1], [2, 2], [3, 3], None]
    for name in ("capture", "rules", "folds", "objectives"):
        refused = kvcal("bench", name, *options)
        assert refused.code == PlanRefused.exit_code
        assert "deepseek_v2 caches a latent" in refused.stderr
