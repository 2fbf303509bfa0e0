"""Which parts of a cache are told apart, and what each is measured to cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcal import arch, scales, sensitivity
from kvcal.arch import LayerSpec
from kvcal.cache import Cache, QuantizedCache
from kvcal.capture import AttentionCall, intercept
from kvcal.errors import UsageError
from kvcal.formats import INT4_PER_TOKEN_HEAD, INT8_PER_TOKEN_HEAD, KVFormat
from kvcal.sensitivity import Item, ItemSide, assembled, items, measure, shares
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set
from tests.test_evaluate import through_online

INT4, INT8 = QuantizedCache(INT4_PER_TOKEN_HEAD), QuantizedCache(INT8_PER_TOKEN_HEAD)


def layers(kinds: str, **geometry: int) -> list[LayerSpec]:
    """One layer for each letter: f for full, s for sliding."""
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 16, "rotary_dim": 16} | geometry
    names = {"f": "full", "s": "sliding"}
    return [LayerSpec(i, names[k], f"layers.{i}", rope="half", **shape) for i, k in enumerate(kinds)]


def test_enough_passes_tell_every_layer_and_side_apart() -> None:
    found = items(layers("fff"), ("k", "v"), options=4, bound=24)
    assert found == [Item((i,), side) for i in range(3) for side in ("k", "v")]
    assert items(layers("fff"), ("kv",), options=1, bound=1000) == [Item((i,), "kv") for i in range(3)]


def test_too_few_passes_group_neighbours_evenly() -> None:
    found = items(layers("f" * 10), ("kv",), options=2, bound=9)
    assert [item.layers for item in found] == [(0, 1), (2, 3, 4), (5, 6), (7, 8, 9)]


def test_layers_of_two_kinds_share_no_item() -> None:
    found = items(layers("sssssf" * 2), ("kv",), options=1, bound=6)
    assert [item.layers for item in found] == [(0, 1), (2, 3), (4, 6), (5, 11), (7, 8), (9, 10)]


@given(st.text("fs", min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 3), st.integers(1, 80))
def test_items_cover_every_place_once_within_the_bound(kinds: str, n: int, options: int, bound: int) -> None:
    sides: list[tuple[ItemSide, ...]] = [("kv",), ("k", "v"), ("k",)]
    fewest = min(len(kinds), max(2, len(set(kinds))))
    each = len(sides[n - 1]) * options
    if bound < fewest * each:
        with pytest.raises(UsageError, match=f"take {fewest * each}"):
            items(layers(kinds), sides[n - 1], options, bound)
        return
    found = items(layers(kinds), sides[n - 1], options, bound)
    assert len(found) * options <= bound
    assert len(found) == len(sides[n - 1]) * min(len(kinds), bound // each)
    places = Counter(place for item in found for place in item.places)
    assert places == Counter((i, side) for i in range(len(kinds)) for side in "".join(sides[n - 1]))
    assert all(len({kinds[i] for i in item.layers}) == 1 for item in found)
    for kind in set(kinds):
        sizes = {len(item.layers) for item in found if kinds[item.layers[0]] == kind}
        assert max(sizes) - min(sizes) <= 1


def test_shares_are_of_elements() -> None:
    mixed = [layers("f")[0], LayerSpec(1, "full", "layers.1", 6, 2, 48, "half", 48)]
    found = shares(items(mixed, ("k", "v"), 1, 4), mixed)
    assert [found[Item((i,), side)] for i in (0, 1) for side in ("k", "v")] == [1 / 8, 1 / 8, 3 / 8, 3 / 8]
    assert sum(found.values()) == 1
    assert shares([Item((0, 1), "kv")], mixed) == {Item((0, 1), "kv"): 1}


def test_an_item_says_what_it_is() -> None:
    assert str(Item((3,), "k")) == "K of layer 3"
    assert str(Item((3, 5), "kv")) == "K and V of layers 3, 5"


def rounded(fmt: KVFormat, places: set[tuple[int, str]]) -> Any:
    """A replacement at attention, independent of kvcal's caches."""

    def see(call: AttentionCall) -> tuple[torch.Tensor, ...]:
        k, v = (
            through_online(x, fmt) if (call.layer, side) in places else x
            for side, x in (("k", call.key), ("v", call.value))
        )
        return call.query, k, v

    return see


@torch.inference_mode()
def kl_by_hand(model: Any, fmt: KVFormat, places: set[tuple[int, str]], samples: Any) -> float:
    each = []
    for sample in samples:
        ids = torch.tensor([sample])
        expected = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        with intercept(model, rounded(fmt, places)):
            found = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        each.append((expected.exp() * (expected - found)).sum(-1))
    return float(torch.cat(each).mean())


def test_each_item_is_measured_alone() -> None:
    """Against a KL computed by hand in float64, on padded batches."""
    model = tiny.build_model("llama", head_dim=32)
    spec = arch.read(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    text = token_set([30, 17, 24])
    told_apart = items(spec.layers, ("k", "v"), options=2, bound=12)
    heard: list[float] = []
    found = measure(model, told_apart, {"8": INT8, "4": INT4}, 2, text, on_tokens=heard.append)
    assert found.keys() == set(told_apart)
    for item, kls in found.items():
        for name, fmt in (("8", INT8_PER_TOKEN_HEAD), ("4", INT4_PER_TOKEN_HEAD)):
            expected = kl_by_hand(model, fmt, set(item.places), text.samples)
            assert kls[name] == pytest.approx(expected, rel=0.02, abs=2e-7), (item, name)
        assert kls["4"] > kls["8"] > 0
    assert sum(heard) == pytest.approx(text.tokens)


def test_kls_of_items_add_up_to_nearly_that_of_the_whole() -> None:
    model = tiny.build_model("llama", head_dim=32)
    text = token_set([40, 40])
    told_apart = [Item((i,), "kv") for i in range(3)]
    each = measure(model, told_apart, {"4": INT4}, 2, text)
    everything = Item((0, 1, 2), "kv")
    whole = measure(model, [everything], {"4": INT4}, 2, text)[everything]["4"]
    assert sum(kls["4"] for kls in each.values()) == pytest.approx(whole, rel=0.5)


def test_what_is_chosen_is_assembled() -> None:
    chosen: dict[Item, Cache | None] = {
        Item((0, 2), "kv"): INT8,
        Item((1,), "k"): INT4,
        Item((1,), "v"): None,
    }
    assert assembled(chosen).parts == {
        (0, "k"): INT8,
        (0, "v"): INT8,
        (2, "k"): INT8,
        (2, "v"): INT8,
        (1, "k"): INT4,
    }
    assert sensitivity.assembled({}).parts == {}


def test_q_is_rounded_with_k_where_it_is_asked_for() -> None:
    model = tiny.build_model("llama")
    text = token_set([40, 40])
    planned = plan_for(model)
    fp8 = QuantizedCache(planned.format, scales.compute(run(model, text), planned))
    told_apart = [Item((0,), "k"), Item((0,), "v")]
    plain = measure(model, told_apart, {"8": fp8}, 2, text)
    with_query = measure(model, told_apart, {"8": fp8}, 2, text, with_query=True)
    assert with_query[told_apart[0]]["8"] > 1.1 * plain[told_apart[0]]["8"]
    assert with_query[told_apart[1]] == plain[told_apart[1]]
