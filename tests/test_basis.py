"""The basis that vectors are stored in: exact both ways, and the balanced one as cheap as its bound says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import basis, calibrate
from kvcal.kernels import reference
from kvcal.scheme import SideScheme
from kvcal.statistics import SideStatistics
from tests import tiny
from tests.test_calibrate import token_set
from tests.test_storage import spec_of

KINDS = ["none", "hadamard", "random_hadamard", "random_orthogonal", "balanced"]


def side(**fields: Any) -> SideScheme:
    return SideScheme(format="int4", granularity="per_token_head", **fields)


def seen_of(family: str = "llama") -> dict[Any, SideStatistics]:
    model = tiny.build_model(family)
    view = calibrate.View()
    spec = spec_of(model)
    found = calibrate.views(model, spec.layers, 2, token_set([40, 33, 21]), (view,), collect="distribution")
    return found[view].layers[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("center", [False, True])
def test_there_and_back_changes_nothing(kind: Any, center: bool) -> None:
    output = torch.eye(16, dtype=torch.float64).expand(2, 16, 16)
    found = basis.choose(side(basis=kind, center=center), "k", seen_of(), output, seed=3)
    x = torch.randn(2, 2, 5, 16) * 3 + 1
    assert torch.allclose(found.out(found.into(x)), x, atol=1e-4)
    if kind in ("hadamard", "random_hadamard", "random_orthogonal"):
        forward = found.forward
        assert forward is not None
        assert torch.allclose(forward @ forward.mT, torch.eye(16).expand(2, 16, 16), atol=1e-5)


@st.composite
def moments(draw: Any, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    a = torch.randn(1, size, 40, generator=generator, dtype=torch.float64)
    a = a * torch.exp(draw(st.floats(0.0, 1.5)) * torch.randn(1, size, 1, generator=generator))
    return a @ a.mT / 40


@settings(max_examples=50)
@given(moments(), moments())
def test_balanced_reaches_the_bound_that_no_map_goes_below(
    stored: torch.Tensor, reading: torch.Tensor
) -> None:
    forward, back = basis._balanced(stored, reading)
    cost = torch.einsum("hij,hjk,hik->h", forward, stored, forward) * torch.einsum(
        "hji,hjk,hki->h", back, reading, back
    )
    roots = [basis._power(m, 0.5) for m in (stored, reading)]
    bound = torch.linalg.matrix_norm(roots[0] @ roots[1], ord="nuc").square()
    assert float(cost) >= float(bound) * (1 - 1e-6)
    assert float(cost) <= float(bound) * 1.02  # the ridge, and the limit on stretching
    assert float(cost) <= float(
        stored.diagonal(dim1=1, dim2=2).sum() * reading.diagonal(dim1=1, dim2=2).sum()
    ) * (1 + 1e-6)


def test_balanced_spreads_the_error_evenly() -> None:
    """What the bound assumes: an error of the same size in each channel costs the same."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1, 16, 60, generator=generator, dtype=torch.float64) for _ in range(2))
    a = a * torch.linspace(0.2, 4, 16)[:, None]
    forward, _ = basis._balanced(a @ a.mT, b @ b.mT)
    channels = (forward @ (a @ a.mT) @ forward.mT).diagonal(dim1=1, dim2=2)[0]
    unrotated = reference.hadamard(torch.eye(16, dtype=torch.float64)) @ forward
    before = (unrotated @ (a @ a.mT) @ unrotated.mT).diagonal(dim1=1, dim2=2)[0]
    assert float(channels.max() / channels.min()) < float(before.max() / before.min())


def test_a_head_that_is_always_zero_stays_finite() -> None:
    zero = torch.zeros(2, 8, 8, dtype=torch.float64)
    forward, back = basis._balanced(zero, zero)
    assert bool(forward.isfinite().all() & back.isfinite().all())
    assert torch.allclose(forward @ back, torch.eye(8, dtype=torch.float64).expand(2, 8, 8))


def test_what_reads_a_head_is_summed_over_its_query_heads() -> None:
    weight = torch.randn(24, 6 * 4)
    found = basis.read_by(weight, kv_heads=2, head_dim=4)
    for head in range(2):
        total = torch.zeros(4, 4, dtype=torch.float64)
        for query in range(3):
            block = weight[:, (head * 3 + query) * 4 : (head * 3 + query + 1) * 4].double()
            total += block.T @ block
        assert torch.allclose(found[head], total)


def test_rms_is_that_of_what_is_stored() -> None:
    seen = seen_of()
    output = torch.eye(16, dtype=torch.float64).expand(2, 16, 16)
    found = basis.choose(side(basis="hadamard", center=True), "k", seen, output, seed=0)
    variance = seen["k"].squares / int(seen["k"].tokens) - (seen["k"].total / int(seen["k"].tokens)).square()
    assert torch.allclose(found.rms.flatten().double(), variance.mean(-1).sqrt(), rtol=1e-4)
