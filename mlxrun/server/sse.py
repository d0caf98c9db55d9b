"""One stream of server-sent events: written as it comes, kept alive by itself, ended with its request.

A slow reader's backpressure is awaited in `send`, and holds up only its own request; the engine's client
merges what comes meanwhile. A reader that takes nothing until its request has timed out is cut off.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from mlxrun.server.live_requests import LiveRequest
    from mlxrun.server.state import Server

Data = Mapping[str, Any] | str
Ping = Callable[[], tuple[str | None, Data]]
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies would collect the events
}
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dumps(data: Any) -> str:
    """Compact JSON."""
    return _encoder.encode(data)


def encode(text: str) -> bytes:
    """JSON text as UTF-8; half of a surrogate pair, which has none, becomes its JSON escape."""
    return text.encode("utf-8", "backslashreplace")


class EventStream:
    """An async context manager around the writing of one stream. `response` is what the handler returns.

    The headers go out with the first event, so an error before it has its own status. `ping` gives what is
    sent while there is nothing to say, (event, data); without one it is a comment with the progress.
    """

    def __init__(
        self, request: web.Request, server: Server, live: LiveRequest, *, ping: Ping | None = None
    ) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self.ping = ping
        self._request = request
        self._server = server
        self._live = live
        self._pending = 0  # writes under way
        self._written = server.clock()
        self._starting = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Whether the headers have gone out: an error must be an event from then on."""
        return self.response.prepared

    async def __aenter__(self) -> EventStream:
        self._watch = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        if error is None and self.started:
            await self.response.write_eof()

    async def send(self, data: Data, event: str | None = None) -> None:
        """One event. A str is sent as it is: JSON already, or a word such as [DONE]."""
        text = data if isinstance(data, str) else _encoder.encode(data)
        if "\n" in text:
            text = text.replace("\n", "\ndata: ")
        head = "" if event is None else f"event: {event}\n"
        await self._write(encode(f"{head}data: {text}\n\n"))

    async def comment(self, text: str) -> None:
        """A line that clients skip."""
        await self._write(encode(f": {text}\n\n"))

    async def _write(self, frame: bytes) -> None:
        if not self.response.prepared:
            await self._start()
        self._pending += 1
        self._written = self._server.clock()
        try:
            await self.response.write(frame)
        finally:
            self._pending -= 1

    async def _start(self) -> None:
        async with self._starting:
            if not self.response.prepared:
                await self.response.prepare(self._request)

    async def _keep_alive(self) -> None:
        every = self._server.config.server.keepalive
        try:
            while True:
                left = self._written + every - self._server.clock()
                await asyncio.sleep(max(left, every / 10))
                if self._pending:
                    self._cut_off()
                elif self._server.clock() - self._written >= every:
                    await self._say_something()
        except ConnectionError:
            pass  # the client is gone; whoever sends next sees that too

    async def _say_something(self) -> None:
        if self.ping is None:
            await self.comment(self._live.progress())
        else:
            event, data = self.ping()
            await self.send(data, event)

    def _cut_off(self) -> None:
        """The reader takes nothing. Its request was ended: so is its connection."""
        if self._live.error is not None and self._request.transport is not None:
            self._request.transport.abort()
