from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import granularity
from kvcal.errors import UsageError
from kvcal.granularity import Granularity, PerChannel, PerGroup, PerHead, PerTensor, PerToken, PerTokenHead

every_granularity = pytest.mark.parametrize("gran", granularity.GRANULARITIES, ids=lambda g: g.name)

quick = settings(deadline=None, max_examples=50)


# Every granularity, with groups along either dimension; sizes divide the lengths that `cached` multiplies.
ALL: tuple[Granularity, ...] = (*granularity.GRANULARITIES, PerGroup(3), PerGroup(4, "tokens"))
STATIC = [g for g in ALL if g.static]
DYNAMIC = [g for g in ALL if not g.static]
every_one = pytest.mark.parametrize("gran", ALL, ids=str)
every_static = pytest.mark.parametrize("gran", STATIC, ids=str)
every_dynamic = pytest.mark.parametrize("gran", DYNAMIC, ids=str)


@st.composite
def cached(draw: Any, tokens_of: int = 1, channels_of: int = 1) -> torch.Tensor:
    """``(batch, heads, tokens, head_dim)`` of distinct values, contiguous or as a projection leaves it.

    Tokens and channels are multiples of what is asked for.
    """
    batch, heads, tokens, head_dim = (draw(st.integers(1, most)) for most in (3, 7, 9, 17))
    tokens, head_dim = tokens * tokens_of, head_dim * channels_of
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    values = torch.randperm(batch * heads * tokens * head_dim, generator=generator).float() - 7
    if draw(st.booleans()):
        return values.reshape(batch, tokens, heads, head_dim).transpose(1, 2)
    return values.reshape(batch, heads, tokens, head_dim)


@quick
@given(cached())
def test_per_tensor_reduces_over_everything(x: torch.Tensor) -> None:
    found = PerTensor().to_canonical(x).abs().amax((0, -1))
    assert found.shape == PerTensor().scale_shape(x.shape[1])
    assert float(found) == max(abs(v) for v in x.flatten().tolist())


@quick
@given(cached())
def test_per_head_reduces_over_all_but_heads(x: torch.Tensor) -> None:
    found = PerHead().to_canonical(x).abs().amax((0, -1))
    assert found.shape == PerHead().scale_shape(x.shape[1])
    assert found.flatten().tolist() == [float(x[:, head].abs().max()) for head in range(x.shape[1])]


@every_one
@quick
@given(cached(4, 3))
def test_canonical_layout_holds_every_element_once(gran: Granularity, x: torch.Tensor) -> None:
    assert sorted(gran.to_canonical(x).flatten().tolist()) == sorted(x.flatten().tolist())


@quick
@given(cached())
def test_per_head_rows_hold_the_elements_of_their_head(x: torch.Tensor) -> None:
    canonical = PerHead().to_canonical(x)
    for head in range(x.shape[1]):
        assert sorted(canonical[:, head].flatten().tolist()) == sorted(x[:, head].flatten().tolist())


@quick
@given(cached())
def test_broadcast_gives_each_head_its_own_scale(x: torch.Tensor) -> None:
    heads = x.shape[1]
    scale = torch.arange(1.0, heads + 1).reshape(PerHead().scale_shape(heads))
    scaled = x * scale
    for head in range(heads):
        assert torch.equal(scaled[:, head], x[:, head] * (head + 1))


@quick
@given(cached())
def test_broadcast_gives_all_heads_one_scale(x: torch.Tensor) -> None:
    assert torch.equal(x * torch.full(PerTensor().scale_shape(x.shape[1]), 3.0), x * 3)


@every_granularity
def test_every_name_leads_to_its_granularity(gran: Granularity) -> None:
    assert granularity.get(gran.name) is gran


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    known = "per_tensor, per_head, per_channel, per_token, per_token_head$"
    with pytest.raises(UsageError, match=f"unknown granularity 'per-head'; known: {known}"):
        granularity.get("per-head")


# What follows holds for static scales and for those that come with the tokens.


def expected_groups(gran: Granularity, x: torch.Tensor) -> list[set[float]]:
    """Elements that share a scale, by loops over all indices."""
    groups: dict[Any, set[float]] = {}
    batch, heads, tokens, head_dim = x.shape
    for b, h, t, c in itertools.product(range(batch), range(heads), range(tokens), range(head_dim)):
        key: Any
        match gran:
            case PerTensor():
                key = ()
            case PerHead():
                key = h
            case PerChannel():
                key = (h, c)
            case PerToken():
                key = (b, t)
            case PerTokenHead():
                key = (b, t, h)
            case PerGroup(size, "channels"):
                key = (b, t, h, c // size)
            case PerGroup(size, "tokens"):
                key = (b, h, t // size, c)
        groups.setdefault(key, set()).add(float(x[b, h, t, c]))
    return list(groups.values())


@every_one
@settings(deadline=None, max_examples=10)
@given(cached(4, 3))
def test_each_scale_has_the_elements_of_its_group(gran: Granularity, x: torch.Tensor) -> None:
    x = x[:2, :3, :8, :12]
    canonical = gran.to_canonical(x)
    observed = canonical.movedim(0, -1).flatten(-2)  # (*scale_shape, group * observations)
    found = [set(group.tolist()) for group in observed.reshape(-1, observed.shape[-1])]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected_groups(gran, x)))


@every_one
@quick
@given(cached(4, 3))
def test_from_canonical_undoes_to_canonical(gran: Granularity, x: torch.Tensor) -> None:
    assert torch.equal(gran.from_canonical(gran.to_canonical(x), x.shape), x)


@every_static
@quick
@given(cached(4, 3))
def test_static_scales_broadcast_as_they_lie_in_the_canonical_layout(
    gran: Granularity, x: torch.Tensor
) -> None:
    shape = gran.scale_shape(x.shape[1], x.shape[3])
    scale = torch.arange(2.0, 2.0 + math.prod(shape)).reshape(shape)
    canonical = gran.to_canonical(x)
    assert canonical.shape[1:-1] == shape
    assert torch.equal(gran.from_canonical(canonical * scale.unsqueeze(-1), x.shape), x * scale)
    assert gran.scales_per_element(x.shape[1], x.shape[3]) == 0


@every_dynamic
@quick
@given(cached(4, 3))
def test_scales_that_come_with_the_tokens_have_one_observation_and_grow_with_them(
    gran: Granularity, x: torch.Tensor
) -> None:
    heads, head_dim = x.shape[1], x.shape[3]
    canonical = gran.to_canonical(x)
    assert canonical.shape[0] == 1
    scales = canonical.amax((0, -1))
    assert scales.numel() == pytest.approx(x.numel() * gran.scales_per_element(heads, head_dim))
    alone = x[:1, :, : gran.size if gran == PerGroup(4, "tokens") else 1]
    assert gran.to_canonical(alone).shape[1:-1] == gran.scale_shape(heads, head_dim)


@pytest.mark.parametrize(
    ("gran", "shape"),
    [
        (PerTensor(), (2, 1, 8 * 12 * 64)),
        (PerHead(), (24, 8, 1, 1, 64)),
        (PerChannel(), (24, 8, 1, 64, 1)),
        (PerToken(), (1, 24, 1, 1, 512)),
        (PerTokenHead(), (1, 24, 8, 1, 64)),
        (PerGroup(32), (1, 24, 8, 2, 32)),
        (PerGroup(4, "tokens"), (1, 2, 8, 3, 64, 4)),
    ],
    ids=str,
)
def test_the_shapes_in_numbers(gran: Granularity, shape: tuple[int, ...]) -> None:
    assert gran.to_canonical(torch.zeros(2, 8, 12, 64)).shape == shape


@pytest.mark.parametrize(
    ("gran", "scales"),
    [
        (PerToken(), 1 / 1024),
        (PerTokenHead(), 1 / 128),
        (PerGroup(32), 1 / 32),
        (PerGroup(32, "tokens"), 1 / 32),
        (PerChannel(), 0),
    ],
    ids=str,
)
def test_scales_per_element_in_numbers(gran: Granularity, scales: float) -> None:
    assert gran.scales_per_element(8, 128) == scales


@quick
@given(x=cached(), size=st.integers(1, 20), along=st.sampled_from(["channels", "tokens"]))
def test_groups_that_do_not_divide_are_refused(x: torch.Tensor, size: int, along: Any) -> None:
    gran = PerGroup(size, along)
    length = x.shape[3 if along == "channels" else 2]
    if length % size == 0:
        assert torch.equal(gran.from_canonical(gran.to_canonical(x), x.shape), x)
        return
    with pytest.raises(UsageError, match=f"^{length} {along} do not make whole groups of {size}; use a div"):
        gran.to_canonical(x)
    if along == "channels":
        with pytest.raises(UsageError, match="whole groups"):
            gran.scale_shape(2, length)


def test_groups_that_do_not_exist_are_refused() -> None:
    for size in (0, -1):
        with pytest.raises(UsageError, match=f"groups of {size} elements do not exist"):
            PerGroup(size)
    with pytest.raises(UsageError, match="groups lie along channels or tokens, not 'heads'"):
        PerGroup(4, "heads")  # type: ignore[arg-type]


def test_a_group_is_got_with_its_size_and_nothing_else_has_one() -> None:
    assert granularity.get("per_group", size=8, along="tokens") == PerGroup(8, "tokens")
    assert granularity.get("per_group", size=8) == PerGroup(8, "channels")
    with pytest.raises(UsageError, match="per_group needs the size of a group"):
        granularity.get("per_group")
    for wrong in ({"size": 8}, {"along": "tokens"}):
        with pytest.raises(UsageError, match="per_head has no groups to give a size or direction"):
            granularity.get("per_head", **wrong)  # type: ignore[arg-type]
