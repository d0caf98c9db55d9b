"""Finds the files and batches that a request may use. Those of other API keys do not exist for it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from mlxrun.api.stored_files import find_file_parts, inline_files
from mlxrun.core.errors import NotFound
from mlxrun.core.field_errors import quote
from mlxrun.server.batches.batch import Batch
from mlxrun.server.batches.batch_queue import BATCH_QUEUE, BatchQueue
from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.http.access import key_name, may_access
from mlxrun.server.http.json_bodies import get_max_body_bytes, read_json


async def get_open_queue(request: web.Request) -> BatchQueue:
    """Return the server's batch queue. StorageError if its storage cannot be opened."""
    queue = request.app.get(BATCH_QUEUE)
    if queue is None:
        raise StorageError("this server was started without a folder for files and batches")
    await queue.open()
    return queue


async def list_own_batches(request: web.Request, *, is_message_batch: bool) -> list[Batch]:
    """List the batches of one API that a request may see, newest first."""
    queue, key = await get_open_queue(request), key_name(request)
    return [batch for batch in queue.list_batches() if _is_own(batch, key, is_message_batch)]


async def find_own_batch(request: web.Request, *, is_message_batch: bool) -> tuple[BatchQueue, Batch]:
    """Find the batch of one API that the request's path names. NotFound if the request may see none."""
    queue, name = await get_open_queue(request), request.match_info["id"]
    batch = queue.find(name)
    if batch is None or not _is_own(batch, key_name(request), is_message_batch):
        kind = "message batch" if is_message_batch else "batch"
        raise NotFound(f"there is no {kind} {quote(name)}", param="id")
    return queue, batch


def _is_own(batch: Batch, key: str, is_message_batch: bool) -> bool:
    return batch.is_message_batch == is_message_batch and may_access(key, batch.owner)


async def read_body_with_files(request: web.Request) -> Any:
    """Read a JSON body, and put the contents of the files that it names in place of their ids. If there is no
    storage, the body stays as it is, and later checks refuse the ids."""
    body = await read_json(request)
    return await inline_stored_files(request, body) if find_file_parts(body) else body


async def inline_stored_files(request: web.Request, body: Any) -> Any:
    """Put the contents of files in place of their ids in a body, as `read_body_with_files` does."""
    if BATCH_QUEUE not in request.app:
        return body
    queue = await get_open_queue(request)
    return await inline_files(
        body, queue.storage.make_reader(key_name(request)), get_max_body_bytes(request.app)
    )
