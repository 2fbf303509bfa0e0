from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from kvcal import arch, capture, families, sources
from kvcal.errors import KvcalError, ModelError, PlanRefused
from tests import tiny

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 263,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_spec_is_what_the_real_model_has(family: str, tmp_path: Path) -> None:
    model = tiny.build_model(family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    spec = arch.read(sources.read_config(tmp_path))

    calls: dict[int, capture.AttentionCall] = {}
    with capture.intercept(model, lambda call: calls.update({call.layer: call})), torch.no_grad():
        model(torch.arange(9)[None])
    modules = dict(model.named_modules())
    assert [layer.index for layer in spec.layers] == sorted(calls)
    for layer in spec.layers:
        call = calls[layer.index]
        assert modules[layer.module].layer_idx == layer.index
        assert call.query.shape == (1, layer.heads, 9, layer.head_dim)
        assert call.key.shape == call.value.shape == (1, layer.kv_heads, 9, layer.head_dim)
        assert call.window == (spec.sliding_window if layer.kind == "sliding" else None)
        assert call.softcap == spec.softcap
    assert spec.architecture == type(model).__name__
    assert (spec.model_type, spec.dtype) == (family, "float32")
    assert (spec.hidden_size, spec.vocab_size) == (96, 263)
    assert (spec.max_context, spec.quant_method) == (256, None)
    assert spec.cached_elements_per_token == sum(c.key.numel() + c.value.numel() for c in calls.values()) // 9


def rotating(rope: arch.Rope, rotary_dim: int, head_dim: int) -> arch.LayerSpec:
    return arch.LayerSpec(0, "full", "m", 6, 2, head_dim, rope, rotary_dim)


@pytest.mark.parametrize(
    ("rope", "rotary_dim", "ties"),
    [
        ("half", 8, (0, 1, 2, 3, 0, 1, 2, 3)),
        ("half", 4, (0, 1, 0, 1, 2, 3, 4, 5)),
        ("half", 2, (0, 0, 1, 2, 3, 4, 5, 6)),
        ("interleaved", 8, (0, 0, 1, 1, 2, 2, 3, 3)),
        ("interleaved", 4, (0, 0, 1, 1, 2, 3, 4, 5)),
        ("none", 0, (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_channels_that_rotate_into_each_other_are_tied(
    rope: arch.Rope, rotary_dim: int, ties: tuple[int, ...]
) -> None:
    assert rotating(rope, rotary_dim, 8).channel_ties == ties


@settings(deadline=None)
@given(st.sampled_from(["half", "interleaved"]), st.integers(1, 40), st.integers(0, 40))
def test_ties_are_pairs_numbered_without_gaps(rope: arch.Rope, pairs: int, rest: int) -> None:
    ties = rotating(rope, 2 * pairs, 2 * pairs + rest).channel_ties
    assert sorted(set(ties)) == list(range(pairs + rest))
    assert [ties.count(number) for number in range(pairs + rest)] == [2] * pairs + [1] * rest


LEARNED_POSITIONS = ("gpt2", "opt")  # added to what layers read, so no layer rotates

# Every way in which models of a family rotate: the tiny ones', and what their configs can say besides.
ROTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in tiny.FAMILIES if family not in LEARNED_POSITIONS},
    # Linear layers tell equal tokens apart by what came before them.
    "qwen3_next": ("qwen3_next", {"layer_types": ["full_attention"] * 3}),
    "falcon with KV heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi3 in part": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3 in part, by its section": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "stablelm rounded down": ("stablelm", {"partial_rotary_factor": 0.4}),
    "stablelm where the section goes first": (
        "stablelm",
        {
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt_neox in full": ("gpt_neox", {"rotary_pct": 1.0}),
    "gpt_neox with a field it does not read": ("gpt_neox", {"partial_rotary_factor": 1.0}),
    "phi in part": ("phi", {"partial_rotary_factor": 0.375}),
    "exaone4 without a window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "exaone4 with a window that no layer has": ("exaone4", {"layer_types": ["full_attention"] * 3}),
    "cohere2 of full layers": ("cohere2", {"layer_types": ["full_attention"] * 3}),
    "llama, stretched": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
}


def built(family: str, changes: dict[str, Any]) -> tuple[Any, arch.ModelSpec]:
    model = tiny.build_model(family, **changes)
    named = {"model_type": family, "architectures": [type(model).__name__]}
    return model, arch.read(tiny.fields(family, **changes) | named)


def calls_of(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> dict[int, capture.AttentionCall]:
    calls: dict[int, capture.AttentionCall] = {}
    with capture.intercept(model, lambda call: calls.update({call.layer: call})), torch.no_grad():
        model(ids, position_ids=positions)
    return calls


def measured_ties(states: torch.Tensor) -> tuple[int, ...]:
    """The ties that ``states`` (heads, positions, head_dim) show, which differ by their positions alone.

    A rotation keeps the length of the pair it turns, and of no other pair of channels whose values move.
    """
    change = states.square() - states[:, :1].square()
    moves = (states - states[:, :1]).abs().amax((0, 1)) > 1e-3
    kept = (change[..., :, None] + change[..., None, :]).abs().amax((0, 1)) < 1e-3
    numbers: list[int] = []
    for channel in range(states.shape[-1]):
        partners = [b for b in range(states.shape[-1]) if b != channel and moves[b] and kept[channel, b]]
        assert len(partners) == int(moves[channel])
        earlier = partners and partners[0] < channel
        numbers.append(numbers[partners[0]] if earlier else len(set(numbers)))
    return tuple(numbers)


@pytest.mark.parametrize(("family", "changes"), ROTATIONS.values(), ids=ROTATIONS)
def test_announced_ties_are_those_that_the_real_model_shows(family: str, changes: dict[str, Any]) -> None:
    model, spec = built(family, changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # they get less the more keys there are
                parameter.fill_(-1e4)
    # Of equal tokens each attends to equal values, so that only positions tell them apart, in every layer.
    # Far positions, for the slowest pairs to have turned visibly.
    positions = torch.tensor([[0, 3, 1000, 50_021]])
    calls = calls_of(model, torch.full((1, 4), 65), positions)
    for layer in spec.layers:
        states = torch.cat([calls[layer.index].query[0], calls[layer.index].key[0]])
        assert states.shape == (layer.heads + layer.kv_heads, 4, layer.head_dim)
        assert measured_ties(states) == layer.channel_ties
        moves = (states - states[:, :1]).abs().amax((0, 1)) > 1e-3
        assert moves.tolist() == [channel < layer.rotary_dim for channel in range(layer.head_dim)]
        assert (layer.rope == "none") == (layer.rotary_dim == 0)


@pytest.mark.parametrize("family", LEARNED_POSITIONS)
def test_layers_of_learned_positions_do_not_rotate(family: str) -> None:
    model, spec = built(family, {})
    assert {(layer.rope, layer.rotary_dim) for layer in spec.layers} == {("none", 0)}
    assert not any("rotary" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_q_k_and_v_come_from_the_rows_announced(family: str) -> None:
    """At position 0 nothing has turned: what the attention gets is the projections', normed as announced."""
    model, spec = built(family, {})
    modules, names = dict(model.named_modules()), spec.projections
    seen: dict[str, torch.Tensor] = {}
    for layer in spec.layers:
        for name in {names.q, names.k, names.v}:
            path = f"{layer.module}.{name}"
            modules[path].register_forward_hook(lambda _m, _i, out, p=path: seen.update({p: out[0, 0]}))
    calls = calls_of(model, torch.tensor([[65, 66, 67]]), torch.tensor([[0, 1, 2]]))

    for layer in spec.layers:
        q, k, v = (seen[f"{layer.module}.{name}"] for name in (names.q, names.k, names.v))
        kv_rows = layer.kv_heads * layer.head_dim
        if names.fused == "blocks":
            q, k, v = q.split([layer.heads * layer.head_dim, kv_rows, kv_rows])
        elif names.fused == "groups":
            grouped = q.view(layer.kv_heads, -1, layer.head_dim)
            q, k, v = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
        else:
            assert len({names.q, names.k, names.v}) == 3
        call = calls[layer.index]
        parts = {"q": (q, spec.q_norm, call.query), "k": (k, spec.k_norm, call.key)}
        for side, (projected, norm, attended) in parts.items():
            x = projected.reshape(layer.heads_of(side), -1)[:, : layer.head_dim]  # a gate may follow
            if spec.qk_norm != "none":
                weight = modules[f"{layer.module}.{norm}"].weight
                shape = (layer.head_dim,) if spec.qk_norm == "head" else (x.numel(),)
                assert weight.shape == shape
                mean_square = x.square().mean(-1 if spec.qk_norm == "head" else (0, 1), keepdim=True)
                gain = weight + 1 if spec.norm_adds_one else weight
                x = x * mean_square.rsqrt() * (gain if spec.qk_norm == "head" else gain.view_as(x))
            torch.testing.assert_close(attended[0, :, 0], x, rtol=1e-3, atol=1e-3)
        assert torch.equal(call.value[0, :, 0], v.reshape(layer.kv_heads, layer.head_dim))

        output = modules[f"{layer.module}.{names.o}"]
        assert output.weight.numel() == spec.hidden_size * layer.heads * layer.head_dim
        if spec.qk_norm == "none":
            assert not [name for name, _ in modules[layer.module].named_modules() if "norm" in name]


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family != "gpt2"])
def test_norm_without_weight_is_zero_unless_it_adds_one(family: str) -> None:
    model, spec = built(family, {})
    named = (item for item in model.named_modules() if "linear_attn" not in item[0])
    norms = [module for name, module in named if name.endswith("norm")]
    assert norms
    for norm in norms:
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.zero_()
            assert bool(norm(torch.randn(2, norm.weight.numel())).any()) == spec.norm_adds_one


BIASES: dict[str, dict[str, Any]] = {
    "stablelm": {"use_qkv_bias": True},
    "qwen2_moe": {"qkv_bias": False},
    "starcoder2": {"use_bias": False},
    "gpt_neox": {"attention_bias": False},
    "llama": {"attention_bias": True},
    "qwen3": {"attention_bias": True},
    "gemma2": {"attention_bias": True},
    "olmo2": {"attention_bias": True},
    "granite": {"attention_bias": True},
    "cohere2": {"attention_bias": True},
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in tiny.FAMILIES), *BIASES.items()],
)
def test_key_bias_is_what_the_real_model_has(family: str, changes: dict[str, Any]) -> None:
    model, spec = built(family, changes)
    for layer in spec.layers:
        projection = model.get_submodule(f"{layer.module}.{spec.projections.k}")
        assert (projection.bias is not None) == spec.key_bias


@pytest.mark.parametrize("family", ["stablelm", "phi"])
def test_layer_norms_of_q_and_k_are_refused(family: str) -> None:
    with pytest.raises(PlanRefused, match=f"model_type '{family}' with qk_layernorm: LayerNorms of Q and K"):
        arch.read(CONFIG | {"model_type": family, "qk_layernorm": True})
    arch.read(CONFIG | {"model_type": family, "qk_layernorm": False})


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("qwen3", {"rope_scaling": {"rope_type": "linear", "partial_rotary_factor": 0.5}}),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}),
    ],
)
def test_partial_rotation_of_a_family_that_has_none_is_refused(family: str, fields: dict[str, Any]) -> None:
    with pytest.raises(PlanRefused, match=f"'{family}' with partial_rotary_factor 0.5: it rotates all"):
        arch.read(CONFIG | {"model_type": family} | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial_rotary_factor": 0}, r"partial_rotary_factor must lie in (0, 1], found 0"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor must lie in (0, 1], found 1.5"),
        ({"partial_rotary_factor": True}, r"partial_rotary_factor must lie in (0, 1], found True"),
        ({"partial_rotary_factor": "half"}, r"partial_rotary_factor must lie in (0, 1], found 'half'"),
        ({"partial_rotary_factor": float("nan")}, r"partial_rotary_factor must lie in (0, 1], found nan"),
        ({"partial_rotary_factor": 0.3}, "7 of a head's 24 channels rotate, which do not pair up"),
        ({"partial_rotary_factor": 0.01}, "0 of a head's 24 channels rotate, which do not pair up"),
        ({"rope_parameters": [1]}, "rope_parameters must be a section, found [1]"),
        ({"rope_scaling": "linear"}, "rope_scaling must be a section, found 'linear'"),
        ({"head_dim": 65_537}, "head_dim is 65537, more than any model has"),
    ],
)
def test_rotation_that_cannot_be_meant_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        arch.read(CONFIG | {"model_type": "phi"} | fields)
    assert message in str(caught.value)


# What hub configs leave out or say in the words of an earlier transformers.
SPARSE: dict[str, dict[str, Any]] = {
    "gemma2 without layer_types": {"model_type": "gemma2", "sliding_window": 24},
    "gemma3_text with a pattern": {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "sliding_window_pattern": 3,
    },
    "gemma3_text without a pattern": {"model_type": "gemma3_text", "sliding_window": 24},
    "qwen2 with a window it does not use": {"model_type": "qwen2", "sliding_window": 24},
    "qwen2 sliding from a layer on": {
        "model_type": "qwen2",
        "sliding_window": 24,
        "use_sliding_window": True,
        "max_window_layers": 5,
    },
    "qwen3 sliding from a layer on": {
        "model_type": "qwen3",
        "sliding_window": 24,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "exaone4 without a window": {
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 7,
    },
    "cohere2 with a pattern": {"model_type": "cohere2", "sliding_window": 24, "sliding_window_pattern": 3},
    **{f"{family} with defaults": {"model_type": family} for family in families.FAMILIES},
}


@pytest.mark.parametrize("fields", SPARSE.values(), ids=SPARSE)
def test_sparse_config_means_what_transformers_takes_it_for(fields: dict[str, Any]) -> None:
    given = {"hidden_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 32, **fields}
    model_type = given.pop("model_type")
    config = CONFIG_MAPPING[model_type](**given)
    named = {"vocab_size": 263, "max_position_embeddings": 256, "architectures": ["X"]}
    spec = arch.read(given | named | {"model_type": model_type})

    sliding = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"] * 7
    attending = [kind for kind in kinds if kind != "linear_attention"]
    assert [f"{layer.kind}_attention" for layer in spec.layers] == attending
    assert spec.layers_without_attention == len(kinds) - len(attending)
    kv_heads = 1 if model_type == "falcon" else getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None)
    if hasattr(config, "kv_lora_rank"):
        kv_heads, head_dim = 1, config.kv_lora_rank + config.qk_rope_head_dim
    assert {layer.kv_heads for layer in spec.layers} == {kv_heads or 32}
    assert {layer.head_dim for layer in spec.layers} == {head_dim or 1024 // 32}


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("mamba", "has no attention layer"),
        ("mllama", "keeps K and V of images"),
        ("perceptron", "is not a family kvcal knows; it knows .*llama"),
    ],
)
def test_family_is_refused_by_name(model_type: str, why: str) -> None:
    with pytest.raises(PlanRefused, match=rf"model_type '{model_type}' {why}"):
        arch.read(CONFIG | {"model_type": model_type})


def test_no_family_is_both_handled_and_refused() -> None:
    assert not families.FAMILIES.keys() & families.REFUSED.keys()


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention", "mamba"])
def test_layers_without_a_plain_cache_are_refused(kind: str) -> None:
    with pytest.raises(PlanRefused, match=f"layers of kind {kind} keep no plain KV cache"):
        arch.read(CONFIG | {"layer_types": ["full_attention", kind, "full_attention"]})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", None, "has no model_type"),
        ("model_type", 7, "has no model_type"),
        ("architectures", [], "architectures must name the model class"),
        ("architectures", None, "architectures must name the model class"),
        ("hidden_size", None, "hidden_size must be a positive integer, found None"),
        ("hidden_size", "96", "hidden_size must be a positive integer, found '96'"),
        ("num_hidden_layers", 0, "num_hidden_layers must be a positive integer, found 0"),
        ("num_hidden_layers", True, "num_hidden_layers must be a positive integer, found True"),
        ("num_attention_heads", -6, "num_attention_heads must be a positive integer, found -6"),
        ("num_key_value_heads", 4, "6 attention heads do not divide into 4 KV heads"),
        ("num_key_value_heads", [2, 2, 2], "num_key_value_heads must be a positive integer"),
        ("head_dim", 24.0, "head_dim must be a positive integer, found 24.0"),
        ("vocab_size", None, "vocab_size must be a positive integer"),
        ("max_position_embeddings", None, "max_position_embeddings must be a positive integer"),
        ("sliding_window", 0, "sliding_window must be a positive integer, found 0"),
        ("attn_logit_softcapping", -1.0, "attn_logit_softcapping must be a positive number, found -1.0"),
        ("attn_logit_softcapping", float("nan"), "attn_logit_softcapping must be a positive number"),
        ("layer_types", ["full_attention"], "layer_types must list 3 layers"),
        ("layer_types", "full_attention", "layer_types must list 3 layers"),
        ("quantization_config", {}, "quantization_config names no quant_method"),
        ("quantization_config", "fp8", "quantization_config names no quant_method"),
    ],
)
def test_malformed_field_is_named_with_its_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        arch.read(CONFIG | {field: value})
    assert message in str(caught.value)


def test_head_size_must_come_out_whole() -> None:
    with pytest.raises(ModelError, match="hidden_size 96 does not divide into 5 heads"):
        arch.read(CONFIG | {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5})


def test_quant_method_of_the_base_is_kept() -> None:
    spec = arch.read(CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    assert spec.quant_method == "fp8"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2000) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [*CONFIG, "layer_types", "sliding_window", "use_sliding_window", "sliding_window_pattern"]
FIELDS += ["attn_logit_softcapping", "quantization_config", "max_window_layers", "qk_layernorm"]
FIELDS += ["rope_parameters", "rope_scaling", "partial_rotary_factor", "rotary_pct"]


@settings(deadline=None)
@given(st.sampled_from(sorted(families.FAMILIES)), st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_json_gives_a_spec_or_a_kvcal_error(family: str, fields: dict[str, Any]) -> None:
    try:
        spec = arch.read(CONFIG | {"model_type": family} | fields)
    except KvcalError:
        return
    assert spec.cached_elements_per_token > 0
