"""/v1/files: uploads and downloads of job files, images, PDFs and texts.

An upload is written to disk as it arrives, and becomes a file once it is complete. No file is held in memory.
A file belongs to the API key that it was sent with; for other keys it does not exist. One
storage has two shapes: Anthropic's for requests with its headers, else OpenAI's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from aiohttp import web

from mlxrun.api.anthropic.response import format_time
from mlxrun.core.errors import NotFound
from mlxrun.core.field_errors import check_given, quote, reject
from mlxrun.server.batches.batch import MIN_COUNTED_BYTES
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.batches.queue_access import get_open_queue
from mlxrun.server.batches.storage import UNKNOWN_TYPE, Storage, StoredFile, Upload, guess_media_type
from mlxrun.server.http.access import CONFIG, key_name, may_access
from mlxrun.server.http.forms import FILE, FILE_TYPE, MAX_FIELD, read_form
from mlxrun.server.http.json_bodies import json_response
from mlxrun.server.http.pagination import (
    make_anthropic_page,
    make_page,
    parse_number,
    read_query,
    sort_by_order,
)
from mlxrun.server.http.surface import Endpoint, is_anthropic

PURPOSE = "batch"
USER_DATA, VISION = "user_data", "vision"  # files of any use, and images
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
OPENAI_SECONDS = (3600, 30 * 86_400)  # of an expiry
_ANTHROPIC_SECONDS = (3600, 90 * 86_400)
_MOST_IDS = 100

Json = dict[str, Any]


class OpenAIFiles:
    """OpenAI's files. `fields`: those of the form besides the file. `id_prefix`: of new files' ids."""

    fields = ("purpose", ANCHOR, SECONDS)
    id_prefix = "file-"

    def check_field(self, name: str, text: str) -> None:
        """Check one field of a form before the rest of the form has arrived. RequestError if it is wrong."""
        allowed = {"purpose": (PURPOSE, USER_DATA, VISION), ANCHOR: ("created_at",)}.get(name)
        if allowed is None:
            _check_seconds(text, name, OPENAI_SECONDS)
        elif text not in allowed:
            names = ", ".join(map(repr, allowed))
            reject(name, f"only {names} {'is' if len(allowed) == 1 else 'are'} supported, not {quote(text)}")

    def read_fields(self, given: Mapping[str, str]) -> tuple[str, int | None]:
        """Read a file's purpose, and the seconds until it expires (None: never), from its form."""
        expires = ANCHOR in given or SECONDS in given
        check_given(given, "purpose", *((ANCHOR, SECONDS) if expires else ()))
        return given["purpose"], int(given[SECONDS]) if expires else None

    def describe(self, file: StoredFile) -> Json:
        return file.describe()

    def describe_deleted(self, file_id: str) -> Json:
        return {"id": file_id, "object": "file", "deleted": True}

    def make_page(self, request: web.Request, files: Sequence[StoredFile]) -> Json:
        """Build the page that the URL asks for. `files`: newest first."""
        query = read_query(request, ("after", "limit", "order", "purpose"))
        purpose = query.get("purpose")
        found = [file for file in files if purpose in (None, file.purpose)]
        return make_page(sort_by_order(found, query), query, self.describe, default=10_000, most=10_000)


class AnthropicFiles:
    """Anthropic's files. They have the purpose of OpenAI's files of any use."""

    fields = ("expires_in_seconds",)
    id_prefix = "file_"

    def check_field(self, name: str, text: str) -> None:
        _check_seconds(text, name, _ANTHROPIC_SECONDS)

    def read_fields(self, given: Mapping[str, str]) -> tuple[str, int | None]:
        seconds = given.get(self.fields[0])
        return USER_DATA, None if seconds is None else int(seconds)

    def describe(self, file: StoredFile) -> Json:
        return {
            "id": file.id,
            "type": "file",
            "filename": file.filename,
            "mime_type": file.media_type,
            "size_bytes": file.bytes,
            "created_at": format_time(file.created_at),
            "expires_at": format_time(file.expires_at),
            "downloadable": True,
        }

    def describe_deleted(self, file_id: str) -> Json:
        return {"id": file_id, "type": "file_deleted"}

    def make_page(self, request: web.Request, files: Sequence[StoredFile]) -> Json:
        names = ("after_id", "before_id", "page", "limit", "ids", "ids[]", "scope_id", "beta")
        query = read_query(request, names)
        if query.get("scope_id"):
            files = []  # files belong to no session
        given = [*request.query.getall("ids", ()), *request.query.getall("ids[]", ())]
        ids = {name for text in given for name in text.split(",")}
        if len(ids) > _MOST_IDS:
            reject("ids", f"has {len(ids)} entries; at most {_MOST_IDS} are allowed")
        if ids:
            for name in ("page", "limit"):
                if name in query:
                    reject(name, "not together with ids")
            files = [file for file in files if file.id in ids]
            query["limit"] = str(_MOST_IDS)
        if "page" in query:
            query["after_id"] = query["page"]
        page = make_anthropic_page(files, query, self.describe)
        return {**page, "next_page": page["last_id"] if page["has_more"] else None}


def _check_seconds(text: str, name: str, limits: tuple[int, int]) -> None:
    parse_number(text, name, *limits, "a number of seconds")


FileShape = OpenAIFiles | AnthropicFiles
OPENAI, ANTHROPIC = OpenAIFiles(), AnthropicFiles()


def choose_shape(request: web.Request) -> FileShape:
    """Choose the shape of a request by its headers."""
    return ANTHROPIC if is_anthropic(request) else OPENAI


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
        check_given(fields, FILE)
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
