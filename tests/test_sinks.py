"""Learned sinks, logits of no key: everywhere that kvcal computes attention or its probabilities again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvcal import calibrate, capture, comparison, formats, paged_cache
from kvcal.cache import QuantizedCache
from kvcal.errors import ModelError
from kvcal.kernels import dispatch, reference
from kvcal.scales import Scales
from kvcal.transforms import key_turn
from tests import tiny

SINKS = torch.tensor([-1.0, 0.5, 3.0, 0.0, 1.5, 8.0])


def drawn(tokens: int, *, heads: int = 6, kv_heads: int = 2, head_dim: int = 16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens)
    return tuple(torch.randn(2, n, tokens, head_dim) for n in (heads, kv_heads, kv_heads))


def probabilities(
    q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Of keys, in float64: softmax over the logits of all keys and one more, which is then left out."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q.double() @ k.mT * 0.3
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    position = torch.arange(k.shape[2])
    hidden = position[None] > position[:, None]
    if window is not None:
        hidden |= position[None] <= position[:, None] - window
    logits = logits.masked_fill(hidden, float("-inf"))
    column = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0)])
def test_reference_is_the_softmax_with_one_more_logit(window: int | None, softcap: float | None) -> None:
    q, k, v = drawn(13)
    expected = probabilities(q, k, SINKS, window, softcap) @ v.double().repeat_interleave(3, 1)
    given = {"scaling": 0.3, "window": window, "softcap": softcap, "sinks": SINKS}
    torch.testing.assert_close(reference.attention(q, k, v, **given), expected.float(), rtol=1e-5, atol=1e-5)
    seen = (torch.ones(13, 13, dtype=torch.bool),)
    versions = reference.attention_over_versions(q, (k,), (v,), seen, **given)
    torch.testing.assert_close(versions, expected.float(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(
        reference.attention(q, k, v, **(given | {"sinks": None})), expected.float(), 0.05
    )


def test_quantized_attention_has_them_too() -> None:
    q, k, v = drawn(13)
    fmt, scales = formats.FP8_E4M3, {side: torch.tensor([0.011 * i]) for i, side in enumerate("kvq", 1)}
    codes = {side: reference.quantize(x, scales[side], fmt) for side, x in (("q", q), ("k", k), ("v", v))}
    q_hat, k_hat, v_hat = (reference.dequantize(codes[side], scales[side]) for side in "qkv")
    expected = probabilities(q_hat, k_hat, SINKS, 6, None) @ v_hat.double().repeat_interleave(3, 1)
    found = reference.quantized_attention(
        q,
        codes["k"],
        codes["v"],
        **{f"{side}_scale": scale for side, scale in scales.items()},
        fmt=fmt,
        scaling=0.3,
        window=6,
        sinks=SINKS,
    )
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def call_of(tokens: int) -> capture.AttentionCall:
    q, k, v = drawn(tokens)
    return capture.AttentionCall(0, q, k, v, 0.3, None, None, sinks=SINKS)


def test_weights_of_tokens_are_those_of_the_real_probabilities() -> None:
    call = call_of(13)
    p = probabilities(call.query, call.key, SINKS, None, None)[1]
    expected = p.square().view(2, 3, 13, 13).sum((1, 2)).float()
    found = calibrate.attention_weights(call, 1, slice(0, 13))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    without = calibrate.attention_weights(dataclasses.replace(call, sinks=None), 1, slice(0, 13))
    assert not torch.allclose(without, expected, rtol=0.05)


def test_cost_of_an_error_knows_them() -> None:
    call = call_of(7)
    p = probabilities(call.query, call.key, SINKS, None, None)[0]
    v = call.value[0].double().repeat_interleave(3, 0)
    moved = (v[:, None] - (p @ v)[:, :, None]).square().sum(-1)  # (heads, queries, keys)
    cost = (p.square() * moved * call.query[0].double().square().sum(-1)[:, :, None]).sum(1)
    torch.testing.assert_close(key_turn._cost(call), cost.view(2, 3, 7).sum(1).float(), rtol=1e-4, atol=1e-5)


def test_pages_are_read_with_them() -> None:
    ones: dict[str, torch.Tensor] = dict.fromkeys("kvq", torch.ones(1))
    cache = QuantizedCache(formats.FP8_E4M3, Scales({0: ones}))  # type: ignore[dict-item]
    q, k, v = drawn(9, head_dim=64)
    call = capture.AttentionCall(0, q, k, v, 0.3, None, None, sinks=SINKS)
    assert paged_cache.reads(call, cache)
    k_hat, v_hat = (x.to(torch.float8_e4m3fn).float() for x in (k, v))
    expected = probabilities(q, k_hat, SINKS, None, None) @ v_hat.double().repeat_interleave(3, 1)
    found = paged_cache.attend(call, cache, dispatch.choose(torch.device("cpu")))
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_a_model_that_hides_its_sinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a layer does that kvcal does not emulate shows on the first batch."""
    model = tiny.build_model("gpt_oss")
    tokens = comparison.TokenSet(tuple(tuple(range(start, start + 30)) for start in (1, 40)))
    spec = tiny.spec_of(model)
    calibrate.views(model, spec.layers, 2, tokens, (calibrate.View(),))
    monkeypatch.setattr(
        capture.AttentionCall,
        "geometry",
        property(lambda call: {"scaling": call.scaling, "window": call.window, "softcap": call.softcap}),
    )
    with pytest.raises(
        ModelError, match="layer 0: its attention differs by .* from causal softmax attention"
    ):
        calibrate.views(model, spec.layers, 2, tokens, (calibrate.View(),))
