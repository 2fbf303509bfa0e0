"""Text for models with an encoder: each sample is cut in two, and read as a server would have it read.

The encoder reads the first half, closed as the tokenizer closes a text; the decoder is given the second half
behind the token that it begins with, and so predicts every token of it.
"""

from __future__ import annotations

from typing import Any

from kvcal import data
from kvcal.data import Role, TokenSet
from kvcal.errors import ModelError
from kvcal.recipe import MIN_TOKENS, Text


def load(text: Text, tokenizer: Any, role: Role, seq_len: int, seed: int, start: int) -> TokenSet:
    """As :func:`kvcal.data.load`; ``start`` is what the decoder begins with.

    A sample of ``n`` tokens, at most ``seq_len``, is ``n // 2`` of the encoder, the closing ones included,
    and then ``start`` with those of the decoder.

    Raises:
        DataError: as there.
        ModelError: the tokenizer closes a text with more tokens than samples have room for.
    """
    closing = closing_of(tokenizer)
    room = seq_len - 1 - len(closing)
    if room < MIN_TOKENS or len(closing) >= MIN_TOKENS // 2:
        raise ModelError(
            f"the tokenizer puts {len(closing)} tokens behind a text, which leaves no room in samples of"
            f" {seq_len} tokens; give a larger --seq-len"
        )
    found = data.load(text, tokenizer, role, room, seed)
    samples = tuple(_joined(sample, closing, start) for sample in found.samples)
    return TokenSet(samples, found.notices, found.chunk, halves=True)


def closing_of(tokenizer: Any) -> tuple[int, ...]:
    """The ids that the tokenizer puts behind every text."""
    inside = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = [i for i in range(len(whole) - len(inside) + 1) if whole[i : i + len(inside)] == inside]
    return tuple(whole[starts[-1] + len(inside) :]) if starts else ()


def _joined(sample: tuple[int, ...], closing: tuple[int, ...], start: int) -> tuple[int, ...]:
    half = (len(sample) + len(closing) + 1) // 2 - len(closing)
    return (*sample[:half], *closing, start, *sample[half:])
