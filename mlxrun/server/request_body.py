"""Bodies. A request's JSON is read strictly: within the size limit, UTF-8, no key twice, no NaN, no Infinity.

Large bodies are parsed on a worker thread; the callback for objects lets the event loop in between.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mlxrun.errors import RequestError, TimedOut, TooLarge
from mlxrun.server.access import request_id
from mlxrun.server.sse import dumps, encode
from mlxrun.text.field_errors import UNKNOWN, bad, need, shorten

if TYPE_CHECKING:
    from mlxrun.server.state import Server

log = logging.getLogger(__name__)

SMALL = 65_536  # bytes that are parsed on the event loop
PATIENCE = 60.0  # seconds without a byte of a body that is announced
_LISTS = ("messages", "input")


async def read_json(request: web.Request, server: Server) -> Any:
    """The body. TooLarge, or RequestError that says where it is not JSON."""
    raw = await read_bytes(request, server.config.server.max_body_bytes)
    body = parse(raw) if len(raw) <= SMALL else await asyncio.to_thread(parse, raw)
    _check_lists(body, server.config.server.max_messages)
    if server.config.log.prompts:
        log.debug("%s body %s", request_id(request), raw.decode())
    return body


async def read_nothing(request: web.Request, server: Server) -> None:
    """The body of what takes no fields: none, or `{}`. RequestError names a field that is given."""
    raw = await read_bytes(request, server.config.server.max_body_bytes)
    for key in need(parse(raw), dict, "body") if raw.strip() else ():
        raise bad(shorten(key), "unknown parameter: this takes none", code=UNKNOWN)


def json_reply(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A response of compact JSON."""
    return web.Response(
        body=encode(dumps(data)), status=status, headers=headers, content_type="application/json"
    )


async def read_bytes(request: web.Request, most: int) -> bytes:
    """The body as it came, of at most so many bytes."""
    check_length(request, most)
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(PATIENCE):
                part = await request.content.readany()
        except TimeoutError as error:
            raise TimedOut(f"no more of the body came for {PATIENCE:g} s") from error
        if not part:
            return b"".join(parts)
        size += len(part)
        if size > most:
            raise _too_large(size, most)
        parts.append(part)


def check_length(request: web.Request, most: int) -> None:
    """TooLarge if the request says that its body has more than `most` bytes."""
    if request.content_length is not None and request.content_length > most:
        raise _too_large(request.content_length, most)


def _too_large(size: int, most: int) -> TooLarge:
    return TooLarge(f"the body has {size} bytes or more; at most {most} are taken (server.max_body_bytes)")


def parse(raw: bytes) -> Any:
    """Strict JSON."""
    if not raw.strip():
        raise RequestError("the body is empty; it must be JSON", code="invalid_json")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}", code="invalid_json") from error
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", code="invalid_json") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise RequestError(f"the body is not JSON: {error.msg} at {where}", code="invalid_json") from error
    except ValueError as error:  # a number of thousands of digits
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RequestError(f"the key {twice[:80]!r} stands twice in one object", code="invalid_json")
    return found


def _constant(name: str) -> float:
    raise RequestError(f"{name} is no JSON number", code="invalid_json")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise RequestError(f"the number {text[:40]} is too large", code="invalid_json")
    return value


def _check_lists(body: Any, most: int) -> None:
    """Before anything is done for each of them."""
    for name in _LISTS:
        items = body.get(name) if isinstance(body, dict) else None
        if isinstance(items, list) and len(items) > most:
            text = f"{name}: {len(items)} items are more than {most} (server.max_messages)"
            raise RequestError(text, param=name)
