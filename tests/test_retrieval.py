"""Retrieval prompts: exact lengths, one seed one prompt, every answer where it should be and nowhere else."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import prompts, retrieval, scoring
from kvcal.errors import ModelError, UsageError
from kvcal.retrieval import NEEDLE, TASKS, Task
from tests import tiny

every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
CODES = [task for task in TASKS if task.name in (NEEDLE, "multi_key", "multi_value", "multi_query")]
BY_NAME = {task.name: task for task in TASKS}

draws = st.integers(0, 2**32).map(str)
TOKENIZER = tiny.build_tokenizer()
PLAIN = tiny.build_tokenizer()
PLAIN.chat_template = None


def text_of(tokens: tuple[int, ...]) -> str:
    return str(TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False))


@every_task
@pytest.mark.parametrize("tokenizer", [TOKENIZER, PLAIN], ids=["chat", "plain"])
@given(draw=draws, length=st.integers(1400, 5000))
@settings(max_examples=10)
def test_prompts_have_the_exact_length(task: Task, tokenizer: Any, draw: str, length: int) -> None:
    found = prompts.fitted(task, tokenizer, length, draw)
    assert len(found.tokens) + found.room == length
    ideal = tokenizer(found.draft.ideal, add_special_tokens=False)["input_ids"]
    assert found.room > len(ideal)
    assert found.score(found.draft.ideal) == 1


@every_task
def test_every_length_can_be_had(task: Task) -> None:
    for length in range(2400, 2420):
        found = prompts.fitted(task, TOKENIZER, length, "0")
        assert len(found.tokens) + found.room == length


@every_task
@given(draw=draws, lines=st.integers(30, 200), more=st.integers(1, 200))
@settings(max_examples=20)
def test_what_is_asked_depends_on_the_draw_alone(task: Task, draw: str, lines: int, more: int) -> None:
    one, same, longer = (task.draft(draw, n, None) for n in (lines, lines, lines + more))
    assert one == same
    assert len(one.lines) < len(longer.lines)
    assert (one.question, one.answers, one.ideal, one.guess) == (
        longer.question,
        longer.answers,
        longer.ideal,
        longer.guess,
    )
    assert task.draft(f"{draw}+", lines, None).lines != one.lines


@every_task
def test_prompts_are_those_of_the_seed(task: Task) -> None:
    one, same, other = (prompts.fitted(task, TOKENIZER, 2000, draw) for draw in ("7/a", "7/a", "8/a"))
    assert one == same
    assert one.tokens != other.tokens


@pytest.mark.parametrize("task", CODES, ids=lambda task: task.name)
@given(draw=draws)
@settings(max_examples=10)
def test_each_code_stands_in_the_prompt_once(task: Task, draw: str) -> None:
    found = prompts.fitted(task, TOKENIZER, 2500, draw)
    text = text_of(found.tokens)
    for answer in found.draft.answers:
        assert len(re.findall(rf"\b{answer}\b", text)) == 1
    assert text.endswith(found.draft.opening)
    codes = re.findall(r"\b\d{6}\b", text)
    assert len(codes) == len(set(codes))
    if task.name != NEEDLE:  # whoever copies any of them gets what is called a guess
        assert found.draft.guess == len(found.draft.answers) / len(codes)


@given(draw=draws, lines=st.integers(2, 300), depth=st.floats(0, 1))
@settings(max_examples=50)
def test_the_needle_lies_at_its_depth(draw: str, lines: int, depth: float) -> None:
    draft = BY_NAME[NEEDLE].draft(draw, lines, depth)
    (place,) = [i for i, line in enumerate(draft.lines) if draft.answers[0] in line]
    assert len(draft.lines) == lines + 1
    assert abs(place / lines - depth) <= 0.5 / lines + 1e-9


@given(draw=draws, lines=st.integers(2, 100))
@settings(max_examples=20)
def test_variables_are_set_before_they_are_used_and_lead_to_the_value(draw: str, lines: int) -> None:
    draft = BY_NAME["variables"].draft(draw, lines, None)
    values: dict[str, str] = {}
    for line in draft.lines:
        if line.startswith("VAR "):
            name, given_as = line.removeprefix("VAR ").split(" = ")
            assert name not in values
            values[name] = values[given_as.removeprefix("VAR ")] if "VAR" in given_as else given_as
    (asked,) = re.findall(r"value (\d+)\?", draft.question)
    holding = [name for name, value in values.items() if value == asked]
    assert sorted(holding) == sorted(draft.answers)
    assert draft.guess == len(holding) / len(values)


@given(draw=draws, lines=st.integers(30, 3000))
@settings(max_examples=20)
def test_common_words_are_far_more_common(draw: str, lines: int) -> None:
    draft = BY_NAME["common_words"].draft(draw, lines, None)
    # Padding can add each word once more.
    counts = {word: draft.lines.count(word) for word in {*draft.lines, *draft.padding.split("\n")}}
    common = [counts[word] for word in draft.answers]
    others = [count + 1 for word, count in counts.items() if word not in draft.answers]
    assert min(common) > max(others)
    assert draft.guess == pytest.approx(len(common) / len(counts))


@given(draw=draws, lines=st.integers(2, 60))
@settings(max_examples=20)
def test_the_reply_that_is_asked_for_is_the_nth_to_its_request(draw: str, lines: int) -> None:
    draft = BY_NAME["coreference"].draft(draw, lines, None)
    ordinal, form, topic = re.findall(r"assistant's (\w+) reply .* for a (.*) about (\w+),", draft.question)[
        0
    ]
    request = f"User: Write a {form} about {topic}.\nAssistant: "
    replies = [line.removeprefix(request) for line in draft.lines if line.startswith(request)]
    assert len(replies) == 3
    assert replies[["first", "second", "third"].index(ordinal)] == draft.ideal
    others = [reply for reply in replies if reply != draft.ideal]
    assert draft.guess == pytest.approx(sum(scoring.ratio(o, draft.ideal) for o in others) / len(others))
    assert sum(draft.ideal in line for line in draft.lines) == 1


def test_filler_holds_nothing_that_is_asked_for() -> None:
    filler = " ".join(BY_NAME[NEEDLE].draft("0", 2000, 0.0).lines[1:])
    assert not re.search(r"\d|VAR|pass code", filler)
    assert not [city for city in retrieval._CITIES if city in filler]


# What cannot be


@every_task
def test_a_length_without_room_is_refused_with_the_one_that_has(task: Task) -> None:
    with pytest.raises(
        UsageError, match=rf"{task.name} needs \d+ tokens or more; 100 were asked for"
    ) as told:
        prompts.fitted(task, TOKENIZER, 100, "0")
    needed = int(re.findall(r"needs (\d+)", str(told.value))[0])
    assert len(prompts.fitted(task, TOKENIZER, needed, "0").tokens) < needed
    with pytest.raises(UsageError):
        prompts.fitted(task, TOKENIZER, needed - 1, "0")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no users here') }}", "refuses a message of the user: no users here"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not render a message"),
        ("hello", "does not render a message"),
    ],
)
def test_a_template_that_changes_what_is_said_is_refused(template: str, message: str) -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=message):
        prompts.fitted(TASKS[0], tokenizer, 900, "0")


def test_the_template_is_the_models_own_and_bos_comes_once() -> None:
    chat, plain = (prompts.fitted(TASKS[0], t, 900, "0") for t in (TOKENIZER, PLAIN))
    assert text_of(chat.tokens).startswith("[user] There are")
    assert plain.tokens[0] == PLAIN.bos_token_id
    assert plain.tokens.count(PLAIN.bos_token_id) == 1
    writes_bos = tiny.build_tokenizer()
    writes_bos.chat_template = "<s>" + str(writes_bos.chat_template)
    assert prompts.fitted(TASKS[0], writes_bos, 900, "0").tokens.count(PLAIN.bos_token_id) == 1
