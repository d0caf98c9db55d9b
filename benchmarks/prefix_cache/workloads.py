"""What `python -m benchmarks prefix-cache` asks: scripts of requests that are served one after the other.
Pure and seeded.

A script yields an Ask and is sent the answer's tokens, so that a conversation can build on its answers. The
same scenario, scale, vocabulary and seed give the same asks. `boundaries` are those that the text side gives:
the end of the system part and the start of the last user turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxrun.bench.engine.workloads import BenchRequest, Workload

TURNS = 10
USERS = 4  # requests that share a prefix
LEAST_OUTPUT = 16  # however small the scale: answers are compared

Role = Literal["first", "cold", "warm", "alone"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `first` opens a conversation, `cold` is new to the cache, `warm` is not, `alone` is asked
    of an empty cache for what it then holds. `fresh`: forget everything before."""

    role: Role
    prompt: tuple[int, ...] = field(repr=False)
    output: int
    boundaries: tuple[int, ...] = ()
    fresh: bool = False
    request: Any = field(default=None, repr=False)  # a Request, where tokens alone do not say it all


Script = Generator[Ask, tuple[int, ...], None]


class Draw:
    """Random tokens, and lengths times the scale."""

    def __init__(self, name: str, scale: float, vocab: int) -> None:
        self._random = random.Random(name)
        self._scale = scale
        self._vocab = vocab

    def tokens(self, count: int) -> tuple[int, ...]:
        """`count` tokens, as they are."""
        return tuple(self._random.choices(range(self._vocab), k=count))

    def scaled(self, count: int) -> tuple[int, ...]:
        """`count` times the scale of them."""
        return self.tokens(self.length(count))

    def length(self, count: int, least: int = 4) -> int:
        """`count` times the scale."""
        return max(least, round(count * self._scale))

    def output(self, count: int) -> int:
        """Length of an answer."""
        return self.length(count, LEAST_OUTPUT)


def make_script(name: str, scale: float, vocab: int, seed: str) -> Script:
    """The asks of that scenario; every seed draws other tokens of the same lengths."""
    return SCRIPTS[name](Draw(f"{name} {seed}", scale, vocab))


def _repeat(draw: Draw) -> Script:
    """16k tokens, and the very same again: system and tools a quarter of them."""
    system = draw.scaled(4096)
    prompt = system + draw.scaled(12288)
    for role, fresh in (("cold", True), ("warm", False)):
        yield Ask(role, prompt, draw.output(32), (len(system),), fresh)  # type: ignore[arg-type]


def _shared(tokens: int) -> Callable[[Draw], Script]:
    def script(draw: Draw) -> Script:
        system = draw.scaled(tokens)
        for i in range(USERS):
            prompt = system + draw.scaled(256)
            yield Ask("warm" if i else "cold", prompt, draw.output(32), (len(system),), fresh=i == 0)

    return script


def _conversation(draw: Draw) -> Script:
    """An agent's turns on a system prompt of 4k; then what the same lengths cost without a past."""
    system, output = draw.scaled(4096), draw.output(128)
    prompt, sizes = system, []
    for i in range(TURNS):
        start, prompt = len(prompt), prompt + draw.scaled(700)
        sizes.append((len(prompt), (len(system), start)[: 1 + bool(i)]))
        answer = yield Ask("warm" if i else "first", prompt, output, sizes[-1][1], fresh=i == 0)
        prompt += answer
    length, boundaries = sizes[1 + (TURNS - 1) // 2]  # the middle one of the warm turns
    yield Ask("cold", draw.tokens(length), output, boundaries)
    length, boundaries = sizes[-1]
    yield Ask("alone", draw.tokens(length), output, boundaries, fresh=True)


def _alternating(draw: Draw) -> Script:
    """Two system prompts of 4k take turns."""
    systems = (draw.scaled(4096), draw.scaled(4096))
    for i in range(2 * USERS):
        system = systems[i % 2]
        prompt = system + draw.scaled(64)
        yield Ask("cold" if i < 2 else "warm", prompt, draw.output(32), (len(system),), fresh=i == 0)


SCRIPTS: dict[str, Callable[[Draw], Script]] = {
    "repeat": _repeat,
    "shared-2k": _shared(2048),
    "shared-16k": _shared(16384),
    "conversation": _conversation,
    "alternating": _alternating,
}
IMAGE, NOTHING, LOOKUP = "image", "nothing", "lookup"
SCENARIOS = (*SCRIPTS, IMAGE, NOTHING, LOOKUP)


def distinct(scale: float, vocab: int, seed: str) -> Workload:
    """32 prompts of 512 tokens that share nothing, all at once."""
    draw = Draw(f"{NOTHING} {seed}", scale, vocab)
    output = draw.output(32)
    jobs = tuple(BenchRequest(f"{seed}-{i:02d}", draw.scaled(512), output) for i in range(32))
    return Workload(NOTHING, jobs)
