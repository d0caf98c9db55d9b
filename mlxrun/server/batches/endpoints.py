"""OpenAI's /v1/batches, and the surface of files and batches. A batch is an uploaded file whose lines run in
the engine's idle room; batch_queue.py has what becomes of it.

A line is answered as its endpoint would answer the same body. Lines may show images as data, never as files
of this machine. A batch belongs to the API key that made it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aiohttp import web

from mlxrun.api.body_schema import Body
from mlxrun.api.openai.fields import URLS
from mlxrun.errors import NotFound
from mlxrun.server.auth import key_name
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.files import ENDPOINTS, PURPOSE, QuotaExceeded, mine, queue_of
from mlxrun.server.batches.jobs import Batch
from mlxrun.server.batches.storage import LEAST
from mlxrun.server.pagination import page, read_query
from mlxrun.server.request_body import json_reply, read_json, read_nothing
from mlxrun.server.surface import Endpoint, Surface
from mlxrun.text.field_errors import bad, quote, suggest, unsupported

if TYPE_CHECKING:
    from mlxrun.server.state import Server

_WINDOW = re.compile("([1-9][0-9]{0,2})([hd])")
_HOURS = {"h": 1, "d": 24}
_OTHERS = ("/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/moderations")
_STRING = {"type": "string"}
BODY = Body(
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


async def create(request: web.Request, server: Server) -> web.Response:
    """Takes a batch in; its file is looked at, and run, after the answer."""
    given = BODY.check(await read_json(request, server))
    queue = await queue_of(server)
    for name in ("input_file_id", "endpoint", "completion_window"):
        if name not in given:
            raise bad(name, "missing", code="missing_field")
    endpoint, window = given["endpoint"], given["completion_window"]
    if endpoint in _OTHERS:
        raise unsupported("endpoint", f"batches are for {' and '.join(URLS)}, not for {endpoint}")
    if endpoint not in URLS:
        raise bad("endpoint", f"{quote(endpoint)} is not one of {', '.join(URLS)}{suggest(endpoint, URLS)}")
    file = queue.storage.find(given["input_file_id"])
    if file is None or not mine(request, file.owner):
        raise bad("input_file_id", f"there is no file {quote(given['input_file_id'])}", code="not_found")
    if file.purpose != PURPOSE:
        raise bad("input_file_id", f"the file's purpose is {file.purpose!r}, not {PURPOSE!r}")
    quota = server.config.server.files_max_bytes
    if queue.storage.used + LEAST > quota:
        raise QuotaExceeded("input_file_id", quota)
    now = int(queue.storage.now())
    batch = Batch(
        queue.storage.new_id("batch_"),
        endpoint,
        file.id,
        window,
        now,
        now + _seconds(window),
        key_name(request),
        given.get("metadata"),
    )
    await queue.add(batch)
    return json_reply(batch.body())


def _seconds(window: str) -> int:
    found = _WINDOW.fullmatch(window)
    if found is None:
        raise bad("completion_window", f"{quote(window)} is not a time such as '24h' or '7d'")
    return int(found[1]) * _HOURS[found[2]] * 3600


async def list_batches(request: web.Request, server: Server) -> web.Response:
    """Batches, the newest first."""
    queue = await queue_of(server)
    query = read_query(request, ("after", "limit"))
    batches = [batch for batch in queue.newest() if mine(request, batch.owner)]
    return json_reply(page(batches, query, Batch.body, usual=20, most=100))


async def get_batch(request: web.Request, server: Server) -> web.Response:
    """Where a batch is."""
    return json_reply((await _find(request, server))[1].body())


async def cancel(request: web.Request, server: Server) -> web.Response:
    """Ends a batch early; what is finished is kept."""
    await read_nothing(request, server)
    queue, batch = await _find(request, server)
    await queue.cancel(batch)
    return json_reply(batch.body())


async def _find(request: web.Request, server: Server) -> tuple[BatchQueue, Batch]:
    queue = await queue_of(server)
    batch = queue.find(request.match_info["id"])
    if batch is None or not mine(request, batch.owner):
        raise NotFound(f"there is no batch {quote(request.match_info['id'])}", param="id")
    return queue, batch


SURFACE = Surface(
    "batches",
    (
        *ENDPOINTS,
        Endpoint("POST", "/v1/batches", create, "Run a file's lines in idle room", BODY.schema, engine=False),
        Endpoint("GET", "/v1/batches", list_batches, "List batches", engine=False),
        Endpoint("GET", "/v1/batches/{id}", get_batch, "Describe a batch", engine=False),
        Endpoint("POST", "/v1/batches/{id}/cancel", cancel, "End a batch early", engine=False),
    ),
)
