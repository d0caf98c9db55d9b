"""The metrics that requests write, for /metrics; status.py adds what is read when Prometheus asks."""

from __future__ import annotations

from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)


class RequestMetrics:
    """The metrics that requests write. Each server has a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        text = "Requests that have ended. A stream that failed counts with the status of its error."
        self.requests = counter("mlxrun_requests", text, ("surface", "status"))
        text = "Tokens of clients' ended requests: of prompts, of prompts found in the cache, of answers."
        self._tokens = counter("mlxrun_tokens", text, ("kind",))
        text = "From a validated request to its first token."
        self.ttft = histogram("mlxrun_time_to_first_token_seconds", text, buckets=_REQUEST_BUCKETS)
        text = "From a validated request to the step in which the engine began with it."
        self.queue = histogram("mlxrun_queue_seconds", text, buckets=_REQUEST_BUCKETS)
        text = "Time between two consecutive tokens of an answer, where each token was sent by itself."
        self.inter_token = histogram("mlxrun_inter_token_seconds", text, buckets=_TOKEN_BUCKETS)
        text = "From a validated request to the end of its answer."
        self._duration = histogram("mlxrun_request_duration_seconds", text, buckets=_REQUEST_BUCKETS)
        for kind in ("prompt", "cached", "output"):
            self._tokens.labels(kind)
        ProcessCollector(registry=self.registry)  # memory, CPU and open files, on Linux

    def count_answer(self, seconds: float, **tokens: int) -> None:
        """Count a request that has ended: its seconds, and its tokens by kind."""
        self._duration.observe(seconds)
        for kind, count in tokens.items():
            self._tokens.labels(kind).inc(count)


METRICS = web.AppKey("metrics", RequestMetrics)
