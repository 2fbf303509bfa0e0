"""Rows of a dataset that have images: found, read from where they are, and put through the model's processor.

A chat says with a part of type ``image`` or ``image_url`` where an image belongs; the image is in the part
itself or in the row's column ``image`` or ``images``, in order. Images are files, bytes or ``data:`` URIs.
Nothing is fetched over a network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvcal.errors import DataError, ModelError, UsageError, in_one_line

COLUMNS = ("image", "images")
_PARTS = ("image", "image_url")
_SOURCES = ("image", "image_url", "url", "path")
_IDS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class Picture:
    """An image as it is stored, read when it is needed."""

    source: Path | bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, wherever it is kept."""
        return hashlib.sha256(self.content()).hexdigest()

    def content(self) -> bytes:
        """Bytes of the file.

        Raises:
            DataError: it cannot be read.
        """
        if isinstance(self.source, bytes):
            return self.source
        try:
            return self.source.read_bytes()
        except OSError as error:
            raise DataError(f"{self.source}: cannot be read as an image: {error.strerror}") from None

    def decoded(self) -> Any:
        """The image in RGB, upright.

        Raises:
            DataError: the file is no image.
        """
        from PIL import Image, ImageOps, UnidentifiedImageError

        name = self.source if isinstance(self.source, Path) else "an image of a row"
        try:
            with Image.open(io.BytesIO(self.content())) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
        except UnidentifiedImageError:
            raise DataError(f"{name}: cannot be read as an image: it is of no format that is known") from None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{name}: cannot be read as an image: {error}") from None


@dataclass(frozen=True)
class Row:
    """A document with its images.

    ``document`` is text or a chat, in which a part of type ``image`` says where an image belongs; without
    such a part, and without the model's own placeholders in the text, they belong before it.
    """

    document: str | list[dict[str, Any]]
    pictures: tuple[Picture, ...]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the text and the bytes of every image."""
        content = [self.document, [picture.digest for picture in self.pictures]]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()


@dataclass(frozen=True)
class ImageInputs:
    """What a model is given beside the token ids of one sample.

    Attributes:
        digest: SHA-256 of the tensors, hexadecimal.
        tensors: keyword arguments of a forward pass over this sample alone, as the processor made them.
        placeholders: ``(tokens,)`` bool, the positions that stand for images.
    """

    digest: str
    tensors: Mapping[str, torch.Tensor] = field(compare=False, repr=False)
    placeholders: torch.Tensor = field(compare=False, repr=False)

    def on(self, device: torch.device, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """The tensors on a device, and what is floating there in ``dtype``, if one is given."""
        return {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None)
            for name, tensor in self.tensors.items()
        }


Encoded = tuple[tuple[int, ...], ImageInputs | None]


def as_stored(rows: Any) -> Any:
    """A dataset whose images are bytes and paths; decoding all of them would be in vain for most."""
    for name, feature in rows.features.items():
        stored = _as_stored(feature)
        if stored != feature:
            rows = rows.cast_column(name, stored)
    return rows


def _as_stored(feature: Any) -> Any:
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, dict):
        return {name: _as_stored(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_as_stored(feature.feature))
    return feature


def row(dataset: str, document: str | list[dict[str, Any]], beside: Any, folder: Path | None) -> Any:
    """A document as it was, if there are no images, else a :class:`Row`.

    Args:
        dataset: its name, for messages.
        document: text or a chat.
        beside: what the row's column of images holds.
        folder: that relative paths start from; None where there is none.

    Raises:
        DataError: an image is missing, left over, or of a kind that is not read.
    """
    given = [_picture(dataset, each, folder) for each in _listed(beside)]
    if isinstance(document, str):
        return Row(document, tuple(given)) if given else document
    if not given and not any(_kind(part) in _PARTS for turn in document for part in _parts(turn)):
        _refuse_others(dataset, document)
        return document
    chat, pictures, waiting = [], [], list(given)
    for turn in document:
        parts: list[dict[str, Any]] = []
        for part in _parts(turn):
            if _kind(part) not in _PARTS:
                parts.append({key: value for key, value in part.items() if value is not None})
                continue
            own = _own(part)
            if own is None and not waiting:
                raise DataError(f"{dataset}: a chat has more parts of type image than images")
            pictures.append(waiting.pop(0) if own is None else _picture(dataset, own, folder))
            parts.append({"type": "image"})
        chat.append({**turn, "content": parts})
    _refuse_others(dataset, chat)
    if pictures and waiting:
        raise DataError(f"{dataset}: a chat has fewer parts of type image than images")
    return Row(chat, tuple(pictures or waiting))


def _parts(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = turn.get("content")
    if isinstance(content, list):
        return [part for part in content if isinstance(part, dict)]
    return [] if content is None else [{"type": "text", "text": content}]


def _own(part: Mapping[str, Any]) -> Any:
    """What a part says of its image; None if that is for a column to say."""
    if part.get("base64") is not None:
        return "data:," + part["base64"].rpartition(",")[2]
    told = (part[key] for key in _SOURCES if part.get(key) is not None)
    # Rows of a table have every field that any row has, and null where a row has none.
    filled = (
        each for each in told if not isinstance(each, dict) or any(v is not None for v in each.values())
    )
    return next(filled, None)


def _kind(part: Mapping[str, Any]) -> Any:
    return part.get("type")


def _refuse_others(dataset: str, chat: Sequence[Mapping[str, Any]]) -> None:
    for kind in (_kind(part) for turn in chat for part in _parts(turn)):
        if kind not in ("text", "image", None):
            raise DataError(
                f"{dataset}: a chat has a part of type {kind!r}; kvcal calibrates on text and images, leave"
                " such rows out"
            )


def _listed(beside: Any) -> list[Any]:
    if beside is None:
        return []
    return [each for each in beside if each is not None] if isinstance(beside, list) else [beside]


def _picture(dataset: str, found: Any, folder: Path | None) -> Picture:
    """An image by what a dataset says of it: a path, a ``data:`` URI, or a dict with bytes, path or url."""
    if isinstance(found, dict):
        found = next((found[key] for key in ("bytes", "url", "path") if found.get(key) is not None), None)
    if isinstance(found, bytes):
        return Picture(found)
    if not isinstance(found, str) or not found:
        raise DataError(f"{dataset}: an image is {type(found).__name__}, neither a path nor bytes")
    if found.startswith("data:"):
        try:
            return Picture(base64.b64decode(found.partition(",")[2], validate=True))
        except binascii.Error as error:
            raise DataError(f"{dataset}: a data: URI of an image is not base64: {error}") from None
    if "://" in found:
        raise DataError(
            f"{dataset}: an image is at {found[:80]}; kvcal fetches none, download it and give its path"
        )
    path = Path(found)
    if not path.is_absolute():
        if folder is None:
            raise DataError(
                f"{dataset}: image {found!r} is a path, and relative ones start from the folder of a dataset"
                " file; store the images in the dataset"
            )
        path = folder / path
    return Picture(path)


class Encoder:
    """Rows to tokens and what belongs to them, by the processor of the model.

    Rows that are longer than samples may be are left out: images are never cut.
    """

    def __init__(self, dataset: str, processor: Callable[[], Any] | None, seq_len: int, chunk: int):
        self._dataset, self._load, self._seq_len, self._chunk = dataset, processor, seq_len, chunk
        self._too_long: list[int] = []

    @cached_property
    def _processor(self) -> Any:
        if self._load is None:
            raise DataError(f"{self._dataset}: has rows with images, and there is no processor to read them")
        return self._load()

    @property
    def left_out(self) -> str | None:
        """What to tell of rows that were left out; None if none was."""
        if not self._too_long:
            return None
        return (
            f"left out {len(self._too_long)} rows whose images would not fit whole into {self._seq_len}"
            f" tokens; the shortest has {min(self._too_long)} (--seq-len)"
        )

    def encode(self, row: Row) -> Iterator[Encoded]:
        """Token ids and inputs of a row; nothing if it is longer than samples may be.

        Raises:
            DataError: the processor refuses the row.
            UsageError: the row would be run in chunks.
        """
        processor = self._processor
        images = [picture.decoded() for picture in row.pictures]
        text, special = self._text(row)
        try:
            found = dict(
                self._processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=special)
            )
        except Exception as error:  # processors raise what they like
            raise DataError(
                f"{self._dataset}: the model's processor refuses a row with images: {in_one_line(error)}"
            ) from None
        ids = found["input_ids"][0]
        if len(ids) > self._seq_len:
            self._too_long.append(len(ids))
            return
        if len(ids) > self._chunk:
            raise UsageError(
                f"{self._dataset}: a row with images has {len(ids)} tokens, which --chunk {self._chunk} would"
                f" cut; use --chunk {self._seq_len} or --seq-len {self._chunk}"
            )
        placeholders = torch.isin(ids, torch.tensor(_placeholder_ids(processor)))
        if not bool(placeholders.any()):
            raise DataError(f"{self._dataset}: no token of a row stands for its images")
        tensors = {name: value for name, value in found.items() if name not in _IDS}
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                raise DataError(f"{self._dataset}: the model's processor makes no tensor of {name}")
        yield tuple(ids.tolist()), ImageInputs(_digest(tensors), tensors, placeholders)

    def _text(self, row: Row) -> tuple[str, bool]:
        """What the processor reads, with a placeholder per image, and whether it is to add special tokens."""
        token, wanted = getattr(self._processor, "image_token", None), len(row.pictures)
        chat = row.document
        if isinstance(chat, str):
            if token is not None and token in chat:
                return self._counted(chat, token, wanted), True
            chat = [{"role": "user", "content": [{"type": "text", "text": chat}]}]
        told = any(_kind(part) == "image" for turn in chat for part in turn["content"])
        rendered = self._rendered(chat)
        if not told and (token is None or token not in rendered):
            rendered = self._rendered(_in_front(chat, wanted))
        # As transformers has it: what a template does not begin with, the processor adds.
        begins = getattr(getattr(self._processor, "tokenizer", None), "bos_token", None)
        special = begins is None or not rendered.startswith(begins)
        return self._counted(rendered, token, wanted), special

    def _rendered(self, chat: Sequence[Mapping[str, Any]]) -> str:
        if getattr(self._processor, "chat_template", None) is None:
            raise DataError(
                f"{self._dataset}: the model's processor has no chat template; give text with"
                f" {getattr(self._processor, 'image_token', 'a placeholder')!r} where each image belongs"
            )
        try:
            found = self._processor.apply_chat_template([dict(turn) for turn in chat], tokenize=False)
        except Exception as error:  # templates raise what they like, and fail on what they do not expect
            raise DataError(f"a chat does not fit the processor's template: {error}") from None
        return str(found)

    def _counted(self, text: str, token: str | None, wanted: int) -> str:
        if token is not None and text.count(token) != wanted:
            raise DataError(
                f"{self._dataset}: a row has {wanted} images and {text.count(token)} placeholders {token!r}"
            )
        return text


def _in_front(chat: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """The chat with the images before what the user says first, or before everything."""
    turns = [dict(turn) for turn in chat]
    first = next((turn for turn in turns if turn["role"] == "user"), turns[0])
    first["content"] = [{"type": "image"}] * count + list(first["content"])
    return turns


def _placeholder_ids(processor: Any) -> list[int]:
    """The tokens that stand for images.

    Raises:
        ModelError: the processor does not say.
    """
    listed = getattr(processor, "image_token_ids", None) or [getattr(processor, "image_token_id", None)]
    found = [each for each in listed if each is not None]
    if not found:
        raise ModelError(f"{type(processor).__name__} does not say which token stands for an image")
    return found


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
