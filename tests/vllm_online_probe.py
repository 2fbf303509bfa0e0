"""Runs vLLM's own cache writers and INT4 attention on the CPU: `PYTHON vllm_online_probe.py IN OUT`.

For the interpreter that has vLLM, so nothing of kvcal is imported. IN is a torch file of cases:
``{name: {"format": str, "key": (tokens, heads, head_dim), "value": likewise}}``, a case with ``"query"`` asks
for attention too. OUT is ``{name: {"key": codes, "value": ..., "key_scale": (tokens, heads), "value_scale":
..., "output": ...}}`` with INT4 codes packed and scales holding zero points, as the cache does, and under
``"signs"`` what the engine multiplies vectors of 128 by.
"""

from __future__ import annotations

import os
import sys

# Triton decides at import; without a GPU its interpreter is all there is.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
import triton
import triton.language as tl
import vllm.triton_utils
from triton.runtime import interpreter

# Without a GPU vLLM takes placeholders for Triton. Its kernels do not: they import these two names.
vllm.triton_utils.triton = triton
vllm.triton_utils.tl = tl

_interpreted_cast = interpreter._convert_float


def cast(values, source, target, rounding):
    """To E4M3 as a GPU does it, and torch: to nearest even.

    Triton's interpreter rounds ties up, and loses a carry into an odd exponent: 0.49 becomes 0.25.
    """
    if (source, target) != (tl.float32, tl.float8e4nv):
        return _interpreted_cast(values, source, target, rounding)
    return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = cast

STORAGE = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int4_per_token_head": torch.uint8,
}
BLOCK = 16


def run(case):
    from vllm.v1.attention.ops import int4_per_token_head, triton_reshape_and_cache_flash
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    key, value, name = case["key"], case["value"], case["format"]
    tokens, heads, head_dim = key.shape
    blocks = -(-tokens // BLOCK) + 1
    stored = head_dim // 2 if name.startswith("int4") else head_dim
    key_cache, value_cache = (torch.zeros(blocks, BLOCK, heads, stored, dtype=STORAGE[name]) for _ in "kv")
    key_scale, value_scale = (torch.zeros(blocks, BLOCK, heads) for _ in "kv")
    slots = torch.arange(tokens) + BLOCK  # the first block stays empty, so that a wrong slot is seen
    triton_reshape_and_cache_flash.triton_reshape_and_cache_flash_per_token_head_quant(
        key, value, key_cache, value_cache, key_scale, value_scale, slots, get_kv_quant_mode(name)
    )
    assert not key_scale[0].any()
    written = {
        "key": key_cache.view(torch.uint8).flatten(0, 1)[slots].clone(),
        "value": value_cache.view(torch.uint8).flatten(0, 1)[slots].clone(),
        "key_scale": key_scale.flatten(0, 1)[slots].clone(),
        "value_scale": value_scale.flatten(0, 1)[slots].clone(),
    }
    if "query" in case:
        out = torch.zeros_like(case["query"])
        int4_per_token_head.unified_attention_int4(
            case["query"],
            key_cache,
            value_cache,
            out,
            cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32),
            max_seqlen_q=tokens,
            seqused_k=torch.tensor([tokens], dtype=torch.int32),
            max_seqlen_k=tokens,
            softmax_scale=head_dim**-0.5,
            window_size=(-1, -1),
            block_table=torch.arange(1, blocks, dtype=torch.int32).unsqueeze(0),
            softcap=0.0,
            sinks=None,
            alibi_slopes=None,
            use_alibi_sqrt=False,
            qq_bias=None,
            output_scale=None,
            mm_prefix_range=None,
            k_scale_cache=key_scale,
            v_scale_cache=value_scale,
        )
        written["output"] = out
    return written


if __name__ == "__main__":
    from vllm.v1.attention.ops.int4_per_token_head import _get_rht_signs

    source, target = sys.argv[1:]
    cases = torch.load(source)
    answer = {name: run(case) for name, case in cases.items()}
    answer["signs"] = _get_rht_signs(128, 0, torch.device("cpu"))
    torch.save(answer, target)
