"""Counters and histograms of requests, for /metrics. status.py adds the gauges, read at each scrape."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)


class RequestMetrics:
    """What requests write, in a registry of each server's own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "mlxrun_requests",
            "Requests that have ended. A stream that failed counts with the status of its error.",
            ("surface", "status"),
            registry=registry,
        )
        self._tokens = Counter(
            "mlxrun_tokens",
            "Tokens of clients' ended requests: of prompts, of prompts found in the cache, of answers.",
            ("kind",),
            registry=registry,
        )
        self.ttft = Histogram(
            "mlxrun_time_to_first_token_seconds",
            "From a validated request to its first token.",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "mlxrun_inter_token_seconds",
            "Between two tokens of an answer that came one by one.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._duration = Histogram(
            "mlxrun_request_duration_seconds",
            "From a validated request to the end of its answer.",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        for kind in ("prompt", "cached", "output"):
            self._tokens.labels(kind)
        ProcessCollector(registry=registry)  # memory, CPU and open files, on Linux

    def count_answer(self, seconds: float, **tokens: int) -> None:
        """Count a request that has ended: how long it took, and its tokens by kind."""
        self._duration.observe(seconds)
        for kind, count in tokens.items():
            self._tokens.labels(kind).inc(count)


METRICS = web.AppKey("metrics", RequestMetrics)
