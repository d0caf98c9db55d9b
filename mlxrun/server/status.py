"""The present state of a server, for /v1/status and for the gauges of /metrics.

A Mac has a power and a thermal state too, both of which slow a model down. `pmset` and `notifyutil` are asked
for it, which need no rights.
"""

from __future__ import annotations

import platform
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web
from cachetools import TTLCache, cached
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxrun import __version__
from mlxrun.core.processes import read_output
from mlxrun.server.batches.batch_queue import BATCH_QUEUE
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.http.access import CONFIG, CONFIG_HASH
from mlxrun.server.live_requests import LIVE_REQUESTS

_HITS = ("exact", "prefix", "supersequence", "lcp", "miss")


def describe_limits(app: web.Application) -> Mapping[str, int]:
    """Return how many requests may run, and how many more may wait."""
    settings = app[CONFIG].scheduler
    return {"max_running": settings.max_running, "max_queue": settings.max_queue}


def describe_batches(app: web.Application) -> Mapping[str, Any]:
    """Describe the running batch, and count the waiting ones."""
    queue = app.get(BATCH_QUEUE)
    return {"running": None, "waiting": 0} if queue is None else queue.describe()


def describe_files(app: web.Application) -> Mapping[str, int]:
    """Return the number and bytes of stored files, and the limit of bytes; 0 until the storage is open."""
    queue = app.get(BATCH_QUEUE)
    count, used = (0, 0) if queue is None else (len(queue.storage.list_files()), queue.storage.used_bytes)
    return {"count": count, "bytes": used, "max_bytes": app[CONFIG].server.files_max_bytes}


def count_phases(app: web.Application) -> dict[str, int]:
    """Count clients' requests by phase."""
    phases = [live.phase for live in app[LIVE_REQUESTS]]
    return {phase: phases.count(phase) for phase in ("queued", "prefill", "decode")}


class StatusCollector(Collector):
    """The metrics that are read when Prometheus asks for them."""

    def __init__(self, app: web.Application) -> None:
        self._app = app

    def collect(self) -> Iterable[Metric]:
        app, engine = self._app, self._app[ENGINE]
        yield _make_gauge("requests_live", "Requests in flight.", count_phases(app), "phase")
        yield _make_gauge("limits", "Most requests that may run, and wait.", describe_limits(app), "name")
        yield _make_gauge("ready", "Whether requests are served.", {"": engine.find_unavailability() is None})
        labels = {"version": __version__, "config_hash": app[CONFIG_HASH]}
        labels["model"] = (engine.describe_model() or {"name": ""})["name"]
        info = GaugeMetricFamily("mlxrun_info", "What is served; always 1.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info
        yield from collect_storage(app)
        yield from _collect_cache(engine.read_cache_counts())
        yield from _collect_engine(*engine.read_stats())


def collect_storage(app: web.Application) -> Iterable[Metric]:
    """The gauges of files and batches."""
    batches, files = describe_batches(app), describe_files(app)
    states = {"running": int(batches["running"] is not None), "waiting": batches["waiting"]}
    yield _make_gauge("batches", "Batches that have not ended.", states, "state")
    yield _make_gauge("files_bytes", "Bytes of files and of running batches.", {"": files["bytes"]})
    yield _make_gauge(
        "files_max_bytes", "The limit of these (server.files_max_bytes).", {"": files["max_bytes"]}
    )


def _collect_cache(counts: Mapping[str, int]) -> Iterable[Metric]:
    hits = {name: counts.get(name, 0) for name in _HITS}
    yield _make_counter("cache_lookups", "Prompts by their kind of prefix-cache hit.", hits, "hit")
    tokens = {"": counts.get("tokens", 0)}
    yield _make_counter("cache_tokens", "Prompt tokens that were found in the prefix cache.", tokens)
    sizes = {"memory": counts.get("memory_bytes", 0), "disk": counts.get("disk_bytes", 0)}
    yield _make_gauge("cache_bytes", "Bytes that the prefix cache holds.", sizes, "tier")
    evicted = {"memory": counts.get("evicted", 0), "disk": counts.get("evicted_disk", 0)}
    yield _make_counter("cache_evicted", "Entries evicted from the prefix cache.", evicted, "tier")


def _collect_engine(stats: Mapping[str, Any], age: float | None) -> Iterable[Metric]:
    ages = {} if age is None else {"": age}
    yield _make_gauge(
        "engine_age_seconds", "Seconds since the engine's newest step ended; 0 while it is idle.", ages
    )
    yield _make_counter("engine_steps", "Steps of the engine.", {"": stats["steps"]})
    yield _make_counter("engine_errors", "Steps that failed.", {"": stats["errors"]})
    text = "Rows that were freed before their end, to be computed again."
    yield _make_counter("preemptions", text, {"": stats["preemptions"]})
    rows = {name: stats[name] for name in ("running", "waiting")}
    yield _make_gauge("engine_requests", "Rows that run, and requests that wait.", rows, "state")
    text = "Of the engine's requests, the background requests (lines of batches)."
    yield _make_gauge("engine_background", text, stats["background"], "state")
    states = {name: stats["pooling"][name] for name in ("running", "waiting")}
    yield _make_gauge("pooling", "Texts that get an embedding or a score, or wait for it.", states, "state")
    done = {"": stats["pooling"]["finished"]}
    yield _make_counter("pooling_finished", "Texts that got an embedding or a score.", done)
    states = {name: stats["transcription"][name] for name in ("running", "waiting")}
    yield _make_gauge("transcription", "Recordings that are transcribed, or wait for it.", states, "state")
    done = {"": stats["transcription"]["finished"]}
    yield _make_counter("transcription_finished", "Recordings that were transcribed.", done)
    drafts = {name: stats["speculation"][name] for name in ("drafted", "accepted")}
    text = "Tokens that were drafted (speculation), and those of them that were accepted."
    yield _make_counter("speculation_tokens", text, drafts, "state")
    drafted = {"": stats["speculation"]["steps"]}
    yield _make_counter("speculation_steps", "Steps that verified drafts.", drafted)
    sparse = {"": stats["sparse_prefill"]["left_out"]}
    yield _make_counter("sparse_prefill_left_out", "Prompt tokens that sparse prefill left out.", sparse)
    memory = {k: v for k, v in (stats["memory"] or {}).items() if v is not None}
    text = "Memory of the device as MLX counts it; cache: freed, and kept for later allocations."
    yield _make_gauge("memory_bytes", text, memory, "kind")


def _make_gauge(name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
    return _fill(GaugeMetricFamily(f"mlxrun_{name}", text, labels=label and [label]), values)


def _make_counter(name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
    return _fill(CounterMetricFamily(f"mlxrun_{name}", text, labels=label and [label]), values)


def _fill(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    """Add a sample for each value of the family's label; a family without a label has one value, of ''."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


READ_EVERY = 10.0  # seconds
_PRESSURE = "com.apple.system.thermalpressurelevel"
# The levels of this notification, in the words of macOS' `powermetrics`.
_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")


@cached(TTLCache(1, READ_EVERY), lock=threading.Lock())
def read_power_state() -> dict[str, Any] | None:
    """`low_power_mode`, `thermal_pressure` and `cpu_speed_limit` (percent), each None where the system does
    not say it; None as a whole elsewhere than on macOS. Blocks for some milliseconds."""
    if platform.system() != "Darwin":
        return None
    settings, heat = read_output("pmset", "-g"), read_output("pmset", "-g", "therm")
    return parse_power_state(settings, heat, read_output("notifyutil", "-g", _PRESSURE))


def parse_power_state(settings: str, heat: str, pressure: str) -> dict[str, Any]:
    """The state from the outputs of `pmset -g`, `pmset -g therm`, and `notifyutil -g` of the thermal
    pressure."""
    # One of the two, by the model of Mac; 2 is the mode of high power.
    mode = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d+)", settings, re.MULTILINE)
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", heat)
    level = re.search(rf"{re.escape(_PRESSURE)}\s+(\d+)", pressure)
    number = int(level[1]) if level else len(_LEVELS)
    return {
        "low_power_mode": mode[1] == "1" if mode else None,
        "thermal_pressure": _LEVELS[number] if number < len(_LEVELS) else None,
        "cpu_speed_limit": int(limit[1]) if limit else None,
    }
