"""/v1/files: uploads and downloads of job files, images, PDFs and texts.

An upload is written to disk as it arrives, and becomes a file once it is complete. No file is held in memory.
A file belongs to the API key that it was sent with; for other keys it does not exist. file_shapes.py has the
shapes of both APIs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from functools import partial

from aiohttp import web

from mlxrun.core.errors import NotFound
from mlxrun.core.field_errors import quote, reject
from mlxrun.server.batches.batch import MIN_COUNTED_BYTES
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.batches.queue_access import get_open_queue
from mlxrun.server.batches.storage import UNKNOWN_TYPE, Storage, StoredFile, Upload, guess_media_type
from mlxrun.server.endpoints.file_shapes import choose_shape
from mlxrun.server.http.access import CONFIG, key_name, may_access
from mlxrun.server.http.forms import FILE, FILE_TYPE, MAX_FIELD, read_form
from mlxrun.server.http.json_bodies import json_response
from mlxrun.server.http.surface import Endpoint

BLOCK_BYTES = 1 << 20  # written at once


async def upload_file(request: web.Request) -> web.Response:
    """Receive a form with `file` and the fields of its API, in any order."""
    shape = choose_shape(request)
    storage = (await get_open_queue(request)).storage
    most, length = request.app[CONFIG].batch.max_file_bytes, request.content_length or 0
    async with open_upload(storage, most) as upload:
        upload.check(length - 4 * MAX_FIELD)
        storage.check_quota(length - 4 * MAX_FIELD - MIN_COUNTED_BYTES, "file")
        fields, _ = await read_form(
            request, shape.fields, partial(_write_file, storage, upload), shape.check_field
        )
        if FILE not in fields:
            reject("file", "missing", code="missing_field")
        purpose, seconds = shape.read_fields(fields)
        if not upload.size:
            reject("file", "is empty")
        now = storage.get_time()
        file = StoredFile(
            id=storage.create_id(shape.id_prefix),
            filename=fields[FILE],
            bytes=upload.size,
            created_at=now,
            purpose=purpose,
            owner=key_name(request),
            media_type=guess_media_type(fields.get(FILE_TYPE), fields[FILE]),
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


async def _write_file(storage: Storage, upload: Upload, content: AsyncIterator[bytes]) -> None:
    """Write the file in blocks; the client waits for the disk."""
    block = bytearray()

    async def write() -> None:
        storage.check_quota(0, "file")  # not for each chunk, since it sums over all files
        await asyncio.to_thread(upload.write, bytes(block))

    async for chunk in content:
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
