"""The engine's numbers for /v1/status and /metrics, which the engine thread publishes after each step."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxrun.model.machine.device import read_device_memory

if TYPE_CHECKING:
    from mlxrun.engine.engine import Engine
    from mlxrun.engine.scheduler.request_state import RequestState
    from mlxrun.model.probe.report import ProbeReport


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`counts` are JSON-ready: running and waiting requests, in all and in the background; steps and failed
    steps since the start; drafts."""

    counts: Mapping[str, Any]
    memory_limit: int | None  # bytes
    time: float  # seconds of time.monotonic
    busy: bool  # whether another step follows
    probe: ProbeReport | None = None

    def compute_age(self) -> float:
        """Seconds since these were collected; 0 while the engine is idle."""
        return time.monotonic() - self.time if self.busy else 0.0

    def describe(self) -> dict[str, Any]:
        """The counts, the result of the probe (None if there was none), and the bytes of memory at this
        moment."""
        probe = None if self.probe is None else self.probe.describe()
        return {"probe": probe, **self.counts, "memory": {**read_device_memory(), "limit": self.memory_limit}}


def collect_stats(engine: Engine) -> EngineStats:
    """Collect them on the engine's thread, between two steps."""
    requests = engine.scheduler.requests
    reading = [] if engine.selection is None else list(engine.selection.waiting.values())
    background = [state for state in requests if state.request.background]
    counts = {
        **_count_requests(requests, len(reading)),
        "background": _count_requests(background, sum(request.background for request in reading)),
        **({} if engine.pooling is None else {"pooling": engine.pooling.count()}),
        "steps": engine.generation.steps,
        "errors": engine.generation.errors,
        "speculation": engine.scheduler.drafts.describe(),
        **({} if engine.selection is None else {"sparse_prefill": engine.selection.describe()}),
    }
    limit = engine.scheduler.limits.memory.limit or None
    return EngineStats(counts, limit, time.monotonic(), engine.busy, engine.probe)


def _count_requests(requests: Collection[RequestState], reading: int) -> dict[str, int]:
    """`reading`: requests besides, which are with a draft model."""
    running = sum(state.running for state in requests)
    return {"running": running, "waiting": len(requests) - running + reading}
