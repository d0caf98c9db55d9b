"""A worker's answer on its way to the client of the front: headers and bytes as they come."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
from aiohttp import web

from mlxrun.core.errors import EngineDead, RequestError
from mlxrun.server.http.access import CONFIG, request_id
from mlxrun.server.http.json_bodies import encode_json
from mlxrun.server.http.request_log import note_refusal
from mlxrun.server.http.sse import EventStream
from mlxrun.server.http.surface import ROUTES
from mlxrun.server.live_requests import ENGINE_ERROR
from mlxrun.server.telemetry import RECORDED_ELSEWHERE

_OF_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
)
NOT_SENT = _OF_CONNECTION | {"content-length", "content-encoding", "expect"}  # the body arrives decoded
_NOT_RETURNED = _OF_CONNECTION | {"content-length"}
_EVENT_END = b"\n\n"
_WITH_ERRORS = {"openai": "data: %s\n\n", "anthropic": "event: error\ndata: %s\n\n"}  # events, by surface


async def pass_on(
    request: web.Request,
    upstream: aiohttp.ClientResponse,
    worker: str = "the worker",
    stream: EventStream | None = None,
) -> web.StreamResponse:
    """Send a worker's answer to the client, each part as it comes. `worker`: its name; `stream`: that of the
    client. If this has begun, a refusal is its last event. If the worker dies meanwhile, a stream of an API
    with error events ends with one. Any other answer is cut: EngineDead."""
    request[RECORDED_ELSEWHERE] = True
    begun = stream if stream is not None and await stream.stop_pings() else None
    response = await _begin(request, upstream) if begun is None else begun.response
    last = b""
    if upstream.status >= 400:
        body = await upstream.read()
        details = _parse_error(body)
        _note_refusal(request, details)
        if begun is None:
            await response.write(body)
        else:
            await begun.send_error(_make_refusal(upstream.status, details))
    while True:
        try:
            part = await upstream.content.readany()
        except aiohttp.ClientError as error:
            dead = EngineDead(f"{worker} died while it answered")
            request[ENGINE_ERROR] = dead
            request[RECORDED_ELSEWHERE] = False
            event = _make_error_event(request, upstream, dead, last)
            if event is None:
                if begun is not None:
                    begun.is_broken = True
                raise dead from error
            await response.write(event)
            break
        if not part:
            break
        await response.write(part)
        last = (last + part)[-len(_EVENT_END) :]
    await response.write_eof()
    return response


async def _begin(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    """Send the headers of a worker's answer."""
    response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
    for name, value in upstream.headers.items():
        if name.lower() not in _NOT_RETURNED:
            response.headers.add(name, value)
    length = upstream.headers.get("Content-Length")
    if length is not None:
        response.content_length = int(length)
    await response.prepare(request)
    return response


def _parse_error(body: bytes) -> dict[str, Any]:
    """The details of an error in the body of any API; empty if there are none."""
    try:
        found: Any = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return {}
    return found if isinstance(found, dict) else {"message": found}


def _note_refusal(request: web.Request, details: dict[str, Any]) -> None:
    """Have the log say the code and the field of an error, as without workers."""
    code = details.get("code") or details.get("type")
    if code is not None:
        text = details.get("message") if request.app[CONFIG].log.prompts else details.get("param")
        note_refusal(request, str(code), text)


def _make_refusal(status: int, details: dict[str, Any]) -> RequestError:
    """The error that a worker has answered with."""
    text = str(details.get("message", f"it was refused with status {status}"))
    error = RequestError(text, param=details.get("param"), code=details.get("code"))
    error.http_status = status
    return error


def _make_error_event(
    request: web.Request, upstream: aiohttp.ClientResponse, error: EngineDead, last: bytes
) -> bytes | None:
    """The last event of a stream that sent `last`; None if it is no stream, or broke inside an event."""
    surface = request.app[ROUTES].find(request)[0]
    frame = _WITH_ERRORS.get(surface.name)
    if frame is None or last != _EVENT_END or upstream.content_type != "text/event-stream":
        return None
    return (frame % encode_json(surface.error_body(error, request_id(request)))).encode()
