"""The table of exactness: every fold on a tiny random model of every RoPE, bias and QK-norm kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvcal import exactness, probe
from kvcal.arch import ModelSpec
from kvcal.errors import ModelError
from kvcal.kernels import reference
from kvcal.transforms import proof
from kvcal.transforms.record import LayerTransform, Transforms
from tests import tiny
from tests.transforms import drawn

# Beside the families as they are: biases that a config can ask for, and other shares of rotating channels.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in tiny.FAMILIES},
    "llama with biases": ("llama", {"attention_bias": True}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "stablelm with biases": ("stablelm", {"use_qkv_bias": True}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "no GQA": ("llama", {"num_key_value_heads": 6}),
    "head size 24": ("llama", {"head_dim": 24}),
    "falcon with KV heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon of one head per query head": ("falcon", {"multi_query": False}),
    "opt without biases": ("opt", {"enable_bias": False}),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def built(variant: str) -> tuple[Any, ModelSpec]:
    family, changes = VARIANTS[variant]
    model = tiny.build_model(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()  # large enough that one left behind shows
    return model, drawn.spec_of(model)


def only(transforms: Transforms, step: str) -> Transforms:
    return Transforms({i: LayerTransform(**{step: getattr(t, step)}) for i, t in transforms.layers.items()})


@every_variant
@pytest.mark.parametrize("step", ["key_scale", "key_turn", "value_map"])
def test_folds_are_exact_in_float64(variant: str, step: str) -> None:
    model, spec = built(variant)
    errors = proof.block_errors(model, spec, only(drawn.everything(spec), step))
    assert errors.keys() == {layer.index for layer in spec.layers}
    assert max(errors.values()) < proof.TOLERANCE
    proof.require_exact(errors)


@every_variant
def test_all_folds_together_are_exact_in_float64(variant: str) -> None:
    model, spec = built(variant)
    assert max(proof.block_errors(model, spec, drawn.everything(spec)).values()) < proof.TOLERANCE


@every_variant
def test_a_scale_that_rope_does_not_allow_is_seen(variant: str) -> None:
    """One channel apart from the one it turns into; in layers without RoPE that is exact."""
    model, spec = built(variant)
    for layer in spec.layers:
        scale = torch.ones(layer.kv_heads, layer.head_dim, dtype=torch.float64)
        scale[:, 0] = 2.0
        (error,) = proof.block_errors(
            model, spec, Transforms({layer.index: LayerTransform(key_scale=scale)})
        ).values()
        assert (error < proof.TOLERANCE) == (layer.rope == "none")


@pytest.mark.parametrize("variant", ["qwen3", "gemma3_text", "olmo2", "exaone4"])
def test_a_scale_in_front_of_a_qk_norm_is_seen(variant: str) -> None:
    model, spec = built(variant)
    scale = only(drawn.everything(spec), "key_scale")
    errors = proof.block_errors(model, dataclasses.replace(spec, qk_norm="none"), scale)
    assert min(errors.values()) > 1e-3
    with pytest.raises(ModelError, match=r"layer \d: folding changes its attention by"):
        proof.require_exact(errors)


def test_heads_that_share_gains_must_share_scales() -> None:
    model, spec = built("qwen3")
    layer = spec.layers[0]
    apart = drawn.key_scale(layer, dataclasses.replace(spec, qk_norm="none"), 0)
    assert not torch.equal(apart[0], apart[1])
    with pytest.raises(ModelError, match="share"):
        proof.block_errors(model, spec, Transforms({0: LayerTransform(key_scale=apart)}))


@every_variant
def test_a_key_offset_is_exact_where_the_table_says_so(variant: str) -> None:
    """Channels without RoPE, through a bias that is there; elsewhere the constant would turn."""
    model, spec = built(variant)
    reason = exactness.table(spec)["key_offset"]
    for layer in spec.layers:
        projection = model.get_submodule(f"{layer.module}.{spec.projections.k}")
        free = list(exactness.free_channels(layer))
        offset = torch.zeros(layer.kv_heads, layer.head_dim, dtype=torch.float64)
        offset[:, free] = 3.0
        if projection.bias is None or not free:
            continue
        (error,) = proof.block_errors(
            model, spec, Transforms({layer.index: LayerTransform(key_offset=offset)})
        ).values()
        assert (error < proof.TOLERANCE) == (reason is None)


def test_a_key_offset_in_front_of_rope_is_seen() -> None:
    model, spec = built("qwen2")
    offset = torch.full((2, 16), 3.0, dtype=torch.float64)
    errors = proof.block_errors(model, spec, Transforms({0: LayerTransform(key_offset=offset)}))
    assert errors[0] > 1e-3


def test_the_model_is_left_as_it_was() -> None:
    model, spec = built("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    transforms = drawn.everything(spec)
    proof.block_errors(model, spec, transforms)
    folded = proof.FoldedWeights(model, spec, transforms)
    ids = torch.arange(9)[None]
    plain = model(ids).logits
    seen = []

    def fail_inside() -> None:
        with folded():
            seen.append(model(ids).logits)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside()
    (inside,) = seen
    torch.testing.assert_close(inside, plain, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert hooks == [len(m._forward_pre_hooks) for m in model.modules()]
    assert any(not torch.equal(old, new) for _, old, new in folded._swaps)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "phi3", "gpt_neox", "cohere2", "gemma2", "olmo2"])
def test_powers_of_two_and_turns_leave_every_logit_bit_for_bit(variant: str) -> None:
    """Scales move exponents through the whole model: not one rounding changes."""
    model, spec = built(variant)
    ids = torch.arange(30)[None]
    scales = Transforms(
        {i: dataclasses.replace(t, key_turn=None) for i, t in drawn.exact(spec).layers.items()}
    )
    with torch.inference_mode():
        plain = model(ids).logits
        with proof.FoldedWeights(model, spec, scales)():
            folded = model(ids).logits
    assert torch.equal(plain, folded)


def test_a_map_of_channels_does_not_pass_an_output_gate() -> None:
    model, spec = built("qwen3_next")
    assert all(
        "a gate per channel" in str(exactness.table(spec)[f"value_{name}"])
        for name in ("hadamard", "balanced")
    )
    dense = {layer.index: LayerTransform(value_map=drawn.value_map(layer, 0)) for layer in spec.layers}
    assert min(proof.block_errors(model, spec, Transforms(dense)).values()) > 1e-3


def test_an_offset_of_keys_is_seen_by_learned_sinks() -> None:
    model, spec = built("gpt_oss")
    assert "learned sinks" in str(exactness.table(spec)["key_offset"])
    layer = spec.layers[0]
    q, k, v = (torch.randn(1, n, 9, layer.head_dim) for n in (layer.heads, layer.kv_heads, layer.kv_heads))
    sinks = model.get_submodule(layer.module).sinks.detach()

    def attend(keys: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        return reference.attention(q, keys, v, scaling=0.25, sinks=sinks)

    torch.testing.assert_close(attend(k - 3.0, None), attend(k, None), rtol=1e-4, atol=1e-4)
    assert float((attend(k - 3.0, sinks) - attend(k, sinks)).norm() / attend(k, sinks).norm()) > 0.05


def test_nothing_folds_where_nobody_knows_what_the_weights_are() -> None:
    spec = probe.read(tiny.fields("olmoe") | {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]})
    assert set(exactness.table(spec).values()) == {"which weights of olmoe make Q, K and V is not known"}
