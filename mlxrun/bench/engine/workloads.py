"""What the benchmark asks for: prompts of random tokens, fixed answer lengths, and when each arrives.

Pure and seeded: the same name, scale, vocabulary and seed give the same jobs. Arrivals count *ticks*, steps
in which some row got a token, so that they mean the same to engines whose steps differ. No stop ids: every
answer has its full length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

OUTPUT = 128
SHORTEST_OUTPUT = 24  # however small the scale: all rows must decode together for a while
STAGGERED_OUTPUT = 256
STAGGERED_BEFORE = 16  # rows that decode when the long prompt arrives
STAGGERED_AFTER = 15


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt with its answer length; `tick`: when it arrives."""

    id: str
    prompt: tuple[int, ...]
    output: int
    tick: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of arrival. `long_id`: the job whose prefill the others should not feel, if any."""

    name: str
    jobs: tuple[Job, ...] = field(repr=False)
    long_id: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def output_tokens(self) -> int:
        return sum(job.output for job in self.jobs)

    def job(self, job_id: str) -> Job:
        """The job of that id."""
        return next(job for job in self.jobs if job.id == job_id)


@dataclass(frozen=True, slots=True)
class Shape:
    """A job before its tokens are drawn."""

    prompt: int
    output: int
    tick: int = 0


def make_workload(name: str, scale: float, vocab: int, seed: int = 0) -> Workload:
    """The workload of that name, prompt and answer lengths times `scale`."""
    shapes = list(WORKLOADS[name](scale))
    draw = random.Random(f"{name} {seed}")
    jobs = tuple(
        Job(f"{name}-{i:02d}", tuple(draw.choices(range(vocab), k=shape.prompt)), shape.output, shape.tick)
        for i, shape in enumerate(shapes)
    )
    long_id = jobs[STAGGERED_BEFORE].id if name == "staggered" else None
    return Workload(name, jobs, long_id)


def _scaled(tokens: int, scale: float, least: int = 2) -> int:
    return max(least, round(tokens * scale))


def _at_once(*counts: tuple[int, int]) -> Callable[[float], Iterator[Shape]]:
    """(count, prompt tokens) pairs, all arriving at the start."""

    def shapes(scale: float) -> Iterator[Shape]:
        for count, tokens in counts:
            yield from [Shape(_scaled(tokens, scale), _scaled(OUTPUT, scale, SHORTEST_OUTPUT))] * count

    return shapes


def _staggered(scale: float) -> Iterator[Shape]:
    """A short prompt every few ticks; a long one once 16 decode, none of which ends before it is in."""
    every = max(1, round(4 * scale))
    arrives = STAGGERED_BEFORE * every + 4
    output = _scaled(STAGGERED_OUTPUT, scale, 2 * arrives)
    for i in range(STAGGERED_BEFORE):
        yield Shape(_scaled(256, scale), output, i * every)
    yield Shape(_scaled(16384, scale), output, arrives)
    for i in range(1, STAGGERED_AFTER + 1):
        yield Shape(_scaled(256, scale), output, arrives + i * every)


WORKLOADS: dict[str, Callable[[float], Iterator[Shape]]] = {
    "uniform": _at_once((32, 512)),
    "ragged": _at_once((1, 16384), (31, 256)),
    "mixed": _at_once((4, 8192), (8, 2048), (20, 512)),
    "staggered": _staggered,
}
