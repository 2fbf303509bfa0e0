"""What holds for every model of a ``model_type``: a table, as far as a config and transformers' code say it.

A row says what of a model its weights' fold depends on; a new family is a new row. A model without one is
looked at by :mod:`kvcal.probe`, which also holds rows against transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvcal.errors import ModelError, PlanRefused
from kvcal.model_config import bounded_layers, positive_int

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True)
class Projections:
    """Where an attention block keeps its weights: module paths relative to :attr:`LayerSpec.module`.

    Weights are ``(out, in)``. Rows of ``q``, ``k`` and ``v`` and columns of ``o`` run over heads, then over
    the channels of a head. ``fused`` says that ``q``, ``k`` and ``v`` name one module: with ``blocks`` its
    rows are all of Q, then all of K, then all of V; with ``groups`` they are ``[KV head][its query heads, k,
    v][channel]``. ``transposed``: weights are ``(in, out)``. Which of the modules carry a bias is for the
    checkpoint to say.
    """

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    fused: Literal["no", "blocks", "groups"] = "no"
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """What holds for every model of one ``model_type``; the facts are those of transformers' modeling file.

    ``attention_module`` is the module path of a layer's attention block; ``defaults`` are what
    transformers takes for fields that a config may leave out. ``names``: field -> the family's own name of
    it. ``settle`` says in the common fields what the family says in others. ``without_cache`` are the
    ``layer_types`` whose layers do not attend.

    ``rope`` is the pairing of the layers that have positions: every layer (``all``), only those with a
    sliding window (``sliding``), the same unless the model has no window at all (``hybrid``), or ``no``
    layer.
    ``rotary_factor`` is the share of a head's channels that rotates where the config, under
    ``rotary_field`` or in its RoPE section, does not say; None for families whose code rotates them all.
    RoPE hands out a cosine per rotating ``channel``, or per ``pair`` of them.

    ``qk_norm``, ``norm_adds_one``, ``q_norm``, ``k_norm``, ``sinks`` and ``output_gate`` are those of
    :class:`ModelSpec`. ``key_bias`` says whether K has a bias, or names the config field that does.
    ``refused`` has the config fields that must not be set, as no :class:`ModelSpec` can describe the outcome,
    with why.

    ``latent``: the layers cache a latent and a rotary key (:mod:`kvcal.latent`); ``rope`` is then the pairing
    of that key as it is cached.
    """

    model_type: str
    attention_module: str = "model.layers.{index}.self_attn"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    settle: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    without_cache: tuple[str, ...] = ()
    projections: Projections = Projections()
    rope: Literal["half", "interleaved"] = "half"
    rope_layers: Literal["all", "sliding", "hybrid", "no"] = "all"
    rotary_factor: float | None = None
    rotary_field: str = "partial_rotary_factor"
    qk_norm: QkNorm = "none"
    norm_adds_one: bool = False
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    key_bias: bool | str = "attention_bias"
    cosines: Literal["channel", "pair"] = "channel"
    sinks: bool = False
    output_gate: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    latent: bool = False


# Qwen: a window that is only used on request, and then from one layer on.
_OPTIONAL_WINDOW = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}


_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}


_EVERY_FOURTH_FULL = {"sliding_window": 4096, "sliding_window_pattern": 4}


_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


# vLLM does not implement them either.
_QK_LAYERNORM = {"qk_layernorm": "LayerNorms of Q and K, with a mean and a bias, are not handled"}


def _one_kv_head_per_head(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, "num_key_value_heads": None}


def _even_heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """One KV head per query head, and together they are as wide as the model."""
    return {**config, "num_key_value_heads": None, "head_dim": None}


def _falcon_kv_heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    config = {**config, "head_dim": None}
    if not config["new_decoder_architecture"]:
        config["num_key_value_heads"] = 1 if config["multi_query"] else None
    return config


def _full_every_nth(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Linear layers but for every ``full_attention_interval``-th, where a config does not list them."""
    if config.get("layer_types") is not None:
        return config
    bounded_layers(config)
    interval, layers = (positive_int(config, key) for key in ("full_attention_interval", "num_hidden_layers"))
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return {**config, "layer_types": kinds}


_QUERY_KEY_VALUE = Projections(
    q="query_key_value", k="query_key_value", v="query_key_value", o="dense", fused="groups"
)


_ALIBI = {"alibi": "attention with linear biases (ALiBi) is not emulated"}


FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family("llama"),
        Family("mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}, key_bias=False),
        Family("mixtral", defaults={"num_key_value_heads": 8}, key_bias=False),
        Family("qwen2", defaults={"num_key_value_heads": 32} | _OPTIONAL_WINDOW, key_bias=True),
        Family(
            "qwen2_moe",
            defaults={"num_key_value_heads": 16, "use_sliding_window": False, "qkv_bias": True},
            key_bias="qkv_bias",
        ),
        Family(
            "qwen3",
            defaults={"num_key_value_heads": 32, "head_dim": 128} | _OPTIONAL_WINDOW,
            qk_norm="head",
        ),
        Family(
            "qwen3_moe",
            defaults={"num_key_value_heads": 4, "use_sliding_window": False},
            qk_norm="head",
        ),
        Family(
            "gemma2",
            defaults=_GEMMA | {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0},
            norm_adds_one=True,
        ),
        Family(
            "gemma3_text",
            defaults=_GEMMA | {"sliding_window_pattern": 6},
            qk_norm="head",
            norm_adds_one=True,
        ),
        Family(
            "phi3",
            projections=Projections(q="qkv_proj", k="qkv_proj", v="qkv_proj", fused="blocks"),
            rotary_factor=1.0,
            key_bias=False,
        ),
        Family("olmo2", qk_norm="full"),
        Family("granite"),
        Family("starcoder2", defaults={"num_key_value_heads": 2, "use_bias": True}, key_bias="use_bias"),
        Family("cohere2", defaults=_EVERY_FOURTH_FULL, rope="interleaved", rope_layers="sliding"),
        Family(
            "stablelm",
            defaults={"num_key_value_heads": 32},
            rotary_factor=0.25,
            key_bias="use_qkv_bias",
            refused=_QK_LAYERNORM,
        ),
        Family(
            "gpt_neox",
            attention_module="gpt_neox.layers.{index}.attention",
            defaults={"attention_bias": True},
            settle=_one_kv_head_per_head,
            projections=_QUERY_KEY_VALUE,
            rotary_factor=0.25,
            rotary_field="rotary_pct",
        ),
        Family(
            "phi",
            projections=Projections(o="dense"),
            rotary_factor=0.5,
            key_bias=True,
            refused=_QK_LAYERNORM,
        ),
        Family(
            "exaone4",
            defaults={"num_key_value_heads": 32} | _EVERY_FOURTH_FULL,
            rope_layers="hybrid",
            qk_norm="head",
            key_bias=False,
        ),
        Family("deepseek_v2", defaults=_LATENT, rope="interleaved", latent=True),
        # Pairs lie side by side in the weights, and half a key apart once they are rotated.
        Family("deepseek_v3", defaults=_LATENT, latent=True),
        Family(
            "gpt2",
            attention_module="transformer.h.{index}.attn",
            defaults={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
            | {"max_position_embeddings": 1024, "vocab_size": 50257},
            names={
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "max_position_embeddings": "n_positions",
            },
            settle=_even_heads,
            projections=Projections(
                q="c_attn", k="c_attn", v="c_attn", o="c_proj", fused="blocks", transposed=True
            ),
            rope_layers="no",
            key_bias=True,
            refused={"add_cross_attention": "a cache of cross-attention is not handled"},
        ),
        Family(
            "opt",
            attention_module="model.decoder.layers.{index}.self_attn",
            defaults={"enable_bias": True},
            settle=_even_heads,
            projections=Projections(o="out_proj"),
            rope_layers="no",
            key_bias="enable_bias",
        ),
        Family(
            "falcon",
            attention_module="transformer.h.{index}.self_attention",
            defaults={"multi_query": True, "new_decoder_architecture": False, "bias": False}
            | {"max_position_embeddings": 2048},
            names={"num_key_value_heads": "num_kv_heads"},
            settle=_falcon_kv_heads,
            projections=_QUERY_KEY_VALUE,
            key_bias="bias",
            refused=_ALIBI,
        ),
        Family(
            "gpt_oss",
            defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
            | {"sliding_window_pattern": 2, "attention_bias": True},
            cosines="pair",
            sinks=True,
        ),
        Family(
            "qwen3_next",
            defaults={"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
            settle=_full_every_nth,
            without_cache=("linear_attention",),
            rotary_factor=0.25,
            qk_norm="head",
            norm_adds_one=True,
            output_gate=True,
        ),
    )
}


# Families people will try, with the reason they are refused instead of being called merely unknown.
REFUSED: dict[str, str] = {
    "mamba": "has no attention layer, hence no KV cache",
    "mamba2": "has no attention layer, hence no KV cache",
    "bert": "is an encoder and has no KV cache",
    "mllama": "keeps K and V of images in layers of cross-attention, which text alone does not reach",
}


def model_type_of(config: Mapping[str, Any]) -> str:
    """``model_type``, as long as nothing is known against it.

    Raises:
        ModelError: there is none.
        PlanRefused: a family that cannot be handled.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("config.json has no model_type; is this a transformers model folder?")
    if model_type in REFUSED:
        raise unhandled(model_type, REFUSED[model_type])
    return model_type


def unhandled(model_type: str, why: str) -> PlanRefused:
    """The refusal of a family."""
    return PlanRefused([f"model_type {model_type!r} {why}"])
