"""The engine's numbers, for /v1/status and /metrics. To be read on the engine thread, between two steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from mlxrun.model.machine.memory_meter import read_device_memory

if TYPE_CHECKING:
    from mlxrun.engine.engine import Engine
    from mlxrun.model.probe import ProbeReport
    from mlxrun.scheduler.request_state import RequestState


def collect_stats(engine: Engine) -> Mapping[str, Any]:
    """JSON-ready: rows running and requests waiting, of either those in the background, steps and failed
    steps since the start, bytes of memory, and what the probe found (None: there was none)."""
    entries = engine.scheduler.requests
    return {
        **_count_requests(entries),
        "background": _count_requests([entry for entry in entries if entry.request.background]),
        "steps": engine.steps,
        "errors": engine.errors,
        "memory": {**read_device_memory(), "limit": engine.scheduler.memory.limit or None},
        "probe": None if engine.probe is None else _describe_probe(engine.probe),
    }


def _count_requests(entries: Collection[RequestState]) -> dict[str, int]:
    running = sum(entry.running for entry in entries)
    return {"running": running, "waiting": len(entries) - running}


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
