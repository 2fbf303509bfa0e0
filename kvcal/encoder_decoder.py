"""Encoder-decoders of text: which attention of a decoder keeps a cache, and what kvcal can say of it.

Each layer of such a decoder attends twice: to its own tokens, whose K and V are cached one by one, and to
those that the encoder has read, whose K and V are cached once, before the first token is written. The
encoder's own attention caches nothing. Both caches know one and the same number of their layer, so here
self-attention of decoder layer ``i`` is ``2 i`` and its cross-attention ``2 i + 1``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Of the encoder and of the decoder in a run without weights: K of cross-attention must be told by its length.
PROBED = (8, 5)
# Relative positions have no largest one; this is what T5 was trained on (arXiv 1910.10683, 3.1.3).
_CONTEXT_OF_RELATIVE_POSITIONS = 512


class Call(Protocol):
    """What is looked at of a :class:`kvcal.capture.AttentionCall`."""

    @property
    def layer(self) -> int: ...
    @property
    def key(self) -> torch.Tensor: ...
    @property
    def window(self) -> int | None: ...
    @property
    def cross(self) -> bool: ...
    @property
    def bias(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Role:
    """The number of an attention module among those with a cache, and whether it attends to the encoder."""

    index: int
    cross: bool


def applies(config: Any) -> bool:
    """Whether a config is that of a model with an encoder in front of its decoder."""
    return bool(getattr(config, "is_encoder_decoder", False))


def roles(model: Any) -> Mapping[torch.nn.Module, Role] | None:
    """The attention modules of the decoder; None of a model without an encoder, whose layers count alone.

    A module that attends to the encoder is one that does not call itself causal, which the probe holds
    against what it does.
    """
    if not applies(model.config):
        return None
    found = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "is_causal"):
            cross = not module.is_causal
            found[module] = Role(2 * index + cross, cross)
    return found


def refusal(config: Any) -> str | None:
    """Why a model with an encoder is not handled, before its code has run; None if nothing is known."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as OF_TEXT,
    )

    if type(config) not in OF_TEXT:
        return (
            "is an encoder-decoder whose encoder reads no text; kvcal calibrates those of text to text, such"
            " as t5, bart and marian"
        )
    if decoder_start(config) is None:
        return (
            "is an encoder-decoder whose config.json names no decoder_start_token_id, behind which its"
            " decoder would begin; add the one it was trained with"
        )
    return None


def decoder_start(config: Any) -> int | None:
    """The token that the decoder begins with."""
    found = getattr(config, "decoder_start_token_id", None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def context(config: Any) -> int | None:
    """Tokens that encoder and decoder each take."""
    found = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if found is None and hasattr(config, "relative_attention_num_buckets"):
        return _CONTEXT_OF_RELATIVE_POSITIONS
    return found


def probe_inputs() -> dict[str, torch.Tensor]:
    """What a model without weights is run on: tokens without content."""
    encoder, decoder = (torch.zeros(1, n, dtype=torch.long, device="meta") for n in PROBED)
    return {"input_ids": encoder, "decoder_input_ids": decoder}


def oddities(calls: Sequence[Call], config: Any) -> Iterator[str]:
    """What of the calls of that run is not two caches per decoder layer, as kvcal describes them."""
    if not applies(config):
        if any(call.bias is not None for call in calls):
            yield "adds a bias of positions to its logits, which kvcal emulates behind encoders alone"
        return
    of_encoder, of_decoder = PROBED
    layers = [call.layer for call in calls]
    for index in sorted({index for index in layers if layers.count(index) > 1}):
        yield (
            f"is an encoder-decoder whose decoder layer {index // 2} has two attentions that both"
            f" {'do not ' if index % 2 else ''}call themselves causal, by which kvcal tells self- from"
            " cross-attention"
        )
    for index in sorted(index ^ 1 for index in layers if index ^ 1 not in layers):
        kind = "cross-attention" if index % 2 else "self-attention"
        yield f"is an encoder-decoder whose decoder layer {index // 2} has no {kind} that kvcal can see"
    for call in calls:
        keys, wanted = call.key.shape[2], of_encoder if call.cross else of_decoder
        if keys != wanted:
            yield (
                f"is an encoder-decoder whose decoder layer {call.layer // 2} attends to {keys} keys where"
                f" the {'encoder' if call.cross else 'decoder'} has {wanted} tokens"
            )
        if call.cross and call.window is not None:
            yield f"has a window of {call.window} tokens in cross-attention, which kvcal does not emulate"
