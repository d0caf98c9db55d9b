"""Scripts of `python -m benchmarks prefix-cache`: requests that are served one after the other. Pure and
seeded.

A script yields a PromptCase and is sent the answer's tokens, so that a conversation can build on its answers.
The same scenario, scale, vocabulary and seed give the same cases. `cache_positions` are those of the text
package: the end of the system part and the start of the last user turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxrun.cli.bench.engine.workloads import BenchRequest, RequestWorkload

TURNS = 10
USERS = 4  # requests that share a prefix
LEAST_OUTPUT = 16  # however small the scale: answers are compared

Role = Literal["first", "cold", "warm", "alone"]


@dataclass(frozen=True, slots=True)
class PromptCase:
    """One request. `first` opens a conversation, `cold` is new to the cache, `warm` is not, `alone` is sent
    to an empty cache to measure its size afterwards. `clear_before`: the cache is cleared first."""

    role: Role
    prompt: tuple[int, ...] = field(repr=False)
    output: int
    cache_positions: tuple[int, ...] = ()
    clear_before: bool = False
    request: Any = field(default=None, repr=False)  # a Request, if tokens alone are not enough


Script = Generator[PromptCase, tuple[int, ...], None]


class RandomTokens:
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
    """The cases of that scenario; every seed gives other tokens of the same lengths."""
    return SCRIPTS[name](RandomTokens(f"{name} {seed}", scale, vocab))


def _repeat(rng: RandomTokens) -> Script:
    """16k tokens, then the same again; a quarter of them are system prompt and tools."""
    system = rng.scaled(4096)
    prompt = system + rng.scaled(12288)
    for role, fresh in (("cold", True), ("warm", False)):
        yield PromptCase(role, prompt, rng.output(32), (len(system),), fresh)  # type: ignore[arg-type]


def _shared(tokens: int) -> Callable[[RandomTokens], Script]:
    def script(rng: RandomTokens) -> Script:
        system = rng.scaled(tokens)
        for i in range(USERS):
            prompt = system + rng.scaled(256)
            yield PromptCase(
                "warm" if i else "cold", prompt, rng.output(32), (len(system),), clear_before=i == 0
            )

    return script


def _conversation(rng: RandomTokens) -> Script:
    """The turns of an agent on a system prompt of 4k; then prompts of the same lengths without earlier
    turns."""
    system, output = rng.scaled(4096), rng.output(128)
    prompt, sizes = system, []
    for i in range(TURNS):
        start, prompt = len(prompt), prompt + rng.scaled(700)
        sizes.append((len(prompt), (len(system), start)[: 1 + bool(i)]))
        answer = yield PromptCase("warm" if i else "first", prompt, output, sizes[-1][1], clear_before=i == 0)
        prompt += answer
    length, cache_positions = sizes[1 + (TURNS - 1) // 2]  # the middle one of the warm turns
    yield PromptCase("cold", rng.tokens(length), output, cache_positions)
    length, cache_positions = sizes[-1]
    yield PromptCase("alone", rng.tokens(length), output, cache_positions, clear_before=True)


def _alternating(rng: RandomTokens) -> Script:
    """Two system prompts of 4k take turns."""
    systems = (rng.scaled(4096), rng.scaled(4096))
    for i in range(2 * USERS):
        system = systems[i % 2]
        prompt = system + rng.scaled(64)
        yield PromptCase(
            "cold" if i < 2 else "warm", prompt, rng.output(32), (len(system),), clear_before=i == 0
        )


SCRIPTS: dict[str, Callable[[RandomTokens], Script]] = {
    "repeat": _repeat,
    "shared-2k": _shared(2048),
    "shared-16k": _shared(16384),
    "conversation": _conversation,
    "alternating": _alternating,
}
IMAGE, NO_REUSE, LOOKUP = "image", "nothing", "lookup"
SCENARIOS = (*SCRIPTS, IMAGE, NO_REUSE, LOOKUP)


def make_distinct(scale: float, vocab: int, seed: str) -> RequestWorkload:
    """32 prompts of 512 tokens that share nothing, all at once."""
    rng = RandomTokens(f"{NO_REUSE} {seed}", scale, vocab)
    output = rng.output(32)
    jobs = tuple(BenchRequest(f"{seed}-{i:02d}", rng.scaled(512), output) for i in range(32))
    return RequestWorkload(NO_REUSE, jobs)
