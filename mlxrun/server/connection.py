"""What is answered where there is no request: to bytes that are not HTTP, and to a connection too many.

Nobody knows for which API it was meant, so both have OpenAI's shape.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from mlxrun import __version__
from mlxrun.api.openai.response import error_body
from mlxrun.errors import MlxrunError, RequestError
from mlxrun.server.access import ID_HEADER, give_id
from mlxrun.server.request_body import json_reply
from mlxrun.text.field_errors import shorten


class HttpConnection(web.RequestHandler):
    """One connection. What aiohttp itself refuses, such as a broken request line, headers that are too long
    or chunks that are none, gets JSON like every other error."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp's hook: the answer to what could not be read, or to what got past the middleware."""
        super().handle_error(request, status, exc, message)  # logs; raises if an answer has begun
        error: MlxrunError = MlxrunError("internal error")
        if status < 500:
            # aiohttp's text: the reason, and below it what was sent, with a mark at the place.
            reason = (message or "").strip().partition("\n")[0].rstrip(": ")
            error = RequestError(f"this is no HTTP request that can be read: {shorten(reason)}")
        headers = {
            ID_HEADER: give_id(request, ()),
            "Server": f"mlxrun/{__version__}",
        }
        response = json_reply(error_body(error), status, headers)
        response.force_close()
        return response


_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
)
_FULL_BODY = (
    b'{"error":{"message":"too many connections (server.max_connections): try again later",'
    b'"type":"server_error","param":null,"code":"overloaded"}}'
)


class RefusedConnection(asyncio.Protocol):
    """A connection too many: it is told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
        transport.close()
