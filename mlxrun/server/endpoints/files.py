"""/v1/files: uploads and downloads of job files, images, PDFs and texts.

An upload is written to disk as it arrives, and becomes a file once it is complete. No file is held in memory.
A file belongs to the API key that it was sent with; for other keys it does not exist. file_shapes.py has the
shapes of both APIs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from mlxrun.core.errors import NotFound, RequestError, TimedOut
from mlxrun.core.field_errors import quote, reject, reject_unknown, shorten
from mlxrun.server.batches.batch import MIN_COUNTED_BYTES
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.batches.queue_access import get_open_queue
from mlxrun.server.batches.storage import UNKNOWN_TYPE, Storage, StoredFile, Upload, guess_media_type
from mlxrun.server.endpoints.file_shapes import FileShape, choose_shape
from mlxrun.server.http.access import CONFIG, key_name, may_access
from mlxrun.server.http.json_bodies import BODY_TIMEOUT, json_response
from mlxrun.server.http.surface import Endpoint

T = TypeVar("T")

BLOCK_BYTES = 1 << 20  # written at once
_MAX_FIELD_BYTES = 1000  # of a form field other than the file
_MAX_NAME_LENGTH = 255  # characters
_TYPE = "Content-Type"  # of the file, among the fields


async def upload_file(request: web.Request) -> web.Response:
    """Receive a form with `file` and the fields of its API, in any order."""
    shape = choose_shape(request)
    storage = (await get_open_queue(request)).storage
    most, length = request.app[CONFIG].batch.max_file_bytes, request.content_length or 0
    async with open_upload(storage, most) as upload:
        upload.check(length - 4 * _MAX_FIELD_BYTES)
        storage.check_quota(length - 4 * _MAX_FIELD_BYTES - MIN_COUNTED_BYTES, "file")
        fields = await _read_form(request, shape, storage, upload)
        if "file" not in fields:
            reject("file", "missing", code="missing_field")
        purpose, seconds = shape.read_fields(fields)
        if not upload.size:
            reject("file", "is empty")
        now = storage.get_time()
        file = StoredFile(
            id=storage.create_id(shape.id_prefix),
            filename=fields["file"],
            bytes=upload.size,
            created_at=now,
            purpose=purpose,
            owner=key_name(request),
            media_type=guess_media_type(fields.get(_TYPE), fields["file"]),
            expires_at=None if seconds is None else now + seconds,
        )
        await asyncio.to_thread(storage.add, upload, file)
    return json_response(shape.describe(file))


@asynccontextmanager
async def open_upload(storage: Storage, most: int) -> AsyncIterator[Upload]:
    """Start an upload. After the block it is removed unless it was added. That holds even if the client
    disconnects while a worker thread is still creating the file."""
    starting = asyncio.ensure_future(asyncio.to_thread(storage.start_upload, most))
    try:
        yield await asyncio.shield(starting)
    finally:
        await asyncio.shield(discard(storage, starting))


async def discard(storage: Storage, starting: Awaitable[Upload]) -> None:
    """Delete an upload that was begun."""
    with suppress(StorageError):  # the file could not be created
        await asyncio.to_thread(storage.discard_upload, await starting)


async def _read_form(
    request: web.Request, shape: FileShape, storage: Storage, upload: Upload
) -> dict[str, str]:
    """The fields of the form; of the file its name and type, while its content is written to disk."""
    if request.content_type != "multipart/form-data":
        raise RequestError(f"the body must be multipart/form-data, not {quote(request.content_type)}")
    fields: dict[str, str] = {}
    try:
        reader = await request.multipart()
        while (part := await _receive(reader.next())) is not None:
            name = part.name if isinstance(part, BodyPartReader) else None
            if not isinstance(part, BodyPartReader) or name is None:
                raise ValueError("a part of the form has no name")
            if name in fields:
                reject(shorten(name), "is given twice")
            _check_part(part, name, ("file", *shape.fields))
            if name == "file":
                fields[name] = _clean_file_name(part)
                fields[_TYPE] = part.headers.get("Content-Type", "")[:_MAX_NAME_LENGTH]
                await _receive_file(part, storage, upload)
            else:
                fields[name] = await _read_field(part, name)
            if not part.at_eof():
                raise ValueError("a part of the form has no end")
            if name != "file":
                shape.check_field(name, fields[name])
    except TimeoutError as error:
        raise TimedOut(f"nothing more of the form arrived for {BODY_TIMEOUT:g} s") from error
    except (ValueError, AssertionError, HttpProcessingError) as error:
        if request.content.at_eof():  # a complete form has its closing boundary left when a part is refused
            raise RequestError("the form ended early, before its closing boundary") from error
        reason = " ".join(str(error).removeprefix("400, message:").split())
        raise RequestError(f"the form cannot be read: {shorten(reason)}") from error
    return fields


async def _receive(data: Awaitable[T]) -> T:
    """What is read from the client. TimeoutError if nothing arrives; cancelled if the client disconnects, for
    which asyncio.wait_for would raise the connection's error."""
    async with asyncio.timeout(BODY_TIMEOUT):
        return await data


def _check_part(part: BodyPartReader, name: str, allowed: Sequence[str]) -> None:
    if name not in allowed:
        reject_unknown(name, allowed)
    for header in ("Content-Transfer-Encoding", "Content-Encoding"):
        coding = part.headers.get(header, "binary").lower()
        if coding not in ("binary", "8bit", "7bit", "identity"):
            reject(name, f"{header} {quote(coding)} is not supported; send the bytes unencoded")


def _clean_file_name(part: BodyPartReader) -> str:
    """The client's name of the file; no path is ever made of it."""
    name = (part.filename or "").encode("utf-8", "replace").decode()  # invalid UTF-8 is decoded to surrogates
    return name[:_MAX_NAME_LENGTH] or "file"


async def _read_field(part: BodyPartReader, name: str) -> str:
    data = bytearray()
    while chunk := await _receive(part.read_chunk(_MAX_FIELD_BYTES)):
        data += chunk
        if len(data) > _MAX_FIELD_BYTES:
            reject(name, f"is longer than {_MAX_FIELD_BYTES} bytes")
    return data.decode("utf-8", "replace")


async def _receive_file(part: BodyPartReader, storage: Storage, upload: Upload) -> None:
    """Write the file in blocks; the client waits for the disk."""
    block = bytearray()

    async def write() -> None:
        storage.check_quota(0, "file")  # not for each chunk, since it sums over all files
        await asyncio.to_thread(upload.write, bytes(block))

    while chunk := await _receive(part.read_chunk(1 << 16)):
        upload.receive(len(chunk))
        block += chunk
        if len(block) >= BLOCK_BYTES:
            await write()
            block.clear()
    await write()


async def list_files(request: web.Request) -> web.Response:
    """List files, newest first unless `order` is asc."""
    storage, key = (await get_open_queue(request)).storage, key_name(request)
    files = [file for file in storage.list_files() if may_access(key, file.owner)]
    return json_response(choose_shape(request).make_page(request, files))


async def get_file(request: web.Request) -> web.Response:
    """Describe a file."""
    return json_response(choose_shape(request).describe((await _find(request))[1]))


async def get_content(request: web.Request) -> web.StreamResponse:
    """Download a file."""
    queue, file = await _find(request)
    headers = {"Content-Type": UNKNOWN_TYPE, "Content-Disposition": "attachment"}
    return web.FileResponse(queue.storage.find_content(file.id), headers=headers)


async def delete_file(request: web.Request) -> web.Response:
    """Delete a file. A batch that was created from it continues."""
    queue, file = await _find(request)
    await asyncio.to_thread(queue.storage.delete, file.id)
    return json_response(choose_shape(request).describe_deleted(file.id))


async def _find(request: web.Request) -> tuple[BatchQueue, StoredFile]:
    queue = await get_open_queue(request)
    file = queue.storage.find_own(key_name(request), request.match_info["id"])
    if file is None:
        raise NotFound(f"there is no file {quote(request.match_info['id'])}", param="id")
    return queue, file


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/files",
        upload_file,
        "Upload a file: JSONL for a batch, an image, a PDF or a text",
        engine=False,
        max_body=sys.maxsize,
        is_form=True,
    ),  # `upload_file` counts as it reads
    Endpoint("GET", "/v1/files", list_files, "List files", engine=False),
    Endpoint("GET", "/v1/files/{id}", get_file, "Describe a file", engine=False),
    Endpoint("DELETE", "/v1/files/{id}", delete_file, "Delete a file", engine=False),
    Endpoint("GET", "/v1/files/{id}/content", get_content, "Download a file", engine=False),
)
