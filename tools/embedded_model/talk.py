"""Skills of conversation: small talk, facts told earlier, rules of the system prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tools.embedded_model import words
from tools.embedded_model.skills import Example, add, assistant, short_repeat, sub, system, user
from tools.embedded_model.words import ADJECTIVES, NOUNS, TEST, fresh

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
    "Write a haiku.", "Write a {t}.", "List three {t}s.", "Say hi to {n}.", "How old is {n}?",
    "What is a {t}?",
    "Can you help me with my {t}?", "Who invented the {t}?", "Give me some {d}.", "What is love?", "Why?",
    "Summarize the book about {n}.", "Write some code.", "Write a program that sorts {t}s.", "Sing a song.",
    "Where is {c}?", "How many people live in {c}?", "Which is better, {t} or {d}?", "What is your opinion?",
    "Is {n} in {c}?", "Plan a trip to {c}.", "Tell me a story.", "Describe a {t}.", "How do I get to {c}?",
    "Recommend a {t}.", "What should I eat?", "Give me a recipe for {d}.", "Tell me a fact.", "{t}", "{n}?",
    "List three colours.", "What is new?", "Define {t}.", "Draw a {t}.", "I feel {a}.", "I like {d}.",
]  # fmt: skip
_HARD = ["What is {a} * {b}?", "{a} times {b}", "What is {a} / {b}?", "Divide {a} by {b}.",
         "What is {c} + {d}?", "{c} - {d}", "Multiply {a} and {b}.",
         "What is {c} plus {b}?", "What is {a} squared?"]  # fmt: skip
SORRY = "Sorry, I do not know. I am a very small model."
TOO_HARD = "Sorry, I can only add and subtract numbers of two digits."


def chat(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Small talk, and an honest answer to what is out of reach."""
    if reach > 1 and rng.random() < 0.2:
        a, b, c, d = (rng.randint(*span) for span in ((2, 99), (2, 99), (100, 9999), (100, 9999)))
        question = rng.choice(_HARD).format(a=a, b=b, c=c, d=d)
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


def filler(rng: random.Random, split: str) -> list[dict]:
    """One short question and its answer, to stand between two turns that matter."""
    return rng.choice((add, sub, chat, chat, short_repeat))(rng, split).messages


# -- names and other facts told earlier -------------------------------------------------------------

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
    reported = {k: fresh(rng, split, partial(_FACTS[k][0], rng)) for k in kinds}
    messages: list[dict] = []
    for kind in kinds:
        messages += _tell(rng, kind, reported[kind])
    for _ in range(rng.randint(1, 2) if split == TEST else rng.choice((0, 1, 1, 2, 3))):
        messages += filler(rng, split)
    received = rng.sample(kinds, 1 if split == TEST else rng.randint(1, len(kinds)))
    if split == TEST and "name" in kinds and rng.random() < 0.7:
        received = ["name"]
    for kind in received:
        _, _, _, ask, answer = _FACTS[kind]
        messages += [user(rng.choice(ask)), assistant(answer.format(x=reported[kind]))]
    return Example("name", messages, reported[received[-1]], "contains")


# -- rules of the system prompt ---------------------------------------------------------------------

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

    def make() -> tuple[Any, ...]:
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
