"""OpenAI's /v1/files: uploads of job files, and downloads of answers, neither of which is held in memory.

An upload is written to disk as it arrives, and becomes a file once it is complete. A file belongs to the API
key that it was sent with: for other keys it does not exist.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from mlxrun.errors import NotFound, RequestError, TimedOut
from mlxrun.server.access import key_name, may_access
from mlxrun.server.batches.batch_folders import MIN_COUNTED_BYTES
from mlxrun.server.batches.batch_queue import BatchQueue, get_open_queue
from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.batches.storage import Storage, StoredFile, Upload
from mlxrun.server.json_bodies import BODY_TIMEOUT, json_response
from mlxrun.server.pagination import make_page, read_query, sort_by_order
from mlxrun.server.request_context import CONFIG
from mlxrun.server.surface import Endpoint
from mlxrun.text.field_errors import quote, reject, reject_unsupported, shorten, suggest

PURPOSE = "batch"
BLOCK_BYTES = 1 << 20  # written at once
_MAX_FIELD_BYTES = 1000  # of a form field other than the file
_MAX_NAME_LENGTH = 255  # characters
_EXPIRY_FIELDS = ("expires_after[anchor]", "expires_after[seconds]")


async def upload_file(request: web.Request) -> web.Response:
    """Receive a job file: a form with `purpose` and `file`, in any order."""
    storage = (await get_open_queue(request)).storage
    most, length = request.app[CONFIG].batch.max_file_bytes, request.content_length or 0
    async with _open_upload(storage, most) as upload:
        upload.check(length - 4 * _MAX_FIELD_BYTES)
        storage.check_quota(length - 4 * _MAX_FIELD_BYTES - MIN_COUNTED_BYTES, "file")
        fields = await _read_form(request, storage, upload)
        for name in ("file", "purpose"):
            if name not in fields:
                reject(name, "missing", code="missing_field")
        if not upload.size:
            reject("file", "is empty")
        now, file_id = storage.get_time(), storage.create_id("file-")
        file = StoredFile(file_id, fields["file"], upload.size, now, PURPOSE, key_name(request))
        await asyncio.to_thread(storage.add, upload, file)
    return json_response(file.describe())


@asynccontextmanager
async def _open_upload(storage: Storage, most: int) -> AsyncIterator[Upload]:
    """An upload that is removed after the block unless it was added, even if the client disconnects while a
    worker thread is still creating its file."""
    starting = asyncio.ensure_future(asyncio.to_thread(storage.start_upload, most))
    try:
        yield await asyncio.shield(starting)
    finally:
        await asyncio.shield(_discard(storage, starting))


async def _discard(storage: Storage, starting: Awaitable[Upload]) -> None:
    with suppress(StorageError):  # the file could not be created
        await asyncio.to_thread(storage.discard_upload, await starting)


async def _read_form(request: web.Request, storage: Storage, upload: Upload) -> dict[str, str]:
    """The fields of the form; of the file its name, while its content is written to disk."""
    if request.content_type != "multipart/form-data":
        raise RequestError(f"the body must be multipart/form-data, not {quote(request.content_type)}")
    fields: dict[str, str] = {}
    try:
        reader = await request.multipart()
        while (part := await asyncio.wait_for(reader.next(), BODY_TIMEOUT)) is not None:
            name = part.name if isinstance(part, BodyPartReader) else None
            if not isinstance(part, BodyPartReader) or name is None:
                raise RequestError("a part of the form has no name")
            if name in fields:
                reject(shorten(name), "is given twice")
            _check_part(part, name)
            if name == "file":
                fields[name] = _clean_file_name(part)
                await _receive_file(part, storage, upload)
            else:
                fields[name] = await _read_field(part, name)
                if fields[name] != PURPOSE:
                    reject("purpose", f"only {PURPOSE!r} is supported, not {quote(fields[name])}")
    except TimeoutError as error:
        raise TimedOut(f"nothing more of the form arrived for {BODY_TIMEOUT:g} s") from error
    except (ValueError, AssertionError, HttpProcessingError) as error:
        raise RequestError(f"the form cannot be read: {shorten(str(error))}") from error
    return fields


def _check_part(part: BodyPartReader, name: str) -> None:
    if name in _EXPIRY_FIELDS:
        reject_unsupported(name, "files are kept until they are deleted")
    if name not in ("file", "purpose"):
        hint = suggest(name, ("file", "purpose"))
        reject(shorten(name), f"unknown parameter{hint}", code="unknown_parameter")
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
    while chunk := await asyncio.wait_for(part.read_chunk(_MAX_FIELD_BYTES), BODY_TIMEOUT):
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

    while chunk := await asyncio.wait_for(part.read_chunk(1 << 16), BODY_TIMEOUT):
        upload.receive(len(chunk))
        block += chunk
        if len(block) >= BLOCK_BYTES:
            await write()
            block.clear()
    await write()


async def list_files(request: web.Request) -> web.Response:
    """List files, newest first unless `order` is asc."""
    queue = await get_open_queue(request)
    query = read_query(request, ("after", "limit", "order", "purpose"))
    files = [file for file in queue.storage.list_files() if may_access(request, file.owner)]
    purpose = query.get("purpose")
    if purpose is not None:
        files = [file for file in files if file.purpose == purpose]
    return json_response(make_page(sort_by_order(files, query), query, StoredFile.describe, most=10_000))


async def get_file(request: web.Request) -> web.Response:
    """Describe a file."""
    return json_response((await _find(request))[1].describe())


async def get_content(request: web.Request) -> web.StreamResponse:
    """Download a file."""
    queue, file = await _find(request)
    headers = {"Content-Type": "application/octet-stream", "Content-Disposition": "attachment"}
    return web.FileResponse(queue.storage.find_content(file.id), headers=headers)


async def delete_file(request: web.Request) -> web.Response:
    """Delete a file. A batch that was created with it continues."""
    queue, file = await _find(request)
    await asyncio.to_thread(queue.storage.delete, file.id)
    return json_response({"id": file.id, "object": "file", "deleted": True})


async def _find(request: web.Request) -> tuple[BatchQueue, StoredFile]:
    queue = await get_open_queue(request)
    file = queue.storage.find(request.match_info["id"])
    if file is None or not may_access(request, file.owner):
        raise NotFound(f"there is no file {quote(request.match_info['id'])}", param="id")
    return queue, file


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/files",
        upload_file,
        "Upload a JSONL file for a batch",
        engine=False,
        max_body=sys.maxsize,
    ),  # `upload_file` counts as it reads
    Endpoint("GET", "/v1/files", list_files, "List files", engine=False),
    Endpoint("GET", "/v1/files/{id}", get_file, "Describe a file", engine=False),
    Endpoint("DELETE", "/v1/files/{id}", delete_file, "Delete a file", engine=False),
    Endpoint("GET", "/v1/files/{id}/content", get_content, "Download a file", engine=False),
)
