"""The batches that a request may see: for other API keys they do not exist."""

from __future__ import annotations

from aiohttp import web

from mlxrun.core.errors import NotFound
from mlxrun.core.field_errors import quote
from mlxrun.server.batches.batch import Batch
from mlxrun.server.batches.batch_queue import BatchQueue, get_open_queue
from mlxrun.server.http.access import key_name, may_access


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
