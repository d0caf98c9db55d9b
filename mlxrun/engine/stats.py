"""The engine's numbers for /v1/status and /metrics. Read them on the engine thread, between two steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from mlxrun.model.machine.memory_meter import read_device_memory

if TYPE_CHECKING:
    from mlxrun.engine.engine import Engine
    from mlxrun.model.probe import ProbeReport
    from mlxrun.scheduler.request_state import RequestState


def collect_stats(engine: Engine) -> Mapping[str, Any]:
    """JSON-ready: running and waiting requests, in all and in the background; steps and failed steps since
    the start; bytes of memory; and the result of the probe, or None if there was none."""
    requests = engine.scheduler.requests
    return {
        **_count_requests(requests),
        "background": _count_requests([state for state in requests if state.request.background]),
        "steps": engine.steps,
        "errors": engine.errors,
        "memory": {**read_device_memory(), "limit": engine.scheduler.limits.memory.limit or None},
        "probe": None if engine.probe is None else _describe_probe(engine.probe),
    }


def _count_requests(requests: Collection[RequestState]) -> dict[str, int]:
    running = sum(state.running for state in requests)
    return {"running": running, "waiting": len(requests) - running}


def _describe_probe(probe: ProbeReport) -> Mapping[str, Any]:
    sharing = probe.methods.sharing
    return {
        "decode": probe.methods.decode,
        "prefill_rows": sharing.max_rows,
        "padded": sharing.max_padded,
        "checks": [
            {"name": check.name, "passed": check.passed, "difference": check.difference, "error": check.error}
            for check in probe.checks
        ],
    }
