"""A model built by hand that copies: it finds where its last characters stood before and says what followed.

StableLM of two layers, whose heads turn a quarter of their channels by position. In the first layer each head
attends to the character so many places back, by position alone, and notes it down. In the second one head
compares these notes with those of every earlier place, by content alone, and writes the character from there.
It has no other knowledge: it can find a needle, and it can do none of the tasks that want more than a copy.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import StableLmConfig, StableLmForCausalLM

from tests import tiny

CODE = 32  # channels of a character's code, ±1
BACK = 6  # characters that are compared
HEAD_DIM, TURNED = 128, 32
THETA = 100.0
HIDDEN = BACK * HEAD_DIM
CONSTANT = CODE * (BACK + 1)  # two channels, 1 and -1
SAID = CONSTANT + 2  # where the copied character is written


def build() -> StableLmForCausalLM:
    config = StableLmConfig(
        vocab_size=263,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=BACK,
        num_key_value_heads=BACK,
        partial_rotary_factor=TURNED / HEAD_DIM,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": TURNED / HEAD_DIM,
        },
        max_position_embeddings=2048,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
    )
    model = StableLmForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        codes = torch.ones(263, CODE)
        for row in codes:
            row[torch.randperm(CODE, generator=generator)[: CODE // 2]] = -1
        model.model.embed_tokens.weight[:, :CODE] = codes
        model.model.embed_tokens.weight[:, CONSTANT] = 1
        model.model.embed_tokens.weight[:, CONSTANT + 1] = -1
        model.lm_head.weight[:, SAID : SAID + CODE] = codes
        _look_back(model.model.layers[0].self_attn)
        _compare(model.model.layers[1].self_attn, generator)
    return model.eval()


def _look_back(attention: torch.nn.Module) -> None:
    """Head ``h`` finds its key ``h + 1`` places back, where all its pairs of channels agree."""
    angles = THETA ** (-torch.arange(TURNED // 2) / (TURNED // 2))
    for head in range(BACK):
        rows = slice(head * HEAD_DIM, head * HEAD_DIM + TURNED)
        behind = (head + 1) * angles
        query = torch.cat([behind.cos(), -behind.sin()])
        key = torch.cat([torch.ones(TURNED // 2), torch.zeros(TURNED // 2)])
        for weight, x in ((attention.q_proj.weight, query), (attention.k_proj.weight, key)):
            weight[rows, CONSTANT], weight[rows, CONSTANT + 1] = 4 * x, -4 * x
        _carry(attention, head, note=CODE * (head + 1))


def _compare(attention: torch.nn.Module, generator: torch.Generator) -> None:
    """The first head's query mixes the last characters as its keys mix those before each place."""
    free = HEAD_DIM - TURNED
    for back in range(BACK):
        mix = torch.randn(free, CODE, generator=generator) / math.sqrt(free)
        attention.q_proj.weight[TURNED:HEAD_DIM, back * CODE : (back + 1) * CODE] = 1.5 * mix
        attention.k_proj.weight[TURNED:HEAD_DIM, (back + 1) * CODE : (back + 2) * CODE] = 1.5 * mix
    _carry(attention, 0, note=SAID)


def _carry(attention: torch.nn.Module, head: int, note: int) -> None:
    """V of a head is the code of its character, and its output is noted down."""
    start = head * HEAD_DIM
    for i in range(CODE):
        attention.v_proj.weight[start + i, i] = 1.0
        attention.o_proj.weight[note + i, start + i] = 0.25


def save(folder: Path) -> Path:
    """A checkpoint folder of it, with the tokenizer of the tiny models."""
    build().to(torch.bfloat16).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder
