from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import granularity
from kvcal.errors import UsageError
from kvcal.granularity import Granularity, PerHead, PerTensor

every_granularity = pytest.mark.parametrize("gran", granularity.GRANULARITIES, ids=lambda g: g.name)

quick = settings(deadline=None, max_examples=50)


@st.composite
def cached(draw: Any) -> torch.Tensor:
    """``(batch, heads, tokens, head_dim)`` of distinct values, contiguous or as a projection leaves it."""
    batch, heads, tokens, head_dim = (draw(st.integers(1, most)) for most in (3, 7, 9, 17))
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


@every_granularity
@quick
@given(cached())
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
    with pytest.raises(UsageError, match="unknown granularity 'per-head'; known: per_tensor, per_head"):
        granularity.get("per-head")
