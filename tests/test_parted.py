"""A cache put together from others, by layer and side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvcal import scales
from kvcal.cache import Cache, Parted, QuantizedCache
from kvcal.capture import AttentionCall, Versions
from kvcal.errors import UsageError
from kvcal.evaluate import through
from kvcal.formats import FP8_E4M3, INT4_PER_TOKEN_HEAD, INT8_PER_TOKEN_HEAD
from tests import tiny
from tests.test_calibrate import plan_for, run, token_set

TOKENS = token_set([24])
INT4, INT8 = QuantizedCache(INT4_PER_TOKEN_HEAD), QuantizedCache(INT8_PER_TOKEN_HEAD)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build_model("llama", head_dim=32)


@pytest.fixture(scope="module")
def fp8(model: Any) -> QuantizedCache:
    planned = plan_for(model, granularity="per_head")
    return QuantizedCache(FP8_E4M3, scales.compute(run(model, TOKENS, granularity="per_head"), planned))


@torch.inference_mode()
def logits(model: Any, cache: Cache | None, *, with_query: bool = False) -> torch.Tensor:
    with through(model, cache, with_query=with_query):
        found: torch.Tensor = model(torch.tensor(TOKENS.samples), use_cache=False).logits
    return found


def call(layer: int = 0) -> AttentionCall:
    chooser = torch.Generator().manual_seed(layer)
    q, k, v = (torch.randn(1, heads, 24, 32, generator=chooser) for heads in (6, 2, 2))
    return AttentionCall(layer, q, k, v, scaling=32**-0.5, window=None, softcap=None)


@dataclass(frozen=True)
class Windowed:
    """The last ``recent`` tokens in 16 bits, the others as another cache stores them."""

    stored: QuantizedCache
    recent: int

    needs_rotary = True

    def to(self, device: torch.device) -> Windowed:
        return self

    def replace(self, call: AttentionCall, *, with_query: bool = False) -> Versions:
        assert call.rotary is not None
        q, k, v = self.stored.replace(call, with_query=with_query)
        rows = torch.arange(call.key.shape[2])
        old = rows[:, None] - rows[None] >= self.recent
        return Versions(q, (call.key, k), (call.value, v), (~old, old))


def test_k_comes_from_one_part_and_v_from_another() -> None:
    seen = call()
    q, k, v = Parted({(0, "k"): INT8, (0, "v"): INT4}).replace(seen)
    assert isinstance(q, torch.Tensor)
    assert torch.equal(q, seen.query)
    assert torch.equal(k, INT8.replace(seen)[1])
    assert torch.equal(v, INT4.replace(seen)[2])
    assert not torch.equal(v, INT8.replace(seen)[2])


@pytest.mark.parametrize("side", ["k", "v"])
def test_what_has_no_part_stays_as_it_is(side: Any) -> None:
    parted, seen = Parted({(1, side): INT4}), call(1)
    _, k, v = parted.replace(seen)
    assert torch.equal(k, seen.key) == (side == "v")
    assert torch.equal(v, seen.value) == (side == "k")
    other = call(0)
    assert parted.replace(other) == (other.query, other.key, other.value)


def test_the_same_part_everywhere_is_that_cache(model: Any, fp8: QuantizedCache) -> None:
    for cache in (fp8, INT4):
        parted = Parted({(layer, side): cache for layer in range(3) for side in ("k", "v")})
        assert torch.equal(logits(model, parted), logits(model, cache))
    parted = Parted({(layer, side): fp8 for layer in range(3) for side in ("k", "v")})
    assert torch.equal(logits(model, parted, with_query=True), logits(model, fp8, with_query=True))
    assert not torch.equal(logits(model, parted, with_query=True), logits(model, fp8))


@pytest.mark.parametrize("with_query", [False, True])
def test_skipped_layers_are_layers_without_a_part(model: Any, fp8: QuantizedCache, with_query: bool) -> None:
    skipping = QuantizedCache(fp8.format, fp8.scales, skipped=(1,))
    parted = Parted({(layer, side): fp8 for layer in (0, 2) for side in ("k", "v")})
    found = logits(model, skipping, with_query=with_query)
    assert torch.equal(found, logits(model, parted, with_query=with_query))
    assert not torch.equal(found, logits(model, fp8, with_query=with_query))


def test_q_is_rounded_where_k_has_static_scales(fp8: QuantizedCache) -> None:
    seen = call()
    rounded = fp8.replace(seen, with_query=True)[0]
    assert not torch.equal(rounded, seen.query)
    for parts, expected in (
        ({(0, "k"): fp8, (0, "v"): INT4}, rounded),
        ({(0, "k"): fp8}, rounded),
        ({(0, "k"): INT4, (0, "v"): fp8}, seen.query),
        ({(0, "v"): fp8}, seen.query),
        ({(0, "k"): INT4, (0, "v"): INT4}, seen.query),
    ):
        found = Parted(parts).replace(seen, with_query=True)
        assert torch.equal(found[0], expected)
        assert torch.equal(Parted(parts).replace(seen)[0], seen.query)


def test_windows_that_agree_are_joined(model: Any) -> None:
    """Each query meets every K and V in the version that its own part would show it."""
    eight, four = Windowed(INT8, 5), Windowed(INT4, 5)
    layers = range(3)
    parted = Parted({(i, "k"): eight for i in layers} | {(i, "v"): four for i in layers})
    assert parted.needs_rotary
    found = logits(model, parted)

    @dataclass(frozen=True)
    class Whole(Windowed):
        def replace(self, call: AttentionCall, *, with_query: bool = False) -> Versions:
            a, b = eight.replace(call), four.replace(call)
            return Versions(a.query, a.keys, b.values, a.seen)

    assert torch.equal(found, logits(model, Whole(INT8, 5)))
    assert not torch.equal(found, logits(model, Windowed(INT8, 5)))


def test_a_window_of_one_side_leaves_the_other_as_it_is(model: Any) -> None:
    keys = Windowed(INT4, 5)
    alone = Parted({(i, "k"): keys for i in range(3)})

    @dataclass(frozen=True)
    class KeysOnly(Windowed):
        def replace(self, call: AttentionCall, *, with_query: bool = False) -> Versions:
            found = super().replace(call)
            return Versions(found.query, found.keys, (call.value,) * 2, found.seen)

    assert torch.equal(logits(model, alone), logits(model, KeysOnly(INT4, 5)))
    # No window at all is the limit in which nothing is recent.
    all_old = Parted({(i, "k"): Windowed(INT4, 0) for i in range(3)} | {(i, "v"): INT8 for i in range(3)})
    plain = Parted({(i, "k"): INT4 for i in range(3)} | {(i, "v"): INT8 for i in range(3)})
    torch.testing.assert_close(logits(model, all_old), logits(model, plain), rtol=1e-4, atol=1e-4)


def test_windows_that_differ_are_refused(model: Any) -> None:
    parted = Parted({(2, "k"): Windowed(INT8, 5), (2, "v"): Windowed(INT4, 6)})
    with pytest.raises(UsageError, match="layer 2: K and V keep different tokens in 16 bits"):
        logits(model, parted)


def test_a_part_of_many_places_is_moved_once(fp8: QuantizedCache) -> None:
    moved: list[torch.device] = []

    @dataclass(frozen=True)
    class Counted(QuantizedCache):
        def to(self, device: torch.device) -> QuantizedCache:
            moved.append(device)
            return INT8

    part = Counted(INT4_PER_TOKEN_HEAD)
    found = Parted({(0, "k"): part, (0, "v"): part, (1, "k"): fp8}).to(torch.device("cpu"))
    assert moved == [torch.device("cpu")]
    assert found.parts[0, "k"] is found.parts[0, "v"] is INT8
    assert not found.needs_rotary
