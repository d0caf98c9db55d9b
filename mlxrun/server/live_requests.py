"""The requests in flight. /v1/status shows them; cancelling, time limits and shutdown end them.

A `LiveRequest` is open from its validated body to the last byte of its answer. When it closes, the engine's
work for it is aborted. Its time and its tokens are counted for /metrics; status.py adds the gauges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from mlxrun.api.prepared import PreparedRequest, check_prompt_lengths
from mlxrun.config.settings import Config
from mlxrun.core.errors import Cancelled, MlxrunError, TimedOut
from mlxrun.core.request import FinishReason, HitKind, TokenEvent
from mlxrun.server.engine_state import EngineState
from mlxrun.server.http.access import key_name, request_id

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


Phase = Literal["queued", "prefill", "decode"]
# The error that ended a request in the engine; a stream may have sent it as its last event.
ENGINE_ERROR = web.RequestKey("engine_error", MlxrunError)


class LiveRequest:
    """A client's request with all its choices. Times are seconds of the engine state's clock."""

    def __init__(
        self, requests: LiveRequests, rid: str, surface: str, key: str, prepared: PreparedRequest
    ) -> None:
        self.config = requests.config
        self.engine = requests.engine
        self.id = rid
        self.surface = surface
        self.key_name = key
        self.prepared = prepared
        self.phase: Phase = "queued"
        self.started = asyncio.Event()  # set once the phase is another one
        self.cached_tokens = 0  # of the prompt, found in the prefix cache
        self.output_tokens = 0
        self.hit: HitKind | None = None
        self.ttft: float | None = None
        self.aborted_by: MlxrunError | None = None  # the time limit, cancellation or shutdown that ended it
        self.error: MlxrunError | None = None  # raised by the engine or the parser
        self._metrics = requests.metrics
        self._opened = self.engine.clock()
        self._running: set[str] = set()  # ids of engine requests that have not ended
        self._computed: dict[int, int] = {}  # prompt tokens, by choice
        self._first_token = self._last_token = 0.0  # times

    @property
    def prompt_tokens(self) -> int:
        return self.prepared.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """The prompt tokens that are computed or cached. A prompt counts once for all its choices."""
        return min(self.prompt_tokens, sum(self._computed.values()))

    @property
    def age(self) -> float:
        """The seconds since it was opened."""
        return self.engine.clock() - self._opened

    @property
    def tokens_per_second(self) -> float | None:
        """The output tokens per second since the first one; None if there are fewer than two."""
        seconds = self._last_token - self._first_token
        return (self.output_tokens - 1) / seconds if self.output_tokens > 1 and seconds > 0 else None

    def describe_progress(self) -> str:
        """Describe the phase and its progress for people: `prefill 2048/16384`, in tokens."""
        if self.phase == "queued":
            return "queued"
        if self.phase == "prefill":
            return f"prefill {self.computed_tokens}/{self.prompt_tokens}"
        return f"decode {self.output_tokens}"

    @contextmanager
    def run_choice(self, engine_id: str) -> Iterator[None]:
        """List a choice as running in the engine within the block. Raises the error of `fail`, if any."""
        if self.aborted_by is not None:
            raise self.aborted_by
        self._running.add(engine_id)
        try:
            yield
        finally:
            self._running.discard(engine_id)

    def record(self, index: int, event: TokenEvent) -> None:
        """Count an event of the choice at `index`."""
        is_first = index % self.prepared.n == 0  # of its prompt's choices
        if event.hit_kind is not None:
            if is_first and self.hit is None:
                self.hit = event.hit_kind
            if index == 0:
                self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
        if is_first:
            self._computed[index] = max(self._computed.get(index, 0), event.num_computed_tokens)
        if event.tokens:
            self._record_tokens(len(event.tokens))
        elif self.phase == "queued" and (event.num_computed_tokens or event.hit_kind is not None):
            self.phase = "prefill"
            self.started.set()
        if event.finish is not None and event.finish is not FinishReason.ERROR:
            self._running.discard(event.request_id)

    def _record_tokens(self, count: int) -> None:
        now = self.engine.clock()
        self.output_tokens += count
        if self.ttft is None:
            self.phase = "decode"
            self.started.set()
            self.ttft = now - self._opened
            self._first_token = now
            self._metrics.ttft.observe(self.ttft)
        elif count == 1:
            self._metrics.inter_token.observe(now - self._last_token)
        self._last_token = now

    def fail(self, error: MlxrunError) -> None:
        """End the request from outside. Its handler gets `error` as if the engine had raised it."""
        if self.aborted_by is None:
            self.aborted_by = error
            for engine_id in tuple(self._running):
                self.engine.client.fail(engine_id, error)

    def cancel(self) -> None:
        """End the request with Cancelled."""
        self.fail(Cancelled("the request was cancelled"))

    def close(self) -> None:
        """Abort the engine's remaining work for the request, and count the request."""
        for engine_id in tuple(self._running):
            self.engine.client.abort(engine_id)
        self._running.clear()
        self._metrics.count_answer(
            self.age, prompt=self.computed_tokens, cached=self.cached_tokens, output=self.output_tokens
        )

    def describe(self) -> dict[str, Any]:
        """Build the request's entry in /v1/status."""
        rate = self.tokens_per_second
        return {
            "id": self.id,
            "surface": self.surface,
            "key": self.key_name,
            "phase": self.phase,
            "progress": round(self.computed_tokens / max(1, self.prompt_tokens), 4),
            "age": round(self.age, 3),
            "ttft": None if self.ttft is None else round(self.ttft, 4),
            "tokens_per_second": None if rate is None else round(rate, 2),
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "hit": None if self.hit is None else self.hit.value,
        }


class LiveRequests:
    """All requests in flight, by id."""

    def __init__(self, config: Config, engine: EngineState, metrics: RequestMetrics) -> None:
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self._requests: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._requests.values()))

    def get(self, rid: str) -> LiveRequest | None:
        return self._requests.get(rid)

    @contextmanager
    def open(self, request: web.Request, surface: str, prepared: PreparedRequest) -> Iterator[LiveRequest]:
        """List a request while the block runs. Afterwards the engine's remaining work for it is aborted.

        PromptTooLong if a prompt is longer than server.max_prompt_tokens.
        """
        with self.open_as(request_id(request), key_name(request), surface, prepared) as live:
            try:
                yield live
            finally:
                error = live.aborted_by or live.error
                if error is not None:
                    request[ENGINE_ERROR] = error

    @contextmanager
    def open_as(self, rid: str, key: str, surface: str, prepared: PreparedRequest) -> Iterator[LiveRequest]:
        """The same for a request that outlives its HTTP request. `rid`: its id; `key`: the API key's name."""
        settings = self.config.server
        check_prompt_lengths(prepared, settings.max_prompt_tokens)
        live = LiveRequest(self, rid, surface, key, prepared)
        assert rid not in self._requests, "the ids of requests in flight are unique"
        self._requests[rid] = live
        timer, seconds = None, settings.request_timeout
        if seconds is not None:
            text = f"the request took longer than {seconds:g} s (server.request_timeout) and was aborted"
            timer = asyncio.get_running_loop().call_later(seconds, live.fail, TimedOut(text))
        try:
            yield live
        finally:
            if timer is not None:
                timer.cancel()
            del self._requests[rid]
            live.close()


LIVE_REQUESTS = web.AppKey("live_requests", LiveRequests)
