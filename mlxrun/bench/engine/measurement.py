"""Drives one contender through a workload and turns what it saw into numbers. Pure: the clock comes in.

A contender is an engine behind three calls; it never learns how long an answer was timed or which row counts.
All times are seconds of `clock` at the moment a step returned; tokens of one step share a time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mlxrun.bench.engine.workloads import Job, Workload
from mlxrun.errors import MlxrunError

Values = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens that one step gave one job."""

    job_id: str
    tokens: tuple[int, ...]
    done: bool = False


class Contender(Protocol):
    """An engine that is measured. Built with its model loaded; used on one thread."""

    def add(self, jobs: Sequence[Job]) -> None:
        """Take jobs in, in this order."""

    def step(self) -> list[Output]:
        """Compute something; called while jobs are unfinished."""

    def close(self) -> None:
        """Let go of everything, the weights too."""


@dataclass(slots=True)
class Trace:
    """When each job came in and when each of its tokens came out."""

    start: float
    added: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return max(times[-1] for times in self.times.values())


def drive(contender: Contender, workload: Workload, clock: Callable[[], float]) -> Trace:
    """Run the workload to its end. A job that gets more or fewer tokens than it asked for is an error."""
    waiting, live, tick = deque(workload.jobs), set[str](), 0
    trace = Trace(clock())
    while waiting or live:
        if not live:
            tick = max(tick, waiting[0].tick)
        due: list[Job] = []
        while waiting and waiting[0].tick <= tick:
            due.append(waiting.popleft())
        if due:
            now = clock()
            contender.add(due)
            live.update(job.id for job in due)
            trace.added.update({job.id: now for job in due})
        tick += int(_take(trace, contender.step(), live, clock))
    _check(trace, workload)
    return trace


def _take(trace: Trace, outputs: Sequence[Output], live: set[str], clock: Callable[[], float]) -> bool:
    """Note a step's outputs; True if some row got a token."""
    now = clock()
    for output in outputs:
        trace.times.setdefault(output.job_id, []).extend([now] * len(output.tokens))
        trace.tokens.setdefault(output.job_id, []).extend(output.tokens)
        if output.done:
            live.discard(output.job_id)
    return any(output.tokens for output in outputs)


def _check(trace: Trace, workload: Workload) -> None:
    for job in workload.jobs:
        got = len(trace.tokens.get(job.id, []))
        if got != job.output:
            raise MlxrunError(
                f"bench: {job.id} got {got} tokens instead of {job.output}: the run counts for nothing"
            )


# -- numbers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineMeasure:
    """One number of a run: how it is shown and which direction is better."""

    key: str
    title: str
    unit: Literal["s", "ms", "tok/s", "bytes"]
    better: Literal["low", "high"]


MEASURES = (
    EngineMeasure("wall_s", "whole job", "s", "low"),
    EngineMeasure("output_tps", "output", "tok/s", "high"),
    EngineMeasure("prefill_tps", "prefill, to the last first token", "tok/s", "high"),
    EngineMeasure("decode_tps", "decode, all rows decoding", "tok/s", "high"),
    EngineMeasure("ttft_mean_s", "TTFT mean", "s", "low"),
    EngineMeasure("ttft_p99_s", "TTFT p99", "s", "low"),
    EngineMeasure("gap_p50_s", "inter-token p50", "ms", "low"),
    EngineMeasure("gap_p99_s", "inter-token p99", "ms", "low"),
    EngineMeasure("long_gap_p99_s", "inter-token p99 while the long prompt prefills", "ms", "low"),
    EngineMeasure("peak_bytes", "peak memory", "bytes", "low"),
    EngineMeasure("peak_rows_bytes", "peak memory without weights", "bytes", "low"),
)


def metrics(trace: Trace, workload: Workload) -> dict[str, float | None]:
    """The numbers of one run, memory aside; None where the run does not have such a moment."""
    first = {job_id: times[0] for job_id, times in trace.times.items()}
    ttft = [first[job_id] - added for job_id, added in trace.added.items()]
    gaps = [b - a for times in trace.times.values() for a, b in zip(times, times[1:], strict=False)]
    wall = trace.end - trace.start
    return {
        "wall_s": wall,
        "output_tps": _rate(workload.output_tokens, wall),
        "prefill_tps": _rate(workload.prompt_tokens, max(first.values()) - trace.start),
        "decode_tps": _steady(trace),
        "ttft_mean_s": statistics.fmean(ttft),
        "ttft_p99_s": percentile(ttft, 0.99),
        "gap_p50_s": percentile(gaps, 0.50),
        "gap_p99_s": percentile(gaps, 0.99),
        "long_gap_p99_s": _gap_beside(trace, workload.long_id),
    }


def _steady(trace: Trace) -> float | None:
    """Tokens a second from the last row's first token to the first row's last one."""
    start = max(times[0] for times in trace.times.values())
    end = min(times[-1] for times in trace.times.values())
    tokens = sum(start < t <= end for times in trace.times.values() for t in times)
    return _rate(tokens, end - start)


def _gap_beside(trace: Trace, long_id: str | None) -> float | None:
    """p99 of the other rows' gaps that end between a job's arrival and its first token."""
    if long_id is None:
        return None
    start, end = trace.added[long_id], trace.times[long_id][0]
    rows = [times for job_id, times in trace.times.items() if job_id != long_id]
    pairs = [pair for times in rows for pair in zip(times, times[1:], strict=False)]
    return percentile([b - a for a, b in pairs if start < b <= end], 0.99)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value that at least `share` of all are not above."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def medians(runs: Sequence[Values]) -> dict[str, float | None]:
    """Per measure the median over runs; None if a run lacks it."""
    return {m.key: _median([run.get(m.key) for run in runs]) for m in MEASURES}


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def ratios(ours: Values, peer: Values) -> dict[str, float | None]:
    """How many times better ours is, per measure: above 1 is better whatever the direction."""
    out: dict[str, float | None] = {}
    for m in MEASURES:
        over, under = (ours, peer) if m.better == "high" else (peer, ours)
        a, b = over.get(m.key), under.get(m.key)
        out[m.key] = a / b if a is not None and b else None
    return out


def agreement(ours: Trace, peer: Trace) -> float:
    """Share of jobs whose tokens are the same on both sides: 1.0 unless rounding decides a near-tie."""
    return statistics.fmean(float(ours.tokens[job_id] == peer.tokens[job_id]) for job_id in ours.tokens)
