"""Tiny models that see images, with processors and images made in code."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import (
    AutoProcessor,
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.processing_utils import ProcessorMixin

from tests import tiny

SIDE = 28
PLACEHOLDER = 260  # as tests.tiny has it for every model that sees


class ImagesAlone(Qwen2_5_VLProcessor):
    """Qwen's processor without the one for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None):
        self.image_token, self.video_token = "<image>", "<video>"
        self.image_token_id, self.video_token_id = PLACEHOLDER, PLACEHOLDER + 1
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class _Key(Qwen2_5_VLConfig):
    """Transformers looks registered processors up by name, but registers none for a config of its own."""


AutoProcessor.register(_Key, ImagesAlone)

_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}PLACE {% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


def build_processor(family: str = "llava", *, template: bool = True) -> Any:
    """The processor of a tiny model; an image takes four tokens, or as many as its size asks for."""
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<boi>", "<eoi>", "<image>", "<video>"]})
    text = _TEMPLATE.replace("PLACE", "<boi>" if family == "gemma3" else "<image>")
    square = {"height": SIDE, "width": SIDE}
    common = {"tokenizer": tokenizer, "chat_template": text if template else None}
    if family == "llava":
        return LlavaProcessor(
            image_processor=CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            **common,
        )
    if family == "qwen2_5_vl":
        few = {"shortest_edge": 4 * SIDE**2, "longest_edge": 9 * SIDE**2}
        return ImagesAlone(image_processor=Qwen2VLImageProcessorPil(size=few), **common)
    tokenizer.boi_token, tokenizer.eoi_token, tokenizer.image_token = "<boi>", "<eoi>", "<image>"
    tokenizer.boi_token_id, tokenizer.eoi_token_id, tokenizer.image_token_id = 258, 259, PLACEHOLDER
    tokenizer.init_kwargs |= {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    resized = Gemma3ImageProcessorPil(size=square)
    return Gemma3Processor(image_processor=resized, image_seq_length=4, **common)


def save(folder: Path, family: str = "llava", **changes: Any) -> Path:
    """A complete checkpoint folder of a model that sees images."""
    tiny.save(folder, family, **changes)
    build_processor(family).save_pretrained(folder)
    return folder


@functools.cache
def png(seed: int, size: tuple[int, int] = (40, 30)) -> bytes:
    """An image of noise over a colour, as a file."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, 3) // 2 + generator.integers(0, 128, (size[1], size[0], 3))
    content = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(content, "png")
    return content.getvalue()


def files(folder: Path, count: int, size: tuple[int, int] = (40, 30)) -> list[str]:
    """Names of images in a folder."""
    for seed in range(count):
        (folder / f"{seed}.png").write_bytes(png(seed, size))
    return [f"{seed}.png" for seed in range(count)]


def chat(question: str, *images: Any) -> list[dict[str, Any]]:
    """A question with images before it, and an answer."""
    parts = [{"type": "image", **image} for image in images]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cache line."}]},
    ]


def jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(path: Path, count: int = 24) -> Path:
    """A dataset file of questions about images beside it, of several sizes; every third is about two."""
    names = files(path.parent, count)
    rows = []
    for index, name in enumerate(names):
        (path.parent / name).write_bytes(png(index, (40 + 24 * (index % 3), 40)))
        seen = [name] if index % 3 else [name, names[index - 1]]
        rows.append({"messages": chat(f"What is in {name}?", *({"path": each} for each in seen))})
    return jsonl(path, rows)
