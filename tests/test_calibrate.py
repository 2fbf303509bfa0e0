"""The same text gives the same statistics, however it is batched, ordered or padded."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
from transformers import DynamicCache

from kvcal import arch, calibrate, capture, plan, recipe, scales
from kvcal.data import Batch, TokenSet
from kvcal.errors import ModelError, StatisticsError
from kvcal.recipe import SIDES
from kvcal.statistics import Statistics
from tests import tiny


def plan_for(model: Any, **fields: Any) -> plan.Plan:
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    exact = {"scale": {"rule": "amax", "headroom": 1.0}}
    return plan.resolve(recipe.parse(exact | fields, "test"), arch.read(config))


def token_set(lengths: list[int], seed: int = 0) -> TokenSet:
    chooser = random.Random(seed)
    return TokenSet(tuple(tuple(chooser.randrange(256) for _ in range(n)) for n in lengths))


def run(model: Any, tokens: TokenSet, batch_size: int = 1, **fields: Any) -> Statistics:
    resolved = plan_for(model, calibration={"batch_size": batch_size}, **fields)
    return calibrate.calibrate(model, resolved, tokens)


def amaxes(statistics: Statistics) -> torch.Tensor:
    return torch.cat([s[side].amax.flatten() for s in statistics.layers.values() for side in SIDES])


MIXED = [9, 40, 23, 40, 17, 31, 12]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "mistral", "qwen3", "phi3"])
@pytest.mark.parametrize("batch_size", [2, 3, 7])
def test_batch_size_does_not_matter(family: str, batch_size: int) -> None:
    model = tiny.build_model(family)
    alone, together = run(model, token_set(MIXED)), run(model, token_set(MIXED), batch_size)
    torch.testing.assert_close(amaxes(together), amaxes(alone), rtol=1e-5, atol=1e-6)
    for index, sides in alone.layers.items():
        for side in SIDES:
            assert int(sides[side].tokens) == int(together.layers[index][side].tokens) == sum(MIXED)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_padding_side_does_not_matter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny.build_model(family), token_set(MIXED)
    right = run(model, tokens, 4)
    plain = TokenSet.batches

    def left(self: TokenSet, batch_size: int, padding_side: Literal["left", "right"] = "left") -> Any:
        return plain(self, batch_size, "left")

    monkeypatch.setattr(TokenSet, "batches", left)
    batches: list[Batch] = list(tokens.batches(4))
    assert any(b.attention_mask[:, 0].min() == 0 for b in batches)
    torch.testing.assert_close(amaxes(run(model, tokens, 4)), amaxes(right), rtol=1e-5, atol=1e-6)


def test_order_of_samples_does_not_matter_bit_for_bit() -> None:
    model, tokens = tiny.build_model(), token_set([32] * 8)
    shuffled = TokenSet(tuple(reversed(tokens.samples)))
    assert torch.equal(amaxes(run(model, tokens, 4)), amaxes(run(model, shuffled, 4)))
    assert tokens.content_hash == shuffled.content_hash


def test_extremes_are_those_of_the_cached_tensors() -> None:
    model, tokens = tiny.build_model("qwen2"), token_set([30, 30, 21])
    statistics = run(model, tokens, 3)
    keys: dict[int, list[torch.Tensor]] = {}
    for sample in tokens.samples:
        cache = DynamicCache()
        with torch.inference_mode():
            model(torch.tensor([sample]), past_key_values=cache, use_cache=True)
        for index, layer in enumerate(cache.layers):
            keys.setdefault(index, []).append(layer.keys[0].transpose(0, 1))
    for index, parts in keys.items():
        seen, rows = statistics.layers[index]["k"], torch.cat(parts)
        torch.testing.assert_close(seen.maximum, rows.amax(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(seen.minimum, rows.amin(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(seen.total, rows.double().sum(0), rtol=1e-4, atol=1e-3)


def test_extremes_only_gives_the_same_scales() -> None:
    model, tokens = tiny.build_model(), token_set(MIXED)
    resolved = plan_for(model, granularity="per_head")
    full = calibrate.calibrate(model, resolved, tokens)
    lean = calibrate.calibrate(model, resolved, tokens, collect="extremes")
    assert torch.equal(amaxes(full), amaxes(lean))
    before, after = (scales.compute(s, resolved).layers for s in (full, lean))
    assert all(torch.equal(before[i][side], after[i][side]) for i in before for side in SIDES)


def distribution(model: Any, tokens: TokenSet, batch_size: int = 1) -> Statistics:
    resolved = plan_for(model, calibration={"batch_size": batch_size})
    return calibrate.calibrate(model, resolved, tokens, collect="distribution")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "granite"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_distributions_do_not_depend_on_batches(
    family: str, side: Literal["left", "right"], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny.build_model(family), token_set([*MIXED, 140])
    alone = distribution(model, tokens)
    plain = TokenSet.batches
    monkeypatch.setattr(TokenSet, "batches", lambda self, batch_size: plain(self, batch_size, side))
    together = distribution(model, tokens, 3)
    shuffled = distribution(model, TokenSet(tuple(reversed(tokens.samples))), 4)
    for index, sides in alone.layers.items():
        for name in SIDES:
            for field, value in sides[name].tensors().items():
                for other in (together, shuffled):
                    found = other.layers[index][name].tensors()[field]
                    if field == "histogram":  # rounding may carry a value into the next bin
                        assert int((found - value).abs().sum()) < 1e-3 * int(value.sum())
                    else:
                        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_attention_weights_are_those_of_eager_attention(family: str) -> None:
    """Σ p² from the probabilities that transformers gives out; windows and softcaps included."""
    model, sample = tiny.build_model(family), token_set([31]).samples[0]
    model.set_attn_implementation("eager")
    found: dict[int, torch.Tensor] = {}

    def see(call: capture.AttentionCall) -> None:
        found[call.layer] = calibrate.attention_weights(call, 0, slice(0, 31))

    with torch.inference_mode(), capture.intercept(model, see):
        probabilities = model(torch.tensor([sample]), output_attentions=True).attentions
    for index, each in enumerate(probabilities):
        exact = each[0].view(2, 3, 31, 31).double().square().sum((1, 2))
        torch.testing.assert_close(found[index].double(), exact, rtol=1e-4, atol=1e-6)


def call_of(tokens: int) -> capture.AttentionCall:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    return capture.AttentionCall(0, q, k, v, scaling=8**-0.5, window=None, softcap=None)


def test_few_queries_stand_for_all_of_a_long_sample() -> None:
    call = call_of(1024)
    found = calibrate.attention_weights(call, 0, slice(0, 1024)).double()
    hidden = torch.ones(1024, 1024, dtype=torch.bool).triu(1)
    logits = call.query.view(2, 2, 1024, 8) @ call.key[0].unsqueeze(1).mT * call.scaling
    exact = logits.masked_fill(hidden, -torch.inf).double().softmax(-1).square().sum((1, 2))
    late = slice(64, 960)  # the first tokens are read by few queries, of which none may be chosen
    torch.testing.assert_close(found[:, late].sum(-1), exact[:, late].sum(-1), rtol=0.1, atol=0)


def test_attention_weights_look_at_no_padding() -> None:
    call = call_of(40)
    q, k, v = (torch.full((1, x.shape[1], 60, 8), torch.nan) for x in (call.query, call.key, call.value))
    for padded, x in ((q, call.query), (k, call.key), (v, call.value)):
        padded[:, :, 15:55] = x
    padded_call = capture.AttentionCall(0, q, k, v, call.scaling, None, None)
    weights = calibrate.attention_weights(padded_call, 0, slice(15, 55))
    assert torch.equal(weights, calibrate.attention_weights(call, 0, slice(0, 40)))


@pytest.mark.parametrize("weight", ["q_proj", "k_proj", "v_proj"])
def test_a_nan_weight_is_named(weight: str) -> None:
    model = tiny.build_model()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, weight).weight[3, 5] = torch.nan
    with pytest.raises(
        StatisticsError, match=rf"layer 1: {weight[0].upper()} holds NaN.*layers\.1\.self_attn\.{weight}"
    ):
        run(model, token_set([20]))


def test_a_nan_before_the_first_attention_is_blamed_on_its_weight() -> None:
    model = tiny.build_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.inf
    with pytest.raises(StatisticsError, match=r"layer 1: .*model\.layers\.0\.mlp\.down_proj\.weight"):
        run(model, token_set([20]))


def test_a_layer_that_config_announces_but_model_lacks_is_an_error() -> None:
    model = tiny.build_model()
    resolved = plan_for(model)
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    with pytest.raises(StatisticsError, match="layer 2: K was never observed"):
        calibrate.calibrate(model, resolved, token_set([20]))


def test_other_shapes_than_announced_are_an_error() -> None:
    resolved = plan_for(tiny.build_model(num_key_value_heads=3))
    with pytest.raises(ModelError, match="layer 0: K has 2 heads of size 16, config.json announces 3 of 16"):
        calibrate.calibrate(tiny.build_model(), resolved, token_set([20]))


def test_every_token_is_reported_to_the_progress_bar() -> None:
    model, tokens, told = tiny.build_model(), token_set(MIXED), []
    calibrate.calibrate(model, plan_for(model, calibration={"batch_size": 3}), tokens, on_tokens=told.append)
    assert sum(told) == sum(MIXED) == tokens.tokens
