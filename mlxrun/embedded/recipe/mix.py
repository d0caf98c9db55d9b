"""The mixture: which skills, how much of each, and dialogues that join several of them."""

from __future__ import annotations

import random

from . import scenes, skills, tools
from .skills import Example, Skill
from .words import TRAIN

# Scored on held-out data, in the order of the model card.
SCORED: dict[str, Skill] = {
    "add": skills.add, "sub": skills.sub, "recall": skills.recall, "repeat": skills.repeat,
    "name": skills.name, "rule": skills.rule, "json": skills.json_object, "tool": tools.tool,
    "tool_rounds": tools.tool_rounds, "think": skills.think, "chat": skills.chat,
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
    messages, images = [], []
    for part in rng.choices(_PARTS, k=rng.randint(2, 4)):
        example = SCORED[part](rng, split, 0.3)
        messages += [m for m in example.messages if m["role"] != "system"] if messages else example.messages
        images += example.images
        if messages[0]["role"] == "system" and part == "recall":
            break
    return Example("mixed", messages, messages[-1]["content"], images=images)


class Mixture:
    """Draws training examples so that each skill keeps its share of the tokens."""

    def __init__(self, rng: random.Random, split: str = TRAIN) -> None:
        self.rng, self.split = rng, split
        self.tokens = dict.fromkeys(SHARES, 1.0)

    def draw(self, reach: float) -> tuple[str, Example]:
        """The example of the skill that is furthest behind its share."""
        skill = max(SHARES, key=lambda s: SHARES[s] / self.tokens[s])
        make = SCORED.get(skill, mixed)
        return skill, make(self.rng, self.split, reach)

    def count(self, skill: str, tokens: int) -> None:
        """Book the tokens of an example; what is long ago fades."""
        self.tokens[skill] += tokens
        if sum(self.tokens.values()) > 1e6:
            self.tokens = {s: t / 2 for s, t in self.tokens.items()}
