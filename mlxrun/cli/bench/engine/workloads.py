"""Workloads of `mlxrun bench engine`: prompts of random tokens, answer lengths and arrivals. Pure and seeded.

The same name, scale, vocabulary and seed make the same requests. An arrival is a number of *ticks*: steps in
which any row got a token. So it means the same to engines whose steps differ. Without stop ids, every answer
has its full length.
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
INTERACTIVE_ALONE = 5  # short requests whose median is taken; the first one warms up
INTERACTIVE_OUTPUTS = (8, 2)  # tokens of a short request and of a long one
MOMENTS = (0.5, 0.35, 0.65)  # by run: how far the running step has got decides how long one waits for its end


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt with its answer length in tokens. `arrival`: a number of ticks."""

    id: str
    prompt: tuple[int, ...]
    output: int
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class RequestWorkload:
    """Requests in order of arrival. `long_id`: the request whose prefill should not delay the others, if any;
    `moment`: when another request comes during a long prefill of `interactive`, as a share of that prompt's
    TTFT."""

    name: str
    requests: tuple[BenchRequest, ...] = field(repr=False)
    long_id: str | None = None
    moment: float = 0.5

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output for request in self.requests)

    def find_request(self, request_id: str) -> BenchRequest:
        """Return the request with that id."""
        return next(request for request in self.requests if request.id == request_id)


@dataclass(frozen=True, slots=True)
class RequestShape:
    """A request before its tokens are chosen. Its first `shared` tokens are the same as those of all
    others."""

    prompt: int
    output: int
    arrival: int = 0
    shared: int = 0


def make_workload(name: str, scale: float, vocab: int, seed: int = 0) -> RequestWorkload:
    """Make the workload of that name, with prompt and answer lengths times `scale`."""
    shapes = list(WORKLOADS[name](scale))
    rng = random.Random(f"{name} {seed}")
    common = rng.choices(range(vocab), k=max(shape.shared for shape in shapes))

    def make_prompt(shape: RequestShape) -> tuple[int, ...]:
        return (*common[: shape.shared], *rng.choices(range(vocab), k=shape.prompt - shape.shared))

    requests = tuple(
        BenchRequest(f"{name}-{i:02d}", make_prompt(shape), shape.output, shape.arrival)
        for i, shape in enumerate(shapes)
    )
    long_id = requests[STAGGERED_BEFORE].id if name == "staggered" else None
    return RequestWorkload(name, requests, long_id)


def _scale(tokens: int, scale: float, least: int = 2) -> int:
    return max(least, round(tokens * scale))


def _arrive_at_once(*counts: tuple[int, int]) -> Callable[[float], Iterator[RequestShape]]:
    """Shapes of (count, prompt tokens) pairs that all arrive at the start."""

    def shapes(scale: float) -> Iterator[RequestShape]:
        for count, tokens in counts:
            yield from [RequestShape(_scale(tokens, scale), _scale(OUTPUT, scale, SHORTEST_OUTPUT))] * count

    return shapes


def _arrive_staggered(scale: float) -> Iterator[RequestShape]:
    """A short prompt every few ticks, and a long one once 16 rows decode, which all outlast its prefill."""
    every = max(1, round(4 * scale))
    arrives = STAGGERED_BEFORE * every + 4
    output = _scale(STAGGERED_OUTPUT, scale, 2 * arrives)
    for i in range(STAGGERED_BEFORE):
        yield RequestShape(_scale(256, scale), output, i * every)
    yield RequestShape(_scale(16384, scale), output, arrives)
    for i in range(1, STAGGERED_AFTER + 1):
        yield RequestShape(_scale(256, scale), output, arrives + i * every)


def _arrive_with_shared_prefix(scale: float) -> Iterator[RequestShape]:
    """Short questions about one long text, all at once."""
    shared, output = _scale(16384, scale), _scale(OUTPUT, scale, SHORTEST_OUTPUT)
    yield from [RequestShape(shared + _scale(64, scale), output, shared=shared)] * 32


def _come_one_by_one(scale: float) -> Iterator[RequestShape]:
    """What `interactive` sends, in this order; when each comes is decided while it runs."""
    short, long = (
        RequestShape(_scale(tokens, scale), output)
        for tokens, output in zip((256, 16384), INTERACTIVE_OUTPUTS, strict=True)
    )
    yield from [short] * INTERACTIVE_ALONE
    yield from (long, long, long, short, long, short)


WORKLOADS: dict[str, Callable[[float], Iterator[RequestShape]]] = {
    "uniform": _arrive_at_once((32, 512)),
    "ragged": _arrive_at_once((1, 16384), (31, 256)),
    "mixed": _arrive_at_once((4, 8192), (8, 2048), (20, 512)),
    "staggered": _arrive_staggered,
    "few": _arrive_at_once((8, 512)),
    "single": _arrive_at_once((1, 512)),
    "shared": _arrive_with_shared_prefix,
    "interactive": _come_one_by_one,
}
CACHED_WORKLOADS = frozenset({"shared"})  # run with the config's prefix cache, and all others without
# On a CPU the peer takes many minutes for the others: it computes the text of `shared` for each prompt, and
# `interactive` prefills seven long prompts a run, which must not be so short that nothing can come meanwhile.
DEFAULT_WORKLOADS = tuple(name for name in WORKLOADS if name not in ("shared", "interactive"))
