"""Receives the body that creates a message batch, and writes each of its requests as the line of a job.

The body may have many times the bytes and keys of other bodies. So it is parsed as it arrives, one request
after the other. Memory holds only the bytes that were received since the last whole request.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from mlxrun.api.anthropic.fields import MESSAGES
from mlxrun.api.anthropic.response import MAX_REQUESTS, check_request
from mlxrun.api.anthropic.tagged_schema import EXTRA
from mlxrun.core.errors import BodyTooLarge, RequestError
from mlxrun.core.field_errors import UNKNOWN, check_type, quote, reject, shorten
from mlxrun.core.limited_json import NestedTooDeeply, NotStrict, check_depth
from mlxrun.server.batches.storage import Storage, Upload
from mlxrun.server.http.json_bodies import (
    DECODER,
    LONG_NUMBER,
    SMALL_BODY,
    check_value_counts,
    get_max_body_bytes,
    iterate_body,
    parse_json,
)

BLOCK_BYTES = 1 << 20  # parsed and written at once
_HEAD = re.compile(r'[ \t\r\n]*\{[ \t\r\n]*"requests"[ \t\r\n]*:[ \t\r\n]*\[')
_SPACE = re.compile(r"[ \t\r\n]*")
_TAIL = re.compile(r"[ \t\r\n]*\}[ \t\r\n]*")


async def receive_requests(request: web.Request, storage: Storage, upload: Upload) -> int:
    """Write the requests of a body to `upload`, as lines, and return their number. RequestError if the body
    has another shape; BodyTooLarge if it is larger than `upload` or the storage allows."""
    reader = RequestLines(get_max_body_bytes(request.app))
    block = bytearray()

    async def write(*, end: bool = False) -> None:
        lines = await asyncio.to_thread(reader.feed, bytes(block), end)
        block.clear()
        upload.receive(len(lines))
        storage.check_quota(0, "requests")
        await asyncio.to_thread(upload.write, lines)

    async for part in iterate_body(request):
        block += part
        if len(block) >= BLOCK_BYTES:
            await write()
    await write(end=True)
    return reader.count


class RequestLines:
    """Turns the bytes of a body into the lines of a job. `count`: the lines so far. `max_length`: of one
    request, in characters."""

    def __init__(self, max_length: int) -> None:
        self.count = 0
        self._max_length = max_length
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""  # what is not parsed yet
        self._needed = 0  # characters of it before it is tried again, so that none is parsed many times
        self._begun = self._closed = False
        self._names: set[str] = set()

    def feed(self, data: bytes, end: bool) -> bytes:
        """Return the lines of the requests that these bytes complete. `end`: they are the last bytes."""
        try:
            self._text += self._decoder.decode(data, end)
        except UnicodeDecodeError as error:
            raise RequestError("the body is not UTF-8", code="invalid_json") from error
        if len(self._text) < self._needed and not end:
            return b""
        lines = b"".join(self._make_line(request) for request in self._parse_requests())
        self._needed = 2 * len(self._text)
        if len(self._text) > self._max_length:  # of one request, as all that are complete are removed
            raise BodyTooLarge(f"requests.{self.count}: has more than {self._max_length} characters")
        if len(self._text) > SMALL_BODY:
            check_value_counts(self._text.encode())
        if end:
            self._check_end()
        return lines

    def _parse_requests(self) -> Iterator[Any]:
        """The requests that are complete, which are removed from the text."""
        if not self._begun and (head := _HEAD.match(self._text)) is not None:
            self._begun, self._text = True, self._text[head.end() :]
        at = 0
        while self._begun and not self._closed:
            start = _skip_space(self._text, at)
            if self._text.startswith("]", start):
                self._closed, at = True, start + 1
                break
            if self.count and not self._text.startswith(",", start):
                break
            try:
                request, at = DECODER.raw_decode(
                    self._text, _skip_space(self._text, start + bool(self.count))
                )
                check_depth(request)
            except json.JSONDecodeError:
                break  # it is not complete, or an error at the end
            except (RecursionError, NestedTooDeeply) as error:
                raise RequestError(f"the body is {NestedTooDeeply()}", code="invalid_json") from error
            except NotStrict as error:
                raise RequestError(str(error), code="invalid_json") from error
            except ValueError as error:
                raise RequestError(LONG_NUMBER, code="invalid_json") from error
            yield request
        self._text = self._text[at:]

    def _make_line(self, request: Any) -> bytes:
        where = f"requests.{self.count}"
        custom_id, params = check_request(request, where)
        if custom_id in self._names:
            reject(f"{where}.custom_id", f"{quote(custom_id)} occurs twice")
        self._names.add(custom_id)
        self.count += 1
        if self.count > MAX_REQUESTS:
            reject("requests", f"has more than {MAX_REQUESTS} entries")
        line = {"custom_id": custom_id, "method": "POST", "url": MESSAGES, "body": params}
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _check_end(self) -> None:
        """Refuse a body that is not complete, or is something else."""
        if not self._begun:
            given = parse_json(self._text.encode())
            check_type(given, dict, "body")
            for key in given:
                if key != "requests":
                    reject(shorten(key), EXTRA, code=UNKNOWN)
            if given.get("requests") is None:
                reject("requests", "Field required", code="missing_field")
            check_type(given["requests"], list, "requests")
        if not self._closed:
            raise RequestError(f"the body is not JSON from requests.{self.count} on", code="invalid_json")
        if not _TAIL.fullmatch(self._text):
            raise RequestError("the body has more than `requests`", code="invalid_json")
        if not self.count:
            reject("requests", "is empty; give at least one request")


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
