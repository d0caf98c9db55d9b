"""Skills of form: JSON with given fields, and thinking before the answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tools.embedded_model import words
from tools.embedded_model.skills import Example, assistant, sum_pair, system, user
from tools.embedded_model.talk import filler
from tools.embedded_model.words import NOUNS, fresh

# -- JSON -------------------------------------------------------------------------------------------

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

        def make() -> list[tuple[str, Any]]:
            keys = rng.sample(list(_FIELDS), rng.randint(1, 5))
            return [(k if rng.random() < 0.8 else words.invented(rng), _FIELDS[k](rng)) for k in keys]

        value = dict(fresh(rng, split, make))
        question = rng.choice(_JSON).format(x=_field_list(rng, value))
    else:
        form, named = rng.choice(_PERSON)
        value = dict(fresh(rng, split, lambda: [(k, _FIELDS[k](rng)) for k in named]))
        text = form.format(**value)
        keys = rng.sample(named, rng.randint(1, len(named)))
        value = {k: value[k] for k in keys}
        ask = rng.choice(("As JSON with the keys {k}:", "Give JSON with the keys {k} for this:",
                          "Extract {k} as JSON."))  # fmt: skip
        question = f"{ask.format(k=', '.join(keys))} {text}"
    messages = [user(question), assistant(json.dumps(value, ensure_ascii=False))]
    if rng.random() < 0.25:
        messages.insert(0, system(rng.choice(("Answer in JSON.", "You write JSON.", "Only JSON."))))
    return Example("json", messages, value, "json")


# -- thinking ---------------------------------------------------------------------------------------

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

        def make(minus: bool = minus, total: int = total) -> tuple[Any, ...]:
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


def reasoning(message: str, content: str) -> dict:
    """An assistant turn that thinks first."""
    return {"role": "assistant", "content": content, "reasoning_content": message}


def think(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Think in steps, then answer."""
    question, steps, result = (_sorting if rng.random() < 0.25 else _steps)(rng, split)
    messages = [user(question), reasoning(steps, str(result))]
    for _ in range(rng.choice((0, 0, 0, 1))):
        messages = filler(rng, split) + messages
    if rng.random() < 0.2:
        messages.insert(0, system(rng.choice(("You are a helpful assistant.", "Be brief."))))
    return Example("think", messages, result, "number", thinking=True)
