"""Runs a workload on a contender and computes the measures of the run. Pure: the clock is a parameter.

A contender is an engine behind three calls. Times are seconds of `clock` when a step has returned; tokens of
one step have the same time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlxrun.cli.bench.engine.workloads import BenchRequest, RequestWorkload
from mlxrun.core.errors import MlxrunError

Values = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The tokens of one request in one step."""

    request_id: str
    tokens: tuple[int, ...]
    done: bool = False


class Contender(Protocol):
    """An engine that is measured, with its model loaded. It is used on one thread."""

    def add(self, requests: Sequence[BenchRequest]) -> None:
        """Add requests in this order."""

    def step(self) -> list[RequestOutput]:
        """Compute one step. Called while requests are unfinished."""

    def close(self) -> None:
        """Release everything, including the weights."""


@dataclass(slots=True)
class Trace:
    """When each request was added, and when each of its tokens came, in seconds."""

    start: float
    added: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return max(times[-1] for times in self.times.values())


def run_workload(contender: Contender, workload: RequestWorkload, clock: Callable[[], float]) -> Trace:
    """Run the workload to its end. MlxrunError if a request does not get exactly its tokens."""
    waiting, live, tick = deque(workload.requests), set[str](), 0
    trace = Trace(clock())
    while waiting or live:
        if not live:
            tick = max(tick, waiting[0].arrival)
        due: list[BenchRequest] = []
        while waiting and waiting[0].arrival <= tick:
            due.append(waiting.popleft())
        if due:
            now = clock()
            contender.add(due)
            live.update(request.id for request in due)
            trace.added.update({request.id: now for request in due})
        tick += int(record_outputs(trace, contender.step(), live, clock))
    check_lengths(trace, workload.requests)
    return trace


def record_outputs(
    trace: Trace, outputs: Sequence[RequestOutput], live: set[str], clock: Callable[[], float]
) -> bool:
    """Add a step's outputs to the trace. Returns whether any row got a token."""
    now = clock()
    for output in outputs:
        trace.times.setdefault(output.request_id, []).extend([now] * len(output.tokens))
        trace.tokens.setdefault(output.request_id, []).extend(output.tokens)
        if output.done:
            live.discard(output.request_id)
    return any(output.tokens for output in outputs)


def check_lengths(trace: Trace, requests: Sequence[BenchRequest]) -> None:
    """Raise MlxrunError if one of these requests did not get exactly its tokens."""
    for request in requests:
        got = len(trace.tokens.get(request.id, []))
        if got != request.output:
            raise MlxrunError(
                f"bench: {request.id} got {got} tokens instead of {request.output}: the run is not counted"
            )


# -- numbers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a run: its label, its unit, and whether more is better (None: neither)."""

    title: str
    unit: str
    more: bool | None = False


INTERACTIVE_MEASURES = {  # also those of `mlxrun bench serve`
    "alone": Measure("TTFT of a short request alone", "ms"),
    "behind": Measure("TTFT of one that comes behind a long prompt", "ms"),
    "ratio": Measure("behind the long prompt / alone", "x"),
    "after_cancel": Measure("TTFT of one that comes as a long prompt is abandoned", "ms"),
    "long_ttft": Measure("TTFT of the long prompt", "ms"),
}
MEASURES = {
    "wall_s": Measure("whole workload", "s"),
    "output_tps": Measure("output", "tok/s", True),
    "prefill_tps": Measure("prefill until all have a first token", "tok/s", True),
    "decode_tps": Measure("decode, all rows decoding", "tok/s", True),
    "ttft_mean_s": Measure("TTFT mean", "s"),
    "ttft_p99_s": Measure("TTFT p99", "s"),
    "gap_p50_s": Measure("inter-token p50", "ms"),
    "gap_p99_s": Measure("inter-token p99", "ms"),
    "long_gap_p99_s": Measure("inter-token p99 while the long prompt prefills", "ms"),
    **INTERACTIVE_MEASURES,
    "freed": Measure("until the abandoned prompt's memory is free", "ms"),
    "peak_bytes": Measure("peak memory", "bytes"),
    "peak_rows_bytes": Measure("peak memory without weights", "bytes"),
}


def compute_metrics(trace: Trace, workload: RequestWorkload) -> dict[str, float | None]:
    """Compute the measures of one run, without memory. None for measures that the run does not have."""
    first = {request_id: times[0] for request_id, times in trace.times.items()}
    ttft = [first[request_id] - added for request_id, added in trace.added.items()]
    gaps = [b - a for times in trace.times.values() for a, b in zip(times, times[1:], strict=False)]
    wall = trace.end - trace.start
    return {
        "wall_s": wall,
        "output_tps": _compute_rate(workload.output_tokens, wall),
        "prefill_tps": _compute_rate(workload.prompt_tokens, max(first.values()) - trace.start),
        "decode_tps": _compute_decode_rate(trace),
        "ttft_mean_s": statistics.fmean(ttft),
        "ttft_p99_s": compute_percentile(ttft, 99),
        "gap_p50_s": compute_percentile(gaps, 50),
        "gap_p99_s": compute_percentile(gaps, 99),
        "long_gap_p99_s": _compute_gap_beside(trace, workload.long_id),
    }


def _compute_decode_rate(trace: Trace) -> float | None:
    """Tokens a second from the last row's first token to the first row's last one."""
    start = max(times[0] for times in trace.times.values())
    end = min(times[-1] for times in trace.times.values())
    tokens = sum(start < t <= end for times in trace.times.values() for t in times)
    return _compute_rate(tokens, end - start)


def _compute_gap_beside(trace: Trace, long_id: str | None) -> float | None:
    """p99 of the other rows' gaps that end between a job's arrival and its first token."""
    if long_id is None:
        return None
    start, end = trace.added[long_id], trace.times[long_id][0]
    rows = [times for request_id, times in trace.times.items() if request_id != long_id]
    pairs = [pair for times in rows for pair in zip(times, times[1:], strict=False)]
    return compute_percentile([b - a for a, b in pairs if start < b <= end], 99)


def compute_percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the percentile by nearest rank: the smallest value that is not below `percent` per cent of all.
    None if there are no values."""
    rank = -(-percent * len(values) // 100)  # rounded up
    return sorted(values)[max(rank, 1) - 1] if values else None


def _compute_rate(count: float, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def compute_medians(runs: Sequence[Values]) -> dict[str, float | None]:
    """Compute the median over runs of each measure that this workload has. None if one run lacks it."""
    known = set().union(*runs)
    return {key: _median([run.get(key) for run in runs]) for key in MEASURES if key in known}


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def compute_ratios(
    ours: Values, peer: Values, measures: Mapping[str, Measure] = MEASURES
) -> dict[str, float | None]:
    """Compute how many times better ours is, for each measure that both have: above 1 is better. None for a
    measure of which neither more nor less is better."""
    both = {key: measure.more for key, measure in measures.items() if key in ours and key in peer}
    return {key: _compute_ratio(ours[key], peer[key], more) for key, more in both.items()}


def _compute_ratio(ours: float | None, peer: float | None, more: bool | None) -> float | None:
    over, under = (ours, peer) if more else (peer, ours)
    return over / under if more is not None and over is not None and under else None


def compute_agreement(ours: Trace, peer: Trace) -> float:
    """Compute the share of requests with the same tokens on both sides: 1.0 unless rounding decides a
    near-tie."""
    return statistics.fmean(
        float(ours.tokens[request_id] == peer.tokens[request_id]) for request_id in ours.tokens
    )
