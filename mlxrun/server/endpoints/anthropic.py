"""Anthropic's messages and count_tokens; api/anthropic reads the bodies and builds the responses.

`anthropic-version` and `anthropic-beta` may have any value, since the body says what it uses. Of the betas,
only interleaved thinking changes what is accepted. openai.py serves /v1/models for both APIs.
"""

from __future__ import annotations

from contextlib import aclosing

from aiohttp import web

from mlxrun.api.anthropic.fields import BODY, COUNT_BODY, COUNT_TOKENS, MESSAGES, build_schema
from mlxrun.api.anthropic.request import count_tokens, prepare_message
from mlxrun.api.anthropic.response import MessageWriter, build_error, get_error_status
from mlxrun.api.anthropic.typed_tools import TYPED_SCHEMA
from mlxrun.server.batches.queue_access import read_body_with_files
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.generation import stream_deltas
from mlxrun.server.http.json_bodies import json_response
from mlxrun.server.http.sse import open_stream
from mlxrun.server.http.surface import Endpoint, Surface
from mlxrun.server.live_requests import LIVE_REQUESTS, LiveRequest

NAME = "anthropic"
ID_HEADER = "request-id"  # Anthropic's clients read this one


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer a conversation with one message, or with a stream of events."""
    body = await read_body_with_files(request)
    betas = ",".join(request.headers.getall("anthropic-beta", ()))
    message = await prepare_message(
        body, request.app[ENGINE].context, interleaved="interleaved-thinking" in betas
    )
    prepared = message.prepared
    writer = MessageWriter(message, f"msg_{prepared.requests[0].id.rpartition('-')[0]}")
    with request.app[LIVE_REQUESTS].open(request, NAME, prepared) as live:
        if prepared.stream:
            return await _stream(request, live, writer)
        async with aclosing(stream_deltas(live)) as stream:
            async for choice, deltas in stream:
                writer.feed(choice, deltas)
    return json_response(writer.build_message(choice), headers={ID_HEADER: live.id})


async def _stream(request: web.Request, live: LiveRequest, writer: MessageWriter) -> web.StreamResponse:
    async with open_stream(
        request,
        live,
        ping=lambda: writer.write_ping(live.cached_tokens),
        describe_error=lambda error: ("error", build_error(error, live.id)),
    ) as events:
        events.response.headers[ID_HEADER] = live.id
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
)
