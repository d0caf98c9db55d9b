"""Reads bodies of requests that name stored files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from mlxrun.api.stored_files import ReadFile
from mlxrun.server.batches.batch_queue import BATCH_QUEUE, get_open_queue
from mlxrun.server.batches.file_reader import make_file_reader
from mlxrun.server.http.access import key_name
from mlxrun.server.http.json_bodies import get_max_body_bytes, read_json


async def read_body_with_files(
    request: web.Request,
    has_files: Callable[[Any], bool],
    inline: Callable[[Any, ReadFile, int], Awaitable[Any]],
) -> Any:
    """The JSON body, with the contents of the files that it names in place of their ids. `has_files`: whether
    it names any; `inline`: puts them there. Without a storage the body stays as it is, for the checks that
    follow."""
    body = await read_json(request)
    if BATCH_QUEUE not in request.app or not has_files(body):
        return body
    queue = await get_open_queue(request)
    read_file = make_file_reader(queue.storage, key_name(request))
    return await inline(body, read_file, get_max_body_bytes(request.app))
