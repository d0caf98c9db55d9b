"""OpenAI's /v1/batches, and the surface of files and batches. The lines of an uploaded file run on spare
capacity; see batches/batch_queue.py.

A line is answered as its endpoint would answer the same body, but images must be data URLs: paths of this
machine are refused. A batch belongs to the API key that created it.
"""

from __future__ import annotations

import asyncio
import re

from aiohttp import web

from mlxrun.api.body_schema import BodySchema
from mlxrun.api.openai.fields import URLS
from mlxrun.errors import NotFound
from mlxrun.server.access import key_name, may_access
from mlxrun.server.batches.batch import Batch
from mlxrun.server.batches.batch_folders import MIN_COUNTED_BYTES
from mlxrun.server.batches.batch_queue import BatchQueue, get_open_queue
from mlxrun.server.endpoints.files import ENDPOINTS, PURPOSE
from mlxrun.server.json_bodies import json_response, read_empty_body, read_json
from mlxrun.server.pagination import make_page, read_query
from mlxrun.server.surface import Endpoint, Surface
from mlxrun.text.field_errors import quote, reject, reject_unsupported, suggest

_WINDOW = re.compile("([1-9][0-9]{0,2})([hd])")
_HOURS = {"h": 1, "d": 24}
_OTHER_ENDPOINTS = ("/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/moderations")
_STRING = {"type": "string"}
BODY = BodySchema(
    {
        "input_file_id": _STRING,
        "endpoint": _STRING,
        "completion_window": _STRING,
        "metadata": {
            "type": "object",
            "maxProperties": 16,
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
    },
    refused={"output_expires_after": "files are kept until they are deleted"},
)


async def create_batch(request: web.Request) -> web.Response:
    """Create a batch. Its file is validated, and its lines run, after the response."""
    given = BODY.check(await read_json(request))
    queue = await get_open_queue(request)
    for name in ("input_file_id", "endpoint", "completion_window"):
        if name not in given:
            reject(name, "missing", code="missing_field")
    endpoint, window = given["endpoint"], given["completion_window"]
    if endpoint in _OTHER_ENDPOINTS:
        reject_unsupported("endpoint", f"batches are for {' and '.join(URLS)}, not for {endpoint}")
    if endpoint not in URLS:
        reject("endpoint", f"{quote(endpoint)} is not one of {', '.join(URLS)}{suggest(endpoint, URLS)}")
    file = queue.storage.find(given["input_file_id"])
    if file is None or not may_access(request, file.owner):
        reject("input_file_id", f"there is no file {quote(given['input_file_id'])}", code="not_found")
    if file.purpose != PURPOSE:
        reject("input_file_id", f"the file's purpose is {file.purpose!r}, not {PURPOSE!r}")
    queue.storage.check_quota(MIN_COUNTED_BYTES, "input_file_id")
    now, batch_id = queue.storage.get_time(), queue.storage.create_id("batch_")
    expires, owner = now + _parse_window(window), key_name(request)
    batch = Batch(batch_id, endpoint, file.id, window, now, expires, owner, given.get("metadata"))
    await asyncio.shield(queue.add(batch))  # complete it even if the client disconnects
    return json_response(batch.describe())


def _parse_window(window: str) -> int:
    """Seconds of a completion window."""
    found = _WINDOW.fullmatch(window)
    if found is None:
        reject("completion_window", f"{quote(window)} is not a time such as '24h' or '7d'")
    return int(found[1]) * _HOURS[found[2]] * 3600


async def list_batches(request: web.Request) -> web.Response:
    """List batches, newest first."""
    queue = await get_open_queue(request)
    query = read_query(request, ("after", "limit"))
    batches = [batch for batch in queue.list_batches() if may_access(request, batch.owner)]
    return json_response(make_page(batches, query, Batch.describe, default=20, most=100))


async def get_batch(request: web.Request) -> web.Response:
    """Describe a batch."""
    return json_response((await _find(request))[1].describe())


async def cancel_batch(request: web.Request) -> web.Response:
    """End a batch early; finished lines are kept."""
    await read_empty_body(request)
    queue, batch = await _find(request)
    await asyncio.shield(queue.cancel(batch))  # complete it even if the client disconnects
    return json_response(batch.describe())


async def _find(request: web.Request) -> tuple[BatchQueue, Batch]:
    queue = await get_open_queue(request)
    batch = queue.find(request.match_info["id"])
    if batch is None or not may_access(request, batch.owner):
        raise NotFound(f"there is no batch {quote(request.match_info['id'])}", param="id")
    return queue, batch


SURFACE = Surface(
    "batches",
    (
        *ENDPOINTS,
        Endpoint(
            "POST", "/v1/batches", create_batch, "Run a file on spare capacity", BODY.schema, engine=False
        ),
        Endpoint("GET", "/v1/batches", list_batches, "List batches", engine=False),
        Endpoint("GET", "/v1/batches/{id}", get_batch, "Describe a batch", engine=False),
        Endpoint("POST", "/v1/batches/{id}/cancel", cancel_batch, "End a batch early", engine=False),
    ),
)
