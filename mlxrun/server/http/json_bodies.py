"""JSON bodies. Requests are read strictly: limited size, UTF-8, no duplicate key, no NaN, no Infinity.

Large bodies are parsed on a worker thread. The callback for objects lets the event loop run meanwhile.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from aiohttp import web

from mlxrun.api.prepared import check_message_counts
from mlxrun.core.errors import BodyTooLarge, RequestError, TimedOut, WrongContentType
from mlxrun.core.field_errors import UNKNOWN, check_type, reject, shorten
from mlxrun.core.limited_json import STRICT, NestedTooDeeply, NotStrict, load_json
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.http.access import CONFIG, SAFE_METHODS, request_id

log = logging.getLogger(__name__)

SMALL_BODY = 65_536  # bytes that are parsed on the event loop
BODY_TIMEOUT = 60.0  # seconds without a byte of a body that is announced
_TOKEN_BYTES = 32  # of a body, for each token of the context: text has four, and some is escaped
_MIN_BODY, _IMAGES_BODY = 16_000_000, 64_000_000  # bytes
# Keys, objects and arrays of a large body: Python takes some microseconds for each, and does nothing else.
MAX_NODES = 100_000
MAX_VALUES = 4_000_000  # numbers and strings besides, of which token ids have many
LONG_NUMBER = "a number in the body has thousands of digits"
# A browser sends these for every page, without asking the server first. It may also send URL-encoded forms,
# but a form of that type cannot hold JSON, and curl declares the bodies of `-d` as one.
_PAGE_TYPES = ("text/plain", "multipart/form-data")
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


async def read_json(request: web.Request) -> Any:
    """Read the body. BodyTooLarge if it is too large; RequestError if it is not JSON; TimedOut if it stops
    arriving."""
    config = request.app[CONFIG]
    raw = await read_bytes(request, get_max_body_bytes(request.app))
    body = await parse_body(raw)
    check_message_counts(body, config.server.max_messages)
    if config.log.prompts:
        log.debug("%s body %s", request_id(request), raw.decode())
    return body


async def read_empty_body(request: web.Request) -> None:
    """Read the body of an endpoint without fields: none, or `{}`. RequestError for any field."""
    raw = await read_bytes(request, get_max_body_bytes(request.app))
    for key in check_type(await parse_body(raw), dict, "body") if raw.strip() else ():
        reject(shorten(key), "unknown parameter: this endpoint takes none", code=UNKNOWN)


def encode_json(data: Any) -> str:
    """Encode compact JSON."""
    return _encoder.encode(data)


def encode_utf8(text: str) -> bytes:
    """Encode JSON text as UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes its JSON escape."""
    return text.encode("utf-8", "backslashreplace")


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Make a response of compact JSON. orjson takes a twentieth of the time for logprobs and embeddings. It
    refuses lone surrogates and integers of more than 64 bits; Python encodes those."""
    try:
        body = orjson.dumps(data)
    except orjson.JSONEncodeError:
        body = encode_utf8(encode_json(data))
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def get_max_body_bytes(app: web.Application) -> int:
    """Return the maximum bytes of a body: the config's, or enough for the model's context and images."""
    configured = app[CONFIG].server.max_body_bytes
    if configured is not None:
        return configured
    model = app[ENGINE].find_model()
    if model is None:
        return _MIN_BODY
    return max(_MIN_BODY, _TOKEN_BYTES * model.context_length) + (_IMAGES_BODY if model.vision else 0)


async def read_bytes(request: web.Request, most: int) -> bytes:
    """Read the body as it was sent. BodyTooLarge if it has more than `most` bytes."""
    check_length(request, most)
    parts: list[bytes] = []
    size = 0
    async for part in iterate_body(request):
        size += len(part)
        if size > most:
            raise _make_too_large(size, most)
        parts.append(part)
    return b"".join(parts)


async def iterate_body(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. TimedOut if nothing arrives for BODY_TIMEOUT seconds."""
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                part = await request.content.readany()
        except TimeoutError as error:
            raise TimedOut(f"nothing more of the body arrived for {BODY_TIMEOUT:g} s") from error
        if not part:
            return
        yield part


def check_length(request: web.Request, most: int) -> None:
    """Raise BodyTooLarge if the Content-Length is more than `most` bytes."""
    if request.content_length is not None and request.content_length > most:
        raise _make_too_large(request.content_length, most)


def check_content_type(request: web.Request) -> None:
    """Raise WrongContentType if the body has a type that a form of any web page may have. No client of a JSON
    API needs one."""
    if request.method not in SAFE_METHODS and request.content_type in _PAGE_TYPES:
        raise WrongContentType(
            f"the Content-Type {request.content_type} is not accepted here: send application/json"
        )


def _make_too_large(size: int, most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {size} bytes or more; at most {most} are taken (server.max_body_bytes)"
    )


def parse_json(raw: bytes) -> Any:
    """Parse strict JSON, with or without a byte order mark. RequestError says where it is wrong."""
    if not raw.strip():
        raise RequestError("the body is empty; it must be JSON", code="invalid_json")
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}", code="invalid_json") from error
    try:
        return load_json(text, **STRICT)
    except NestedTooDeeply as error:
        raise RequestError(f"the body is {error}", code="invalid_json") from error
    except NotStrict as error:
        raise RequestError(str(error), code="invalid_json") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise RequestError(f"the body is not JSON: {error.msg} at {where}", code="invalid_json") from error
    except ValueError as error:
        raise RequestError(LONG_NUMBER, code="invalid_json") from error


async def parse_body(raw: bytes) -> Any:
    """Parse strict JSON of any size, but with a limited number of values. RequestError says where it is
    wrong."""
    if len(raw) <= SMALL_BODY:
        return parse_json(raw)
    await asyncio.to_thread(check_value_counts, raw)
    return await asyncio.to_thread(parse_json, raw)


def check_value_counts(raw: bytes) -> None:
    """Raise RequestError if a JSON text has too many values, before any is made. Separators in strings are
    left out only if they matter."""
    counts = _count_values(raw)
    if counts[0] > MAX_NODES or counts[1] > MAX_VALUES:
        outside = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
        counts = _count_values(b'"'.join(outside))
    for count, most, what in (
        (counts[0], MAX_NODES, "keys and containers"),
        (counts[1], MAX_VALUES, "values"),
    ):
        if count > most:
            raise RequestError(f"the body has {count} {what}; at most {most} are taken", code="invalid_json")


def _count_values(raw: bytes) -> tuple[int, int]:
    """At most so many keys and containers, and values, are in a JSON text."""
    return raw.count(b":") + raw.count(b"[") + raw.count(b"{"), raw.count(b",") + 1


DECODER = json.JSONDecoder(**STRICT)
