"""The requests in flight. /v1/status shows them; cancelling, time limits and shutdown end them.

A `LiveRequest` is open from its validated body to the last byte of its answer. When it closes, the engine's
work for it is aborted, and its time and its tokens are counted.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from aiohttp import web

from mlxrun.api.choice import Choice
from mlxrun.api.prepared import PreparedRequest, check_prompt_lengths
from mlxrun.config.settings import Config
from mlxrun.core.errors import Cancelled, MlxrunError, TimedOut
from mlxrun.core.request import FinishReason, HitKind, TokenEvent
from mlxrun.core.visible_text import FIELDS
from mlxrun.server.engine_state import EngineState
from mlxrun.server.http.access import key_name, request_id
from mlxrun.server.http.key_limits import KeyLimits
from mlxrun.server.http.surface import Handler
from mlxrun.server.request_metrics import RequestMetrics

log = logging.getLogger(__name__)

Phase = Literal["queued", "prefill", "decode"]
# The error that ended a request in the engine; a stream may have sent it as its last event.
ENGINE_ERROR = web.RequestKey("engine_error", MlxrunError)
PREFILL_REPORT, PREFILL_REPORTS = 10.0, 30.0  # seconds of a prefill until its first log line, and the next


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
        self.queue_seconds: float | None = None  # until it had a row; None for embeddings
        self.output_tokens = 0
        self.hit: HitKind | None = None
        self.ttft: float | None = None
        self.aborted_by: MlxrunError | None = None  # the time limit, cancellation or shutdown that ended it
        self.error: MlxrunError | None = None  # raised by the engine or the parser
        self.choices: Sequence[Choice] = ()  # none of embeddings
        self._metrics = requests.metrics
        self._opened = self.engine.clock()
        self._running: set[str] = set()  # ids of engine requests that have not ended
        self._computed: dict[int, int] = {}  # prompt tokens, by the first choice of each prompt
        self._cached: dict[int, int] = {}  # of these, found in the prefix cache
        self._first_token = self._last_token = 0.0  # times
        self._next_report = PREFILL_REPORT  # age, in seconds, at which its prefill is logged

    @property
    def prompt_tokens(self) -> int:
        return self.prepared.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """The prompt tokens that are computed or cached. A prompt counts once for all its choices."""
        return min(self.prompt_tokens, sum(self._computed.values()))

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens that were in the prefix cache, as in `usage`."""
        return sum(self._cached.values())

    @property
    def age(self) -> float:
        """The seconds since it was opened."""
        return self.engine.clock() - self._opened

    @property
    def finish_reasons(self) -> list[str]:
        """OpenAI's `finish_reason` of each choice that has ended."""
        return [reason for choice in self.choices if (reason := choice.finish_reason) is not None]

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
        if event.hit_kind is not None and is_first and self.hit is None:
            self.hit = event.hit_kind
            self.queue_seconds = event.queue_seconds
            self._metrics.queue.observe(event.queue_seconds)
        if is_first:
            self._computed[index] = max(self._computed.get(index, 0), event.num_computed_tokens)
            self._cached[index] = max(self._cached.get(index, 0), event.num_cached_tokens)
        if event.tokens:
            self._record_tokens(len(event.tokens))
        elif self.phase == "queued" and (event.num_computed_tokens or event.hit_kind is not None):
            self.phase = "prefill"
            self.started.set()
        if self.phase == "prefill":
            self._report_prefill()
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

    def _report_prefill(self) -> None:
        """Log the progress of a prefill that takes long: after PREFILL_REPORT seconds, and every
        PREFILL_REPORTS then."""
        seconds = self.age - (self.queue_seconds or 0.0)
        if seconds < self._next_report:
            return
        self._next_report = seconds + PREFILL_REPORTS
        done, total = self.computed_tokens, self.prompt_tokens
        if done == total:
            return
        computed = done - self.cached_tokens
        left = seconds * (total - done) / computed if computed > 0 else None
        rest = "" if left is None else f", about {left:.0f} s left"
        fields = {
            **self.describe_work(),
            "request_id": self.id,
            "key": self.key_name or None,
            "computed_tokens": done,
            "remaining_ms": _round_ms(left),
        }
        text = "%s prefill %d/%d tokens after %.0f s%s"
        log.info(text, self.id, done, total, seconds, rest, extra={FIELDS: fields})

    def measure_phases(self) -> tuple[float | None, float | None, float | None]:
        """Return the seconds of waiting, prefill and decoding. A phase that has not begun has None; one that
        goes on lasts until now."""
        queue, prefill, decode = self.queue_seconds, None, None
        if self.phase == "queued":
            queue = self.age
        else:
            prefill = (self.age if self.ttft is None else self.ttft) - (queue or 0.0)
        if self.ttft is not None:
            decode = self._last_token - self._first_token
        return queue, prefill, decode

    def describe_work(self) -> dict[str, Any]:
        """Build what the log has of the engine's work: tokens, and milliseconds by phase, as
        `measure_phases` has them."""
        queue, prefill, decode = self.measure_phases()
        rate = self.tokens_per_second
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queue_ms": _round_ms(queue),
            "prefill_ms": _round_ms(prefill),
            "decode_ms": _round_ms(decode),
            "tokens_per_second": None if rate is None else round(rate, 2),
        }

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


def _round_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(seconds, 0.0) * 1000, 1)


LIVE = web.RequestKey("live", LiveRequest)  # of a request that reached the engine, also once it has ended


class LiveRequests:
    """All requests in flight, by id."""

    def __init__(
        self, config: Config, engine: EngineState, metrics: RequestMetrics, limits: KeyLimits
    ) -> None:
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self.limits = limits
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

        PromptTooLong if a prompt is longer than server.max_prompt_tokens; RateLimited as in `open_as`.
        """
        with self.open_as(request_id(request), key_name(request), surface, prepared) as live:
            request[LIVE] = live
            try:
                yield live
            finally:
                error = live.aborted_by or live.error
                if error is not None:
                    request[ENGINE_ERROR] = error

    @contextmanager
    def open_as(
        self, rid: str, key: str, surface: str, prepared: PreparedRequest, parent: str = ""
    ) -> Iterator[LiveRequest]:
        """The same for a request that outlives its HTTP request, whose id is `parent`. `rid`: its own id;
        `key`: the API key's name. RateLimited if the key is at one of its limits."""
        settings = self.config.server
        check_prompt_lengths(prepared, settings.max_prompt_tokens)
        with self.limits.hold(key, parent), self._list(rid, key, surface, prepared) as live:
            yield live

    @contextmanager
    def _list(self, rid: str, key: str, surface: str, prepared: PreparedRequest) -> Iterator[LiveRequest]:
        live = LiveRequest(self, rid, surface, key, prepared)
        assert rid not in self._requests, "the ids of requests in flight are unique"
        self._requests[rid] = live
        timer, seconds = None, self.config.server.request_timeout
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
            self.limits.count_tokens(key, live.computed_tokens + live.output_tokens)


LIVE_REQUESTS = web.AppKey("live_requests", LiveRequests)


def count_from_arrival(handler: Handler) -> Handler:
    """Wrap a handler whose requests count in their key's `max_concurrent`, also while they are prepared."""

    @functools.wraps(handler)
    async def accept(request: web.Request) -> web.StreamResponse:
        with request.app[LIVE_REQUESTS].limits.accept(request_id(request), key_name(request)):
            return await handler(request)

    return accept
