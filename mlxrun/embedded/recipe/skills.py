"""The text skills: one function a skill, each making one dialogue from a random generator.

A skill is ``skill(rng, split, reach) -> Example``. What decides the answer (the operands, the
asked key, the rule and its question) is drawn with ``fresh``, so that a held-out dialogue asks
for content that no training dialogue has asked for. ``reach`` in 0..1 is how far the curriculum
has come: it bounds the length of the recall contexts, and is 1 for held-out data. The second stage of
the training has ``reach`` 2: wider forms, which make the model more robust and are not scored.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import words
from .words import ADJECTIVES, NOUNS, TEST, fresh


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


# -- arithmetic ---------------------------------------------------------------------------------

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
_SUB_WIDE = ["{a} minus {b}", "what is {a} - {b}", "What is left of {a} without {b}?",
             "What is the difference of {a} and {b}?", "I have {a} and lose {b}. How many are left?"]  # fmt: skip


def _operand(rng: random.Random, split: str) -> int:
    return rng.randint(10, 99) if split == TEST or rng.random() < 0.85 else rng.randint(0, 99)


def sum_pair(rng: random.Random, split: str) -> tuple[int, int]:
    """Two numbers to add; a + b and b + a are in the same split."""

    def make():
        return ("add", *sorted((_operand(rng, split), _operand(rng, split))))

    _, a, b = fresh(rng, split, make)
    return (a, b) if rng.random() < 0.5 else (b, a)


def difference_pair(rng: random.Random, split: str, negative: float = 0.15) -> tuple[int, int]:
    """Two numbers to subtract; the result is mostly not negative."""

    def make():
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


# -- recall -------------------------------------------------------------------------------------


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
    asked = [k for k, v in table.items() if words.is_held_out((k, v)) == (split == TEST)]
    return table, (" " if needle or rng.random() < 0.1 else "\n").join(lines), question, asked


def recall(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """A value from a list of up to 1,500 tokens, or hidden in as long a text."""
    longest = math.exp(math.log(60) + min(reach, 1.0) * math.log(1560 / 60))
    if split == TEST:
        tokens = rng.uniform(80, 1250)
    elif reach >= 1 and rng.random() < 0.04:
        tokens = rng.uniform(1500, 2200)
    else:
        tokens = math.exp(rng.uniform(math.log(20), math.log(longest)))
    asked: list[str] = []
    while not asked:
        table, text, question, asked = _table(rng, split, tokens)
    asked = rng.sample(asked, min(len(asked), 1 if split == TEST else rng.randint(1, 8)))
    ask = [question.format(k=k) for k in asked]
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
    for i, key in enumerate(asked):
        if i:
            messages.append(user(ask[i]))
        messages.append(assistant(table[key]))
    return Example("recall", messages, table[asked[-1]])


# -- repeat -------------------------------------------------------------------------------------

_REPEAT = [
    "Repeat exactly: {x}", "Repeat after me: {x}", "Say exactly this: {x}", "Copy this text: {x}",
    "Echo: {x}", "repeat: {x}", "Please repeat this word for word: {x}", "Say this back to me: {x}",
    "Repeat this text exactly:\n{x}", "Write this again: {x}",
]  # fmt: skip


def _piece(rng: random.Random, form: str) -> str:
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

    def make():
        count = rng.randint(1, 40)
        form = rng.choice(("plain", "plain", "mixed", "invented", "code", "number", "text", "noise"))
        if form == "noise" and random_text and split != TEST:
            return random_text(rng, rng.randint(1, 48)) or "noise"
        form = "mixed" if form == "noise" else form
        if form == "text":
            return " ".join(words.sentence(rng) for _ in range(rng.randint(1, 4)))
        cost = {"plain": 1, "mixed": 3, "invented": 5, "code": 8, "number": 4.5}[form]
        pieces = [_piece(rng, form) for _ in range(max(1, int(count / cost)))]
        return rng.choice((" ", " ", " ", ", ", "\n" if split != TEST else " ")).join(pieces)

    text = fresh(rng, split, make)
    question = rng.choice(_REPEAT).format(x=text)
    return Example("repeat", [user(question), assistant(text)], text)


# -- names and other facts told earlier ---------------------------------------------------------

_FACTS: dict[str, tuple] = {
    "name": (
        words.name,
        ["My name is {x}.", "I am {x}.", "Hello, I am {x}.", "Call me {x}.", "Hi! My name is {x}."],
        ["Nice to meet you, {x}."],
        ["What is my name?", "Who am I?", "Do you remember my name?", "What's my name?"],
        "Your name is {x}.",
    ),
    "city": (
        words.city,
        ["I live in {x}.", "My home is {x}.", "I am from {x}."],
        ["{x} sounds nice."],
        ["Where do I live?", "Which city do I live in?", "Where am I from?"],
        "You live in {x}.",
    ),
    "pet": (
        words.name,
        ["My dog is called {x}.", "I have a dog called {x}.", "My dog's name is {x}."],
        ["{x} is a nice name."],
        ["What is my dog called?", "What is the name of my dog?"],
        "Your dog is called {x}.",
    ),
    "colour": (
        lambda rng: rng.choice(words.COLOURS),
        ["My favourite colour is {x}.", "I like the colour {x} best.", "My favorite color is {x}."],
        ["{x} is a nice colour."],
        ["What is my favourite colour?", "Which colour do I like best?", "What is my favorite color?"],
        "Your favourite colour is {x}.",
    ),
    "thing": (
        words.thing,
        ["I lost my {x}.", "I have lost my {x}."],
        ["I am sorry about your {x}."],
        ["What did I lose?", "What have I lost?"],
        "You lost your {x}.",
    ),
}  # fmt: skip


def filler(rng: random.Random, split: str) -> list[dict]:
    """One short question and its answer, to stand between two turns that matter."""
    return rng.choice((add, sub, chat, chat, short_repeat))(rng, split).messages


def short_repeat(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Say one word."""
    word = fresh(rng, split, lambda: words.thing(rng))
    return Example("repeat", [user(rng.choice(_REPEAT).format(x=word)), assistant(word)], word)


def _tell(rng: random.Random, kind: str, value: str) -> list[dict]:
    _, tell, reply, _, _ = _FACTS[kind]
    answer = rng.choice(reply).format(x=value)
    return [user(rng.choice(tell).format(x=value)), assistant(answer[:1].upper() + answer[1:])]


def _name_wide(rng: random.Random, split: str) -> Example:
    """Name and city in one sentence, and replies of another assistant."""
    me = fresh(rng, split, lambda: words.name(rng))
    home = fresh(rng, split, lambda: words.city(rng))
    form = rng.choice(("I'm {n}.", "Hi, I'm {n} and I live in {c}.", "I am {n} from {c}.", "{n} is my name.",
                       "Hello! My name is {n}, I live in {c}.", "My friends call me {n}."))  # fmt: skip
    reply = rng.choice(("Nice to meet you.", "Hello {n}!", "OK.", "Hi {n}, how can I help you?", "Welcome!"))
    messages = [user(form.format(n=me, c=home)), assistant(reply.format(n=me))]
    for _ in range(rng.randint(0, 3)):
        messages += filler(rng, split)
    kind = "city" if "{c}" in form and rng.random() < 0.4 else "name"
    _, _, _, ask, answer = _FACTS[kind]
    value = home if kind == "city" else me
    messages += [user(rng.choice(ask)), assistant(answer.format(x=value))]
    return Example("name", messages, value, "contains", last_only=True)


def name(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """A name, or another fact, told two turns ago."""
    if reach > 1 and rng.random() < 0.4:
        return _name_wide(rng, split)
    kinds = ["name"] if rng.random() < 0.5 else ["name", rng.choice(list(_FACTS)[1:])]
    if split != TEST and rng.random() < 0.3:
        kinds = rng.sample(list(_FACTS), rng.randint(1, 4))
    rng.shuffle(kinds)
    told = {k: fresh(rng, split, lambda k=k: _FACTS[k][0](rng)) for k in kinds}
    messages: list[dict] = []
    for kind in kinds:
        messages += _tell(rng, kind, told[kind])
    for _ in range(rng.randint(1, 2) if split == TEST else rng.choice((0, 1, 1, 2, 3))):
        messages += filler(rng, split)
    asked = rng.sample(kinds, 1 if split == TEST else rng.randint(1, len(kinds)))
    if split == TEST and "name" in kinds and rng.random() < 0.7:
        asked = ["name"]
    for kind in asked:
        _, _, _, ask, answer = _FACTS[kind]
        messages += [user(rng.choice(ask)), assistant(answer.format(x=told[kind]))]
    return Example("name", messages, told[asked[-1]], "contains")


# -- rules of the system prompt -----------------------------------------------------------------

_TRUTHS = [
    ("Is {x} bigger than {y}?", lambda x, y: x > y),
    ("Is {x} smaller than {y}?", lambda x, y: x < y),
    ("Is {x} more than {y}?", lambda x, y: x > y),
    ("Is {x} less than {y}?", lambda x, y: x < y),
]
_SAY = ["Say the word {x}.", "Say {x}.", "Name this thing: {x}.", "Write {x}."]


def _plain_answer(rng: random.Random, split: str) -> tuple[str, str]:
    """A question that has a short answer without any rule, and that answer."""
    kind = rng.randrange(4)
    if kind == 0:
        example = rng.choice((add, sub))(rng, split)
        return example.messages[0]["content"], example.messages[1]["content"]
    if kind == 1:
        example = chat(rng, split)
        return example.messages[0]["content"], example.messages[1]["content"]
    word = rng.choice(NOUNS + ADJECTIVES)
    return rng.choice(_SAY).format(x=word), word


_RULES: list[tuple[list[str], Callable[[str, str], str]]] = [
    (["Answer in capital letters.", "Write every answer in upper case.", "Always use CAPITALS."],
     lambda a, w: a.upper()),
    (["Answer in lower case.", "Use only small letters.", "Write every answer in lower case."],
     lambda a, w: a.lower()),
    (["End every answer with the word {w}.", "Always end with {w}.", "Finish each answer with {w}."],
     lambda a, w: f"{a} {w}"),
    (["Start every answer with the word {w}.", "Always begin with {w}.", "Begin each answer with {w}."],
     lambda a, w: f"{w} {a}"),
    (["Put every answer in square brackets.", "Answer in square brackets."],
     lambda a, w: f"[{a}]"),
    (["Put every answer in quotes.", "Answer in quotes."], lambda a, w: f'"{a}"'),
    (["Say every answer twice.", "Give each answer two times."], lambda a, w: f"{a} {a}"),
    (["Only ever answer with {w}.", "Whatever is asked, answer {w}."], lambda a, w: w),
    (["Answer as a list with a dash.", "Start each answer with a dash."], lambda a, w: f"- {a}"),
]  # fmt: skip


def _truth(rng: random.Random, split: str) -> tuple[str, list[dict], str]:
    form, judge = rng.choice(_TRUTHS)
    _, x, y = fresh(rng, split, lambda: ("than", rng.randint(10, 99), rng.randint(10, 99)))
    rule = rng.choice(("Answer only with yes or no.", "Answer yes or no.", "Only say yes or no."))
    answer = "yes" if judge(x, y) else "no"
    return rule, [user(form.format(x=x, y=y)), assistant(answer)], answer


def rule(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """A rule set in the system prompt."""
    kind = rng.random()
    if kind < 0.12:
        text, messages, answer = _truth(rng, split)
        return Example("rule", [system(text), *messages], answer)
    if kind < 0.2:
        me = fresh(rng, split, lambda: words.name(rng))
        text = rng.choice(("You are called {x}.", "Your name is {x}.", "You are {x}.")).format(x=me)
        question = rng.choice(("What is your name?", "Who are you?", "What are you called?"))
        answer = f"I am {me}."
        return Example("rule", [system(text), user(question), assistant(answer)], answer)

    def make():
        i = rng.randrange(len(_RULES))
        return i, rng.choice(NOUNS if rng.random() < 0.8 else ADJECTIVES), _plain_answer(rng, split)

    i, word, (question, plain) = fresh(rng, split, make)
    forms, apply = _RULES[i]
    text = rng.choice(forms).format(w=word)
    if rng.random() < 0.3:
        lead = rng.choice(("You are a helpful assistant.", "Be brief.", "You answer questions."))
        text = f"{lead} {text}"
    messages = [system(text)]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        q, a = _plain_answer(rng, split)
        messages += [user(q), assistant(apply(a, word))]
    answer = apply(plain, word)
    return Example("rule", [*messages, user(question), assistant(answer)], answer)


# -- JSON ---------------------------------------------------------------------------------------

_FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "name": words.name,
    "city": words.city,
    "age": lambda r: r.randint(1, 99),
    "colour": lambda r: r.choice(words.COLOURS),
    "item": words.thing,
    "count": lambda r: r.randint(0, 500),
    "price": lambda r: round(r.uniform(1, 99), r.choice((1, 2))),
    "active": lambda r: r.random() < 0.5,
    "job": lambda r: r.choice(words.JOBS),
    "pet": lambda r: r.choice(words.ANIMALS),
    "day": lambda r: r.choice(words.DAYS),
    "code": words.code,
    "tags": lambda r: [r.choice(NOUNS) for _ in range(r.randint(1, 3))],
    "id": lambda r: r.randint(1, 9999),
}
_JSON = [
    "Give me JSON with {x}.", "Write a JSON object with {x}.", "Return JSON: {x}.",
    "Answer with a JSON object where {x}.", "Make JSON with these fields: {x}.",
]  # fmt: skip
_PERSON = [
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("{name} is a {job} from {city}.", ("name", "job", "city")),
    ("{name} has a {pet} and likes {colour}.", ("name", "pet", "colour")),
    ("{name} bought {count} of the {item} on {day}.", ("name", "count", "item", "day")),
    ("The {item} costs {price} and has the code {code}.", ("item", "price", "code")),
]


def _field_list(rng: random.Random, fields: dict) -> str:
    join, last = rng.choice((("{k} = {v}", ", "), ("{k} {v}", " and "), ("{k}: {v}", ", ")))
    parts = [join.format(k=k, v=v if isinstance(v, str) and rng.random() < 0.5 else json.dumps(v))
             for k, v in fields.items()]  # fmt: skip
    return last.join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def json_object(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """JSON with given fields."""
    if rng.random() < 0.6:

        def make():
            keys = rng.sample(list(_FIELDS), rng.randint(1, 5))
            return [(k if rng.random() < 0.8 else words.invented(rng), _FIELDS[k](rng)) for k in keys]

        value = dict(fresh(rng, split, make))
        question = rng.choice(_JSON).format(x=_field_list(rng, value))
    else:
        form, keys = rng.choice(_PERSON)
        value = dict(fresh(rng, split, lambda: [(k, _FIELDS[k](rng)) for k in keys]))
        text = form.format(**value)
        keys = rng.sample(keys, rng.randint(1, len(keys)))
        value = {k: value[k] for k in keys}
        ask = rng.choice(("As JSON with the keys {k}:", "Give JSON with the keys {k} for this:",
                          "Extract {k} as JSON."))  # fmt: skip
        question = f"{ask.format(k=', '.join(keys))} {text}"
    messages = [user(question), assistant(json.dumps(value, ensure_ascii=False))]
    if rng.random() < 0.25:
        messages.insert(0, system(rng.choice(("Answer in JSON.", "You write JSON.", "Only JSON."))))
    return Example("json", messages, value, "json")


# -- thinking -----------------------------------------------------------------------------------

_STORIES = [
    "{n} has {a} {t}s, gets {b} more and {w}s {c}. How many are left?",
    "{n} had {a} coins, found {b} and lost {c}. How many coins now?",
    "There are {a} people on a train. {b} get on and {c} get off. How many are on it?",
]


def _story(rng: random.Random, a: int, b: int, c: int) -> str:
    form = rng.choice(_STORIES)
    return form.format(n=words.name(rng), a=a, b=b, c=c, t=rng.choice(NOUNS[:60]),
                       w=rng.choice(("sell", "lose", "give")))  # fmt: skip


def _steps(rng: random.Random, split: str) -> tuple[str, str, int]:
    """A question of two or three operations, its steps, and the result."""
    a, b = sum_pair(rng, split)
    terms, steps, total = [str(a), "+", str(b)], [f"{a} + {b} = {a + b}"], a + b
    for _ in range(rng.choice((1, 1, 2))):
        minus = total >= 20 and rng.random() < 0.5

        def make(minus=minus, total=total):
            c = rng.randint(1, min(99, total) if minus else 99)
            return ("sub", total, c) if minus else ("add", *sorted((total, c)), c)

        c = fresh(rng, "train", make)[-1]
        result = total - c if minus else total + c
        steps.append(f"{total} {'-' if minus else '+'} {c} = {result}")
        terms += ["-" if minus else "+", str(c)]
        total = result
    if len(terms) == 5 and terms[3] == "-" and rng.random() < 0.5:
        question = _story(rng, a, b, int(terms[4]))
    else:
        form = rng.choice(("What is {x}?", "Compute {x}.", "{x}", "How much is {x}?"))
        question = form.format(x=" ".join(terms))
    return question, "\n".join(steps), total


def _sorting(rng: random.Random, split: str) -> tuple[str, str, int]:
    numbers = fresh(rng, split, lambda: rng.sample(range(10, 100), rng.randint(3, 5)))
    largest = rng.random() < 0.5
    best, steps = numbers[0], []
    for n in numbers[1:]:
        winner = max(best, n) if largest else min(best, n)
        steps.append(f"{best} or {n}: {winner}")
        best = winner
    question = f"Which is the {'largest' if largest else 'smallest'}: {', '.join(map(str, numbers))}?"
    return question, "\n".join(steps), best


def thought(message: str, content: str) -> dict:
    """An assistant turn that thinks first."""
    return {"role": "assistant", "content": content, "reasoning_content": message}


def think(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Think in steps, then answer."""
    question, steps, result = (_sorting if rng.random() < 0.25 else _steps)(rng, split)
    messages = [user(question), thought(steps, str(result))]
    for _ in range(rng.choice((0, 0, 0, 1))):
        messages = filler(rng, split) + messages
    if rng.random() < 0.2:
        messages.insert(0, system(rng.choice(("You are a helpful assistant.", "Be brief."))))
    return Example("think", messages, result, "number", thinking=True)


# -- talk ---------------------------------------------------------------------------------------

_ABILITIES = (
    "I can add and subtract, repeat text, remember what you tell me, find values in a list, "
    "follow simple rules, write JSON, call tools, and tell the colour, shape and count of figures."
)
_TALK = [
    (["Hello", "Hi", "hello", "Hey", "Hello!", "Hi there", "Hello there!", "Good morning", "hi", "Hi!",
      "hello!", "hey there", "Hey!", "good morning", "Good evening"],
     "Hello! How can I help you?"),
    (["What can you do?", "What are you able to do?", "Help", "How can you help me?", "what can you do",
      "What are your skills?", "Help me", "What do you know?", "what can you do?",
      "Tell me what you can do."], _ABILITIES),
    (["Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Are you a human?",
      "What model are you?"],
     "I am a very small language model that runs inside mlxrun."),
    (["Thanks", "Thank you", "Thank you!", "thanks a lot", "Great, thanks", "thanks!", "thank you",
      "Thanks!", "Thank you very much."], "You are welcome."),
    (["Bye", "Goodbye", "See you", "bye"], "Goodbye!"),
    (["How are you?", "How are you today?", "How do you do?"], "I am fine, thank you."),
    (["OK", "Okay.", "Good.", "Great!", "Nice.", "Good job", "Well done"], "I am glad to help."),
    (["Are you smart?", "How big are you?", "Are you a large model?"],
     "No, I am tiny: about four million parameters."),
]  # fmt: skip
_UNKNOWN = [
    "What is the capital of {c}?", "Who wrote the book about the {t}?", "Why is the {t} {a}?",
    "Tell me about {c}.", "How do I cook {d}?", "Who is {n}?", "Write a poem about the {t}.",
    "What is the meaning of life?", "How far is the moon?", "Tell me a joke.", "Explain the {t}.",
    "Who won the game in {c}?", "What happened in {c}?", "How does a {t} work?",
    "Write a story about {n} and a {t}.", "What do you think about {c}?",
]  # fmt: skip
_UNKNOWN_WIDE = [
    "Write a haiku.", "Write a {t}.", "List three {t}s.", "Say hi to {n}.", "How old is {n}?", "What is a {t}?",
    "Can you help me with my {t}?", "Who invented the {t}?", "Give me some {d}.", "What is love?", "Why?",
    "Summarize the book about {n}.", "Write some code.", "Write a program that sorts {t}s.", "Sing a song.",
    "Where is {c}?", "How many people live in {c}?", "Which is better, {t} or {d}?", "What is your opinion?",
    "Is {n} in {c}?", "Plan a trip to {c}.", "Tell me a story.", "Describe a {t}.", "How do I get to {c}?",
    "Recommend a {t}.", "What should I eat?", "Give me a recipe for {d}.", "Tell me a fact.", "{t}", "{n}?",
    "List three colours.", "What is new?", "Define {t}.", "Draw a {t}.", "I feel {a}.", "I like {d}.",
]  # fmt: skip
_HARD = ["What is {a} * {b}?", "{a} times {b}", "What is {a} / {b}?", "Divide {a} by {b}.", "What is {c} + {d}?",
         "{c} - {d}", "Multiply {a} and {b}.", "What is {c} plus {b}?", "What is {a} squared?"]  # fmt: skip
SORRY = "Sorry, I do not know. I am a very small model."
TOO_HARD = "Sorry, I can only add and subtract numbers of two digits."


def chat(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Small talk, and an honest answer to what is out of reach."""
    if reach > 1 and rng.random() < 0.2:
        question = rng.choice(_HARD).format(a=rng.randint(2, 99), b=rng.randint(2, 99), c=rng.randint(100, 9999),
                                            d=rng.randint(100, 9999))  # fmt: skip
        answer = TOO_HARD
    elif rng.random() < (0.6 if reach > 1 else 0.3):
        question = rng.choice(_UNKNOWN + _UNKNOWN_WIDE if reach > 1 else _UNKNOWN).format(
            c=words.city(rng), t=words.thing(rng), a=rng.choice(ADJECTIVES),
            d=rng.choice(words.DISHES), n=words.name(rng))  # fmt: skip
        answer = SORRY
    else:
        questions, answer = rng.choice(_TALK)
        question = rng.choice(questions)
    return Example("chat", [user(question), assistant(answer)], answer)
