from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import data
from kvcal.data import Role, TokenSet
from kvcal.errors import DataError
from kvcal.recipe import Text
from tests import tiny

BOS = 256
CHAT = [{"role": "user", "content": "What is a cache?"}, {"role": "assistant", "content": "Memory."}]
tokenizer = tiny.build_tokenizer()


@pytest.fixture(autouse=True)
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))


def load(
    dataset: Path | str, role: Role = "calibration", seq_len: int = 32, seed: int = 0, **fields: Any
) -> TokenSet:
    text = Text(dataset=str(dataset), **({"samples": 1000} | fields))
    return data.load(text, tokenizer, role, seq_len, seed)


def decoded(tokens: TokenSet) -> list[str]:
    return [tokenizer.decode([i for i in sample if i != BOS]) for sample in tokens.samples]


def parts(dataset: Path | str, seq_len: int = 10**6, **fields: Any) -> tuple[list[str], list[str]]:
    """Decoded samples of calibration and of evaluation, each a whole document."""
    calibration, evaluation = (load(dataset, role, seq_len, **fields) for role in get_args(Role))
    return decoded(calibration), decoded(evaluation)


def rows(count: int) -> list[str]:
    return [f"row {index}: " + "token window page " * (1 + index % 3) for index in range(count)]


def write_rows(path: Path, values: list[Any], column: str = "text") -> Path:
    """Rows in the format that the suffix names; a folder gets them as its ``train`` split."""
    import datasets

    table = datasets.Dataset.from_dict({column: values, "number": list(range(len(values)))})
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        path.mkdir()
        table.to_parquet(path / "train-00000-of-00001.parquet")
        datasets.Dataset.from_dict({column: ["only the test split says this"] * 9}).to_parquet(
            path / "test-00000-of-00001.parquet"
        )
    return path


every_role = pytest.mark.parametrize("role", get_args(Role))
every_kind = pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "folder"])


@every_kind
def test_rows_of_a_dataset_stay_samples(name: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / name, rows(30))
    calibration, evaluation = parts(path)
    assert sorted(calibration + evaluation) == sorted(rows(30))
    assert all(sample[0] == BOS and BOS not in sample[1:] for sample in load(path).samples)


def test_split_of_a_dataset_folder_is_the_one_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "folder", rows(30))
    (role,) = {data.belongs_to("only the test split says this")}
    assert decoded(load(path, role, seq_len=512, split="test")) == ["only the test split says this"]


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
@pytest.mark.parametrize("column", ["messages", "conversations", "prompt"])
def test_chats_go_through_the_template(name: str, column: str, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"Question {i}?"}, *CHAT] for i in range(20)]
    found = decoded(load(write_rows(tmp_path / name, chats, column), seq_len=512))
    expected = [tokenizer.apply_chat_template(c, tokenize=False) for c in chats]
    assert found
    assert set(found) <= set(expected)


def test_a_template_that_writes_bos_itself_gets_no_second_one(tmp_path: Path) -> None:
    own = tiny.build_tokenizer()
    own.chat_template = "<s>" + str(own.chat_template)
    path = write_rows(
        tmp_path / "chats.jsonl", [[*CHAT, {"role": "user", "content": str(i)}] for i in range(9)]
    )
    found = data.load(Text(dataset=str(path)), own, "calibration", 512, 0)
    assert all(sample[0] == BOS and BOS not in sample[1:] for sample in found.samples)


def test_the_named_column_wins(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "not this one", "body": row}) + "\n" for row in rows(9)))
    assert set(decoded(load(path, seq_len=512, column="body"))) <= set(rows(9))


def test_txt_is_cut_into_windows_that_begin_as_a_prompt_does(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(tiny.text(60))
    found = load(path)
    assert {len(sample) for sample in found.samples[:-1]} == {32}
    assert all(sample[0] == BOS and BOS not in sample[1:] for sample in found.samples)
    assert all(part in tiny.text(60) for part in "".join(decoded(found)).split("\n\n") if part)


def test_windows_of_a_tokenizer_without_bos_have_none(tmp_path: Path) -> None:
    bare = tiny.build_tokenizer()
    bare.backend_tokenizer.post_processor = None  # type: ignore[assignment]
    path = tmp_path / "notes.txt"
    path.write_text(tiny.text(60))
    found = data.load(Text(dataset=str(path)), bare, "calibration", 32, 0)
    assert {len(sample) for sample in found.samples} == {32}
    assert not any(BOS in sample for sample in found.samples)


@pytest.mark.parametrize("separator", ["\n\n", " \n \n", "\n", " \n "], ids=repr)
@every_role
def test_txt_needs_no_blank_lines(separator: str, role: Role, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(separator.join(tiny.text(400).split("\n\n")))
    assert load(path, role, samples=5).tokens == 5 * 32


@every_role
def test_builtin_needs_nothing(role: Role) -> None:
    assert load("builtin", role, samples=40).tokens == 40 * 32


def paragraphs(windows: list[str]) -> set[str]:
    """Paragraphs, whatever their line breaks; single words are nobody's text."""
    pieces = "".join(windows).split("\n\n")
    return {" ".join(piece.split()) for piece in pieces if len(piece.split()) > 3}


def test_help_topics_held_out_share_no_paragraph_with_those_calibrated_on() -> None:
    calibration, evaluation = map(paragraphs, parts("builtin"))
    assert len(calibration) > 500
    assert len(evaluation) > 100
    assert not calibration & evaluation


@pytest.mark.parametrize("separator", ["\n\n", "\n"], ids=repr)
def test_repeated_text_is_never_in_both_parts(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    lines = tiny.text(200).split("\n\n")
    path.write_text(separator.join([*lines, *lines[3:], *lines[5:]]))  # shifted: other documents
    calibration, evaluation = ({line for line in lines if line in "".join(part)} for part in parts(path))
    assert len(calibration) > len(evaluation) > 0
    assert not calibration & evaluation


@every_kind
def test_repeated_rows_are_never_in_both_parts_and_count_once(name: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / name, rows(25) * 3)
    calibration, evaluation = parts(path)
    assert not set(calibration) & set(evaluation)
    assert sorted(calibration + evaluation) == sorted(rows(25))


def test_a_document_has_the_same_part_in_every_file(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "first.jsonl", rows(40))
    second = write_rows(tmp_path / "second.parquet", rows(60)[::-1])
    assert not set(decoded(load(first, seq_len=512))) & set(decoded(load(second, "evaluation", seq_len=512)))


def test_one_document_in_five_is_held_out() -> None:
    held_out = [data.belongs_to(f"document {i}") == "evaluation" for i in range(5000)]
    assert 0.18 < sum(held_out) / 5000 < 0.22


def sources(tmp_path: Path) -> dict[str, Path | str]:
    notes = tmp_path / "notes.txt"
    notes.write_text(tiny.text(400))
    return {"txt": notes, "jsonl": write_rows(tmp_path / "rows.jsonl", rows(60)), "builtin": "builtin"}


every_source = pytest.mark.parametrize("source", ["txt", "jsonl", "builtin"])


@every_source
def test_the_seed_decides_which_text_calibrates(source: str, tmp_path: Path) -> None:
    dataset = sources(tmp_path)[source]
    first, again, other = (load(dataset, seed=seed, samples=10) for seed in (1, 1, 2))
    assert first == again
    assert set(first.samples) != set(other.samples)


@every_source
def test_the_seed_does_not_touch_evaluation(source: str, tmp_path: Path) -> None:
    dataset = sources(tmp_path)[source]
    assert load(dataset, "evaluation", seed=1, samples=4) == load(dataset, "evaluation", seed=2, samples=4)


def test_the_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    forward = write_rows(tmp_path / "forward.jsonl", rows(60))
    backward = write_rows(tmp_path / "backward.jsonl", rows(60)[::-1])
    assert load(forward, samples=10).samples == load(backward, samples=10).samples


def test_fewer_samples_than_asked_are_said_so(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows(20))
    found = load(path, samples=100)
    (notice,) = found.notices
    assert notice.startswith(
        f"calibration: {len(found.samples)} samples of at most 32 tokens, fewer than the 100"
    )
    assert notice.endswith(f"{path} has no more text for calibration")
    assert load(path, samples=len(found.samples)).notices == ()


def test_samples_that_are_too_short_do_not_count(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [*rows(20), *(f"s{i}" for i in range(20))])
    assert min(len(sample) for sample in load(path, seq_len=512).samples) >= data.MIN_TOKENS


def in_txt(content: str | bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "notes.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def in_jsonl(values: list[Any], column: str = "text") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({column: value}) + "\n" for value in values))
        return path

    return write


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda folder: folder / "no.txt", "no such file", id="missing txt"),
        pytest.param(lambda folder: folder / "no.jsonl", "no such file", id="missing jsonl"),
        pytest.param(lambda folder: folder / "no", "cannot be read as a dataset", id="missing folder"),
        pytest.param(in_txt(""), "holds no text", id="empty txt"),
        pytest.param(in_txt(" \n\n \n"), "holds no text", id="blank txt"),
        pytest.param(in_txt(b"\xff\xfe\x00"), "cannot be read as UTF-8 text", id="not UTF-8"),
        pytest.param(in_txt("One document alone."), "none of its 1 documents falls into", id="one document"),
        pytest.param(in_jsonl([]), "cannot be read as a dataset", id="empty jsonl"),
        pytest.param(in_jsonl(["", None, ""]), "holds no text", id="empty rows"),
        pytest.param(in_jsonl(["a", "b", "c", "d"] * 9), "sample has 8 tokens or more", id="too short"),
        pytest.param(
            in_jsonl(rows(9), "body"),
            "has no column text or messages or conversations or prompt; its columns are body"
            " (use --dataset-column)",
            id="wrong column",
        ),
        pytest.param(in_jsonl([1, 2]), "column 'text' holds int, not text or chat messages", id="numbers"),
        pytest.param(
            in_jsonl([[{"from": "human", "value": "Hi"}]] * 9, "conversations"),
            "column 'conversations' holds list, not text or chat messages",
            id="chats without roles",
        ),
    ],
)
def test_text_that_cannot_be_used_is_named(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    with pytest.raises(DataError) as caught:
        parts(path)
    assert message in str(caught.value)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no column 'txt'; its columns are text, number"):
        load(write_rows(tmp_path / "rows.jsonl", rows(9)), column="txt")


def test_a_chat_that_the_template_refuses_is_an_error(tmp_path: Path) -> None:
    strict = tiny.build_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write_rows(
        tmp_path / "chats.jsonl", [[*CHAT, {"role": "user", "content": str(i)}] for i in range(9)]
    )
    with pytest.raises(DataError, match="a chat does not fit the tokenizer's template: roles must alternate"):
        data.load(Text(dataset=str(path)), strict, "calibration", 32, 0)


def test_chats_need_a_template(tmp_path: Path) -> None:
    bare = tiny.build_tokenizer()
    bare.chat_template = None
    path = write_rows(
        tmp_path / "chats.jsonl", [[*CHAT, {"role": "user", "content": str(i)}] for i in range(9)]
    )
    with pytest.raises(DataError, match="tokenizer has no chat template"):
        data.load(Text(dataset=str(path)), bare, "calibration", 32, 0)


quick = settings(deadline=None, max_examples=50)
samples = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=9).map(tuple), min_size=1, max_size=7)


@quick
@given(samples, st.integers(0, 99))
def test_content_hash_does_not_depend_on_order(values: list[tuple[int, ...]], seed: int) -> None:
    shuffled = random.Random(seed).sample(values, len(values))
    assert TokenSet(tuple(shuffled)).content_hash == TokenSet(tuple(values)).content_hash


@quick
@given(samples, st.data())
def test_content_hash_depends_on_every_token(values: list[tuple[int, ...]], drawn: Any) -> None:
    row = drawn.draw(st.integers(0, len(values) - 1))
    column = drawn.draw(st.integers(0, len(values[row]) - 1))
    changed = [list(sample) for sample in values]
    changed[row][column] += 1
    found = TokenSet(tuple(tuple(sample) for sample in changed))
    same = sorted(found.samples) == sorted(values)
    assert (found.content_hash == TokenSet(tuple(values)).content_hash) == same


def test_content_hash_depends_on_where_samples_end() -> None:
    assert TokenSet(((1, 2), (3,))).content_hash != TokenSet(((1,), (2, 3))).content_hash
    assert TokenSet(((1, 23),)).content_hash != TokenSet(((12, 3),)).content_hash


Side = Literal["left", "right"]


@pytest.mark.parametrize("side", get_args(Side))
@quick
@given(values=samples, batch_size=st.integers(1, 8))
def test_batches_hold_every_sample_once_and_mark_padding(
    side: Side, values: list[tuple[int, ...]], batch_size: int
) -> None:
    tokens = TokenSet(tuple(values))
    found = []
    for batch in tokens.batches(batch_size, side):
        assert batch.input_ids.shape == batch.attention_mask.shape == batch.position_ids.shape
        assert len(batch.input_ids) <= batch_size
        for ids, mask, positions in zip(
            batch.input_ids, batch.attention_mask, batch.position_ids, strict=True
        ):
            real = mask.bool()
            found.append(tuple(ids[real].tolist()))
            assert positions[real].tolist() == list(range(int(real.sum())))
            edge = real.flip(0) if side == "left" else real
            assert edge.tolist() == sorted(edge.tolist(), reverse=True)
        keep = torch.ones_like(batch.input_ids, dtype=torch.bool) if batch.keep is None else batch.keep
        assert int(keep.sum()) == batch.tokens
        assert (batch.keep is None) == bool(batch.attention_mask.all())
    assert sorted(found) == sorted(values)
    assert sum(batch.tokens for batch in tokens.batches(batch_size)) == tokens.tokens


def test_batches_waste_little_on_padding() -> None:
    lengths = [3, 9, 4, 8, 3, 9]
    widths = [b.input_ids.shape[1] for b in TokenSet(tuple((1,) * n for n in lengths)).batches(2)]
    assert widths == [9, 8, 3]


def test_the_mask_goes_to_the_model_only_where_there_is_padding() -> None:
    (padded,) = TokenSet(((1, 2, 3), (4,))).batches(2)
    (full,) = TokenSet(((1, 2), (3, 4))).batches(2)
    cpu = torch.device("cpu")
    assert padded.inputs(cpu).keys() == {"input_ids", "attention_mask", "position_ids"}
    assert full.inputs(cpu).keys() == {"input_ids"}


def test_images_without_a_processor_are_refused_and_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"anything")
    seen = [{"type": "image", "url": "cat.png"}, {"type": "text", "text": "what is it?"}]
    chats = [[{"role": "user", "content": [*seen, {"type": "text", "text": str(i)}]}] for i in range(9)]
    with pytest.raises(DataError, match="has rows with images, and there is no processor to read them"):
        load(write_rows(tmp_path / "rows.jsonl", chats))
    path = tmp_path / "columns.jsonl"
    path.write_text("".join(json.dumps({"text": f"cat {i}", "image": "cat.png"}) + "\n" for i in range(9)))
    with pytest.raises(DataError, match="has rows with images, and there is no processor to read them"):
        load(path)
