"""Scales alone, for kernels that take them as arguments: FlashAttention, FlashInfer, one's own.

``kvcal-kernel.safetensors`` holds, for layer ``i`` of the model, float32 vectors without padding, heads in
the model's order:

===================== ============= ==============================================================
``layers.i.k_scale``  (kv_heads,)  ``k ≈ code * scale``; code = saturate(k / scale)
``layers.i.v_scale``  (kv_heads,)  the same of V
``layers.i.q_scale``  (heads,)     of Q; for a kernel with one per KV head, the largest of each group
===================== ============= ==============================================================

Of a layer that caches a latent and a rotary key (MLA), as one vector that is K and whose latent is V too:

========================= ======== ================================================================
``layers.i.latent_scale`` (1,)     of the whole vector; of the latent alone in ``fp8_latent_bf16_rope``
``layers.i.q_scale``      (heads,) of Q with the up-projection absorbed; none where no kernel rounds it
========================= ======== ================================================================

Of a model with an encoder, layer ``2 i`` is the self-attention of decoder layer ``i`` and ``2 i + 1`` its
cross-attention, whose K and V are of the encoder's tokens; the layout calls it ``cross``.

Of an NVFP4 cache they are the outer scales, ``amax / 2688``: ``k ≈ code * block_scale * scale``, and block
scales are the kernel's own. A scale per tensor is written once for every head. ``kvcal-kernel.json`` says how
many heads each layer has, or how large its latent is, and how two libraries take the vectors. There are no
zero points, and kvcal's rotations are in the weights, where a kernel need not know of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvcal.arch import LayerSpec
from kvcal.export.bundle import Bundle
from kvcal.plan import Plan
from kvcal.recipe import SIDES, Side
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
    tensors = {}
    for layer in plan.layers:
        for name, (side, count) in _vectors(_document(layer, plan)).items():
            scale = scales.layers[layer.index][side].float().flatten()
            tensors[f"layers.{layer.index}.{name}"] = scale.expand(count).contiguous()
    layout = {
        "version": _VERSION,
        "format": plan.format.name,
        "cache": plan.format.storage_dtype,
        "reach": plan.engine.reach(plan.format),
        "granularity": plan.scaling,
        "layers": {str(layer.index): _document(layer, plan) for layer in plan.layers},
        "use": _USE,
    }
    return Bundle(tensors, None, alone=(TENSORS, LAYOUT, layout))


def _document(layer: LayerSpec, plan: Plan) -> dict[str, Any]:
    """What the layout says of one layer."""
    if layer.latent is None:
        sizes: dict[str, Any] = {"kv_heads": layer.kv_heads, "head_dim": layer.head_dim}
    else:
        sizes = {
            "latent": layer.latent.rank,
            "rotary": layer.latent.rotary,
            "rounds_query": "q" in plan.scaled_sides,
        }
    if plan.model.encoder_decoder:
        sizes |= {"cross": layer.cross}
    return {"module": layer.in_checkpoint, "heads": layer.heads} | sizes


def _vectors(layer: dict[str, Any]) -> dict[str, tuple[Side, int]]:
    """Name of each vector of a layer of the layout -> what it scales, and its length."""
    if "latent" not in layer:
        return {f"{side}_scale": (side, layer["heads" if side == "q" else "kv_heads"]) for side in SIDES}
    of_query: dict[str, tuple[Side, int]] = (
        {"q_scale": ("q", layer["heads"])} if layer["rounds_query"] else {}
    )
    return {"latent_scale": ("k", 1), **of_query}


def faults(folder: Path) -> Iterator[str]:
    """What in a written folder is not as the layout says."""
    try:
        layers = json.loads((folder / LAYOUT).read_text(encoding="utf-8"))["layers"]
        tensors = load_file(folder / TENSORS)
        expected = {
            f"layers.{index}.{name}": count
            for index, layer in layers.items()
            for name, (_, count) in _vectors(layer).items()
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
