"""Text to token batches: seeded, hashed, and split so that calibration and evaluation never share text.

A document belongs to evaluation if its own content hash says so, whatever file it came from and wherever
it stands there. Running text (``builtin``, .txt) is cut into windows; rows of a dataset stay samples.
Documents of running text quote each other (over half of what the help topics would hold out stands in
other topics too), so evaluation leaves out every paragraph that calibration could see.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from kvcal.errors import DataError
from kvcal.recipe import MIN_TOKENS, Text

Role = Literal["calibration", "evaluation"]
Document = str | list[dict[str, Any]]

_EVALUATION_SHARE = 5  # one document in five
_TEXT_ALONE = "kvcal calibrates on text alone, also models that see more; leave such rows out"
_COLUMNS = ("text", "messages", "conversations", "prompt")
_TXT_DOCUMENT_CHARS = 4000


@dataclass(frozen=True)
class Batch:
    """Token ids ``(batch, tokens)`` with the mask of real tokens and their positions.

    ``chunk``: so many columns at most are run at a time; None is all of them. ``encoder``: what the encoder
    of a model that has one reads; the rest is then of its decoder.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    chunk: int | None = None
    encoder: Batch | None = None

    @property
    def tokens(self) -> int:
        """Real tokens, those of the encoder included."""
        return int(self.attention_mask.sum()) + (0 if self.encoder is None else self.encoder.tokens)

    @property
    def keep(self) -> torch.Tensor | None:
        """``(batch, tokens)`` bool mask of real tokens; None if nothing is padded."""
        return None if bool(self.attention_mask.all()) else self.attention_mask.bool()

    def inputs(self, device: torch.device, queries: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Keyword arguments of a model's forward pass, over columns of which the earlier are in a cache.

        Without padding only ``input_ids`` are given, so that models can use their fastest causal path.
        """
        if self.encoder is not None:
            return self._both(device)
        named = {"input_ids": self.input_ids[:, queries]}
        if self.keep is not None:
            named["attention_mask"] = self.attention_mask[:, : queries.stop]
            named["position_ids"] = self.position_ids[:, queries]
        return {name: tensor.to(device) for name, tensor in named.items()}

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

    ``chunk``: longer samples are run so many tokens at a time; None is whole. ``halves``: the first half of a
    sample, the smaller one, is for an encoder, and the other for the decoder behind it.
    """

    samples: tuple[tuple[int, ...], ...]
    notices: tuple[str, ...] = field(default=())
    chunk: int | None = None
    halves: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(s) for s in self.samples)

    @property
    def encoder_tokens(self) -> int:
        """Those of them that an encoder reads."""
        return sum(len(s) // 2 for s in self.samples) if self.halves else 0

    @property
    def content_hash(self) -> str:
        """SHA-256 of the samples, independent of their order."""
        return hashlib.sha256("".join(sorted(self.hashes)).encode()).hexdigest()

    @property
    def hashes(self) -> list[str]:
        """SHA-256 of each sample."""
        return [hashlib.sha256(json.dumps(s).encode()).hexdigest() for s in self.samples]

    def batches(self, batch_size: int, padding_side: Literal["left", "right"] = "right") -> Iterator[Batch]:
        """Batches of samples of similar length, longest first, padded with token 0."""
        ordered = sorted(self.samples, key=len, reverse=True)
        for start in range(0, len(ordered), batch_size):
            chosen = ordered[start : start + batch_size]
            if self.halves:
                yield _paired(chosen)
            else:
                yield _pad(chosen, padding_side, self.chunk)

    def first(self, samples: int, tokens: int) -> TokenSet:
        """The first tokens of the first samples; of an encoder's and a decoder's half as many each."""

        def cut(sample: tuple[int, ...]) -> tuple[int, ...]:
            half = len(sample) // 2
            if not self.halves or len(sample) <= tokens:
                return sample[:tokens]
            return sample[: tokens // 2] + sample[half : half + tokens // 2]

        return replace(self, samples=tuple(map(cut, self.samples[:samples])), notices=(), chunk=None)


def load(text: Text, tokenizer: Any, role: Role, seq_len: int, seed: int) -> TokenSet:
    """Read, split, sample and tokenize.

    Raises:
        DataError: nothing there, nothing long enough, or not the column that was asked for.
    """
    documents, running = _read(text)
    if not documents:
        raise DataError(f"{text.dataset}: holds no text")
    mine = _select(documents, role)
    if running and role == "evaluation":
        mine = _unseen(mine, _select(documents, "calibration"))
    if not mine:
        raise DataError(
            f"{text.dataset}: none of its {len(documents)} documents falls into the {role} part;"
            f" give more text or another {role}.dataset"
        )
    if role == "calibration":
        random.Random(seed).shuffle(mine)
    windows = _windows(mine, tokenizer, seq_len) if running else _rows(mine, tokenizer, seq_len)
    samples = []
    for window in windows:
        if len(window) >= MIN_TOKENS:
            samples.append(window)
        if len(samples) == text.samples:
            break
    if not samples:
        raise DataError(f"{text.dataset}: no {role} sample has {MIN_TOKENS} tokens or more")
    notices = []
    if len(samples) < text.samples:
        notices.append(
            f"{role}: {len(samples)} samples of at most {seq_len} tokens, fewer than the {text.samples}"
            f" asked; {text.dataset} has no more text for {role}"
        )
    return TokenSet(tuple(samples), tuple(notices), text.chunk)


def belongs_to(document: Document) -> Role:
    """The part a document falls into, from its content alone."""
    return _part(_digest(document))


def _digest(document: Document) -> bytes:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).digest()


def _part(digest: bytes) -> Role:
    return "evaluation" if digest[0] % _EVALUATION_SHARE == 0 else "calibration"


def _select(documents: list[Document], role: Role) -> list[Document]:
    """Documents of one part, in an order that depends on content only."""
    keyed = {_digest(d): d for d in documents}
    return [keyed[digest] for digest in sorted(keyed) if _part(digest) == role]


def _unseen(held_out: list[Document], others: list[Document]) -> list[Document]:
    """Running text without the paragraphs that stand in other documents too, whatever their line breaks."""

    def key(paragraph: str) -> tuple[str, ...]:
        return tuple(paragraph.split())

    seen = {key(p) for document in others for p in _paragraphs(str(document))}
    kept = ("".join(p for p in _paragraphs(str(d)) if key(p) not in seen).strip() for d in held_out)
    return [document for document in kept if document]


def _read(text: Text) -> tuple[list[Document], bool]:
    """All documents, and whether they are running text."""
    name, path = text.dataset, Path(text.dataset)
    if name == "builtin":
        return list(_builtin()), True
    if path.suffix in (".txt", ".jsonl", ".parquet") and not os.path.isfile(path):
        raise DataError(f"{name}: no such file")
    if path.suffix == ".txt":
        return list(_txt(path)), True
    return _dataset_rows(text), False


def _builtin() -> list[str]:
    """The help topics of Python's own documentation: English prose and code that every machine has."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _txt(path: Path) -> Iterator[str]:
    """Runs of paragraphs, or of lines where there are none, of a few thousand characters."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    gathered = ""
    for paragraph in _paragraphs(content):
        gathered += paragraph
        if len(gathered) >= _TXT_DOCUMENT_CHARS:
            yield gathered.strip()
            gathered = ""
    if gathered.strip():
        yield gathered.strip()


def _paragraphs(content: str) -> Iterator[str]:
    """Pieces that end in blank lines; lines, where a piece would be longer than a document."""
    for piece in re.findall(r".+?(?:\n\s*\n|\Z)", content, re.DOTALL):
        yield from (piece,) if len(piece) < _TXT_DOCUMENT_CHARS else piece.splitlines(keepends=True)


def _dataset_rows(text: Text) -> list[Document]:
    import datasets

    loaders = {".jsonl": "json", ".parquet": "parquet"}
    path = Path(text.dataset)
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # it logs what it raises too
    try:
        if path.suffix in loaders:
            rows = datasets.load_dataset(loaders[path.suffix], data_files=str(path), split="train")
        else:
            rows = datasets.load_dataset(text.dataset, split=text.split)
    except Exception as error:  # datasets raises whatever its readers raise
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(f"{text.dataset}: cannot be read as a dataset: {first_line}") from None
    column = _column(text, list(rows.column_names))
    beside = sorted({"image", "images"} & set(rows.column_names) - {column})
    if beside:
        raise DataError(f"{text.dataset}: has images in column {beside[0]!r}; {_TEXT_ALONE}")
    documents = [_document(text.dataset, column, value) for value in rows[column]]
    return [d for d in documents if d]


def _column(text: Text, present: list[str]) -> str:
    wanted = [text.column] if text.column else list(_COLUMNS)
    for column in wanted:
        if column in present:
            return column
    asked = repr(text.column) if text.column else " or ".join(_COLUMNS)
    raise DataError(
        f"{text.dataset}: has no column {asked}; its columns are {', '.join(present)} (use --dataset-column)"
    )


def _document(dataset: str, column: str, value: Any) -> Document:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
        for part in (
            part for turn in value if isinstance(turn.get("content"), list) for part in turn["content"]
        ):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", None):
                raise DataError(f"{dataset}: a chat has a part of type {kind!r}; {_TEXT_ALONE}")
        return value
    raise DataError(f"{dataset}: column {column!r} holds {type(value).__name__}, not text or chat messages")


def _windows(documents: list[Document], tokenizer: Any, seq_len: int) -> Iterator[tuple[int, ...]]:
    """Documents joined and cut; each window begins as a served prompt does, with BOS if there is one."""
    start = bos(tokenizer)
    room = seq_len - len(start)
    buffer: list[int] = []
    for document in documents:
        buffer += tokenizer(f"{document}\n\n", add_special_tokens=False)["input_ids"]
        while len(buffer) >= room:
            yield (*start, *buffer[:room])
            buffer = buffer[room:]
    if buffer:
        yield (*start, *buffer)


def _rows(documents: list[Document], tokenizer: Any, seq_len: int) -> Iterator[tuple[int, ...]]:
    for document in documents:
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
        yield tuple(ids[:seq_len])


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
