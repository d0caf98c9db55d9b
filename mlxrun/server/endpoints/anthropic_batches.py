"""Anthropic's /v1/messages/batches: many bodies of /v1/messages, which run on spare capacity.

They are batches like OpenAI's, on the same queue and in the same folders; see batches/batch_queue.py. The
params of requests are checked when they run, since an error of a request is its result.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from functools import partial
from typing import Any

from aiohttp import web

from mlxrun.api.anthropic.fields import MESSAGES
from mlxrun.api.anthropic.response import (
    BATCHES,
    BODY,
    HOURS,
    build_error,
    build_request_counts,
    format_time,
    get_error_status,
)
from mlxrun.core.errors import NotFound, RequestError
from mlxrun.server.batches.batch import MIN_COUNTED_BYTES, Batch
from mlxrun.server.batches.batch_queue import InvalidState
from mlxrun.server.batches.queue_access import find_own_batch, get_open_queue, list_own_batches
from mlxrun.server.batches.request_lines import receive_requests
from mlxrun.server.batches.results import UNANSWERED
from mlxrun.server.endpoints.files import open_upload
from mlxrun.server.http.access import CONFIG, key_name
from mlxrun.server.http.json_bodies import json_response, read_empty_body
from mlxrun.server.http.pagination import make_anthropic_page, read_query
from mlxrun.server.http.surface import Endpoint, Surface

_STATUSES = {"cancelling": "canceling", **dict.fromkeys(UNANSWERED, "ended")}
_find = partial(find_own_batch, is_message_batch=True)


async def create_message_batch(request: web.Request) -> web.Response:
    """Create a batch of the requests in the body. They run after the response."""
    queue = await get_open_queue(request)
    storage = queue.storage
    storage.check_quota(MIN_COUNTED_BYTES, "requests")
    async with open_upload(storage, request.app[CONFIG].batch.max_file_bytes) as upload:
        count = await receive_requests(request, storage, upload)
        await asyncio.to_thread(upload.finish)
        now = storage.get_time()
        batch = Batch(
            id=storage.create_id("msgbatch_"),
            endpoint=MESSAGES,
            input_file_id="",
            completion_window=f"{HOURS}h",
            created_at=now,
            expires_at=now + HOURS * 3600,
            owner=key_name(request),
            status="in_progress",
            in_progress_at=now,
            is_message_batch=True,
            request_counts={"total": count, "completed": 0, "failed": 0},
        )
        adding = asyncio.ensure_future(queue.add(batch, upload.path))
        try:
            await asyncio.shield(adding)  # complete it even if the client disconnects
        finally:
            await asyncio.wait((adding,))  # before the upload is discarded
    return json_response(_describe(request, batch))


def _describe(request: web.Request, batch: Batch) -> dict[str, Any]:
    """Anthropic's batch object."""
    status = _get_status(batch)
    has_results = status == "ended" and batch.output_file_id is not None
    counts = batch.request_counts
    numbers = (counts["total"], counts["completed"], counts["failed"])
    # Of several proxies, the first item is that of the client's.
    scheme = request.headers.get("X-Forwarded-Proto", "").partition(",")[0].strip().lower()
    scheme = scheme if scheme in ("http", "https") else request.scheme
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": build_request_counts(*numbers, UNANSWERED.get(batch.status)),
        "created_at": format_time(batch.created_at),
        "expires_at": format_time(batch.expires_at),
        "ended_at": format_time(batch.ended_at),
        "cancel_initiated_at": format_time(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{scheme}://{request.host}{BATCHES}/{batch.id}/results" if has_results else None,
    }


async def list_message_batches(request: web.Request) -> web.Response:
    """List message batches, newest first."""
    batches = await list_own_batches(request, is_message_batch=True)
    query = read_query(request, ("after_id", "before_id", "limit", "beta"))
    return json_response(make_anthropic_page(batches, query, lambda batch: _describe(request, batch)))


async def get_message_batch(request: web.Request) -> web.Response:
    """Describe a message batch."""
    return json_response(_describe(request, (await _find(request))[1]))


async def cancel_message_batch(request: web.Request) -> web.Response:
    """End a message batch early. Finished requests keep their results."""
    await read_empty_body(request)
    queue, batch = await _find(request)
    await _complete(queue.cancel(batch), batch, "and cannot be canceled any more")
    return json_response(_describe(request, batch))


async def delete_message_batch(request: web.Request) -> web.Response:
    """Delete a message batch that has ended, with its results."""
    queue, batch = await _find(request)
    await _complete(queue.delete(batch), batch, "and cannot be deleted yet: cancel it first")
    return json_response({"id": batch.id, "type": "message_batch_deleted"})


async def _complete(change: Coroutine[Any, Any, None], batch: Batch, refusal: str) -> None:
    """Change a batch, even if the client disconnects meanwhile. `refusal` follows its status if it cannot be
    changed."""
    try:
        await asyncio.shield(change)
    except InvalidState as error:  # whose 409 would be retried by Anthropic's clients
        raise RequestError(f"the batch is {_get_status(batch)} {refusal}") from error


def _get_status(batch: Batch) -> str:
    """Anthropic's word for the status of a batch."""
    return _STATUSES.get(batch.status, "in_progress")


async def get_results(request: web.Request) -> web.StreamResponse:
    """Download the results of a message batch: one JSON object a line, in any order."""
    queue, batch = await _find(request)
    if not batch.ended:
        raise RequestError(f"the batch has not ended; its status is {_get_status(batch)}")
    file = queue.storage.find(batch.output_file_id or "")
    if file is None:
        raise NotFound(f"the results of the batch {batch.id} were deleted")
    headers = {"Content-Type": "application/x-jsonl", "Content-Disposition": "attachment"}
    return web.FileResponse(queue.storage.find_content(file.id), headers=headers)


_ONE = f"{BATCHES}/{{id}}"
SURFACE = Surface(
    "batches",
    (
        Endpoint(
            "POST",
            BATCHES,
            create_message_batch,
            "Answer many bodies on spare capacity",
            BODY,
            engine=False,
            max_body=sys.maxsize,
        ),  # `receive_requests` counts as it reads
        Endpoint("GET", BATCHES, list_message_batches, "List message batches", engine=False),
        Endpoint("GET", _ONE, get_message_batch, "Describe a message batch", engine=False),
        Endpoint("DELETE", _ONE, delete_message_batch, "Delete an ended message batch", engine=False),
        Endpoint("POST", f"{_ONE}/cancel", cancel_message_batch, "End a message batch early", engine=False),
        Endpoint("GET", f"{_ONE}/results", get_results, "Download the results of a batch", engine=False),
    ),
    build_error,
    get_error_status,
    needs="anthropic",
)
