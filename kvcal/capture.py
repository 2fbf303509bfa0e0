"""One context manager that sees Q, K and V of every attention layer, and may replace them.

It enters through transformers' ``AttentionInterface``: every layer hands its tensors, after RoPE and
QK-norm and before heads are repeated for GQA, to one function. kvcal puts its own in front of the one the
model uses, and afterwards leaves model and registry as they were. Of a layer that caches a latent it shows
the latent, and puts what comes back through the layer's up-projection again.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvcal import expansion
from kvcal.errors import ModelError
from kvcal.expansion import Cached, Expansion
from kvcal.kernels import reference

_names = (f"kvcal_{n}" for n in itertools.count())


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """What one layer is about to attend with.

    ``query`` is ``(batch, heads, tokens, head_dim)``, ``key`` and ``value`` are
    ``(batch, kv_heads, tokens, head_dim)``. ``window`` counts visible keys, the query's own included.
    ``rotary`` is what RoPE multiplied Q and K by, ``(cos, sin)``, each ``(1 or batch, tokens, rotary_dim)``;
    None in a layer without positions, or if it was not asked for.

    With an ``expansion``, ``key`` is the cached latent ``(batch, 1, tokens, rank)`` and ``value`` the rotary
    key ``(batch, 1, tokens, rotary)``; ``query`` has the up-projection absorbed and meets both,
    ``(batch, heads, tokens, rank + rotary)``.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    expansion: Expansion | None = None

    def attended(self, replaced: Tensors | None = None) -> Tensors:
        """Q, K and V to attend with where ``replaced`` is in place of ``query``, ``key`` and ``value``."""
        query, key, value = replaced or (self.query, self.key, self.value)
        if self.expansion is None:
            return query, key, value
        return self.expansion.attended(None if query is self.query else query, key, value)


@dataclass(frozen=True)
class Versions:
    """Several versions of each cached token, of which every query sees the one that it would find.

    ``keys`` and ``values`` hold one tensor ``(batch, kv_heads, tokens, head_dim)`` per version; ``seen`` one
    mask ``(tokens, tokens)`` bool each, which query meets which key in this version. The layer's own mask
    still applies on top.
    """

    query: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    seen: tuple[torch.Tensor, ...]


@contextmanager
def intercept(
    model: Any, see: Callable[[AttentionCall], Tensors | Versions | None], *, rotary: bool = False
) -> Iterator[None]:
    """Call ``see`` for each attention layer of each forward pass inside the context.

    ``see`` returns None to let the layer go on as it was, ``(query, key, value)`` to put in place, or
    :class:`Versions`. The model's own attention function then runs on them, so results without replacement
    are bit-identical. ``rotary`` also hands over RoPE's cosines and sines.
    """
    config = model.config
    own_name = config._attn_implementation
    name = next(_names)
    rotations: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
    latents: Cached = {}

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        call = AttentionCall(
            layer=module.layer_idx,  # type: ignore[arg-type]
            query=query,
            key=key,
            value=value,
            scaling=kwargs["scaling"],
            window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
            rotary=rotations.get(module),
        )
        if module in latents:
            call = _of_latent(call, module, *latents.pop(module))
        replaced = see(call)
        if isinstance(replaced, Versions):
            query, key, value, attention_mask = _side_by_side(replaced, attention_mask, kwargs)
        elif replaced is not None:
            query, key, value = call.attended(replaced)
        return _own_function(own_name, module)(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own_name])
    hooks = expansion.note_cached(model, latents)
    if rotary:
        hooks += _note_rotations(model, rotations)
    try:
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = own_name
        for hook in hooks:
            hook.remove()
        del AttentionInterface._global_mapping[name]
        del AttentionMaskInterface._global_mapping[name]


def _of_latent(
    call: AttentionCall, module: torch.nn.Module, latent: torch.Tensor, rotary: torch.Tensor
) -> AttentionCall:
    expansion = Expansion(module, call.query)
    return replace(call, query=expansion.absorbed(), key=latent, value=rotary, expansion=expansion)


def _own_function(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    if name in ALL_ATTENTION_FUNCTIONS:
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return function
    # Eager attention is no member of the registry: each modeling file defines its own.
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise ModelError(f"{type(module).__name__} defines no eager attention to capture from")
    return own  # type: ignore[no-any-return]


def _side_by_side(
    versions: Versions, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every version as further keys, with a mask that leaves each query one of them."""
    key = versions.keys[0]
    tokens = key.shape[2]
    if mask is None:  # the fast causal path, without padding
        mask = reference.visible(tokens, tokens, kwargs.get("sliding_window"), key.device)[None, None]
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ModelError(
            f"a mask of {mask.dtype} cannot be split by the age of keys; use sdpa or eager attention"
        )
    parts = []
    for seen in versions.seen:
        if mask.dtype == torch.bool:
            parts.append(mask & seen)
        else:
            parts.append(mask.masked_fill(~seen, torch.finfo(mask.dtype).min))
    return versions.query, torch.cat(versions.keys, 2), torch.cat(versions.values, 2), torch.cat(parts, -1)


def _note_rotations(
    model: Any, found: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Keep the last ``position_embeddings`` that each attention module was called with."""

    def note(module: torch.nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_embeddings")
        if isinstance(given, torch.Tensor):  # DeepSeek-V2: cos + i sin, once per pair of neighbours
            given = (given.real.repeat_interleave(2, -1), given.imag.repeat_interleave(2, -1))
        if given is not None:
            found[module] = given

    attention = (m for m in model.modules() if hasattr(m, "layer_idx"))
    return [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention]
