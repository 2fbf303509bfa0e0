"""Tiny random models of each family, built in code: two or more layers, odd sizes, a byte-level tokenizer.

``python -m tests.tiny FOLDER`` writes the larger random Llama behind the GPU figures of ``kvcal bench``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from kvcal import probe
from kvcal.arch import ModelSpec

# Sizes that no two quantities share, so that a swapped dimension cannot pass unseen.
_COMMON = {
    "vocab_size": 263,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": MOE,
    "gemma2": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "phi3": {},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3},
    "starcoder2": {"sliding_window": None},
    "cohere2": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "stablelm": {"use_qkv_bias": True},
    # Its heads have K and V of their own; the common field means nothing here.
    "gpt_neox": {"num_key_value_heads": None},
    "phi": {},
    "exaone4": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {},
    "opt": {"ffn_dim": 64},
    "falcon": {},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "qwen3_next": MOE
    | {
        "shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "partial_rotary_factor": 0.5,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}

# Multi-head latent attention: one latent and one rotary key per token, whatever the number of heads.
_LATENT = {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "kv_lora_rank": 40,
    "q_lora_rank": 56,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT,
}


_TEXT = _COMMON | {"sliding_window": 24}
_SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

# Families without a row in kvcal's table: kvcal looks at what their code does.
WITHOUT_ROW: dict[str, dict[str, Any]] = {
    "olmoe": _COMMON | {"num_experts": 4, "num_experts_per_tok": 2},
    "lfm2": _COMMON | {"layer_types": ["full_attention", "conv", "full_attention"]},
    "granitemoehybrid": _COMMON
    | _MAMBA
    | {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    # Its last two layers read the caches of the first two.
    "gemma3n_text": _TEXT
    | {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 263,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    # Its heads are larger in full layers.
    "gemma4_text": _TEXT
    | {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 1,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 263,
    },
    "gemma3": {
        "text_config": _TEXT | {"layer_types": [*_ALTERNATING[:2], "sliding_attention"]},
        "vision_config": _SIGHT,
        "mm_tokens_per_image": 4,
        "image_token_index": 260,
    },
    "llava": {
        "text_config": {"model_type": "llama", **_COMMON},
        "vision_config": {"model_type": "clip_vision_model", **_SIGHT},
        "image_token_index": 260,
    },
    "qwen2_5_vl": {
        "text_config": _COMMON
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 96,
            "fullatt_block_indexes": [0],
        },
        "image_token_id": 260,
        "video_token_id": 261,
    },
}

# Encoder and decoder differ in all that may differ, so that neither passes for the other.
_BART = {
    "vocab_size": 263,
    "d_model": 96,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "decoder_start_token_id": 259,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": 263,
    "d_model": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 6,
    "d_kv": 16,
    "d_ff": 64,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 258,
    "eos_token_id": 257,
    "decoder_start_token_id": 259,
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "mbart": _BART,
    "marian": _BART | {"decoder_vocab_size": 263},
    "pegasus": _BART,
    # Its positions are counted from padding.
    "m2m_100": _BART | {"pad_token_id": 1},
    "t5": _T5 | {"n_positions": 64},
    "mt5": _T5 | {"feed_forward_proj": "gated-gelu"},
}

# Fields that the family's config does not have; some computes them, and cannot be told.
_NO_SUCH_FIELD = dict.fromkeys(("gpt2", "opt", "falcon"), ("head_dim", "num_key_value_heads"))


def fields(family: str, **changes: Any) -> dict[str, Any]:
    """What the ``config.json`` of a tiny model says, as somebody would write it by hand."""
    if family in WITHOUT_ROW | ENCODER_DECODERS:
        return (WITHOUT_ROW | ENCODER_DECODERS)[family] | changes
    found = _COMMON | (FAMILIES | LATENT_FAMILIES)[family] | changes
    return {key: value for key, value in found.items() if key not in _NO_SUCH_FIELD.get(family, ())}


def build_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """A model with weights large enough that K, V and Q are far from zero and attention is not flat."""
    config = CONFIG_MAPPING[family](**fields(family, **changes))
    torch.manual_seed(seed)
    # As kvcal.models does: scaled dot-product attention would drop softcaps and sinks.
    eager = "attn_logit_softcapping" in FAMILIES.get(family, ()) or family == "gpt_oss"
    model = probe.auto_class(config).from_config(
        config, dtype=torch.float32, attn_implementation="eager" if eager else "sdpa"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.1)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def spec_of(model: Any) -> ModelSpec:
    """What kvcal reads off a model's config."""
    return probe.read(model.config.to_dict() | {"architectures": [type(model).__name__]})


def in_fp8(folder: Path) -> Path:
    """The checkpoint with its projections in E4M3, one scale per block of 128 by 128; rewritten in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().max() / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in weight.shape]
        tensors[f"{name}_scale_inv"] = scale.expand(*blocks).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return folder


def in_modelopt_fp8(folder: Path, *, inline: bool) -> Path:
    """The checkpoint with its projections as ModelOpt's FP8 has them; rewritten in place.

    ``inline``: its config is in ``config.json`` too, as ModelOpt does since 0.31.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().max() / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.125)
    save_file(tensors, path, metadata={"format": "pt"})
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    document = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": own}
    (folder / "hf_quant_config.json").write_text(json.dumps(document))
    if inline:
        section = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
        edit_config(folder, quantization_config=section)
    return folder


def build_tokenizer(*, closes: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte, BOS before every text, and a chat template.

    ``closes``: EOS behind every text too, as encoders of text have it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if closes else "<s> $A",
        special_tokens=[(symbol, tokenizer.token_to_id(symbol)) for symbol in ("<s>", "</s>")],
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    return wrapped


def save_with_key_biases(folder: Path) -> Path:
    """A Qwen2 whose K has biases in the hundreds in one pair of channels per head, as some real ones have."""
    model = build_model("qwen2", head_dim=64, num_attention_heads=4, num_key_value_heads=2, hidden_size=128)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(2, 64)
            bias[0, [29, 61]], bias[1, [30, 62]] = 200.0, -150.0
    model.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def save(folder: Path, family: str = "llama", *, dtype: str = "bfloat16", **changes: Any) -> Path:
    """A complete checkpoint folder."""
    model = build_model(family, **changes).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    build_tokenizer(closes=family in ENCODER_DECODERS).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of ``config.json``; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def text(documents: int = 40) -> str:
    """Prose of no meaning but with structure, different in every paragraph."""
    words = ["cache", "head", "scale", "token", "layer", "value", "query", "window", "sink", "page", "merge"]
    paragraphs = []
    for index in range(documents):
        sentence = " ".join(words[(index * 7 + step * step) % len(words)] for step in range(90))
        paragraphs.append(f"Paragraph {index}. {sentence}.")
    return "\n\n".join(paragraphs)


_BENCH = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}

if __name__ == "__main__":
    save(Path(sys.argv[1]), **_BENCH)
