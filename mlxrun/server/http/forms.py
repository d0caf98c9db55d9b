"""Forms (multipart/form-data): small fields, and one file that is received in parts.

The parts of a form arrive one after the other. A form that stops arriving, ends early or is broken is a
client's mistake with its own words.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from mlxrun.core.errors import BodyTooLarge, RequestError, TimedOut
from mlxrun.core.field_errors import quote, reject, reject_unknown, shorten
from mlxrun.core.visible_text import make_line
from mlxrun.server.http.json_bodies import BODY_TIMEOUT

T = TypeVar("T")

FILE = "file"  # the field that has the file
FILE_TYPE = "Content-Type"  # of the file, among the fields
MAX_FIELDS = 1 << 16  # bytes that a form may have beside its file, of which each part takes some
MAX_FIELD = 1000  # bytes of a field other than the file
_MAX_NAME_LENGTH = 255  # characters

# Gets the bytes of the file as they arrive, in blocks.
ReceiveFile = Callable[[AsyncIterator[bytes]], Awaitable[None]]


class _CountedContent:
    """The body of a form, as MultipartReader reads it. Bytes that are not of the file are counted: those of
    fields and headers, and those before and after the form, which are skipped."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._count = 0
        self.is_file = False
        self.at_eof = content.at_eof

    async def read(self, size: int) -> bytes:
        """Read at most `size` bytes."""
        return self._add(await self._content.read(size))

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """Read one line."""
        return self._add(await self._content.readline(max_line_length=max_line_length))

    def unread_data(self, data: bytes) -> None:
        """Give back what was read too far."""
        self._content.unread_data(data)
        self._count -= 0 if self.is_file else len(data)

    async def skip(self) -> None:
        """Read the rest."""
        while self._add(await _receive(self._content.readany())):
            pass

    def _add(self, data: bytes) -> bytes:
        self._count += 0 if self.is_file else len(data)
        if self._count > MAX_FIELDS:
            raise BodyTooLarge(f"the form has more than {MAX_FIELDS} bytes beside its file")
        return data


class FormFile:
    """A file of a form that is kept in memory, of at most `most` bytes. `setting`: the name of the limit."""

    def __init__(self, most: int, setting: str) -> None:
        self._most, self._setting = most, setting
        self._data = bytearray()

    async def receive(self, content: AsyncIterator[bytes]) -> None:
        """Read the file. BodyTooLarge if it has too many bytes."""
        async for chunk in content:
            self._data += chunk
            if len(self._data) > self._most:
                text = f"{FILE}: has more than {self._most} bytes ({self._setting})"
                raise BodyTooLarge(text, param=FILE)

    def take(self) -> bytes:
        """Return what was received. RequestError if it is empty."""
        if not self._data:
            reject(FILE, "is empty or missing", code="missing_field")
        return bytes(self._data)


async def read_form(
    request: web.Request,
    allowed: Sequence[str],
    receive_file: ReceiveFile,
    check: Callable[[str, str], object] = lambda name, value: None,
    *,
    lists: Sequence[str] = (),
    max_field: int = MAX_FIELD,
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Read the fields of the form; of the file, its name and its type, while `receive_file` gets its content.

    `allowed`: the names of fields besides; `check`: raises RequestError for a wrong value; `lists`: names
    of fields that come once for each value, as `NAME[]` or `NAME`, and are returned apart; `max_field`:
    bytes of a field."""
    if request.content_type != "multipart/form-data":
        raise RequestError(f"the body must be multipart/form-data, not {quote(request.content_type)}")
    fields: dict[str, str] = {}
    several: dict[str, list[str]] = {}
    content = _CountedContent(request.content)
    try:
        reader = MultipartReader(request.headers, cast(StreamReader, content))
        while (part := await _receive(reader.next())) is not None:
            name = part.name if isinstance(part, BodyPartReader) else None
            if not isinstance(part, BodyPartReader) or name is None:
                raise ValueError("a part of the form has no name")
            if name in fields:
                reject(shorten(make_line(name)), "is given twice")
            plain = name.removesuffix("[]")
            _check_part(part, plain if plain in lists else name, (FILE, *allowed, *lists))
            if name == FILE:
                # No path is ever made of it. Invalid UTF-8 is decoded to surrogates.
                given = (part.filename or "").encode("utf-8", "replace").decode()
                fields[name] = given[:_MAX_NAME_LENGTH] or "file"
                fields[FILE_TYPE] = part.headers.get("Content-Type", "")[:_MAX_NAME_LENGTH]
                content.is_file = True
                await receive_file(_iterate_file(part))
                content.is_file = False
            elif plain in lists:
                several.setdefault(plain, []).append(await _read_field(part, plain, max_field))
            else:
                fields[name] = await _read_field(part, name, max_field)
            if not part.at_eof():
                raise ValueError("a part of the form has no end")
            if name != FILE and plain not in lists:
                check(name, fields[name])
        await content.skip()
    except TimeoutError as error:
        raise TimedOut(f"nothing more of the form arrived for {BODY_TIMEOUT:g} s") from error
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
        if request.content.at_eof():  # a complete form has its closing boundary left when a part is refused
            raise RequestError("the form ended early, before its closing boundary") from error
        reason = " ".join(str(error).removeprefix("400, message:").split())
        raise RequestError(f"the form cannot be read: {shorten(make_line(reason))}") from error
    return fields, several


def find_form_field(body: bytes, content_type: str, name: str) -> str | None:
    """Return the value of a field of a form that has been received; None if it is not there."""
    mark = re.search(r'boundary="?([^";]+)', content_type)
    for part in body.split(b"--" + mark[1].encode()) if mark is not None else ():
        head, _, value = part.partition(b"\r\n\r\n")
        if re.search(rb'\bname="?' + name.encode() + rb'["\r;]', head + b"\r"):
            return value.removesuffix(b"\r\n").decode("utf-8", "replace")
    return None


async def _receive(data: Awaitable[T]) -> T:
    """What is read from the client. TimeoutError if nothing arrives; cancelled if the client disconnects, for
    which asyncio.wait_for would raise the connection's error."""
    async with asyncio.timeout(BODY_TIMEOUT):
        return await data


def _check_part(part: BodyPartReader, name: str, allowed: Sequence[str]) -> None:
    if name not in allowed:
        reject_unknown(make_line(name), allowed)
    for header in ("Content-Transfer-Encoding", "Content-Encoding"):
        coding = part.headers.get(header, "binary").lower()
        if coding not in ("binary", "8bit", "7bit", "identity"):
            reject(name, f"{header} {quote(coding)} is not supported; send the bytes unencoded")


async def _read_field(part: BodyPartReader, name: str, most: int) -> str:
    data = bytearray()
    while chunk := await _receive(part.read_chunk(most)):
        data += chunk
        if len(data) > most:
            reject(name, f"is longer than {most} bytes")
    return data.decode("utf-8", "replace")


async def _iterate_file(part: BodyPartReader) -> AsyncIterator[bytes]:
    while chunk := await _receive(part.read_chunk(1 << 16)):
        yield chunk
