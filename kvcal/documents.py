"""The documents of a dataset: running text of a file or of Python's help, or rows of text or chats."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcal import images
from kvcal.errors import DataError
from kvcal.recipe import Text

Document = str | list[dict[str, Any]] | images.Row

_COLUMNS = ("text", "messages", "conversations", "prompt")
_TXT_DOCUMENT_CHARS = 4000


def read(text: Text) -> tuple[list[Document], bool]:
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
    for paragraph in paragraphs(content):
        gathered += paragraph
        if len(gathered) >= _TXT_DOCUMENT_CHARS:
            yield gathered.strip()
            gathered = ""
    if gathered.strip():
        yield gathered.strip()


def paragraphs(content: str) -> Iterator[str]:
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
    beside = [name for name in images.COLUMNS if name in rows.column_names and name != column]
    if len(beside) > 1:
        raise DataError(f"{text.dataset}: has images in columns {' and '.join(beside)}; leave one of them")
    folder = path.parent if path.suffix in loaders else path if path.is_dir() else None
    rows = images.as_stored(rows)
    pictures = rows[beside[0]] if beside else itertools.repeat(None)
    documents = [
        images.row(text.dataset, _document(text.dataset, column, value), seen, folder)
        for value, seen in zip(rows[column], pictures, strict=False)
    ]
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


def _document(dataset: str, column: str, value: Any) -> str | list[dict[str, Any]]:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
        return value
    raise DataError(f"{dataset}: column {column!r} holds {type(value).__name__}, not text or chat messages")
