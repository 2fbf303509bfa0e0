"""Outliers planted into a checkpoint by an exact rewrite: the model computes what it did, its cache suffers.

In every layer two RoPE pairs of each head have K times 16 and Q divided by 16, and one head's V is 1024 times
larger, which the output projection takes back. Powers of two: not a bit of any logit changes.

``python -m tests.planted BASE TARGET`` writes such a copy of a Llama checkpoint of one shard.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PAIRS = (3, 20)
KEY_FACTOR = 16.0
VALUE_FACTOR = 1024.0


def plant(base: Path, target: Path) -> Path:
    """Copy ``base`` to ``target`` with outliers. Independent of kvcal's own folding."""
    config = json.loads((base / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    group = heads // kv_heads
    shutil.copytree(base, target, ignore=shutil.ignore_patterns("*.safetensors", "kvcal"))
    tensors = load_file(base / "model.safetensors")
    for index in range(config["num_hidden_layers"]):
        block = f"model.layers.{index}.self_attn."
        for pair in PAIRS:
            for channel in (pair % (head_dim // 2), pair % (head_dim // 2) + head_dim // 2):
                tensors[block + "k_proj.weight"].view(kv_heads, head_dim, -1)[:, channel] *= KEY_FACTOR
                tensors[block + "q_proj.weight"].view(heads, head_dim, -1)[:, channel] /= KEY_FACTOR
        head = index % kv_heads
        tensors[block + "v_proj.weight"].view(kv_heads, head_dim, -1)[head] *= VALUE_FACTOR
        output = tensors[block + "o_proj.weight"].view(-1, kv_heads, group, head_dim)
        output[:, head] /= VALUE_FACTOR
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    return target


if __name__ == "__main__":
    with torch.inference_mode():
        plant(Path(sys.argv[1]), Path(sys.argv[2]))
