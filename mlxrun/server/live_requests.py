"""The table of requests that are under way, as /v1/status shows them and as cancelling finds them.

A `Live` is open while its handler serves it; when it closes, what the engine still does for it is aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web

from mlxrun.errors import Cancelled, MlxrunError, PromptTooLong, TimedOut
from mlxrun.scheduler.request import FinishReason, HitKind, TokenEvent
from mlxrun.server.access import request_id
from mlxrun.server.auth import key_name

if TYPE_CHECKING:
    from mlxrun.api.prepared import PreparedRequest
    from mlxrun.server.state import Server

log = logging.getLogger(__name__)
Phase = Literal["queued", "prefill", "decode"]
_ENDED = web.RequestKey("ended", MlxrunError)


def ended_by(request: web.Request) -> MlxrunError | None:
    """The error that ended what a request asked of the engine; it may have become a stream's last event."""
    return request.get(_ENDED)


class LiveRequest:
    """One request of a client: all its choices together. Times are seconds of the server's clock."""

    def __init__(self, server: Server, rid: str, surface: str, key: str, prepared: PreparedRequest) -> None:
        self.id = rid
        self.surface = surface
        self.key_name = key
        self.phase: Phase = "queued"
        self.prompt_tokens = prepared.prompt_tokens
        self.cached = 0  # of these, found in the prefix cache
        self.output_tokens = 0
        self.hit: HitKind | None = None
        self.ttft: float | None = None
        self.error: MlxrunError | None = None  # why it was ended from outside
        self.failure: MlxrunError | None = None  # what the engine, or the parser, raised
        self.opened = server.clock()
        self._server = server
        self._prepared = prepared
        self._running: set[str] = set()  # engine requests that have not ended
        self._computed: dict[int, int] = {}
        self._first = self._last = 0.0  # of its tokens

    @property
    def computed(self) -> int:
        """Prompt tokens that are done, the cached ones included; each prompt counts once."""
        return min(self.prompt_tokens, sum(self._computed.values()))

    @property
    def age(self) -> float:
        """Seconds since it was checked."""
        return self._server.clock() - self.opened

    @property
    def rate(self) -> float | None:
        """Output tokens a second since the first one."""
        seconds = self._last - self._first
        return (self.output_tokens - 1) / seconds if self.output_tokens > 1 and seconds > 0 else None

    def progress(self) -> str:
        """How far it is, for people: `prefill 2048/16384`."""
        if self.phase == "queued":
            return "queued"
        if self.phase == "prefill":
            return f"prefill {self.computed}/{self.prompt_tokens}"
        return f"decode {self.output_tokens}"

    def begin(self, engine_id: str) -> None:
        """A choice is handed to the engine. Raises what ended the request before."""
        if self.error is not None:
            raise self.error
        self._running.add(engine_id)

    def ended(self, engine_id: str) -> None:
        """The engine has nothing more for this choice, or was told so."""
        self._running.discard(engine_id)

    def take(self, index: int, event: TokenEvent) -> None:
        """News of the choice at `index`."""
        if event.hit is not None:
            self._met(index, event)
        if index % self._prepared.n == 0:
            self._computed[index] = max(self._computed.get(index, 0), event.computed)
        if event.tokens:
            self._tokens(len(event.tokens))
        elif self.phase == "queued" and (event.computed or event.hit is not None):
            self.phase = "prefill"
        if event.finish is not None and event.finish is not FinishReason.ERROR:
            self._running.discard(event.request_id)

    def _met(self, index: int, event: TokenEvent) -> None:
        if index % self._prepared.n == 0 and self.hit is None:
            self.hit = event.hit
        if index == 0:
            self.cached = max(self.cached, event.cached)

    def _tokens(self, count: int) -> None:
        now, metrics = self._server.clock(), self._server.metrics
        self.output_tokens += count
        if self.ttft is None:
            self.phase = "decode"
            self.ttft = now - self.opened
            self._first = now
            metrics.ttft.observe(self.ttft)
        elif count == 1:
            metrics.gap.observe(now - self._last)
        self._last = now

    def fail(self, error: MlxrunError) -> None:
        """End it from outside: its handler gets `error` as if the engine had raised it."""
        if self.error is None:
            self.error = error
            for engine_id in tuple(self._running):
                self._server.client.fail(engine_id, error)

    def close(self) -> None:
        """The handler is done with it."""
        for engine_id in tuple(self._running):
            self._server.client.abort(engine_id)
        self._running.clear()

    def describe(self) -> dict[str, Any]:
        """Its row of /v1/status."""
        return {
            "id": self.id,
            "surface": self.surface,
            "key": self.key_name,
            "phase": self.phase,
            "progress": round(self.computed / max(1, self.prompt_tokens), 4),
            "age": round(self.age, 3),
            "ttft": None if self.ttft is None else round(self.ttft, 4),
            "tokens_per_second": None if self.rate is None else round(self.rate, 2),
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed,
            "cached_tokens": self.cached,
            "output_tokens": self.output_tokens,
            "hit": None if self.hit is None else self.hit.value,
        }


class LiveRequests:
    """All requests under way, by their ids."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._rows: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._rows.values()))

    def get(self, rid: str) -> LiveRequest | None:
        return self._rows.get(rid)

    @contextmanager
    def open(self, request: web.Request, surface: str, prepared: PreparedRequest) -> Iterator[LiveRequest]:
        """Enter a prepared request for as long as the block runs; then all of it is ended in the engine.

        PromptTooLong if a prompt is longer than server.max_prompt_tokens.
        """
        server = self._server
        _check_length(prepared, server.config.server.max_prompt_tokens)
        rid = request_id(request)
        live = LiveRequest(server, rid, surface, key_name(request), prepared)
        assert rid not in self._rows, "request ids are unique while they are under way"
        self._rows[rid] = live
        timer = _deadline(live, server.config.server.request_timeout)
        try:
            yield live
        finally:
            timer()
            live.close()
            del self._rows[rid]
            server.metrics.close(live)
            error = live.error or live.failure
            if error is not None:
                request[_ENDED] = error

    def cancel(self, rid: str) -> bool:
        """End a request with Cancelled; False if it is not under way."""
        live = self._rows.get(rid)
        if live is None:
            return False
        live.fail(Cancelled("the request was cancelled"))
        return True

    def fail_all(self, error: MlxrunError) -> None:
        """End all with this error."""
        for live in self:
            live.fail(error)


def _deadline(live: LiveRequest, seconds: float | None) -> Callable[[], None]:
    """Ends the request after so long; what is returned calls that off."""
    if seconds is None:
        return lambda: None
    error = TimedOut(f"the request took longer than {seconds:g} s (server.request_timeout) and was aborted")
    return asyncio.get_running_loop().call_later(seconds, live.fail, error).cancel


def _check_length(prepared: PreparedRequest, most: int | None) -> None:
    longest = max(len(request.prompt) for request in prepared.requests)
    if most is not None and longest > most:
        raise PromptTooLong(f"the prompt has {longest} tokens; server.max_prompt_tokens is {most}")
