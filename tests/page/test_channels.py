"""What folds did is taken back from statistics alone, and gives what the tensors themselves gave."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcal.page import channels
from kvcal.statistics import SideStatistics
from kvcal.transforms.record import LayerTransform

HEADS, TOKENS, HEAD_DIM = 3, 41, 10


def seen(x: torch.Tensor) -> SideStatistics:
    """Statistics of ``(1, heads, tokens, head_dim)`` by definition."""
    rows = x[0].double()
    counts = torch.zeros(len(rows), dtype=torch.int64)
    return SideStatistics(
        tokens=torch.tensor(rows.shape[1]),
        minimum=rows.amin(1).float(),
        maximum=rows.amax(1).float(),
        total=rows.sum(1),
        squares=rows.square().sum(1),
        saturated=counts,
        zeroed=counts,
    )


def folded(
    transform: LayerTransform, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V before and after; channels of unlike size, none centred."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(1, HEADS, 1, HEAD_DIM, generator=generator))
    k, v = (
        ((torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=generator) + 0.7) * sizes).double() for _ in "kv"
    )
    _, new_k, new_v = transform.apply(torch.zeros_like(k), k, v)
    return k, v, new_k, new_v


def expected(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[0].abs().amax(1), x[0].square().mean(1).sqrt()


def turn(generator: torch.Generator) -> torch.Tensor:
    """One ±1 in each row and column, another matrix for every head."""
    found = torch.zeros(HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    for head in found:
        order = torch.randperm(HEAD_DIM, generator=generator)
        signs = torch.randint(0, 2, (HEAD_DIM,), generator=generator).double() * 2 - 1
        head[torch.arange(HEAD_DIM), order] = signs
    return found


@given(seed=st.integers(0, 10**6), steps=st.sets(st.sampled_from(["key_scale", "key_offset", "key_turn"])))
def test_folds_of_k_are_taken_back(seed: int, steps: set[str]) -> None:
    generator = torch.Generator().manual_seed(seed)
    wanted = {
        "key_scale": torch.exp(torch.randn(HEADS, HEAD_DIM, generator=generator)).double(),
        "key_offset": torch.randn(HEADS, HEAD_DIM, generator=generator).double(),
        "key_turn": turn(generator),
    }
    transform = LayerTransform(**{step: wanted[step] for step in steps})
    k, _, new, _ = folded(transform, seed)
    found = channels.unfolded_key(seen(new), transform)
    amax, rms = expected(k)
    assert torch.allclose(found.amax, amax, rtol=1e-5, atol=1e-5)
    assert torch.allclose(found.rms, rms, rtol=1e-9)


@given(seed=st.integers(0, 10**6))
def test_a_scale_of_v_is_taken_back_whatever_its_sign(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(HEADS, HEAD_DIM, generator=generator).double()
    transform = LayerTransform(value_map=torch.diag_embed(scale))
    _, v, _, new = folded(transform, seed)
    found = channels.unfolded_value(seen(new), transform)
    assert found is not None
    amax, rms = expected(v)
    assert torch.allclose(found.amax, amax, rtol=1e-5)
    assert torch.allclose(found.rms, rms, rtol=1e-9)


def test_a_map_that_mixes_channels_of_v_cannot_be() -> None:
    mixing = torch.eye(HEAD_DIM, dtype=torch.float64).repeat(HEADS, 1, 1)
    mixing[1, 2, 3] = 1e-3
    _, v, _, new = folded(LayerTransform(value_map=mixing), 0)
    assert channels.unfolded_value(seen(new), LayerTransform(value_map=mixing)) is None
    kept = channels.unfolded_value(seen(v), LayerTransform())
    assert kept is not None
    assert torch.equal(kept.amax, expected(v)[0].float().double())


@pytest.mark.parametrize(("values", "spread"), [([1.0, 2.0, 10.0], 5.0), ([0.0, 0.0, 0.0], 1.0)])
def test_spread_is_over_the_median(values: list[float], spread: float) -> None:
    assert channels.Profile(torch.tensor([values]), torch.tensor([values])).spread.tolist() == [spread]
