"""Scales alone, for kernels that take them as arguments: FlashAttention, FlashInfer, one's own.

``kvcal-kernel.safetensors`` holds, for layer ``i`` of the model, float32 vectors without padding, heads in
the model's order:

===================== ============= ==============================================================
``layers.i.k_scale``  (kv_heads,)  ``k ≈ code * scale``; code = saturate(k / scale)
``layers.i.v_scale``  (kv_heads,)  the same of V
``layers.i.q_scale``  (heads,)     of Q; for a kernel with one per KV head, the largest of each group
===================== ============= ==============================================================

Of an NVFP4 cache they are the outer scales, ``amax / 2688``: ``k ≈ code * block_scale * scale``, and block
scales are the kernel's own. A scale per tensor is written once for every head. ``kvcal-kernel.json`` says how
many heads each layer has, and how two libraries take the vectors. There are no zero points, and kvcal's
rotations are in the weights, where a kernel need not know of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvcal.export.bundle import Bundle
from kvcal.plan import Plan
from kvcal.recipe import SIDES
from kvcal.scales import Scales

TENSORS = "kvcal-kernel.safetensors"
LAYOUT = "kvcal-kernel.json"
_VERSION = 1

# flash_attn_interface.py: descales are (batch, kv_heads). flashinfer/decode.py folds k_scale into sm_scale.
_USE = {
    "flash-attention 3": "q_descale = the largest of each group of layers.i.q_scale, k_descale and v_descale"
    " = layers.i.k_scale and v_scale, each expanded to (batch, kv_heads)",
    "flashinfer": "k_scale and v_scale of run() = the only value of layers.i.k_scale and v_scale, if the"
    " granularity is per_tensor",
}


def to_bundle(scales: Scales | None, plan: Plan, base_quantization: dict[str, Any] | None) -> Bundle:
    """The vectors, and the document that explains them."""
    assert scales is not None
    tensors = {
        f"layers.{layer.index}.{side}_scale": scales.layers[layer.index][side]
        .float()
        .flatten()
        .expand(layer.heads_of(side))
        .contiguous()
        for layer in plan.layers
        for side in SIDES
    }
    layout = {
        "version": _VERSION,
        "format": plan.format.name,
        "cache": plan.format.storage_dtype,
        "reach": plan.engine.reach(plan.format),
        "granularity": plan.scaling,
        "layers": {
            str(layer.index): {
                "module": layer.module,
                "heads": layer.heads,
                "kv_heads": layer.kv_heads,
                "head_dim": layer.head_dim,
            }
            for layer in plan.layers
        },
        "use": _USE,
    }
    return Bundle(tensors, None, alone=(TENSORS, LAYOUT, layout))


def faults(folder: Path) -> Iterator[str]:
    """What in a written folder is not as the layout says."""
    try:
        layers = json.loads((folder / LAYOUT).read_text(encoding="utf-8"))["layers"]
        tensors = load_file(folder / TENSORS)
        expected = {
            f"layers.{index}.{side}_scale": layer["heads" if side == "q" else "kv_heads"]
            for index, layer in layers.items()
            for side in SIDES
        }
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        yield f"{LAYOUT} and {TENSORS} cannot be read: {error}"
        return
    for name in sorted(expected.keys() ^ tensors.keys()):
        yield f"{name} is {'missing' if name in expected else 'no name of the layout'}"
    for name in sorted(expected.keys() & tensors.keys()):
        scale = tensors[name]
        if scale.dtype != torch.float32 or scale.shape != (expected[name],):
            yield f"{name} is {scale.dtype} {list(scale.shape)}, must be torch.float32 [{expected[name]}]"
        elif not bool((scale.isfinite() & (scale > 0)).all()):
            yield f"{name} holds a scale that is not finite and above 0"
