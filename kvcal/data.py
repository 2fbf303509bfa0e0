"""Text to token batches: seeded, hashed, and split so that calibration and evaluation never share text.

A document belongs to evaluation if its own content hash says so, whatever file it came from and wherever
it stands there. Running text (``builtin``, .txt) is cut into windows; rows of a dataset stay samples.
Documents of running text quote each other (over half of what the help topics would hold out stands in
other topics too), so evaluation leaves out every paragraph that calibration could see.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from kvcal import documents, images
from kvcal.documents import Document
from kvcal.errors import DataError
from kvcal.images import Encoded, ImageInputs
from kvcal.recipe import MIN_TOKENS, Text

Role = Literal["calibration", "evaluation"]

_EVALUATION_SHARE = 5  # one document in five


@dataclass(frozen=True)
class Batch:
    """Token ids ``(batch, tokens)`` with the mask of real tokens and their positions.

    ``chunk``: so many columns at most are run at a time; None is all of them. ``images`` go with the one
    sample of a batch that is run whole. ``encoder``: what the encoder of a model that has one reads; the rest
    is then of its decoder.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    chunk: int | None = None
    images: ImageInputs | None = None
    encoder: Batch | None = None

    @property
    def tokens(self) -> int:
        """Real tokens, those of the encoder included."""
        return int(self.attention_mask.sum()) + (0 if self.encoder is None else self.encoder.tokens)

    @property
    def keep(self) -> torch.Tensor | None:
        """``(batch, tokens)`` bool mask of real tokens; None if nothing is padded."""
        return None if bool(self.attention_mask.all()) else self.attention_mask.bool()

    @property
    def scored(self) -> torch.Tensor:
        """``(batch, tokens)`` bool mask of real tokens but for those that an image's placeholder follows.

        A placeholder is in the text because of its image; no model predicts it.
        """
        real = self.attention_mask.bool()
        if self.images is not None:
            real = real.clone()
            real[0, :-1] &= ~self.images.placeholders[1:]
        return real

    def inputs(
        self, device: torch.device, queries: slice = slice(None), dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Keyword arguments of a model's forward pass, over columns of which the earlier are in a cache.

        Without padding only ``input_ids`` are given, so that models can use their fastest causal path, and
        what belongs to images, in the model's ``dtype``.
        """
        if self.encoder is not None:
            return self._both(device)
        named = {"input_ids": self.input_ids[:, queries]}
        if self.keep is not None:
            named["attention_mask"] = self.attention_mask[:, : queries.stop]
            named["position_ids"] = self.position_ids[:, queries]
        on_device = {name: tensor.to(device) for name, tensor in named.items()}
        return on_device if self.images is None else on_device | self.images.on(device, dtype)

    def _both(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Positions are left to the model: samples are padded on the right."""
        named = {}
        for prefix, part in (("", self.encoder), ("decoder_", self)):
            assert part is not None
            named[f"{prefix}input_ids"] = part.input_ids
            if part.keep is not None:
                named[f"{prefix}attention_mask"] = part.attention_mask
        return {name: tensor.to(device) for name, tensor in named.items()}

    def pieces(self) -> Iterator[slice]:
        """Columns that are run at a time, in order."""
        width = self.input_ids.shape[1]
        step = self.chunk or width
        for start in range(0, width, step):
            yield slice(start, min(start + step, width))

    def tokens_in(self, queries: slice) -> int:
        """Real tokens in some columns; the encoder reads its own with the first."""
        encoder = 0 if self.encoder is None or queries.start else self.encoder.tokens
        return int(self.attention_mask[:, queries].sum()) + encoder


@dataclass(frozen=True)
class TokenSet:
    """Samples of token ids, what they hash to, and what the user should know about them.

    ``chunk``: longer samples are run so many tokens at a time; None is whole. ``images``: what goes with each
    sample, None with text alone; empty if all are text. ``halves``: the first half of a sample, the smaller
    one, is for an encoder, and the other for the decoder behind it.
    """

    samples: tuple[tuple[int, ...], ...]
    notices: tuple[str, ...] = field(default=())
    chunk: int | None = None
    images: tuple[ImageInputs | None, ...] = ()
    halves: bool = False

    def __post_init__(self) -> None:
        if self.images and len(self.images) != len(self.samples):
            raise ValueError(f"{len(self.samples)} samples with images of {len(self.images)}")

    @property
    def tokens(self) -> int:
        return sum(len(s) for s in self.samples)

    @property
    def encoder_tokens(self) -> int:
        """Those of them that an encoder reads."""
        return sum(len(s) // 2 for s in self.samples) if self.halves else 0

    @property
    def with_images(self) -> int:
        """How many samples have images."""
        return sum(found is not None for found in self.images)

    def part(self, which: slice) -> TokenSet:
        """Some of the samples, with their images and without notices."""
        return replace(self, samples=self.samples[which], images=self.images[which], notices=())

    @property
    def content_hash(self) -> str:
        """SHA-256 of the samples, independent of their order."""
        return hashlib.sha256("".join(sorted(self.hashes)).encode()).hexdigest()

    @property
    def hashes(self) -> list[str]:
        """SHA-256 of each sample; what the model sees of its images counts."""
        seen = (f" {found.digest}" if found else "" for found in self._images())
        texts = (json.dumps(sample) + found for sample, found in zip(self.samples, seen, strict=True))
        return [hashlib.sha256(text.encode()).hexdigest() for text in texts]

    def groups(self, batch_size: int) -> list[list[int]]:
        """Indices of the samples of each batch, of like length, longest first; one with images is alone."""
        seen = self._images()
        ordered = sorted(range(len(self.samples)), key=lambda i: -len(self.samples[i]))
        text = [i for i in ordered if seen[i] is None]
        found = [text[start : start + batch_size] for start in range(0, len(text), batch_size)]
        found += [[i] for i in ordered if seen[i] is not None]
        return sorted(found, key=lambda group: -len(self.samples[group[0]]))

    def batches(self, batch_size: int, padding_side: Literal["left", "right"] = "right") -> Iterator[Batch]:
        """The batches of :meth:`groups`, padded with token 0."""
        seen = self._images()
        for group in self.groups(batch_size):
            chosen = [self.samples[i] for i in group]
            if self.halves:
                yield _paired(chosen)
            else:
                yield replace(_pad(chosen, padding_side, self.chunk), images=seen[group[0]])

    def first(self, samples: int, tokens: int) -> TokenSet:
        """The first samples, of which so many tokens; of an encoder's and a decoder's half as many each.

        With images no sample is cut: those that are longer are passed over, but for the shortest if all are.
        """
        if not self.with_images:
            few = tuple(self._cut(sample, tokens) for sample in self.samples[:samples])
            return replace(self, samples=few, notices=(), chunk=None)
        every = range(len(self.samples))
        chosen = [i for i in every if len(self.samples[i]) <= tokens][:samples]
        chosen = chosen or [min(every, key=lambda i: len(self.samples[i]))]
        return replace(
            self,
            samples=tuple(self.samples[i] for i in chosen),
            images=tuple(self.images[i] for i in chosen),
            notices=(),
            chunk=None,
        )

    def singly(self) -> Iterator[Batch]:
        """Every sample as a batch of its own, in order."""
        for sample, found in zip(self.samples, self._images(), strict=True):
            yield replace(_pad([sample], "right", self.chunk), images=found)

    def _images(self) -> tuple[ImageInputs | None, ...]:
        return self.images or (None,) * len(self.samples)

    def _cut(self, sample: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        if not self.halves or len(sample) <= tokens:
            return sample[:tokens]
        half = len(sample) // 2
        return sample[: tokens // 2] + sample[half : half + tokens // 2]


def load(
    text: Text,
    tokenizer: Any,
    role: Role,
    seq_len: int,
    seed: int,
    processor: Callable[[], Any] | None = None,
) -> TokenSet:
    """Read, split, sample and tokenize.

    ``processor`` gives the model's, which rows with images are put through.

    Raises:
        DataError: nothing there, nothing long enough, not the column that was asked for, or images that
            cannot be read.
        UsageError: a row with images is longer than a chunk.
    """
    found, running = documents.read(text)
    if not found:
        raise DataError(f"{text.dataset}: holds no text")
    mine = _select(found, role)
    if running and role == "evaluation":
        mine = _unseen(mine, _select(found, "calibration"))
    if not mine:
        raise DataError(
            f"{text.dataset}: none of its {len(found)} documents falls into the {role} part;"
            f" give more text or another {role}.dataset"
        )
    if role == "calibration":
        random.Random(seed).shuffle(mine)
    encoder = images.Encoder(text.dataset, processor, seq_len, text.chunk)
    encoded = _windows(mine, tokenizer, seq_len) if running else _rows(mine, tokenizer, seq_len, encoder)
    enough = (each for each in encoded if len(each[0]) >= MIN_TOKENS)
    taken = list(itertools.islice(enough, text.samples))
    notices = [f"{role}: {encoder.left_out}"] if encoder.left_out else []
    if not taken:
        raise DataError(
            "; ".join([f"{text.dataset}: no {role} sample has {MIN_TOKENS} tokens or more", *notices])
        )
    if len(taken) < text.samples:
        notices.append(
            f"{role}: {len(taken)} samples of at most {seq_len} tokens, fewer than the {text.samples}"
            f" asked; {text.dataset} has no more text for {role}"
        )
    samples, seen = zip(*taken, strict=True)
    return TokenSet(samples, tuple(notices), text.chunk, seen if any(seen) else ())


def belongs_to(document: Document) -> Role:
    """The part a document falls into, from its content alone."""
    return _part(_digest(document))


def _digest(document: Document) -> bytes:
    if isinstance(document, images.Row):
        return document.digest
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).digest()


def _part(digest: bytes) -> Role:
    return "evaluation" if digest[0] % _EVALUATION_SHARE == 0 else "calibration"


def _select(each: list[Document], role: Role) -> list[Document]:
    """Documents of one part, in an order that depends on content only."""
    keyed = {_digest(d): d for d in each}
    return [keyed[digest] for digest in sorted(keyed) if _part(digest) == role]


def _unseen(held_out: list[Document], others: list[Document]) -> list[Document]:
    """Running text without the paragraphs that stand in other documents too, whatever their line breaks."""

    def key(paragraph: str) -> tuple[str, ...]:
        return tuple(paragraph.split())

    seen = {key(p) for document in others for p in documents.paragraphs(str(document))}
    kept = ("".join(p for p in documents.paragraphs(str(d)) if key(p) not in seen).strip() for d in held_out)
    return [document for document in kept if document]


def _windows(each: list[Document], tokenizer: Any, seq_len: int) -> Iterator[Encoded]:
    """Documents joined and cut; each window begins as a served prompt does, with BOS if there is one."""
    start = bos(tokenizer)
    room = seq_len - len(start)
    buffer: list[int] = []
    for document in each:
        buffer += tokenizer(f"{document}\n\n", add_special_tokens=False)["input_ids"]
        while len(buffer) >= room:
            yield (*start, *buffer[:room]), None
            buffer = buffer[room:]
    if buffer:
        yield (*start, *buffer), None


def _rows(each: list[Document], tokenizer: Any, seq_len: int, encoder: images.Encoder) -> Iterator[Encoded]:
    for document in each:
        if isinstance(document, images.Row):
            yield from encoder.encode(document)
            continue
        if isinstance(document, str):
            ids = tokenizer(document)["input_ids"]
        else:
            if tokenizer.chat_template is None:
                raise DataError("the rows are chats, but the model's tokenizer has no chat template")
            try:
                rendered = tokenizer.apply_chat_template(document, tokenize=False)
            except Exception as error:  # templates raise what they like, and fail on what they do not expect
                raise DataError(f"a chat does not fit the tokenizer's template: {error}") from None
            ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        yield tuple(ids[:seq_len]), None


def bos(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before every text."""
    with_special, without = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    first = getattr(tokenizer, "bos_token_id", None)
    return [first] if first is not None and with_special[:1] == [first] and without[:1] != [first] else []


def _pad(samples: list[tuple[int, ...]], side: Literal["left", "right"], chunk: int | None) -> Batch:
    width = max(map(len, samples))
    input_ids = torch.zeros(len(samples), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, sample in enumerate(samples):
        real = slice(0, len(sample)) if side == "right" else slice(width - len(sample), width)
        input_ids[row, real] = torch.tensor(sample)
        attention_mask[row, real] = 1
    # Positions are given: models derive them from the tensor's shape and would shift a left-padded row.
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    return Batch(input_ids, attention_mask, position_ids, chunk)


def _paired(samples: list[tuple[int, ...]]) -> Batch:
    """Each sample's first half for the encoder; padded on the right, where positions are the model's own."""
    encoder = _pad([sample[: len(sample) // 2] for sample in samples], "right", None)
    return replace(_pad([sample[len(sample) // 2 :] for sample in samples], "right", None), encoder=encoder)
