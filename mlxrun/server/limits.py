"""What a request must pass before its handler runs: an id, and an origin that is allowed.

And the limit of connections: one more is answered 503 by a protocol of a few lines, before any HTTP is read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
from collections.abc import Collection

from aiohttp import web

from mlxrun.errors import Forbidden

ID_HEADER = "x-request-id"
_ID = web.RequestKey("id", str)
_SANE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def give_id(request: web.Request, taken: Collection[str]) -> str:
    """Names the request: as the client wants where that is sane and free, else by a new id."""
    asked = request.headers.get(ID_HEADER, "")
    usable = _SANE.fullmatch(asked) is not None and asked not in taken
    request[_ID] = rid = asked if usable else f"req_{secrets.token_hex(12)}"
    return rid


def named(request: web.Request) -> bool:
    """Whether it has a name."""
    return _ID in request


def request_id(request: web.Request) -> str:
    """The id that `give_id` gave."""
    return request[_ID]


def allowed_origin(request: web.Request, origins: Collection[str]) -> str | None:
    """What a browser is told in Access-Control-Allow-Origin; None: nothing."""
    origin = request.headers.get("Origin")
    if origin is None:
        return None
    return "*" if "*" in origins else origin if origin in origins else None


def check_origin(request: web.Request, origins: Collection[str]) -> None:
    """Forbidden if a page of another site has a browser change something here: browsers send such requests
    without asking, and only keep the answer from the page."""
    origin = request.headers.get("Origin")
    if origin is None or request.method in _SAFE_METHODS:
        return
    own = origin.partition("://")[2] == request.host and _is_fixed(request.host)
    if not own and allowed_origin(request, origins) is None:
        raise Forbidden(f"pages of {origin!r} may not use this server: see server.cors_origins")


def _is_fixed(host: str) -> bool:
    """Whether nobody can make this Host mean another machine: a name can be made to, by its DNS entry."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost"
    return True


_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
)
_FULL_BODY = (
    b'{"error":{"message":"too many connections (server.max_connections): try again later",'
    b'"type":"server_error","param":null,"code":"overloaded"}}'
)


class Full(asyncio.Protocol):
    """A connection too many: it is told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
        transport.close()
