"""Anthropic's messages and count_tokens; api/anthropic reads the bodies and builds the responses.

`anthropic-version` and `anthropic-beta` may have any value, since the body says what it uses. Of the betas,
only interleaved thinking changes what is accepted. openai.py serves /v1/models for both APIs.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from aiohttp import web

from mlxrun.api.anthropic.fields import BODY, COUNT_BODY, COUNT_TOKENS, MESSAGES, build_schema
from mlxrun.api.anthropic.request import count_tokens, prepare_message
from mlxrun.api.anthropic.response import MessageWriter, build_error, get_error_status
from mlxrun.api.anthropic.typed_tools import TYPED_SCHEMA
from mlxrun.api.prepared import PreparedRequest
from mlxrun.server.batches.queue_access import read_body_with_files
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.generation import stream_deltas
from mlxrun.server.http.access import request_id
from mlxrun.server.http.json_bodies import json_response
from mlxrun.server.http.sse import open_stream, wants_stream
from mlxrun.server.http.surface import Endpoint, Surface
from mlxrun.server.live_requests import LIVE_REQUESTS, count_from_arrival

NAME = "anthropic"
ID_HEADER = "request-id"  # Anthropic's clients read this one


@count_from_arrival
async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer a conversation with one message, or with a stream of events."""
    body = await read_body_with_files(request)
    if wants_stream(body):
        return await _stream(request, body)
    prepared, writer = await _prepare(request, body)
    with request.app[LIVE_REQUESTS].open(request, NAME, prepared) as live:
        async with aclosing(stream_deltas(live)) as stream:
            async for choice, deltas in stream:
                writer.feed(choice, deltas)
    return json_response(writer.build_message(choice), headers={ID_HEADER: live.id})


async def _prepare(request: web.Request, body: Any) -> tuple[PreparedRequest, MessageWriter]:
    betas = ",".join(request.headers.getall("anthropic-beta", ()))
    message = await prepare_message(
        body, request.app[ENGINE].context, interleaved="interleaved-thinking" in betas
    )
    return message.prepared, MessageWriter(message, f"msg_{message.prepared.name}")


async def _stream(request: web.Request, body: Any) -> web.StreamResponse:
    """Until the prompt is known, which the first event counts, the stream has comments instead of pings."""
    rid = request_id(request)
    async with open_stream(request) as events:
        events.response.headers[ID_HEADER] = rid
        prepared, writer = await _prepare(request, body)
        with request.app[LIVE_REQUESTS].open(request, NAME, prepared) as live:
            events.live, events.ping = live, lambda: writer.write_ping(live.cached_tokens)
            async with aclosing(stream_deltas(live)) as stream:
                async for choice, deltas in stream:
                    for name, data in writer.feed(choice, deltas):
                        await events.send(data, name)
    return events.response


async def count_message_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a conversation."""
    body = await read_body_with_files(request)
    return json_response(await count_tokens(body, request.app[ENGINE].context))


SURFACE = Surface(
    NAME,
    (
        Endpoint(
            "POST",
            MESSAGES,
            create_message,
            "Answer a conversation, at once or as a stream",
            build_schema(BODY, TYPED_SCHEMA),
        ),
        Endpoint(
            "POST",
            COUNT_TOKENS,
            count_message_tokens,
            "Count the tokens of a conversation",
            build_schema(COUNT_BODY, TYPED_SCHEMA),
        ),
    ),
    build_error,
    get_error_status,
    error_event=lambda error, request_id: ("error", build_error(error, request_id)),
)
