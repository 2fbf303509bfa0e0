"""How many parameters a model has, and how many of them one decode step reads, from its ``config.json``.

Counted as transformers builds the model. Multi-token-prediction layers, which engines may leave out, and
buffers are not counted; scales of quantized weights (0.02 % in blocks of 128 by 128) neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcal import arch, families
from kvcal.arch import ModelSpec
from kvcal.errors import PlanRefused
from kvcal.model_config import positive_int


@dataclass(frozen=True)
class Parameters:
    """Parameters by what is done with them.

    Attributes:
        embedding: table of input embeddings, of which a token reads one row; the head too, if they are tied.
        head: weights of the output projection if it has its own.
        tied: the output projection is the embedding.
        matrices: weights of linear layers that every token goes through.
        vectors: norms, biases and routers.
        experts: routed experts of a layer; 0 without.
        chosen: how many of them a token goes through.
        expert: parameters of one, over all layers that have them.
    """

    embedding: int
    head: int
    tied: bool
    matrices: int
    vectors: int
    experts: int = 0
    chosen: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.matrices + self.vectors + self.experts * self.expert

    @property
    def active(self) -> int:
        """Those that a token is multiplied with."""
        head = self.embedding if self.tied else self.head
        return head + self.matrices + self.vectors + self.chosen * self.expert

    def bytes(self, bits: float) -> float:
        """With ``bits`` per weight of linear layers; embeddings, head, norms, biases and routers have 16."""
        wide = self.embedding + self.head + self.vectors
        return 2 * wide + (self.matrices + self.experts * self.expert) * bits / 8

    def bytes_read(self, bits: float, tokens: int) -> float:
        """Bytes that a decode step of ``tokens`` sequences reads, if they choose experts evenly.

        An expert is read once, however many tokens chose it: of ``experts``, the share ``1 - (1 - chosen /
        experts) ** tokens`` is.
        """
        wide = (self.embedding if self.tied else self.head) + self.vectors
        touched = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens) if self.experts else 0.0
        return 2 * wide + (self.matrices + touched * self.expert) * bits / 8


@dataclass(frozen=True)
class _Family:
    """What of a family's blocks is not in :mod:`kvcal.arch`.

    Biases are those of Q, K and V together, of the output projection, and of the MLP; a name is the config
    field that decides. ``norms`` is how many a layer has over the hidden size.
    """

    matrices: int = 3
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: int = 2
    norm_bias: bool = False
    head_bias: bool = False
    tied: bool = False


_ATTENTION_BIAS = _Family(qkv_bias="attention_bias", o_bias="attention_bias")
_FAMILIES: dict[str, _Family] = {
    "llama": _Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "granite": _Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": _Family(),
    "mixtral": _Family(),
    "phi3": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(qkv_bias="qkv_bias"),
    "qwen3": _ATTENTION_BIAS,
    "qwen3_moe": _ATTENTION_BIAS,
    "olmo2": _ATTENTION_BIAS,
    "exaone4": _Family(),
    "gemma2": _Family(qkv_bias="attention_bias", o_bias="attention_bias", norms=4, tied=True),
    "gemma3_text": _Family(qkv_bias="attention_bias", o_bias="attention_bias", norms=4, tied=True),
    "cohere2": _Family(qkv_bias="attention_bias", o_bias="attention_bias", norms=1, tied=True),
    "stablelm": _Family(qkv_bias="use_qkv_bias", norm_bias=True),
    "starcoder2": _Family(
        matrices=2, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", norm_bias=True, tied=True
    ),
    "gpt_neox": _Family(
        matrices=2, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias=True, norm_bias=True
    ),
    "phi": _Family(
        matrices=2,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norms=1,
        norm_bias=True,
        head_bias=True,
    ),
}
_LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")


def count(config: Mapping[str, Any]) -> Parameters:
    """Count them.

    Raises:
        ModelError: a field is missing or cannot be meant.
        PlanRefused: the blocks of this family are not known.
    """
    model_type = config.get("model_type")
    if model_type in _LATENT_FAMILIES:
        return _with_latents(config)
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise PlanRefused([f"parameters of model_type {model_type!r} are not counted; give --weights-gib"])
    model = arch.read(config)
    config = {**families.FAMILIES[model.model_type].defaults, **config}
    hidden, layers = model.hidden_size, len(model.layers)
    matrices, vectors = _attention(config, family, model)
    vectors += (family.norms * layers + 1) * hidden * (2 if family.norm_bias else 1)
    mlp, mlp_vectors, experts, chosen, expert = _mlp(config, family, hidden, layers)
    tied = bool(config.get("tie_word_embeddings", family.tied))
    embedding = model.vocab_size * hidden
    return Parameters(
        embedding=embedding,
        head=0 if tied else embedding,
        tied=tied,
        matrices=matrices + mlp,
        vectors=vectors + mlp_vectors + (model.vocab_size if family.head_bias else 0),
        experts=experts,
        chosen=chosen,
        expert=expert,
    )


def _has(config: Mapping[str, Any], bias: bool | str) -> bool:
    return bool(config.get(bias)) if isinstance(bias, str) else bias


def _attention(config: Mapping[str, Any], family: _Family, model: ModelSpec) -> tuple[int, int]:
    """Weights, and elements of biases and QK-norms, of all layers' attention blocks."""
    matrices = vectors = 0
    for layer in model.layers:
        queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        matrices += model.hidden_size * (2 * queries + 2 * keys)
        vectors += (queries + 2 * keys) * _has(config, family.qkv_bias)
        vectors += model.hidden_size * _has(config, family.o_bias)
        vectors += {"none": 0, "head": 2 * layer.head_dim, "full": queries + keys}[model.qk_norm]
    return matrices, vectors


def _mlp(
    config: Mapping[str, Any], family: _Family, hidden: int, layers: int
) -> tuple[int, int, int, int, int]:
    """Weights every token goes through, vectors and routers, experts, chosen ones, weights of one."""
    experts_field = next((n for n in ("num_experts", "num_local_experts") if config.get(n)), None)
    if experts_field is None:
        width = positive_int(config, "intermediate_size")
        biases = (family.matrices - 1) * width + hidden if _has(config, family.mlp_bias) else 0
        return layers * family.matrices * hidden * width, layers * biases, 0, 0, 0
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise PlanRefused(
            ["parameters of a model whose layers have experts in part are not counted; give --weights-gib"]
        )
    experts, chosen = positive_int(config, experts_field), positive_int(config, "num_experts_per_tok")
    each = config.get("moe_intermediate_size") or positive_int(config, "intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or 0
    gate = hidden if shared else 0
    return (
        layers * 3 * hidden * shared,
        layers * (experts * hidden + gate),
        experts,
        chosen,
        layers * 3 * hidden * each,
    )


def _with_latents(config: Mapping[str, Any]) -> Parameters:
    """DeepSeek-V2 and V3: projections through latents, dense layers first, then experts."""
    hidden, layers, heads, rank, rotary, plain, value = (
        positive_int(config, name)
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
        )
    )
    if config.get("moe_layer_freq", 1) != 1 or config.get("attention_bias"):
        raise PlanRefused(
            ["parameters with moe_layer_freq or attention_bias are not counted; give --weights-gib"]
        )
    query = config.get("q_lora_rank")
    into, norms = (query, query) if query else (hidden, 0)
    matrices = hidden * query if query else 0
    matrices += into * heads * (plain + rotary)
    matrices += hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
    dense = min(int(config.get("first_k_dense_replace", 0)), layers)
    each, experts = positive_int(config, "moe_intermediate_size"), positive_int(config, "n_routed_experts")
    shared = int(config.get("n_shared_experts") or 0)
    embedding = positive_int(config, "vocab_size") * hidden
    tied = bool(config.get("tie_word_embeddings", False))
    return Parameters(
        embedding=embedding,
        head=0 if tied else embedding,
        tied=tied,
        matrices=layers * matrices
        + 3 * hidden * (dense * positive_int(config, "intermediate_size") + (layers - dense) * shared * each),
        vectors=layers * (2 * hidden + rank + norms) + hidden + (layers - dense) * experts * hidden,
        experts=experts,
        chosen=positive_int(config, "num_experts_per_tok"),
        expert=(layers - dense) * 3 * hidden * each,
    )
