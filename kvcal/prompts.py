"""Retrieval tasks as token ids of an exact length, in the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcal import data, scoring
from kvcal.errors import ModelError, UsageError
from kvcal.retrieval import Draft, Task

_SLACK = 8  # tokens of an answer beyond those of the ideal one

# Templates may want to know the day, or write a place for thoughts; neither may change a prompt.
_TEMPLATE = {"date_string": "1 January 2025", "enable_thinking": False}


@dataclass(frozen=True)
class Prompt:
    """One prompt with its answer.

    Attributes:
        tokens: ids, the first words of the answer included.
        room: tokens of the answer at most; ``len(tokens) + room`` is the length that was asked for.
        draft: what it asks.
    """

    tokens: tuple[int, ...]
    room: int
    draft: Draft

    def score(self, answer: str) -> float:
        """Between 0 and 1."""
        if self.draft.score == "ratio":
            return scoring.ratio(answer, self.draft.ideal)
        return scoring.recall(answer, self.draft.answers)


def fitted(task: Task, tokenizer: Any, length: int, draw: str, depth: float | None = None) -> Prompt:
    """The task in ``length`` tokens, those of the answer included.

    As many lines are made as fit, and padding fills the rest.

    Raises:
        UsageError: the length has no room for the task.
        ModelError: the chat template cannot be used.
    """
    lines, few, many = task.least_lines, 0, 0
    room = len(_ids(tokenizer, task.draft(draw, lines, depth).ideal)) + _SLACK
    while True:
        draft = task.draft(draw, lines, depth)
        before, after = _rendered(draft, tokenizer)
        head, rest = _head(before, tokenizer), _ids(tokenizer, after)
        padding = _ids(tokenizer, f"{draft.padding}\n")
        missing = length - len(head) - len(rest) - room
        if 0 <= missing <= len(padding):
            return Prompt((*head, *padding[len(padding) - missing :], *rest), room, draft)
        if missing < 0 and lines == task.least_lines:
            raise UsageError(f"{task.name} needs {length - missing} tokens or more; {length} were asked for")
        few, many = (few, lines) if missing < 0 else (lines, many)
        if many:  # the answer lies between, as padding is longer than a line
            lines = (few + many) // 2
        else:
            lines += max(missing * len(draft.lines) // len(rest), 1)


def _rendered(draft: Draft, tokenizer: Any) -> tuple[str, str]:
    """The prompt as text, parted where the first line begins."""
    text = "\n".join(draft.lines)
    if tokenizer.chat_template is None:
        opening = draft.opening or "Answer:"
        return f"{draft.instruction}\n\n", f"{text}\n\n{draft.question}\n{opening}"
    content = f"{draft.instruction}\n\n{text}\n\n{draft.question}"
    try:
        rendered: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, **_TEMPLATE
        )
    except Exception as error:  # templates raise what they like
        raise ModelError(f"the chat template refuses a message of the user: {error}") from None
    before, found, after = rendered.partition(f"{draft.instruction}\n\n")
    if not found or not after.startswith(text):
        raise ModelError("the chat template does not render a message of the user as it is")
    return before + found, after + draft.opening


def _head(text: str, tokenizer: Any) -> list[int]:
    """Ids of what comes first; a template writes BOS itself."""
    start = [] if tokenizer.chat_template is not None else data.bos(tokenizer)
    return [*start, *_ids(tokenizer, text)]


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(found)
