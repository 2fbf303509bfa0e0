"""What is applied can be undone, inverted and chained; attention does not notice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal.arch import LayerSpec
from kvcal.errors import ModelError
from kvcal.kernels import reference
from kvcal.transforms.record import LayerTransform, Transforms
from tests import tiny
from tests.transforms import drawn

SPEC = drawn.spec_of(tiny.build_model("llama"))
LAYER = SPEC.layers[0]
SEEDS = st.integers(0, 2**20)


def transform(seed: int, layer: LayerSpec = LAYER, *, signs: bool = False) -> LayerTransform:
    generator = torch.Generator().manual_seed(seed + 1)
    return LayerTransform(
        key_scale=drawn.key_scale(layer, SPEC, seed),
        key_offset=torch.randn(layer.kv_heads, layer.head_dim, generator=generator, dtype=torch.float64),
        key_turn=drawn.key_turn(layer, SPEC, seed),
        key_signs=reference.random_signs(layer.head_dim, seed).double() if signs else None,
        value_map=drawn.value_map(layer, seed),
    )


def qkv(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (LAYER.heads, LAYER.kv_heads, LAYER.kv_heads)
    q, k, v = (torch.randn(2, h, 7, LAYER.head_dim, generator=generator, dtype=torch.float64) for h in heads)
    return q, k, v


@given(SEEDS, st.booleans())
@settings(max_examples=30)
def test_undo_is_the_inverse_of_apply(seed: int, signs: bool) -> None:
    tensors = qkv(seed)
    found = transform(seed, signs=signs)
    for back, original in zip(found.undo(*found.apply(*tensors)), tensors, strict=True):
        torch.testing.assert_close(back, original, rtol=1e-9, atol=1e-9)


@given(SEEDS, st.booleans())
@settings(max_examples=30)
def test_attention_of_transformed_tensors_is_the_same(seed: int, signs: bool) -> None:
    q, k, v = qkv(seed)
    found = transform(seed, signs=signs)
    seen_q, seen_k, seen_v = found.apply(q, k, v)
    assert float((seen_k - k).norm() / k.norm()) > 0.1
    expected = reference.attention(q, k, v, scaling=0.3)
    output = reference.attention(seen_q, seen_k, seen_v, scaling=0.3)
    inverse = torch.linalg.inv(found.value_map)  # type: ignore[arg-type]
    inverse = inverse.repeat_interleave(LAYER.heads // LAYER.kv_heads, 0)
    torch.testing.assert_close(output @ inverse.transpose(-1, -2), expected, rtol=1e-9, atol=1e-9)


@given(SEEDS)
@settings(max_examples=30)
def test_the_inverse_transform_applies_what_undo_does(seed: int) -> None:
    q, k, v = qkv(seed)
    found = transform(seed)
    for a, b in zip(found.inverse().apply(q, k, v), found.undo(q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(SEEDS, SEEDS, st.booleans())
@settings(max_examples=30)
def test_then_is_one_after_the_other(seed: int, other: int, signs: bool) -> None:
    tensors = qkv(seed)
    first, second = transform(seed), transform(other, signs=signs)
    expected = second.apply(*first.apply(*tensors))
    for a, b in zip(first.then(second).apply(*tensors), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# That of latents has tensors of its own (tests/test_latent.py).
@pytest.mark.parametrize(
    "step", sorted({f.name for f in dataclasses.fields(LayerTransform)} - {"latent_scale"})
)
def test_every_step_works_alone(step: str) -> None:
    whole = transform(3, signs=True)
    alone = LayerTransform(**{step: getattr(whole, step)})
    assert alone.steps == [step]
    tensors = qkv()
    seen = alone.apply(*tensors)
    assert any(not torch.equal(a, b) for a, b in zip(seen, tensors, strict=True))
    for back, original in zip(alone.undo(*seen), tensors, strict=True):
        torch.testing.assert_close(back, original, rtol=1e-9, atol=1e-9)
    if step != "key_signs":
        for a, b in zip(alone.inverse().apply(*tensors), alone.undo(*tensors), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_nothing_of_k_can_follow_a_rotation_of_k() -> None:
    with pytest.raises(ValueError, match="can follow a rotation"):
        transform(0, signs=True).then(LayerTransform(key_scale=drawn.key_scale(LAYER, SPEC, 0)))
    with pytest.raises(ValueError, match="in no weight"):
        transform(0, signs=True).inverse()


def test_powers_of_two_are_told_from_other_numbers() -> None:
    assert drawn.exact(SPEC).powers_of_two
    assert not drawn.everything(SPEC).powers_of_two
    assert not Transforms({0: LayerTransform(key_offset=torch.ones(2, 16))}).powers_of_two


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    found = Transforms({0: transform(1), 2: LayerTransform(key_signs=torch.ones(16).double())})
    found.save(tmp_path / "t.safetensors")
    again = Transforms.load(tmp_path / "t.safetensors")
    assert again.layers.keys() == {0, 2}
    for index, layer in found.layers.items():
        assert again.layers[index].steps == layer.steps
        assert all(torch.equal(getattr(layer, s), getattr(again.layers[index], s)) for s in layer.steps)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="holds no transforms"):
        Transforms.load(tmp_path / "t.safetensors")
