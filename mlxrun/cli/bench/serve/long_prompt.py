"""The workload `long` of `mlxrun bench serve`: how much one long prompt delays streams that decode.

A round is two passes over one server. In the first, streams decode while a long prompt comes, and a short one
right after it. In the second, as many streams with other words decode alone. Inter-token times of both passes
are taken at the deltas that came beside the long prompt, so rows are equally long in both.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrun.cli.bench.engine.measurement import Measure, compute_percentile
from mlxrun.cli.bench.serve.streaming_client import Clock, Connection, StreamTimes, Target, connect
from mlxrun.cli.bench.serve.workloads import (
    PromptSize,
    RoundResult,
    ServePlan,
    Values,
    WorkloadKind,
    make_bodies,
)

START_DELTAS = 16  # deltas that each stream has before the long prompt is sent
STREAM_TOKENS = 4096  # more than a stream needs: it is closed once all is measured
LONG_TOKENS = 16
SHORT_TOKENS = 8
SHORT_DELAY = 0.1  # seconds: by then the server has the long prompt
CHECK_EVERY = 0.05  # seconds between calls of /health, whether or not the last one came back
SLACK = 2.0  # a server is idle if a short request takes at most this multiple of its time before the round
IDLE_LIMIT = 60.0
IDLE_PAUSE = 0.5

MEASURES = {
    "gap_p50": Measure("inter-token p50 while the long prompt prefills", "ms"),
    "gap_p99": Measure("inter-token p99 while the long prompt prefills", "ms"),
    "alone_p50": Measure("inter-token p50 without the long prompt", "ms"),
    "alone_p99": Measure("inter-token p99 without the long prompt", "ms"),
    "ratio_p99": Measure("p99 with the long prompt / without it", "x"),
    "gaps": Measure("deltas while the long prompt prefills", "", None),
    "ended": Measure("streams that ended early", ""),
    "long_ttft": Measure("TTFT of the long prompt", "ms"),
    "long_tokens": Measure("tokens of the long prompt", "", None),
    "long_cached": Measure("share of the long prompt from cache", "%", None),
    "short_ttft": Measure("TTFT of the short prompt sent after it", "ms"),
    "health_p99": Measure("/health p99 while the long prompt prefills", "ms"),
    "errors": Measure("errors", ""),
}
SETTINGS = frozenset({"concurrency", "prompt_words", "long_words"})


@dataclass(frozen=True, slots=True)
class BesideLongPrompt:
    """The times of the first pass. `checks`: seconds of each call of /health, empty if the server has
    none."""

    streams: Sequence[StreamTimes]
    long: StreamTimes
    short: StreamTimes
    checks: Sequence[float] = ()
    errors: tuple[str, ...] = ()


async def run_long_round(
    target: Target, plan: ServePlan, seed: str, clock: Clock = time.perf_counter
) -> RoundResult:
    """Run one round. If the long prompt fails, there are no numbers."""
    async with connect(target, plan.load.timeout, clock) as connection:
        probes = make_probes(plan.size, seed)
        before = [await connection.stream_chat(next(probes)) for _ in range(3)]
        if lost := next((s.error for s in before if s.error is not None), None):
            return make_failed_round(MEASURES, f"a short request before the round: {lost}")
        usual = max(s.end - s.sent for s in before)
        beside = await _stream_beside_long_prompt(connection, plan, seed)
        if beside.long.error is not None:
            return make_failed_round(MEASURES, f"the long prompt: {beside.long.error}")
        if all(s.error is not None for s in beside.streams):
            what = f"every stream, with max_tokens {STREAM_TOKENS}"
            return make_failed_round(MEASURES, f"{what}: {beside.streams[0].error}")
        errors = await wait_until_idle(connection, usual, probes)
        alone = await _stream_without_long_prompt(
            connection, plan, seed, [deltas.stop for deltas in _find_delta_ranges(beside)]
        )
        errors += await wait_until_idle(connection, usual, probes)
    found = compute_long_numbers(beside, alone)
    errors += [f"a stream: {s.error}" for s in (*beside.streams, *alone) if s.error is not None]
    errors += [f"the short prompt: {beside.short.error}"] if beside.short.error is not None else []
    errors += beside.errors
    if not found["gaps"]:
        errors.append("no stream had a delta while the long prompt was prefilled")
    return RoundResult(found | {"errors": len(errors)}, tuple(errors))


def make_failed_round(measures: Mapping[str, Measure], error: str) -> RoundResult:
    """Make the result of a round without numbers."""
    return RoundResult(dict.fromkeys(measures) | {"errors": 1}, (error,))


class _DecodingStreams:
    """Answers that stream at the same time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tasks: list[asyncio.Task[StreamTimes]] = []
        self._updated = asyncio.Event()

    def start(self, body: dict[str, Any]) -> StreamTimes:
        """Start a stream; its times are filled in as it goes."""
        seen = StreamTimes()
        self._tasks.append(asyncio.create_task(self._connection.stream_chat(body, seen, self._updated.set)))
        return seen

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, which is called again after each delta."""
        while not ready():
            self._updated.clear()
            await self._updated.wait()

    async def __aenter__(self) -> _DecodingStreams:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Disconnect from all streams that have not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _stream_beside_long_prompt(connection: Connection, plan: ServePlan, seed: str) -> BesideLongPrompt:
    """The first pass; it lasts until each stream has a delta after the first one of the long prompt."""
    watch = EndpointWatch(connection, "/health")
    await watch.find()
    async with _DecodingStreams(connection) as answers:
        streams = [answers.start(body) for body in _make_stream_bodies(plan, f"{seed} beside")]
        await answers.until(lambda: all(s.done or len(s.deltas) >= START_DELTAS for s in streams))
        long = answers.start(make_chat_body(plan.size.long, LONG_TOKENS, f"{seed} long"))
        watching = asyncio.create_task(watch.run(lambda: bool(long.deltas) or long.done))
        try:
            await asyncio.sleep(SHORT_DELAY)
            short = answers.start(make_chat_body(plan.size.prompt, SHORT_TOKENS, f"{seed} short"))
            await answers.until(lambda: long.done and short.done)
            first = long.deltas[0] if long.deltas else long.end
            await answers.until(lambda: all(s.done or s.deltas[-1] >= first for s in streams))
            await watching
        finally:
            watching.cancel()
    return BesideLongPrompt(streams, long, short, watch.seconds, tuple(watch.errors))


async def _stream_without_long_prompt(
    connection: Connection, plan: ServePlan, seed: str, counts: Sequence[int]
) -> list[StreamTimes]:
    """The second pass; it lasts until each stream has as many deltas as `counts` says."""
    async with _DecodingStreams(connection) as answers:
        streams = [answers.start(body) for body in _make_stream_bodies(plan, f"{seed} alone")]
        wanted = list(zip(streams, counts, strict=True))
        await answers.until(lambda: all(s.done or len(s.deltas) >= count for s, count in wanted))
    return streams


def _make_stream_bodies(plan: ServePlan, seed: str) -> list[dict[str, Any]]:
    return make_bodies("chat", PromptSize(plan.size.prompt, STREAM_TOKENS), plan.load.concurrency, seed)


def make_chat_body(words: int, tokens: int, seed: str) -> dict[str, Any]:
    """Make a chat of that many random words, whose answer has at most that many tokens."""
    return make_bodies("chat", PromptSize(words, tokens), 1, seed)[0]


def make_probes(size: PromptSize, seed: str) -> Iterator[dict[str, Any]]:
    """Make an endless series of short requests, each with different words."""
    return (make_chat_body(size.prompt, SHORT_TOKENS, f"{seed} probe {at}") for at in itertools.count())


async def wait_until_idle(
    connection: Connection, usual: float, probes: Iterator[dict[str, Any]]
) -> list[str]:
    """Wait until the server is idle, as it may notice late that streams were closed. Returns an error if it
    stays busy for IDLE_LIMIT seconds."""
    begun = connection.clock()
    while True:
        seen = await connection.stream_chat(next(probes))
        if seen.error is None and seen.end - seen.sent <= SLACK * usual:
            return []
        if connection.clock() - begun > IDLE_LIMIT:
            return [f"the server was still busy {IDLE_LIMIT:.0f} s after its streams were closed"]
        await asyncio.sleep(IDLE_PAUSE)


@dataclass(slots=True)
class EndpointWatch:
    """Calls GET `path`, which lies beside /v1, at fixed times, whether or not the last call has returned.
    `seconds`: what the calls took."""

    connection: Connection
    path: str
    there: bool = False
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def find(self) -> None:
        """Find out whether the server has the path."""
        try:
            status, _ = await self.connection.call(self.path)
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
            status, seconds = await self.connection.call(self.path)
        except Exception as error:  # the border: the server is foreign
            self.errors.append(f"{self.path}: {type(error).__name__}: {error}")
            return
        if status == 200:
            self.seconds.append(seconds)
        else:
            self.errors.append(f"{self.path}: {status}")


def _find_delta_ranges(beside: BesideLongPrompt) -> list[range]:
    """The deltas of each stream that came beside the long prompt: those that came after it was sent, and
    whose predecessor came before its first delta."""
    start, end = beside.long.sent, beside.long.deltas[0]
    found = []
    for seen in beside.streams:
        at = [i for i in range(1, len(seen.deltas)) if seen.deltas[i] > start and seen.deltas[i - 1] < end]
        found.append(range(at[0], at[-1] + 1) if at else range(0))
    return found


def compute_long_numbers(beside: BesideLongPrompt, alone: Sequence[StreamTimes]) -> Values:
    """Compute the numbers of one round whose long prompt was answered, from deltas that both passes have.
    Failed streams are left out."""
    found: Values = dict.fromkeys(MEASURES)
    first = beside.long.deltas[0]
    gaps: list[float] = []
    plain: list[float] = []
    ended = 0
    for seen, other, deltas in zip(beside.streams, alone, _find_delta_ranges(beside), strict=True):
        if seen.error is not None or other.error is not None:
            continue
        both = range(deltas.start, min(deltas.stop, len(other.deltas)))
        gaps += [seen.deltas[i] - seen.deltas[i - 1] for i in both]
        plain += [other.deltas[i] - other.deltas[i - 1] for i in both]
        ended += seen.deltas[-1] < first or len(other.deltas) < deltas.stop
    found |= {"gaps": len(gaps), "ended": ended, "errors": 0}
    if gaps:
        found |= {"gap_p50": compute_percentile(gaps, 50), "alone_p50": compute_percentile(plain, 50)}
        with_it, without = compute_percentile(gaps, 99), compute_percentile(plain, 99)
        found |= {"gap_p99": with_it, "alone_p99": without}
        found["ratio_p99"] = with_it / without if with_it and without else None
    long, short = beside.long, beside.short
    found["long_ttft"] = first - long.sent
    found["long_tokens"] = long.prompt or None
    found["long_cached"] = long.cached / long.prompt if long.prompt else None
    found["short_ttft"] = short.deltas[0] - short.sent if short.error is None else None
    found["health_p99"] = compute_percentile(beside.checks, 99)
    return found


def _describe_round(settings: Mapping[str, Any]) -> str:
    return (
        f"long: {settings['concurrency']} streams of {settings['prompt_words']} words, and one prompt of "
        f"{settings['long_words']} among them, with a short one behind it; then the same streams without"
    )


LONG = WorkloadKind(MEASURES, run_long_round, SETTINGS, _describe_round, "ratio_p99")
