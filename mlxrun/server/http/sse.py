"""One stream of server-sent events or of JSON lines, kept alive while no event comes, and ended with its
request.

`send` waits for a slow reader. The reader holds up only its own request, since the engine's client merges
events meanwhile. A reader that takes nothing until its request has timed out is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from mlxrun.core.errors import MlxrunError
from mlxrun.core.visible_text import escape_line_ends
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.http.access import CONFIG, request_id
from mlxrun.server.http.json_bodies import encode_json, encode_utf8
from mlxrun.server.http.surface import ROUTES
from mlxrun.server.live_requests import ENGINE_ERROR, LiveRequest

EventData = Mapping[str, Any] | str
Message = tuple[str | None, EventData]  # the name of an event, and its data
MakePing = Callable[[], Message]
DONE = "[DONE]"  # the end of a stream of OpenAI's APIs
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or proxies would hold the events back
}


def wants_stream(body: Any, *, usually: bool = False) -> bool:
    """Tell whether a body, which is not checked yet, asks for a stream. `usually`: if it has no `stream`."""
    return isinstance(body, dict) and body.get("stream", usually) is True


class EventStream:
    """One stream; `open_stream` makes it. `response`: the handler returns it. `live`: None until the request
    is prepared, or if all events are there already.

    The headers are sent with the first event, so an error before it has its own status. While there is no
    event, `ping` makes one as (event, data); without `ping` a comment with the progress is sent.
    """

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, request: web.Request, *, ping: MakePing | None = None) -> None:
        self.response = web.StreamResponse(headers={**_HEADERS, "Content-Type": self.content_type})
        self._request = request
        self.live: LiveRequest | None = None
        self.ping = ping
        self._clock = request.app[ENGINE].clock
        self._has_events = False  # beside pings
        self.is_broken = False  # inside an event, so that no other one can follow
        self._pending = 0  # writes that have not finished
        self._last_write = self._clock()
        self._starting = asyncio.Lock()

    @property
    def started(self) -> bool:
        """Whether the headers have been sent. From then on an error must be an event."""
        return self.response.prepared

    async def send_headers(self) -> None:
        """Send the headers, if they have not been sent."""
        async with self._starting:
            if not self.response.prepared:
                await self.response.prepare(self._request)

    async def send(self, data: EventData, event: str | None = None) -> None:
        """Send one event. A str is sent as it is: it is JSON already, or a word such as [DONE]."""
        self._has_events = True
        await self._send(data, event)

    async def send_error(self, error: MlxrunError) -> None:
        """Send an error as the last event, in the words of the API."""
        surface, _ = self._request.app[ROUTES].find(self._request)
        event, data = surface.error_event(error, request_id(self._request))
        await self.send(data, event)

    async def stop_pings(self) -> bool:
        """Send no ping any more, before the request is prepared. Returns whether the headers are sent."""
        async with self._starting:
            self._has_events = True
        return self.started

    async def _send(self, data: EventData, event: str | None) -> None:
        await self._write(self._make_frame(data if isinstance(data, str) else encode_json(data), event))

    def _make_frame(self, text: str, event: str | None) -> str:
        if "\n" in text:
            text = text.replace("\n", "\ndata: ")
        name = "" if event is None else f"event: {event}\n"
        return f"{name}data: {text}\n\n"

    async def _write(self, frame: str) -> None:
        await self.send_headers()
        self._pending += 1
        self._last_write = self._clock()
        try:
            await self.response.write(encode_utf8(frame))
        finally:
            self._pending -= 1

    async def keep_alive(self) -> None:
        """Send a ping or a comment whenever no event was sent for server.keepalive seconds."""
        interval = self._request.app[CONFIG].server.keepalive
        try:
            while True:
                left = self._last_write + interval - self._clock()
                await asyncio.sleep(max(left, interval / 10))
                if self._pending:
                    # The reader takes nothing, though its request has been ended.
                    aborted = self.live is not None and self.live.aborted_by is not None
                    if aborted and self._request.transport is not None:
                        self._request.transport.abort()
                elif self._clock() - self._last_write < interval or (self.live is None and self._has_events):
                    continue
                elif self.ping is None:
                    progress = "preparing" if self.live is None else self.live.describe_progress()
                    await self._write(f": {progress}\n\n")
                else:
                    event, data = self.ping()
                    await self._send(data, event)
        except ConnectionError:
            pass  # the client disconnected; the next `send` raises that too


class LineStream(EventStream):
    """A stream of JSON lines. It has no comments, so it needs a `ping`."""

    content_type = "application/x-ndjson"

    def _make_frame(self, text: str, event: str | None) -> str:
        return f"{escape_line_ends(text)}\n"  # httpx, for example, ends a line at each of them


@asynccontextmanager
async def open_stream(
    request: web.Request,
    *,
    ping: MakePing | None = None,
    kind: type[EventStream] = EventStream,
) -> AsyncIterator[EventStream]:
    """Open a stream. It is kept alive within the block, and ended after it unless the block raises. An error
    before the first event has its own status; a later one becomes the last event (`Surface.error_event`)."""
    stream = kind(request, ping=ping)
    keep_alive = asyncio.create_task(stream.keep_alive())
    try:
        yield stream
    except MlxrunError as error:
        if not stream.started or stream.is_broken:
            raise
        request[ENGINE_ERROR] = error
        await stream.send_error(error)
    finally:
        keep_alive.cancel()
        await asyncio.gather(keep_alive, return_exceptions=True)
    if stream.started:
        await stream.response.write_eof()
