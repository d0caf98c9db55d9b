"""What a request may use of the server's files and batches: those of other API keys do not exist for it."""

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
    """The server's batches and their files. StorageError if the storage cannot be opened."""
    queue = request.app.get(BATCH_QUEUE)
    if queue is None:
        raise StorageError("this server was started without a folder for files and batches")
    await queue.open()
    return queue


async def list_own_batches(request: web.Request, *, is_message_batch: bool) -> list[Batch]:
    """The batches of one API that a request may see, newest first."""
    queue, key = await get_open_queue(request), key_name(request)
    return [batch for batch in queue.list_batches() if _is_own(batch, key, is_message_batch)]


async def find_own_batch(request: web.Request, *, is_message_batch: bool) -> tuple[BatchQueue, Batch]:
    """The batch of one API that the path of a request names. NotFound if the request may see none."""
    queue, name = await get_open_queue(request), request.match_info["id"]
    batch = queue.find(name)
    if batch is None or not _is_own(batch, key_name(request), is_message_batch):
        kind = "message batch" if is_message_batch else "batch"
        raise NotFound(f"there is no {kind} {quote(name)}", param="id")
    return queue, batch


def _is_own(batch: Batch, key: str, is_message_batch: bool) -> bool:
    return batch.is_message_batch == is_message_batch and may_access(key, batch.owner)


async def read_body_with_files(request: web.Request) -> Any:
    """The JSON body, with the contents of the files that it names in place of their ids. Without a storage
    the body stays as it is, for the checks that follow."""
    body = await read_json(request)
    if BATCH_QUEUE not in request.app or not find_file_parts(body):
        return body
    queue = await get_open_queue(request)
    return await inline_files(
        body, queue.storage.make_reader(key_name(request)), get_max_body_bytes(request.app)
    )
