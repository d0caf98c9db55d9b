"""The workload `interactive` of `mlxrun bench engine`: how long one person waits for a first token.

A run has four parts, each in an engine without other work:

- short requests alone;
- long prompts alone;
- a long prompt, with a short request in the middle of its prefill;
- the same, but the long prompt is cancelled as the short request comes.

The middle is a share of the time to first token that the long prompt has alone. A step is not interrupted. A
request that comes during a step is added at its end, but its time counts from its arrival.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from mlxrun.cli.bench.engine.measurement import Contender, Trace, check_lengths, record_outputs
from mlxrun.cli.bench.engine.workloads import BenchRequest, RequestWorkload
from mlxrun.core.errors import MlxrunError

FREED = 0.25  # a cancelled row is freed when at most this share of a long row's memory is still in use


@runtime_checkable
class InteractiveContender(Contender, Protocol):
    """A contender whose requests can be cancelled."""

    def abort(self, request_id: str) -> None:
        """Cancel an unfinished request."""

    def settle(self) -> None:
        """Release what ended requests still occupy. Called when no request is unfinished."""


class InteractiveRequests(NamedTuple):
    """The requests by part. `behind` comes behind `in_front`; `after` comes as `cancelled` is cancelled."""

    alone: list[BenchRequest]
    long: list[BenchRequest]
    in_front: BenchRequest
    behind: BenchRequest
    cancelled: BenchRequest
    after: BenchRequest

    @classmethod
    def split(cls, workload: RequestWorkload) -> InteractiveRequests:
        """Split a workload's requests, which have the order of `make_workload`."""
        *alone, cold, warm, in_front, behind, cancelled, after = workload.requests
        return cls(alone, [cold, warm], in_front, behind, cancelled, after)


def run_interactive(
    contender: InteractiveContender,
    workload: RequestWorkload,
    clock: Callable[[], float],
    read_memory: Callable[[], int],
) -> tuple[Trace, float]:
    """Run all parts. Return the trace, and the seconds from the cancellation until its memory was free.
    `read_memory`: returns the bytes in use. MlxrunError if an answer does not have its full length, or if the
    idle engine still uses the memory of the cancelled row."""
    requests = InteractiveRequests.split(workload)
    session = _Session(contender, clock)
    short = max([session.run_request(request, read_memory) for request in requests.alone])
    long = max([session.run_request(request, read_memory) for request in requests.long])
    wait = workload.moment * _find_long_ttft(session.trace, requests)
    session.send(requests.in_front)
    session.send(requests.behind, session.step_for(wait))
    session.finish()
    gc.collect()  # as what is collected later would seem to be the cancelled row's
    limit = read_memory() + short + FREED * max(0, long - short)
    session.send(requests.cancelled)
    came = session.step_for(wait)
    session.cancel(requests.cancelled)
    session.send(requests.after, came)
    freed = session.finish(lambda: read_memory() <= limit)
    if freed is None:
        raise MlxrunError("bench: the memory of the cancelled row is still in use when the engine is idle")
    check_lengths(session.trace, [each for each in workload.requests if each is not requests.cancelled])
    return session.trace, freed - came


class _Session:
    """Sends requests to a contender and records when their tokens come."""

    def __init__(self, contender: InteractiveContender, clock: Callable[[], float]) -> None:
        self._contender, self._clock = contender, clock
        self._live: set[str] = set()
        self.trace = Trace(clock())

    def send(self, request: BenchRequest, came: float | None = None) -> None:
        """Add a request that came at that time; None: that comes now."""
        self.trace.added[request.id] = self._clock() if came is None else came
        self._contender.add([request])
        self._live.add(request.id)

    def run_request(self, request: BenchRequest, read_memory: Callable[[], int]) -> int:
        """Run one request; returns the bytes that it had in use at its first token."""
        before = read_memory()
        self.send(request)
        while request.id not in self.trace.tokens:
            self.step()
        row = read_memory() - before
        self.finish()
        return row

    def cancel(self, request: BenchRequest) -> None:
        self._contender.abort(request.id)
        self._live.discard(request.id)

    def step(self) -> None:
        outputs = [output for output in self._contender.step() if output.request_id in self._live]
        record_outputs(self.trace, outputs, self._live, self._clock)

    def step_for(self, seconds: float) -> float:
        """Step for that long, or until nothing is left to do; returns the time at which that was over."""
        until = self._clock() + seconds
        while self._live and self._clock() < until:
            self.step()
        return min(until, self._clock())

    def finish(self, reached: Callable[[], bool] = lambda: True) -> float | None:
        """Step until the engine is idle; returns the end of the step after which `reached` was first true."""
        first = None
        while self._live:
            self.step()
            if first is None and reached():
                first = self._clock()
        self._contender.settle()
        return self._clock() if first is None and reached() else first


# -- numbers ----------------------------------------------------------------------------------------


def compute_interactive_metrics(
    trace: Trace, workload: RequestWorkload, freed: float
) -> dict[str, float | None]:
    """Compute the measures of one run. MlxrunError if the long prompt was prefilled before a short request
    came."""
    requests = InteractiveRequests.split(workload)
    long_ttft = _find_long_ttft(trace, requests)
    late = trace.times[requests.in_front.id][0] <= trace.added[requests.behind.id]
    if late or requests.cancelled.id in trace.tokens:
        raise MlxrunError(
            f"bench: the long prompt, {len(requests.in_front.prompt):,} tokens, takes "
            f"{long_ttft * 1000:.1f} ms alone, and was prefilled before the short one came, at "
            f"{workload.moment:.0%} of that: give a larger --scale, or let nothing else run on this machine"
        )
    alone = statistics.median(_compute_ttft(trace, short) for short in requests.alone[1:])
    behind = _compute_ttft(trace, requests.behind)
    return {
        "alone": alone,
        "behind": behind,
        "ratio": behind / alone if alone else None,
        "after_cancel": _compute_ttft(trace, requests.after),
        "freed": freed,
        "long_ttft": long_ttft,
        "moment": workload.moment,
    }


def _find_long_ttft(trace: Trace, requests: InteractiveRequests) -> float:
    """The shortest one, as the first prompt of that length may compile."""
    return min(_compute_ttft(trace, long) for long in requests.long)


def _compute_ttft(trace: Trace, request: BenchRequest) -> float:
    return trace.times[request.id][0] - trace.added[request.id]
