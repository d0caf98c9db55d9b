"""The workload `long` of `mlxrun bench serve`: what decoding streams feel of one long prompt among them.

A round is two passes over one server. In the first, streams decode, a long prompt comes, and a short one
right behind it; in the second, as many streams of other words decode alone. The gaps of both passes are taken
at the same pieces of the same streams, those that lay beside the long prompt: rows are equally long in both.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mlxrun.bench.serve.rounds import Round, ServeMeasure, ServePlan, Values, WorkloadKind, percentile
from mlxrun.bench.serve.streaming_client import Clock, Connection, StreamTimes, Target, connect
from mlxrun.bench.serve.workloads import Size, bodies

START = 16  # pieces that each stream has before the long prompt is sent
STREAM_TOKENS = 4096  # more than a stream needs: it is closed when everything is seen
LONG_TOKENS = 16
SHORT_TOKENS = 8
BEHIND = 0.1  # seconds: by then the server has the long prompt
CHECK_EVERY = 0.05  # seconds between calls of /health, whether or not the last one came back
SLACK = 2.0  # a server is idle if a short request takes at most so many times what it took before the round
IDLE_LIMIT = 60.0
IDLE_PAUSE = 0.5

MEASURES = {
    "gap_p50": ServeMeasure("between pieces p50, beside the long prompt", "ms"),
    "gap_p99": ServeMeasure("between pieces p99, beside the long prompt", "ms"),
    "alone_p50": ServeMeasure("between pieces p50, without it", "ms"),
    "alone_p99": ServeMeasure("between pieces p99, without it", "ms"),
    "ratio_p99": ServeMeasure("p99 with / without", "x"),
    "gaps": ServeMeasure("pieces beside the long prompt", "", None),
    "ended": ServeMeasure("streams that ended early", ""),
    "long_ttft": ServeMeasure("TTFT of the long prompt", "ms"),
    "long_tokens": ServeMeasure("tokens of the long prompt", "", None),
    "long_cached": ServeMeasure("long prompt from cache", "%", None),
    "short_ttft": ServeMeasure("TTFT of the short prompt behind it", "ms"),
    "health_p99": ServeMeasure("/health p99 meanwhile", "ms"),
    "errors": ServeMeasure("errors", ""),
}
TAKES = frozenset({"concurrency", "prompt_words", "long_words"})


@dataclass(frozen=True, slots=True)
class Beside:
    """What was seen of the first pass; `checks`: seconds of each call of /health, empty without one."""

    streams: Sequence[StreamTimes]
    long: StreamTimes
    short: StreamTimes
    checks: Sequence[float] = ()
    errors: tuple[str, ...] = ()


async def long_round(target: Target, plan: ServePlan, seed: str, clock: Clock = time.perf_counter) -> Round:
    """One round; an error of the long prompt leaves no number."""
    async with connect(target, plan.load.timeout, clock) as line:
        probes = _probes(plan.size, seed)
        before = [await line.ask(next(probes)) for _ in range(3)]
        if lost := next((s.error for s in before if s.error is not None), None):
            return _lost(f"a short request before the round: {lost}")
        usual = max(s.end - s.sent for s in before)
        beside = await _beside(line, plan, seed)
        if beside.long.error is not None:
            return _lost(f"the long prompt: {beside.long.error}")
        errors = await _until_idle(line, usual, probes)
        alone = await _alone(line, plan, seed, [places.stop for places in _places(beside)])
        errors += await _until_idle(line, usual, probes)
    found = long_numbers(beside, alone)
    errors += [f"a stream: {s.error}" for s in (*beside.streams, *alone) if s.error is not None]
    errors += [f"the short prompt: {beside.short.error}"] if beside.short.error is not None else []
    errors += beside.errors
    if not found["gaps"]:
        errors.append("no stream had a piece beside the long prompt")
    return Round(found | {"errors": len(errors)}, tuple(errors))


def _lost(error: str) -> Round:
    return Round(dict.fromkeys(MEASURES) | {"errors": 1}, (error,))


class _DecodingStreams:
    """Answers that stream at the same time."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._tasks: list[asyncio.Task[StreamTimes]] = []
        self._news = asyncio.Event()

    def start(self, body: dict[str, Any]) -> StreamTimes:
        """What is seen of it grows from now on."""
        seen = StreamTimes()
        self._tasks.append(asyncio.create_task(self._line.ask(body, seen, self._news.set)))
        return seen

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait; it is looked at again whenever anything came."""
        while not ready():
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """Go away from whatever still streams, as a client may."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def _answers(line: Connection) -> AsyncIterator[_DecodingStreams]:
    answers = _DecodingStreams(line)
    try:
        yield answers
    finally:
        await answers.close()


async def _beside(line: Connection, plan: ServePlan, seed: str) -> Beside:
    """The first pass; it lasts until each stream has the piece that it awaits at the long prompt's first."""
    watch = _Health(line)
    await watch.find()
    async with _answers(line) as answers:
        streams = [answers.start(body) for body in _streams(plan, f"{seed} beside")]
        await answers.until(lambda: all(s.done or len(s.pieces) >= START for s in streams))
        long = answers.start(_one(plan.size.long, LONG_TOKENS, f"{seed} long"))
        watching = asyncio.create_task(watch.run(lambda: bool(long.pieces) or long.done))
        try:
            await asyncio.sleep(BEHIND)
            short = answers.start(_one(plan.size.prompt, SHORT_TOKENS, f"{seed} short"))
            await answers.until(lambda: long.done and short.done)
            first = long.pieces[0] if long.pieces else long.end
            await answers.until(lambda: all(s.done or s.pieces[-1] >= first for s in streams))
            await watching
        finally:
            watching.cancel()
    return Beside(streams, long, short, watch.seconds, tuple(watch.errors))


async def _alone(line: Connection, plan: ServePlan, seed: str, counts: Sequence[int]) -> list[StreamTimes]:
    """The second pass; it lasts until each stream has so many pieces."""
    async with _answers(line) as answers:
        streams = [answers.start(body) for body in _streams(plan, f"{seed} alone")]
        wanted = list(zip(streams, counts, strict=True))
        await answers.until(lambda: all(s.done or len(s.pieces) >= count for s, count in wanted))
    return streams


def _streams(plan: ServePlan, seed: str) -> list[dict[str, Any]]:
    return bodies("chat", Size(plan.size.prompt, STREAM_TOKENS), plan.load.concurrency, seed)


def _one(words: int, tokens: int, seed: str) -> dict[str, Any]:
    return bodies("chat", Size(words, tokens), 1, seed)[0]


def _probes(size: Size, seed: str) -> Iterator[dict[str, Any]]:
    """Short requests without end, each of words of its own."""
    return (_one(size.prompt, SHORT_TOKENS, f"{seed} probe {at}") for at in itertools.count())


async def _until_idle(line: Connection, usual: float, probes: Iterator[dict[str, Any]]) -> list[str]:
    """Servers notice late, or never, that a client has gone; the error if one still works for it."""
    begun = line.clock()
    while True:
        seen = await line.ask(next(probes))
        if seen.error is None and seen.end - seen.sent <= SLACK * usual:
            return []
        if line.clock() - begun > IDLE_LIMIT:
            return [f"the server was still busy {IDLE_LIMIT:.0f} s after its streams were closed"]
        await asyncio.sleep(IDLE_PAUSE)


@dataclass(slots=True)
class _Health:
    """Calls GET /health at fixed times, so that one long wait counts as often as it would for others."""

    line: Connection
    there: bool = False
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def find(self) -> None:
        """Whether the server has it."""
        try:
            status, _ = await self.line.health()
        except Exception:  # the border: a foreign server need not have it, nor refuse it well
            return
        self.there = status == 200

    async def run(self, over: Callable[[], bool]) -> None:
        calls = []
        while self.there and not over():
            calls.append(asyncio.create_task(self._call()))
            await asyncio.sleep(CHECK_EVERY)
        await asyncio.gather(*calls)

    async def _call(self) -> None:
        try:
            status, seconds = await self.line.health()
        except Exception as error:  # the border: the server is foreign
            self.errors.append(f"/health: {type(error).__name__}: {error}")
            return
        if status == 200:
            self.seconds.append(seconds)
        else:
            self.errors.append(f"/health: {status}")


def _places(beside: Beside) -> list[range]:
    """Of each stream the pieces that it waited for beside the long prompt, if only in part: a gap counts that
    began before the long prompt's first piece and ended after it was sent."""
    start, end = beside.long.sent, beside.long.pieces[0]
    found = []
    for seen in beside.streams:
        at = [i for i in range(1, len(seen.pieces)) if seen.pieces[i] > start and seen.pieces[i - 1] < end]
        found.append(range(at[0], at[-1] + 1) if at else range(0))
    return found


def long_numbers(beside: Beside, alone: Sequence[StreamTimes]) -> Values:
    """The numbers of one round, whose long prompt was answered. A piece counts that both passes have; what
    failed is left out."""
    found: Values = dict.fromkeys(MEASURES)
    first = beside.long.pieces[0]
    gaps: list[float] = []
    plain: list[float] = []
    ended = 0
    for seen, other, places in zip(beside.streams, alone, _places(beside), strict=True):
        if seen.error is not None or other.error is not None:
            continue
        both = range(places.start, min(places.stop, len(other.pieces)))
        gaps += [seen.pieces[i] - seen.pieces[i - 1] for i in both]
        plain += [other.pieces[i] - other.pieces[i - 1] for i in both]
        ended += seen.pieces[-1] < first or len(other.pieces) < places.stop
    found |= {"gaps": len(gaps), "ended": ended, "errors": 0}
    if gaps:
        found |= {"gap_p50": percentile(gaps, 50), "alone_p50": percentile(plain, 50)}
        found |= {
            "gap_p99": (with_it := percentile(gaps, 99)),
            "alone_p99": (without := percentile(plain, 99)),
        }
        found["ratio_p99"] = with_it / without if without else None
    long, short = beside.long, beside.short
    found["long_ttft"] = first - long.sent
    found["long_tokens"] = long.prompt or None
    found["long_cached"] = long.cached / long.prompt if long.prompt else None
    found["short_ttft"] = short.pieces[0] - short.sent if short.error is None else None
    found["health_p99"] = percentile(beside.checks, 99) if beside.checks else None
    return found


def _note(settings: Mapping[str, Any]) -> str:
    return (
        f"long: {settings['concurrency']} streams of {settings['prompt_words']} words, and one prompt of "
        f"{settings['long_words']} among them, with a short one behind it; then the same streams without"
    )


LONG = WorkloadKind(MEASURES, long_round, TAKES, _note, "ratio_p99")
