"""A cached latent at work: found where the model caches it, expanded or absorbed where attention needs it.

Attention is handed K and V of every head, long after a latent was cached (:mod:`kvcal.latent`). So a layer of
this kind is given a cache that notes what it is to keep, in front of the one it has, if it has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcal.errors import ModelError

Cached = dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Expansion:
    """The up-projection of one attention module, with the Q that the module made.

    ``query`` is ``(batch, heads, tokens, key + rotary)``. Latents are ``(batch, 1, tokens, rank)``, rotary
    keys ``(batch, 1, tokens, rotary)``.
    """

    module: Any
    query: torch.Tensor

    def absorbed(self) -> torch.Tensor:
        """Q as it meets a cached vector, ``[U_kᵀ q, q_r]``: ``(batch, heads, tokens, rank + rotary)``."""
        of_latent, rotary = self.query[..., : self._keys], self.query[..., self._keys :]
        return torch.cat([torch.matmul(of_latent, self._up()[:, : self._keys]), rotary], -1)

    def attended(self, query: torch.Tensor | None, latent: torch.Tensor, rotary: torch.Tensor) -> Tensors:
        """Q, K and V of every head for the attention function, from what a cache gives back.

        K and V come out of the latent by the model's own code. A ``query`` that is None stands for the
        model's own; an absorbed one, which was rounded, meets the cached vectors themselves.
        """
        key, value = self.module.expand_kv(latent, rotary)
        if query is None:
            return self.query, key, value
        heads = query.shape[1]
        return query, torch.cat([latent, rotary], -1).expand(-1, heads, -1, -1), value

    def values(self, output: torch.Tensor) -> torch.Tensor:
        """``U_v o`` of attention over latents ``(batch, heads, tokens, rank)``, in its dtype."""
        return torch.matmul(output, self._up()[:, self._keys :].mT.to(output.dtype))

    @property
    def _keys(self) -> int:
        return int(self.module.qk_nope_head_dim)

    def _up(self) -> torch.Tensor:
        """``(heads, key + value, rank)``. What comes out for unit vectors: a weight may be quantized."""
        rank = self.module.kv_lora_rank
        unit = torch.eye(rank, dtype=self.query.dtype, device=self.query.device)
        rows: torch.Tensor = self.module.kv_b_proj(unit).T
        return rows.view(self.query.shape[1], -1, rank)


def note_cached(model: Any, found: Cached) -> list[torch.utils.hooks.RemovableHandle]:
    """Keep in ``found`` what each module that caches a latent has cached when it attends.

    Raises:
        ModelError: a module has a latent, but its code caches K and V of every head.
    """

    def enter(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"past_key_values": _Noted(module, kwargs.get("past_key_values"), found)}

    hooks = []
    for module in model.modules():
        if not hasattr(module, "kv_lora_rank") or not hasattr(module, "layer_idx"):
            continue
        if not hasattr(module, "expand_kv"):
            raise ModelError(
                f"layer {module.layer_idx}: {type(module).__name__} of this transformers caches K and V of"
                " every head, no latent; take 5.17 or later"
            )
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    return hooks


class _Noted:
    """Stands where the module looks for its cache."""

    def __init__(self, module: torch.nn.Module, own: Any, found: Cached):
        self._module, self._own, self._found = module, own, found

    def update(self, latent: torch.Tensor, rotary: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cached = (latent, rotary) if self._own is None else self._own.update(latent, rotary, *args, **kwargs)
        self._found[self._module] = cached
        return cached
