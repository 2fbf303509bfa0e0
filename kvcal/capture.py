"""One context manager that sees Q, K and V of every attention layer, and may replace them.

It enters through transformers' ``AttentionInterface``: every layer hands its tensors, after RoPE and
QK-norm and before heads are repeated for GQA, to one function. kvcal puts its own in front of the one the
model uses, and afterwards leaves model and registry as they were.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvcal.errors import ModelError

_names = (f"kvcal_{n}" for n in itertools.count())


@dataclass(frozen=True)
class AttentionCall:
    """What one layer is about to attend with.

    ``query`` is ``(batch, heads, tokens, head_dim)``, ``key`` and ``value`` are
    ``(batch, kv_heads, tokens, head_dim)``. ``window`` counts visible keys, the query's own included.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@contextmanager
def intercept(model: Any, see: Callable[[AttentionCall], Tensors | None]) -> Iterator[None]:
    """Call ``see`` for each attention layer of each forward pass inside the context.

    ``see`` returns None to let the layer go on as it was, or ``(query, key, value)`` to put in place.
    The model's own attention function then runs on them, so results without replacement are bit-identical.
    """
    config = model.config
    own_name = config._attn_implementation
    name = next(_names)

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        replaced = see(
            AttentionCall(
                layer=module.layer_idx,  # type: ignore[arg-type]
                query=query,
                key=key,
                value=value,
                scaling=kwargs["scaling"],
                window=kwargs.get("sliding_window"),
                softcap=kwargs.get("softcap"),
            )
        )
        if replaced is not None:
            query, key, value = replaced
        return _own_function(own_name, module)(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own_name])
    try:
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = own_name
        del AttentionInterface._global_mapping[name]
        del AttentionMaskInterface._global_mapping[name]


def _own_function(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    if name in ALL_ATTENTION_FUNCTIONS:
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return function
    # Eager attention is no member of the registry: each modeling file defines its own.
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise ModelError(f"{type(module).__name__} defines no eager attention to capture from")
    return own  # type: ignore[no-any-return]
