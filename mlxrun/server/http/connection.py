"""Answers bytes that are not an HTTP request, connections above the limit, and an unknown `Expect` header.

The first two belong to no known surface, so they get OpenAI's errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from mlxrun import __version__
from mlxrun.api.openai.response import build_error
from mlxrun.core.errors import MlxrunError, RequestError
from mlxrun.core.field_errors import quote, shorten
from mlxrun.server.http.access import ID_HEADER, request_id
from mlxrun.server.http.json_bodies import json_response
from mlxrun.server.http.surface import ROUTES


class HttpConnection(web.RequestHandler):
    """One connection. aiohttp itself refuses broken request lines, long headers and invalid chunks. These
    errors are answered in JSON like all others. `most`: server.max_connections.

    A client is disconnected that takes nothing of a whole response for `keepalive_timeout` seconds."""

    __slots__ = ("_is_watched", "_most")

    def __init__(self, server: web.Server, *, most: int, **options: Any) -> None:
        super().__init__(server, **options)
        self._most = most
        self._is_watched = False  # what the client takes is compared after a while

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or hand the connection to a RefusedConnection. It is counted here: a burst makes many
        protocols before the first of them is connected."""
        assert self._manager is not None and isinstance(transport, asyncio.Transport)
        others = self._manager.connections
        if len(others) < self._most or close_idle(others):
            super().connection_made(transport)
            transport.set_write_buffer_limits(0)  # `pause_writing` is called whenever something is left
        else:
            refused = RefusedConnection()
            transport.set_protocol(refused)
            refused.connection_made(transport)

    def pause_writing(self) -> None:
        """Watch a client that does not take all at once. The transport calls this."""
        super().pause_writing()
        if not self._is_watched and isinstance(self.transport, asyncio.Transport):
            self._watch(self.transport)

    def _watch(self, transport: asyncio.Transport, before: int = -1) -> None:
        """Disconnect the client unless it has taken something since `before` bytes were left. What holds up a
        response that is still made has limits of its own."""
        left = transport.get_write_buffer_size()
        self._is_watched = left > 0
        if left == before and self._current_request is None:
            transport.abort()
        elif left:
            self._loop.call_later(self._keepalive_timeout, self._watch, transport, left)

    @property
    def is_idle(self) -> bool:
        """Whether the connection waits for a request, or for the rest of a request's head."""
        return self._waiter is not None and not self._waiter.done() and self._current_request is None

    @property
    def idle_until(self) -> float:
        """The time of the loop's clock, in seconds, when it is closed if no request comes. It is smallest for
        the connection that has been idle longest."""
        return self._next_keepalive_close_time

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer an unreadable request, or an error outside the middleware. aiohttp calls this."""
        super().handle_error(request, status, exc, message)  # logs; raises if an answer has begun
        error: MlxrunError = MlxrunError("internal error")
        if status < 500:
            # aiohttp's message is the reason, and below it what was sent, with a mark at the mistake.
            reason = (message or "").strip().partition("\n")[0].rstrip(": ")
            error = RequestError(f"the HTTP request cannot be read: {shorten(reason)}")
        headers = {ID_HEADER: request_id(request), "Server": f"mlxrun/{__version__}"}
        response = json_response(build_error(error), status, headers)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response. aiohttp calls this. It refuses an unknown `Expect` in plain text and before the
        middleware; that response becomes JSON."""
        if isinstance(resp, web.HTTPExpectationFailed) and isinstance(request, web.Request):
            value = quote(request.headers.get("Expect", ""))
            error = RequestError(f"the header Expect: {value} is not supported; only 100-continue is")
            surface = request.app[ROUTES].find(request)[0]
            body = surface.error_body(error, request_id(request))
            resp = json_response(body, resp.status, {"Connection": "close"})
        return await super().finish_response(request, resp, start_time)


def close_idle(connections: Iterable[web.RequestHandler]) -> bool:
    """Close the connection that has been idle longest; False if none is idle. So clients with idle
    connections do not lock out others."""
    idle = [each for each in connections if isinstance(each, HttpConnection) and each.is_idle]
    if not idle:
        return False
    min(idle, key=lambda each: each.idle_until).force_close()
    return True


_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
)
_FULL_BODY = (
    b'{"error":{"message":"too many connections (server.max_connections): try again later",'
    b'"type":"server_error","param":null,"code":"overloaded"}}'
)


class RefusedConnection(asyncio.Protocol):
    """A connection above server.max_connections while none is idle. It gets a 503 and is closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
        transport.close()
