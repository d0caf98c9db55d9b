"""OpenAI's /v1/files: job files come in, answers go out; neither is ever held in memory.

An upload goes to disk in pieces as it comes, and is a file once all of it is there. A file belongs to the API
key that it came with: with another key it is not found.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from mlxrun.errors import NotFound, RequestError, TimedOut, TooLarge
from mlxrun.server.auth import key_name
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.storage import LEAST, Storage, StorageError, StoredFile, Upload
from mlxrun.server.pagination import in_order, page, read_query
from mlxrun.server.request_body import PATIENCE, json_reply
from mlxrun.server.surface import Endpoint
from mlxrun.text.field_errors import bad, quote, shorten, suggest, unsupported

if TYPE_CHECKING:
    from mlxrun.server.state import Server

PURPOSE = "batch"
BLOCK = 1 << 20  # bytes that are written at once
_SMALL = 1000  # bytes of a field that is no file
_LONGEST_NAME = 255  # characters
_REFUSED = {
    "expires_after[anchor]": "files are kept until they are deleted",
    "expires_after[seconds]": "files are kept until they are deleted",
}


class QuotaExceeded(TooLarge):
    """The server's files have as many bytes as they may. Not a 507: clients would send all of it again."""

    code = "storage_full"

    def __init__(self, param: str, quota: int) -> None:
        super().__init__(
            f"{param}: there is no room for it: all files and batches together may have {quota} bytes "
            f"(server.files_max_bytes), each of them {LEAST} at least; delete some files first",
            param=param,
        )


async def queue_of(server: Server) -> BatchQueue:
    """The server's batches and their files, opened. StorageError if that cannot be."""
    queue = server.jobs
    if queue is None:
        raise StorageError("this server was started without a folder for files and batches")
    await queue.open()
    return queue


def mine(request: web.Request, owner: str) -> bool:
    """Whether what `owner` made may be seen by who asks. Without keys everybody is the same."""
    name = key_name(request)
    return not name or owner in ("", name)


async def upload(request: web.Request, server: Server) -> web.Response:
    """Takes a job file: a form with `purpose` and `file`, in any order."""
    queue = await queue_of(server)
    most = server.config.batch.max_file_bytes
    if request.content_length is not None and request.content_length > most + 4 * _SMALL:
        raise _too_large(most)
    async with _drafted(queue.storage) as draft:
        room = _UploadQuota(queue.storage, draft, most, server.config.server.files_max_bytes)
        room.check((request.content_length or 0) - 4 * _SMALL - LEAST)
        fields = await _read_form(request, room)
        if "file" not in fields:
            raise bad("file", "missing", code="missing_field")
        if "purpose" not in fields:
            raise bad("purpose", "missing", code="missing_field")
        if not draft.size:
            raise bad("file", "is empty")
        now, file_id = int(queue.storage.now()), queue.storage.new_id("file-")
        file = StoredFile(file_id, fields["file"], draft.size, now, PURPOSE, key_name(request))
        await asyncio.to_thread(queue.storage.add, draft, file)
    return json_reply(file.body())


@asynccontextmanager
async def _drafted(storage: Storage) -> AsyncIterator[Upload]:
    """Room for a new file while the block runs. Nothing of it is left behind, whenever the sender goes away:
    a thread that has begun it goes on without being asked for."""
    begun = asyncio.ensure_future(asyncio.to_thread(storage.begin))
    try:
        yield await asyncio.shield(begun)
    finally:
        await asyncio.shield(_drop(storage, begun))


async def _drop(storage: Storage, begun: Awaitable[Upload]) -> None:
    with suppress(StorageError):  # of `begin`: nothing is there
        await asyncio.to_thread(storage.drop, await begun)


@dataclass(frozen=True, slots=True)
class _UploadQuota:
    """How large an upload may be: `most` bytes by itself, and `quota` with all that the storage holds."""

    storage: Storage
    draft: Upload
    most: int
    quota: int

    def take(self, size: int) -> None:
        """So many bytes have come; TooLarge if one file may not have them."""
        self.draft.taken += size
        if self.draft.taken > self.most:
            raise _too_large(self.most)

    def check(self, more: int) -> None:
        """NoRoom if what is there, and so many bytes more, do not fit."""
        if self.storage.used + max(0, more) > self.quota:
            raise QuotaExceeded("file", self.quota)


async def _read_form(request: web.Request, room: _UploadQuota) -> dict[str, str]:
    """The fields, for the file its name; its content goes to disk."""
    if request.content_type != "multipart/form-data":
        raise RequestError(f"the body must be multipart/form-data, not {quote(request.content_type)}")
    fields: dict[str, str] = {}
    try:
        reader = await request.multipart()
        while (part := await asyncio.wait_for(reader.next(), PATIENCE)) is not None:
            name = part.name if isinstance(part, BodyPartReader) else None
            if not isinstance(part, BodyPartReader) or name is None:
                raise RequestError("a part of the form has no name")
            if name in fields:
                raise bad(shorten(name), "is given twice")
            _check_part(part, name)
            if name == "file":
                fields[name] = _file_name(part)
                await _receive(part, room)
            else:
                fields[name] = await _small(part, name)
                if fields[name] != PURPOSE:
                    raise bad("purpose", f"only {PURPOSE!r} is taken, not {quote(fields[name])}")
    except TimeoutError as error:
        raise TimedOut(f"no more of the form came for {PATIENCE:g} s") from error
    except (ValueError, AssertionError, HttpProcessingError) as error:
        raise RequestError(f"the body is not a form that can be read: {shorten(str(error))}") from error
    return fields


def _check_part(part: BodyPartReader, name: str) -> None:
    if name in _REFUSED:
        raise unsupported(name, _REFUSED[name])
    if name not in ("file", "purpose"):
        hint = suggest(name, ("file", "purpose"))
        raise bad(shorten(name), f"unknown parameter{hint}", code="unknown_parameter")
    for header in ("Content-Transfer-Encoding", "Content-Encoding"):
        coding = part.headers.get(header, "binary").lower()
        if coding not in ("binary", "8bit", "7bit", "identity"):
            raise bad(name, f"{header} {quote(coding)} is not taken; send the bytes as they are")


def _file_name(part: BodyPartReader) -> str:
    """A label: nothing is ever opened by this name."""
    name = (part.filename or "").encode("utf-8", "replace").decode()  # bytes that are no UTF-8 come as halves
    return name[:_LONGEST_NAME] or "file"


async def _small(part: BodyPartReader, name: str) -> str:
    data = bytearray()
    while chunk := await asyncio.wait_for(part.read_chunk(_SMALL), PATIENCE):
        data += chunk
        if len(data) > _SMALL:
            raise bad(name, f"is longer than {_SMALL} bytes")
    return data.decode("utf-8", "replace")


async def _receive(part: BodyPartReader, room: _UploadQuota) -> None:
    """Write what comes, a block at a time: the sender waits for the disk."""
    block = bytearray()

    async def write() -> None:
        room.check(0)  # not for each chunk: it sums over all files
        await asyncio.to_thread(room.draft.write, bytes(block))

    while chunk := await asyncio.wait_for(part.read_chunk(1 << 16), PATIENCE):
        room.take(len(chunk))
        block += chunk
        if len(block) >= BLOCK:
            await write()
            block.clear()
    await write()


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"file: has more than {most} bytes (batch.max_file_bytes)", param="file")


async def list_files(request: web.Request, server: Server) -> web.Response:
    """Files, the newest first unless `order=asc`."""
    queue = await queue_of(server)
    query = read_query(request, ("after", "limit", "order", "purpose"))
    files = [file for file in queue.storage.newest() if mine(request, file.owner)]
    purpose = query.get("purpose")
    if purpose is not None:
        files = [file for file in files if file.purpose == purpose]
    return json_reply(page(in_order(files, query), query, StoredFile.body, most=10_000))


async def get_file(request: web.Request, server: Server) -> web.Response:
    """What is said of a file."""
    return json_reply((await _find(request, server))[1].body())


async def get_content(request: web.Request, server: Server) -> web.StreamResponse:
    """The bytes of a file."""
    queue, file = await _find(request, server)
    headers = {"Content-Type": "application/octet-stream", "Content-Disposition": "attachment"}
    return web.FileResponse(queue.storage.content(file.id), headers=headers)


async def delete_file(request: web.Request, server: Server) -> web.Response:
    """Removes a file. A batch that began with it goes on."""
    queue, file = await _find(request, server)
    await asyncio.to_thread(queue.storage.delete, file.id)
    return json_reply({"id": file.id, "object": "file", "deleted": True})


async def _find(request: web.Request, server: Server) -> tuple[BatchQueue, StoredFile]:
    queue = await queue_of(server)
    file = queue.storage.find(request.match_info["id"])
    if file is None or not mine(request, file.owner):
        raise NotFound(f"there is no file {quote(request.match_info['id'])}", param="id")
    return queue, file


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/files", upload, "Upload a JSONL file for a batch", engine=False, max_body=sys.maxsize
    ),  # `upload` counts by itself, as it reads
    Endpoint("GET", "/v1/files", list_files, "List files", engine=False),
    Endpoint("GET", "/v1/files/{id}", get_file, "Describe a file", engine=False),
    Endpoint("DELETE", "/v1/files/{id}", delete_file, "Delete a file", engine=False),
    Endpoint("GET", "/v1/files/{id}/content", get_content, "Download a file", engine=False),
)
