"""What /metrics shows, by prometheus-client, in a registry of each server's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxrun import __version__

if TYPE_CHECKING:
    from mlxrun.server.live_requests import LiveRequest
    from mlxrun.server.state import Server

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_HITS = ("exact", "prefix", "supersequence", "lcp", "miss")
_LIVE = ("queued", "prefill", "decode")


class Metrics:
    """Counters and histograms that requests write; the rest is read when somebody asks."""

    def __init__(self, server: Server) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "mlxrun_requests",
            "Requests that have ended. A stream that failed counts as the error that ended it.",
            ("surface", "status"),
            registry=registry,
        )
        self.tokens = Counter(
            "mlxrun_tokens",
            "Tokens of clients' ended requests: of prompts, of these found in the cache, of answers.",
            ("kind",),
            registry=registry,
        )
        self.ttft = Histogram(
            "mlxrun_time_to_first_token_seconds",
            "From a checked request to its first token.",
            buckets=_TTFT,
            registry=registry,
        )
        self.gap = Histogram(
            "mlxrun_inter_token_seconds",
            "Between two tokens of an answer that came one by one.",
            buckets=_GAP,
            registry=registry,
        )
        self.duration = Histogram(
            "mlxrun_request_duration_seconds",
            "From a checked request to the end of its answer.",
            buckets=_TTFT,
            registry=registry,
        )
        for kind in ("prompt", "cached", "output"):
            self.tokens.labels(kind)
        registry.register(_StateCollector(server))
        ProcessCollector(registry=registry)  # memory, CPU and open files, on Linux

    def close(self, live: LiveRequest) -> None:
        """A request has ended."""
        for kind, count in (
            ("prompt", live.computed),
            ("cached", live.cached),
            ("output", live.output_tokens),
        ):
            self.tokens.labels(kind).inc(count)
        self.duration.observe(live.age)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _StateCollector(Collector):
    """What there is at the moment of asking."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        server = self._server
        phases = dict.fromkeys(_LIVE, 0)
        for live in server.live:
            phases[live.phase] += 1
        yield _labelled("mlxrun_requests_live", "Requests under way.", "phase", phases)
        yield _labelled("mlxrun_limits", "Most requests that may run, and wait.", "name", server.limits())
        yield _one("mlxrun_ready", "Whether requests are served.", float(server.trouble() is None))
        yield _info(server)
        yield from _storage(server)
        yield from _cache(server.cache_counts())
        yield from _engine(server.stats, server.stats_age)


def _info(server: Server) -> Metric:
    labels = {"version": __version__, "config_hash": server.digest}
    labels["model"] = (server.model_facts() or {"name": ""})["name"]
    info = GaugeMetricFamily("mlxrun_info", "What is served; always 1.", labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    return info


def _storage(server: Server) -> Iterable[Metric]:
    batches, files = server.batches(), server.files()
    states = {"running": int(batches["running"] is not None), "waiting": batches["waiting"]}
    yield _labelled("mlxrun_batches", "Batches that are not over.", "state", states)
    yield _one("mlxrun_files_bytes", "Bytes of files and of running batches.", files["bytes"])
    yield _one("mlxrun_files_max_bytes", "Most of these (server.files_max_bytes).", files["max_bytes"])


def _cache(counts: Mapping[str, int]) -> Iterable[Metric]:
    hits = CounterMetricFamily("mlxrun_cache_lookups", "Prompts by how they met the cache.", labels=["hit"])
    for name in _HITS:
        hits.add_metric([name], counts.get(name, 0))
    yield hits
    saved = CounterMetricFamily("mlxrun_cache_tokens", "Prompt tokens that need not be computed, all told.")
    saved.add_metric([], counts.get("tokens", 0))
    yield saved
    sizes = {"memory": counts.get("memory_bytes", 0), "disk": counts.get("disk_bytes", 0)}
    yield _labelled("mlxrun_cache_bytes", "Bytes that the prefix cache holds.", "tier", sizes)
    evicted = CounterMetricFamily("mlxrun_cache_evicted", "Records that had to go.", labels=["tier"])
    evicted.add_metric(["memory"], counts.get("evicted", 0))
    evicted.add_metric(["disk"], counts.get("evicted_disk", 0))
    yield evicted


def _engine(stats: Mapping[str, Any], age: float | None) -> Iterable[Metric]:
    read = GaugeMetricFamily("mlxrun_engine_age_seconds", "Since the engine's numbers were read.")
    if age is not None:
        read.add_metric([], age)
    yield read
    for name, text in (("steps", "Steps of the engine."), ("errors", "Steps that failed.")):
        counter = CounterMetricFamily(f"mlxrun_engine_{name}", text)
        counter.add_metric([], stats[name])
        yield counter
    rows = {name: stats[name] for name in ("running", "waiting")}
    yield _labelled("mlxrun_engine_requests", "Rows that run, and requests that wait.", "state", rows)
    behind = stats["background"]
    yield _labelled("mlxrun_engine_background", "Of these, lines of batches.", "state", behind)
    memory = {k: v for k, v in (stats["memory"] or {}).items() if v is not None}
    text = "Memory of the device as MLX counts it; cache: freed, and kept for what comes next."
    yield _labelled("mlxrun_memory_bytes", text, "kind", memory)


def _one(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
