"""OpenAI's /v1/batches, and the surface of files and batches.

The lines of an uploaded file run on spare capacity; see batches/batch_queue.py. A line is answered as its
endpoint would answer the same body. Paths of this machine are refused, so images must be data URLs. A batch
belongs to the API key that created it.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial

from aiohttp import web

from mlxrun.api.body_schema import METADATA, STRING, BodySchema, object_of
from mlxrun.core.field_errors import check_given, quote, reject, reject_choice, reject_unsupported
from mlxrun.jobs.run.job_service import URLS
from mlxrun.server.batches.batch import MIN_COUNTED_BYTES, Batch
from mlxrun.server.batches.queue_access import find_own_batch, get_open_queue, list_own_batches
from mlxrun.server.endpoints.files import ENDPOINTS, OPENAI_SECONDS, PURPOSE
from mlxrun.server.http.access import key_name
from mlxrun.server.http.json_bodies import json_response, read_empty_body, read_json
from mlxrun.server.http.pagination import make_page, read_query
from mlxrun.server.http.surface import Endpoint, Surface

_WINDOW = re.compile("([1-9][0-9]{0,2})([hd])")
_HOURS = {"h": 1, "d": 24}
_OTHER_ENDPOINTS = ("/v1/moderations", "/v1/videos")
_LEAST_SECONDS, _MOST_SECONDS = OPENAI_SECONDS
BODY = BodySchema(
    {
        "input_file_id": STRING,
        "endpoint": STRING,
        "completion_window": STRING,
        "metadata": METADATA,
        "output_expires_after": object_of(
            {
                "anchor": {"enum": ["created_at"]},
                "seconds": {"type": "integer", "minimum": _LEAST_SECONDS, "maximum": _MOST_SECONDS},
            }
        ),
    }
)
_find = partial(find_own_batch, is_message_batch=False)


async def create_batch(request: web.Request) -> web.Response:
    """Create a batch. Its file is validated, and its lines run, after the response."""
    given = BODY.check(await read_json(request))
    queue = await get_open_queue(request)
    check_given(given, "input_file_id", "endpoint", "completion_window")
    endpoint, window = given["endpoint"], given["completion_window"]
    if endpoint in _OTHER_ENDPOINTS:
        reject_unsupported("endpoint", f"batches are for {', '.join(URLS)}, not for {endpoint}")
    if endpoint not in URLS:
        reject_choice("endpoint", endpoint, URLS)
    storage = queue.storage
    file = storage.find_own(key_name(request), given["input_file_id"])
    if file is None:
        reject("input_file_id", f"there is no file {quote(given['input_file_id'])}", code="not_found")
    if file.purpose != PURPOSE:
        reject("input_file_id", f"the file's purpose is {file.purpose!r}, not {PURPOSE!r}")
    storage.check_quota(MIN_COUNTED_BYTES, "input_file_id")
    now = storage.get_time()
    batch = Batch(
        id=storage.create_id("batch_"),
        endpoint=endpoint,
        input_file_id=file.id,
        completion_window=window,
        created_at=now,
        expires_at=now + _parse_window(window),
        owner=key_name(request),
        metadata=given.get("metadata"),
        output_expires_after=given.get("output_expires_after", {}).get("seconds"),
    )
    # Complete it even if the client disconnects.
    await asyncio.shield(queue.add(batch, storage.find_content(file.id)))
    return json_response(batch.describe())


def _parse_window(window: str) -> int:
    """Seconds of a completion window."""
    found = _WINDOW.fullmatch(window)
    if found is None:
        reject("completion_window", f"{quote(window)} is not a time such as '24h' or '7d'")
    return int(found[1]) * _HOURS[found[2]] * 3600


async def list_batches(request: web.Request) -> web.Response:
    """List batches, newest first."""
    batches = await list_own_batches(request, is_message_batch=False)
    query = read_query(request, ("after", "limit"))
    return json_response(make_page(batches, query, Batch.describe))


async def get_batch(request: web.Request) -> web.Response:
    """Describe a batch."""
    return json_response((await _find(request))[1].describe())


async def cancel_batch(request: web.Request) -> web.Response:
    """End a batch early. Finished lines are kept."""
    await read_empty_body(request)
    queue, batch = await _find(request)
    await asyncio.shield(queue.cancel(batch))  # complete it even if the client disconnects
    return json_response(batch.describe())


async def delete_batch(request: web.Request) -> web.Response:
    """Delete a batch that has ended. Its files stay until they are deleted, or expire."""
    queue, batch = await _find(request)
    await asyncio.shield(queue.delete(batch))
    return json_response({"id": batch.id, "object": "batch", "deleted": True})


SURFACE = Surface(
    "batches",
    (
        *ENDPOINTS,
        Endpoint(
            "POST", "/v1/batches", create_batch, "Run a file on spare capacity", BODY.schema, engine=False
        ),
        Endpoint("GET", "/v1/batches", list_batches, "List batches", engine=False),
        Endpoint("GET", "/v1/batches/{id}", get_batch, "Describe a batch", engine=False),
        Endpoint("DELETE", "/v1/batches/{id}", delete_batch, "Delete a batch that has ended", engine=False),
        Endpoint("POST", "/v1/batches/{id}/cancel", cancel_batch, "End a batch early", engine=False),
    ),
)
