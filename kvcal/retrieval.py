"""Retrieval tasks made by code: text in which something is to be found, a question, and the right answer.

The kinds are those of RULER (Hsieh et al., arXiv 2404.06654: needles, variable tracking, common words) and of
MRCR (Vodrahalli et al., arXiv 2409.12640: the n-th reply of several to one request); the wording is kvcal's
own. Everything is drawn from a seed, and a text of any number of lines can be made without changing what is
asked of it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvcal import scoring

NEEDLE = "needle"


@dataclass(frozen=True)
class Draft:
    """A prompt before it is fitted to a length.

    Attributes:
        instruction: what comes before the text.
        padding: nothing of use; so much of its end as a length wants stands in front of the text.
        lines: the text.
        question: what comes behind it.
        opening: first words of the answer, which are given.
        answers: what has to be in the answer.
        ideal: a perfect answer behind the opening; how long one may get.
        score: ``recall``: share of ``answers`` in the answer; ``ratio``: how alike it and ``ideal`` are.
        guess: score of an answer that knows the text but not what was asked.
    """

    instruction: str
    padding: str
    lines: tuple[str, ...]
    question: str
    opening: str
    answers: tuple[str, ...]
    ideal: str
    score: Literal["recall", "ratio"]
    guess: float


@dataclass(frozen=True)
class Task:
    """One kind of task.

    ``draft(draw, lines, depth)`` makes one with so many lines beside those that hold the answer; what it asks
    depends on ``draw`` alone. ``depth`` between 0 and 1 places a single needle; None spreads by chance.
    """

    name: str
    least_lines: int
    draft: Callable[[str, int, float | None], Draft]


def _listing(text: str) -> list[str]:
    return text.split("|")


_SUBJECTS = _listing(
    "baker|gardener|pilot|teacher|sailor|painter|doctor|farmer|singer|carpenter|librarian|tailor|miner|"
    "weaver|printer|shepherd|cook|judge|potter|clerk|guard|porter|chemist|dancer"
)
_VERBS = _listing(
    "counted|painted|repaired|carried|described|measured|sorted|watched|borrowed|cleaned|ordered|copied|"
    "forgot|wrapped|weighed|sketched|returned|polished|praised|stacked"
)
_THINGS = _listing(
    "old lamps|wooden boxes|blue plates|paper maps|small bells|clay jars|warm coats|long ropes|green chairs|"
    "iron gates|glass beads|heavy books|round tables|white sheets|empty barrels|silver spoons|stone steps|"
    "brass keys|dry leaves|soft blankets|tall ladders|broken clocks"
)
_PLACES = _listing(
    "near the harbour|behind the mill|in the garden|under the bridge|at the station|by the river|"
    "in the workshop|on the hill|beside the church|along the road|in the cellar|at the market|"
    "across the square|inside the barn|above the shop|outside the school"
)
_TIMES = _listing(
    "before noon|after the rain|in early spring|late at night|on a quiet day|during the winter|at sunrise|"
    "last autumn|between two storms|for the third time|without a word|with great care"
)
_CITIES = _listing(
    "Lisbon|Oslo|Cairo|Lima|Dublin|Prague|Nairobi|Havana|Athens|Kyoto|Vienna|Boston|Madrid|Delhi|Sydney|"
    "Geneva|Warsaw|Tunis|Quito|Riga|Seoul|Milan|Accra|Berlin"
)
_WORDS = _listing(
    "apple|bridge|candle|desert|engine|forest|guitar|hammer|island|jacket|kitchen|ladder|market|needle|orange|"
    "pencil|quarter|river|saddle|temple|uncle|valley|window|yellow|anchor|basket|carpet|dragon|eagle|feather|"
    "garden|helmet|insect|jungle|kettle|lemon|mirror|nation|ocean|palace|rabbit|shadow|thunder|velvet|wagon"
)
_TOPICS = _listing("rivers|owls|bread|trains|snow|music|horses|lighthouses")
_FORMS = ("short note", "riddle", "little story")
_ORDINALS = ("first", "second", "third", "fourth")

_KEYS = 8  # codes that a text of several keys holds
_ASKED = 4  # values, or keys, that a question asks for
_CHAINS, _HOPS = 3, 4
_COMMON, _UNCOMMON = 5, 30
_REPLIES = 3  # to the request that is asked for


def _needle(draw: str, lines: int, depth: float | None) -> Draft:
    city, code = _codes(draw, 1)[0]
    text = _spread(draw, lines, [_code_line(city, code)], depth)
    return _about_codes(draw, text, [city], [code], guess=0.0)


def _multi_key(draw: str, lines: int, depth: float | None) -> Draft:
    codes = _codes(draw, _KEYS)
    text = _spread(draw, lines, [_code_line(*each) for each in codes], depth)
    return _about_codes(draw, text, [codes[0][0]], [codes[0][1]], guess=1 / _KEYS)


def _multi_value(draw: str, lines: int, depth: float | None) -> Draft:
    codes = _codes(draw, _KEYS)
    city, others = codes[0][0], codes[_ASKED:]
    values = [code for _, code in codes[:_ASKED]]
    hidden = [_code_line(city, code) for code in values] + [_code_line(*each) for each in others]
    text = _spread(draw, lines, hidden, depth)
    return _about_codes(draw, text, [city], values, guess=_ASKED / _KEYS)


def _multi_query(draw: str, lines: int, depth: float | None) -> Draft:
    codes = _codes(draw, _KEYS)
    text = _spread(draw, lines, [_code_line(*each) for each in codes], depth)
    asked = codes[:_ASKED]
    cities, values = [city for city, _ in asked], [code for _, code in asked]
    return _about_codes(draw, text, cities, values, guess=_ASKED / _KEYS)


def _variables(draw: str, lines: int, depth: float | None) -> Draft:
    facts = random.Random(f"{draw}/facts")
    letters = "BCDFGHJKLMNPQRSTVWXZ"
    names: list[str] = []
    while len(names) < _CHAINS * _HOPS:
        name = "".join(facts.sample(letters, 3))
        if name not in names and name != "VAR":
            names.append(name)
    values = [str(n) for n in facts.sample(range(10000, 100000), _CHAINS)]
    chains = [names[i * _HOPS : (i + 1) * _HOPS] for i in range(_CHAINS)]
    queues = [
        [f"VAR {chain[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(chain))]
        for chain, value in zip(chains, values, strict=True)
    ]
    hidden = []  # in an order in which each variable is set before it is used
    while any(queues):
        hidden.append(facts.choice([queue for queue in queues if queue]).pop(0))
    return Draft(
        instruction="Some lines of this text set variables. Keep track of the value of each of them.",
        padding=_padding(draw),
        lines=_spread(draw, lines, hidden, depth, shuffled=False),
        question=f"Which variables have the value {values[0]}? Name all {_HOPS} of them.",
        opening=f"The variables with the value {values[0]} are",
        answers=tuple(chains[0]),
        ideal=f" {_listed(chains[0])}.",
        score="recall",
        guess=1 / _CHAINS,
    )


def _common_words(draw: str, lines: int, depth: float | None) -> Draft:
    facts = random.Random(f"{draw}/facts")
    words = facts.sample(_WORDS, _COMMON + _UNCOMMON)
    common, uncommon = words[:_COMMON], words[_COMMON:]
    often = lines // (2 * _COMMON)
    listed = common * often
    rest = lines - len(listed)
    listed += (uncommon * (rest // _UNCOMMON + 1))[:rest]
    random.Random(f"{draw}/order").shuffle(listed)
    return Draft(
        instruction="This is a list of words. Some of them stand there much more often than the others.",
        padding="\n".join(uncommon),
        lines=tuple(listed),
        question=f"Which {_COMMON} words are the most common ones of the list?",
        opening=f"The {_COMMON} most common words are",
        answers=tuple(sorted(common)),
        ideal=f" {_listed(sorted(common))}.",
        score="recall",
        guess=_COMMON / len(words),
    )


def _coreference(draw: str, lines: int, depth: float | None) -> Draft:
    facts = random.Random(f"{draw}/facts")
    topic, form, which = facts.choice(_TOPICS), facts.choice(_FORMS), facts.randrange(_REPLIES)
    replies = [_reply(facts, topic) for _ in range(_REPLIES)]
    requests = [(f, t) for f in _FORMS for t in _TOPICS if (f, t) != (form, topic)]
    drawn = random.Random(f"{draw}/text")
    others = []
    for _ in range(lines):
        other_form, other_topic = drawn.choice(requests)
        others.append(_round(other_form, other_topic, _reply(drawn, other_topic)))
    hidden = [_round(form, topic, reply) for reply in replies]
    wrong = [scoring.ratio(reply, replies[which]) for i, reply in enumerate(replies) if i != which]
    return Draft(
        instruction="This is a conversation of a user with an assistant.",
        padding=_padding(draw),
        lines=_placed(draw, others, hidden, depth, shuffled=False),
        question=(
            f"Repeat, word for word, the assistant's {_ORDINALS[which]} reply to the request for a {form}"
            f" about {topic}, and write nothing else."
        ),
        opening="",
        answers=(replies[which],),
        ideal=replies[which],
        score="ratio",
        guess=sum(wrong) / len(wrong),
    )


# name, the fewest lines that leave room for all that a text has to hold, how it is made
TASKS: tuple[Task, ...] = (
    Task(NEEDLE, 2, _needle),
    Task("multi_key", 2, _multi_key),
    Task("multi_value", 2, _multi_value),
    Task("multi_query", 2, _multi_query),
    Task("variables", 2, _variables),
    Task("common_words", 6 * _COMMON, _common_words),
    Task("coreference", 2, _coreference),
)


def _codes(draw: str, count: int) -> list[tuple[str, str]]:
    """Cities and six-digit codes, all different."""
    facts = random.Random(f"{draw}/facts")
    numbers = facts.sample(range(100000, 1000000), count)
    return list(zip(facts.sample(_CITIES, count), map(str, numbers), strict=True))


def _code_line(city: str, code: str) -> str:
    return f"The pass code for {city} is {code}."


def _about_codes(
    draw: str, text: tuple[str, ...], cities: list[str], codes: list[str], guess: float
) -> Draft:
    several = len(codes) > 1
    asked = f"the pass codes for {_listed(cities)}" if several else f"the pass code for {cities[0]}"
    how_many = f"What are {asked}? There are {len(codes)}." if several else f"What is {asked}?"
    return Draft(
        instruction="There are pass codes in this text. Remember them, you will be asked for them.",
        padding=_padding(draw),
        lines=text,
        question=how_many,
        opening=f"{asked[0].upper()}{asked[1:]} {'are' if several else 'is'}",
        answers=tuple(codes),
        ideal=f" {_listed(codes)}.",
        score="recall",
        guess=guess,
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sentence(drawn: random.Random) -> str:
    parts = (drawn.choice(words) for words in (_SUBJECTS, _VERBS, _THINGS, _PLACES, _TIMES))
    return "The {} {} the {} {} {}.".format(*parts)


def _padding(draw: str) -> str:
    drawn = random.Random(f"{draw}/padding")
    return " ".join(_sentence(drawn) for _ in range(6))


def _reply(drawn: random.Random, topic: str) -> str:
    return f"{topic.capitalize()}: {_sentence(drawn)} {_sentence(drawn)}"


def _round(form: str, topic: str, reply: str) -> str:
    return f"User: Write a {form} about {topic}.\nAssistant: {reply}"


def _spread(
    draw: str, lines: int, hidden: list[str], depth: float | None, *, shuffled: bool = True
) -> tuple[str, ...]:
    drawn = random.Random(f"{draw}/text")
    return _placed(draw, [_sentence(drawn) for _ in range(lines)], hidden, depth, shuffled=shuffled)


def _placed(
    draw: str, others: list[str], hidden: list[str], depth: float | None, *, shuffled: bool
) -> tuple[str, ...]:
    """Hidden lines among others: at depth 0 before the first, at 1 behind the last."""
    chance = random.Random(f"{draw}/places")
    hidden = chance.sample(hidden, len(hidden)) if shuffled else hidden
    depths = sorted(chance.random() for _ in hidden) if depth is None else [depth] * len(hidden)
    text = list(others)
    for line, at in reversed(list(zip(hidden, depths, strict=True))):
        text.insert(round(at * len(others)), line)
    return tuple(text)
