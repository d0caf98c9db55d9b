"""The text skills: one function a skill, each making one dialogue from a random generator.

A skill is ``skill(rng, split, reach) -> Example``. What decides the answer (the operands, the
asked key, the rule and its question) is drawn with ``fresh``, so that a held-out dialogue asks
for content that no training dialogue has asked for. ``reach`` in 0..1 is how far the curriculum
has come: it bounds the length of the recall contexts, and is 1 for held-out data. The second stage of
the training has ``reach`` 2: wider forms, which make the model more robust and are not scored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.embedded_model import words
from tools.embedded_model.words import ADJECTIVES, NOUNS, TEST, fresh


@dataclass
class Example:
    """One dialogue: its last message is the answer that a score looks at."""

    skill: str
    messages: list[dict]
    expected: Any
    match: str = "exact"
    tools: list[dict] | None = None
    thinking: bool = False
    last_only: bool = False  # learn the last turn alone: the earlier ones are not how we would answer
    images: list = field(default_factory=list)


Skill = Callable[[random.Random, str, float], Example]


def user(content: Any) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict:
    return {"role": "system", "content": content}


# -- arithmetic -------------------------------------------------------------------------------------

_ADD = [
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}=",
    "Compute {a} + {b}.",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "What is {a} plus {b}?",
    "Please work out {a} + {b}.",
    "calculate {a}+{b}",
    "What's {a} + {b}?",
    "What is the sum of {a} and {b}?",
    "{a} + {b} = ?",
]
_SUB = [
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}=", "Compute {a} - {b}.", "How much is {a} minus {b}?",
    "Subtract {b} from {a}.", "What is {a} minus {b}?", "Please work out {a} - {b}.",
    "calculate {a}-{b}", "What's {a} - {b}?", "Take {b} from {a}.", "{a} - {b} = ?",
]  # fmt: skip
_ADD_WIDE = [
    "How much are {a} and {b} together?",
    "Sum {a} and {b}.",
    "What do {a} and {b} make?",
    "{a} plus {b}",
    "How many is {a} and {b} together?",
    "what is {a} + {b}",
    "I have {a} and get {b} more. How many?",
]
_SUB_WIDE = [
    "{a} minus {b}", "what is {a} - {b}", "What is left of {a} without {b}?",
    "What is the difference of {a} and {b}?", "I have {a} and lose {b}. How many are left?",
]  # fmt: skip


def _operand(rng: random.Random, split: str) -> int:
    return rng.randint(10, 99) if split == TEST or rng.random() < 0.85 else rng.randint(0, 99)


def sum_pair(rng: random.Random, split: str) -> tuple[int, int]:
    """Two numbers to add; a + b and b + a are in the same split."""

    def make() -> tuple[Any, ...]:
        return ("add", *sorted((_operand(rng, split), _operand(rng, split))))

    _, a, b = fresh(rng, split, make)
    return (a, b) if rng.random() < 0.5 else (b, a)


def difference_pair(rng: random.Random, split: str, negative: float = 0.15) -> tuple[int, int]:
    """Two numbers to subtract; the result is mostly not negative."""

    def make() -> tuple[Any, ...]:
        a, b = _operand(rng, split), _operand(rng, split)
        return ("sub", a, b) if a >= b or rng.random() < negative else ("sub", b, a)

    _, a, b = fresh(rng, split, make)
    return a, b


def add(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Two-digit addition."""
    a, b = sum_pair(rng, split)
    question = rng.choice(_ADD + _ADD_WIDE if reach > 1 else _ADD).format(a=a, b=b)
    return Example("add", [user(question), assistant(str(a + b))], a + b, "number")


def sub(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Two-digit subtraction."""
    a, b = difference_pair(rng, split)
    question = rng.choice(_SUB + _SUB_WIDE if reach > 1 else _SUB).format(a=a, b=b)
    return Example("sub", [user(question), assistant(str(a - b))], a - b, "number")


# -- recall -----------------------------------------------------------------------------------------


def _entry_key(rng: random.Random, form: str) -> str:
    if form == "code":
        return words.code(rng)
    if form == "word":
        return rng.choice(NOUNS) if rng.random() < 0.6 else words.invented(rng)
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def _entry_value(rng: random.Random, form: str) -> str:
    if form == "number":
        return str(rng.randint(10 ** rng.randint(1, 4), 99999))
    return rng.choice(NOUNS) if form == "word" else words.code(rng)


# (a line of the list, the question); "needle" lines hide among filler sentences.
_TABLES = [
    ("{k}: {v}", "What is the value of {k}?"),
    ("{k} = {v}", "{k} = ?"),
    ("The code of the {k} is {v}.", "What is the code of the {k}?"),
    ("{k} -> {v}", "What belongs to {k}?"),
    ("- {k}: {v}", "Which value has {k}?"),
    ("Remember: {k} is {v}.", "What is {k}?"),
    ("The secret for {k} is {v}.", "Tell me the secret for {k}."),
]


def _table(rng: random.Random, split: str, tokens: float) -> tuple[dict, str, str, list[str]]:
    """Keys with values, the line and question forms, and the keys that may be asked."""
    key_form = rng.choices(("word", "two", "code"), (3, 5, 2))[0]
    value_form = rng.choices(("number", "word", "code"), (6, 2, 2))[0]
    line, question = rng.choice(_TABLES)
    cost = len(line) / 5 + {"word": 2.5, "two": 2.5, "code": 5}[key_form]
    cost += {"number": 4, "word": 1, "code": 5}[value_form]
    needle = rng.random() < 0.25
    count = max(1, int(tokens / cost * (rng.uniform(0.05, 0.4) if needle else 1)))
    table: dict[str, str] = {}
    while len(table) < min(count, 120):
        table.setdefault(_entry_key(rng, key_form), _entry_value(rng, value_form))
    lines = [line.format(k=k, v=v) for k, v in table.items()]
    if needle:
        fillers = int((tokens - count * cost) / 9)
        lines += [words.sentence(rng) for _ in range(fillers)]
        rng.shuffle(lines)
    received = [k for k, v in table.items() if words.is_held_out((k, v)) == (split == TEST)]
    return table, (" " if needle or rng.random() < 0.1 else "\n").join(lines), question, received


def recall(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """A value from a list of up to 1,500 tokens, or hidden in as long a text."""
    longest = math.exp(math.log(60) + min(reach, 1.0) * math.log(1560 / 60))
    if split == TEST:
        tokens = rng.uniform(80, 1250)
    elif reach >= 1 and rng.random() < 0.04:
        tokens = rng.uniform(1500, 2200)
    else:
        tokens = math.exp(rng.uniform(math.log(20), math.log(longest)))
    received: list[str] = []
    while not received:
        table, text, question, received = _table(rng, split, tokens)
    received = rng.sample(received, min(len(received), 1 if split == TEST else rng.randint(1, 8)))
    ask = [question.format(k=k) for k in received]
    place = rng.randrange(4)
    if place == 0:
        messages = [system(text), user(ask[0])]
    elif place == 1:
        intro = rng.choice(("Here is a list:", "Notes:", "Read this:", "Remember this list."))
        messages = [user(f"{intro}\n{text}"), assistant("Noted."), user(ask[0])]
    elif place == 2:
        messages = [user(f"{ask[0]}\n{text}")]
    else:
        messages = [user(f"{text}\n{ask[0]}")]
    for i, key in enumerate(received):
        if i:
            messages.append(user(ask[i]))
        messages.append(assistant(table[key]))
    return Example("recall", messages, table[received[-1]])


# -- repeat -----------------------------------------------------------------------------------------

_REPEAT = [
    "Repeat exactly: {x}", "Repeat after me: {x}", "Say exactly this: {x}", "Copy this text: {x}",
    "Echo: {x}", "repeat: {x}", "Please repeat this word for word: {x}", "Say this back to me: {x}",
    "Repeat this text exactly:\n{x}", "Write this again: {x}",
]  # fmt: skip


def _part(rng: random.Random, form: str) -> str:
    if form == "mixed":
        form = rng.choice(("plain", "plain", "invented", "code", "number", "name"))
    if form == "plain":
        return rng.choice(rng.choice((NOUNS, ADJECTIVES, words.VERBS)))
    if form == "name":
        return rng.choice(words.NAMES + words.CITIES)
    if form == "number":
        return str(rng.randint(0, 10 ** rng.randint(1, 5)))
    return words.code(rng) if form == "code" else words.invented(rng)


# Text from random token ids, set by the training run: it makes copying independent of words.
random_text: Callable[[random.Random, int], str] | None = None


def repeat(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Repeat up to 40 tokens exactly."""

    def make() -> str:
        count = rng.randint(1, 40)
        form = rng.choice(("plain", "plain", "mixed", "invented", "code", "number", "text", "noise"))
        if form == "noise" and random_text and split != TEST:
            return random_text(rng, rng.randint(1, 48)) or "noise"
        form = "mixed" if form == "noise" else form
        if form == "text":
            return " ".join(words.sentence(rng) for _ in range(rng.randint(1, 4)))
        cost = {"plain": 1, "mixed": 3, "invented": 5, "code": 8, "number": 4.5}[form]
        parts = [_part(rng, form) for _ in range(max(1, int(count / cost)))]
        return rng.choice((" ", " ", " ", ", ", "\n" if split != TEST else " ")).join(parts)

    text = fresh(rng, split, make)
    question = rng.choice(_REPEAT).format(x=text)
    return Example("repeat", [user(question), assistant(text)], text)


def short_repeat(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Say one word."""
    word = fresh(rng, split, lambda: words.thing(rng))
    return Example("repeat", [user(rng.choice(_REPEAT).format(x=word)), assistant(word)], word)
