"""The mixture: which skills, how much of each, and dialogues that join several of them."""

from __future__ import annotations

import random

from tools.embedded_model import answers, scenes, skills, talk, tool_calls
from tools.embedded_model.skills import Example, Skill
from tools.embedded_model.words import TRAIN

# Scored on held-out data, in the order of the model card.
SCORED: dict[str, Skill] = {
    "add": skills.add, "sub": skills.sub, "recall": skills.recall, "repeat": skills.repeat,
    "name": talk.name, "rule": talk.rule, "json": answers.json_object, "tool": tool_calls.tool,
    "tool_rounds": tool_calls.tool_rounds, "think": answers.think, "chat": talk.chat,
    "colour": scenes.colour, "shape": scenes.shape, "count": scenes.count, "look": scenes.look,
}  # fmt: skip

# Share of the training tokens.
SHARES = {
    "add": 0.04, "sub": 0.06, "recall": 0.25, "repeat": 0.08, "name": 0.06, "rule": 0.07, "json": 0.06,
    "tool": 0.12, "tool_rounds": 0.03, "think": 0.06, "chat": 0.01, "colour": 0.02, "shape": 0.02,
    "count": 0.03, "look": 0.04, "mixed": 0.05,
}  # fmt: skip

_PARTS = ["add", "sub", "repeat", "name", "json", "chat", "colour", "shape", "count", "recall"]


def mixed(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Two to four dialogues of different skills, one after the other, as one."""
    messages: list[dict] = []
    images: list = []
    for part in rng.choices(_PARTS, k=rng.randint(2, 4)):
        example = SCORED[part](rng, split, reach if reach > 1 or rng.random() < 0.15 else min(reach, 0.3))
        turns = example.messages
        if turns[0]["role"] == "system" and part != "recall":
            turns = turns[1:]
        elif turns[0]["role"] == "system" and messages:
            continue
        messages += turns
        images += example.images
    return Example("mixed", messages, messages[-1]["content"], images=images)


_LEADS = [
    "You are a helpful assistant.", "You are a helpful AI assistant.", "Be brief.", "You are mlxrun.",
    "You are an assistant.", "Answer the questions.", "Help the user.", "Be kind and helpful.",
    "You are a friendly assistant. Answer briefly.",
]  # fmt: skip
_LINES = {
    "add": "I add the numbers.", "sub": "I subtract the numbers.", "repeat": "I repeat it.",
    "name": "I was told this before.", "json": "I write the fields as JSON.", "rule": "I follow the rule.",
    "chat": "I answer this.", "recall": "I look for the key.", "tool": "I need a function.",
    "tool_rounds": "I tell the results.", "colour": "I look at the colour.",
    "shape": "I look at the shape.", "count": "I count them.",
}  # fmt: skip


_POLITE = ("add", "sub", "tool", "think", "json", "colour", "shape", "count", "look", "tool_rounds")
_BEFORE = [
    "Please: ",
    "Hello! ",
    "Quick question: ",
    "Can you help? ",
    "Now: ",
    "OK. ",
    "Hey, ",
    "I need help. ",
]
_AFTER = [" Thanks.", " Please.", " Thank you!", " Be quick."]


def polite(rng: random.Random, example: Example) -> None:
    """Put a few words around a question."""
    message = rng.choice([m for m in example.messages if m["role"] == "user"])
    before, after = rng.choice(((rng.choice(_BEFORE), ""), ("", rng.choice(_AFTER))))
    parts = message["content"] if isinstance(message["content"], list) else [message]
    for part in parts:
        key = "text" if "text" in part else "content"
        if key in part:
            text = part[key]
            part[key] = before + text + (after if text.endswith((".", "?")) else "")


def aloud(example: Example) -> None:
    """Switch thinking on for a skill that does not need it: one line, then the same answer."""
    example.messages[-1] = {**example.messages[-1], "reasoning_content": _LINES[example.skill]}
    example.thinking = True


class Mixture:
    """Draws training examples so that each skill keeps its share of the tokens."""

    def __init__(self, rng: random.Random, split: str = TRAIN) -> None:
        self.rng, self.split = rng, split
        self.tokens = dict.fromkeys(SHARES, 1.0)

    def draw(self, reach: float) -> tuple[str, Example]:
        """The example of the skill that is furthest behind its share."""
        skill = max(SHARES, key=lambda s: SHARES[s] / self.tokens[s])
        example = SCORED.get(skill, mixed)(self.rng, self.split, reach)
        if example.messages[0]["role"] != "system" and self.rng.random() < 0.1:
            example.messages.insert(0, {"role": "system", "content": self.rng.choice(_LEADS)})
        if reach > 1 and skill in _POLITE and self.rng.random() < 0.15:
            polite(self.rng, example)
        if skill in _LINES and self.rng.random() < 0.03:
            aloud(example)
        return skill, example

    def count(self, skill: str, tokens: int) -> None:
        """Book the tokens of an example; what is long ago fades."""
        self.tokens[skill] += tokens
        if sum(self.tokens.values()) > 1e6:
            self.tokens = {s: t / 2 for s, t in self.tokens.items()}
