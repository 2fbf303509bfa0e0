"""Suites: which tasks at which lengths, over both caches on the same prompts, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvcal import generation, prompts, scoring
from kvcal.errors import UsageError
from kvcal.generation import Served
from kvcal.prompts import Prompt
from kvcal.retrieval import NEEDLE, TASKS, Task

Name = Literal["quick", "long", "full"]

CANNOT = "the model cannot do this task: says nothing about the cache"
UNCHANGED = "no prompt changed"

_QUICK_LENGTH = 1024  # of the longest prompt
_SHORTEST = 512  # of a grid that has longer ones
_FLOOR = 0.1  # a model that scores less has nothing to lose, however unlikely a guess is
_PROMPTS: dict[Name, tuple[int, int]] = {"quick": (3, 2), "long": (5, 4), "full": (5, 4)}  # depths, prompts


@dataclass(frozen=True)
class Suite:
    """What is run.

    Attributes:
        name: what it is called.
        lengths: tokens of the needle's prompts, answers included, ascending.
        depths: where the needle stands, 0 at the start of the text and 1 at its end.
        prompts: per length and depth; every other task gets as many per length as all depths together.
        task_lengths: of the other tasks; none in ``long``.
        continuations: prompts that are continued; 0 is none, and then no text is evaluated either.
        new_tokens: of a continuation.
        seed: of everything that is drawn.
    """

    name: Name
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    prompts: int
    task_lengths: tuple[int, ...]
    continuations: int
    new_tokens: int
    seed: int

    @property
    def tokens(self) -> int:
        """Of all retrieval prompts together, over one cache."""
        each = sum(self.lengths) + sum(self.task_lengths) * (len(TASKS) - 1)
        return len(self.depths) * self.prompts * each


def resolve(
    name: str,
    context: int,
    *,
    max_length: int | None = None,
    depths: int | None = None,
    each: int | None = None,
    seed: int = 0,
) -> Suite:
    """The suite of this name for a model with this context.

    ``quick``: two lengths up to 1,024, every task at the shorter one. ``long``: the needle alone, from 512
    tokens by doubling up to ``max_length``, by default the context. ``full``: every task at all of these.

    Raises:
        UsageError: there is no such suite, or the model cannot read so much.
    """
    if name not in get_args(Name):
        raise UsageError(f"unknown suite {name!r}; use {', '.join(get_args(Name))}")
    if max_length is not None and max_length > context:
        raise UsageError(f"--max-length {max_length} is beyond the model's context of {context} tokens")
    longest = max_length or context
    if name == "quick":
        longest = min(longest, _QUICK_LENGTH)
        lengths: tuple[int, ...] = (longest // 2, longest)
    else:
        lengths = tuple(sorted(longest >> i for i in range(32) if i == 0 or longest >> i >= _SHORTEST))
    usual_depths, usual_prompts = _PROMPTS[name]  # type: ignore[index]
    steps = usual_depths if depths is None else depths
    return Suite(
        name=name,  # type: ignore[arg-type]
        lengths=lengths,
        depths=(0.5,) if steps == 1 else tuple(round(i / (steps - 1), 4) for i in range(steps)),
        prompts=usual_prompts if each is None else each,
        task_lengths={"quick": lengths[:1], "long": (), "full": lengths}[name],
        continuations={"quick": 4, "long": 0, "full": 16}[name],
        new_tokens=32 if name == "quick" else 128,
        seed=seed,
    )


@dataclass(frozen=True)
class Row:
    """One task at one length.

    Attributes:
        name: of the task.
        length: tokens of each prompt, the answer included.
        prompts: how many.
        reference: mean score over the unquantized cache, 0 to 1.
        quantized: the same over the quantized one.
        low: lower end of the 95 % confidence interval of ``quantized - reference``.
        high: its upper end.
        p_value: of no difference; McNemar's exact test where answers are right or wrong.
        guess: mean score of an answer that knows the text but not the question.
        able: the reference scores more than that for certain. If not, low, high and p_value are None.
        note: what the numbers do not say.
    """

    name: str
    length: int
    prompts: int
    reference: float
    quantized: float
    low: float | None
    high: float | None
    p_value: float | None
    guess: float
    able: bool
    note: str


@dataclass(frozen=True)
class Grid:
    """Mean needle scores ``[length][depth]``."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    reference: tuple[tuple[float, ...], ...]
    quantized: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Runner:
    """Model, tokenizer and the two ways to serve."""

    model: Any
    tokenizer: Any
    reference: Served
    quantized: Served
    stop: Collection[int]

    def scores(self, prompt: Prompt) -> tuple[float, float]:
        """Of the answers over the unquantized and over the quantized cache."""
        return self._score(prompt, self.reference), self._score(prompt, self.quantized)

    def _score(self, prompt: Prompt, served: Served) -> float:
        found = generation.greedy(self.model, served, prompt.tokens, prompt.room, self.stop)
        answer = self.tokenizer.decode(found, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return prompt.score(answer)


def needles(
    suite: Suite, runner: Runner, *, on_tokens: Callable[[float], None] = lambda _: None
) -> tuple[Grid, list[Row]]:
    """The needle at every length and depth, and a row for each length."""
    task, rows = TASKS[0], []
    assert task.name == NEEDLE
    grids: tuple[list[tuple[float, ...]], list[tuple[float, ...]]] = ([], [])
    for length in suite.lengths:
        pairs: list[tuple[float, float]] = []
        for depth in suite.depths:
            for index in range(suite.prompts):
                prompt = _prompt(suite, task, runner, length, index, depth)
                pairs.append(runner.scores(prompt))
                on_tokens(length)
        for side, grid in enumerate(grids):
            scores = [pair[side] for pair in pairs]
            cells = [scores[i : i + suite.prompts] for i in range(0, len(scores), suite.prompts)]
            grid.append(tuple(map(scoring.mean, cells)))
        rows.append(row(task.name, length, pairs, guess=0.0, seed=suite.seed))
    return Grid(suite.lengths, suite.depths, tuple(grids[0]), tuple(grids[1])), rows


def others(
    suite: Suite,
    runner: Runner,
    say: Callable[[str], None],
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> list[Row]:
    """Every other task; those without room in a length are left out there, and ``say`` hears of it."""
    rows = []
    for task in TASKS[1:]:
        for length in suite.task_lengths:
            count = suite.prompts * len(suite.depths)
            try:
                asked = [_prompt(suite, task, runner, length, index) for index in range(count)]
            except UsageError as error:
                say(f"left out: {error}")
                on_tokens(count * length)
                continue
            pairs = []
            for prompt in asked:
                pairs.append(runner.scores(prompt))
                on_tokens(length)
            guess = scoring.mean([prompt.draft.guess for prompt in asked])
            rows.append(row(task.name, length, pairs, guess=guess, seed=suite.seed))
    return rows


def row(name: str, length: int, pairs: Sequence[tuple[float, float]], *, guess: float, seed: int) -> Row:
    """What follows from the scores of pairs of answers, ``(reference, quantized)``."""
    reference, quantized = [a for a, _ in pairs], [b for _, b in pairs]
    able = scoring.bounds(reference)[0] > max(guess, _FLOOR)
    low, high = scoring.difference_bounds(reference, quantized, seed) if able else (None, None)
    return Row(
        name=name,
        length=length,
        prompts=len(pairs),
        reference=scoring.mean(reference),
        quantized=scoring.mean(quantized),
        low=low,
        high=high,
        p_value=scoring.p_value(reference, quantized, seed) if able else None,
        guess=guess,
        able=able,
        note=CANNOT if not able else UNCHANGED if reference == quantized else "",
    )


def areas(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Task -> area under score over length, of either cache; of tasks that the model can do somewhere."""
    found = {}
    for name in dict.fromkeys(row.name for row in rows if row.able):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: row.length)
        lengths = [row.length for row in mine]
        found[name] = {
            "reference": scoring.area(lengths, [row.reference for row in mine]),
            "quantized": scoring.area(lengths, [row.quantized for row in mine]),
        }
    return found


def _prompt(
    suite: Suite, task: Task, runner: Runner, length: int, index: int, depth: float | None = None
) -> Prompt:
    draw = f"{suite.seed}/{task.name}/{length}/{'any' if depth is None else depth}/{index}"
    return prompts.fitted(task, runner.tokenizer, length, draw, depth)
