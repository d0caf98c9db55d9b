"""Anthropic's messages and count_tokens; api/anthropic/request.py reads bodies, anthropic_answer.py writes answers.

`anthropic-version` and `anthropic-beta` may be anything: what a body holds says what it asks for. Of the
betas, interleaved thinking alone changes what is taken. /v1/models is served by openai.py for both.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from mlxrun.api.anthropic.fields import BODY, COUNT_BODY, COUNT_TOKENS, MESSAGES
from mlxrun.api.anthropic.openapi_schema import document
from mlxrun.api.anthropic.request import count_tokens, error_body, error_status, prepare_message
from mlxrun.api.anthropic.stream import MessageWriter
from mlxrun.errors import MlxrunError
from mlxrun.server.generation import answers
from mlxrun.server.request_body import json_reply, read_json
from mlxrun.server.sse import EventStream
from mlxrun.server.surface import Endpoint, Surface

if TYPE_CHECKING:
    from aiohttp import web

    from mlxrun.api.prepared import PreparedRequest
    from mlxrun.server.live_requests import LiveRequest
    from mlxrun.server.state import Server

log = logging.getLogger(__name__)

NAME = "anthropic"
ID_HEADER = "request-id"  # where Anthropic's clients look


async def messages(request: web.Request, server: Server) -> web.StreamResponse:
    """Answers a conversation: one message, or a stream of events."""
    body = await read_json(request, server)
    betas = ",".join(request.headers.getall("anthropic-beta", ()))
    message = await prepare_message(body, server.side, interleaved="interleaved-thinking" in betas)
    prepared = message.prepared
    writer = MessageWriter(message, f"msg_{prepared.requests[0].id.rpartition('-')[0]}")
    with server.live.open(request, NAME, prepared) as live:
        if prepared.stream:
            return await _stream(request, server, live, prepared, writer)
        async with aclosing(answers(server, live, prepared)) as pieces:
            async for choice, deltas in pieces:
                writer.feed(choice, deltas)
    return json_reply(writer.message(choice), headers={ID_HEADER: live.id})


async def _stream(
    request: web.Request, server: Server, live: LiveRequest, prepared: PreparedRequest, writer: MessageWriter
) -> web.StreamResponse:
    async with EventStream(request, server, live, ping=lambda: writer.ping(live.cached)) as stream:
        stream.response.headers[ID_HEADER] = live.id
        try:
            async with aclosing(answers(server, live, prepared)) as pieces:
                async for choice, deltas in pieces:
                    for name, data in writer.feed(choice, deltas):
                        await stream.send(data, name)
        except MlxrunError as error:
            if not stream.started:
                raise
            log.warning("%s %s in the middle of the stream", live.id, error.code)
            await stream.send(error_body(error, live.id), "error")
    return stream.response


async def count(request: web.Request, server: Server) -> web.StreamResponse:
    """How many tokens a conversation has."""
    body = await read_json(request, server)
    return json_reply(await count_tokens(body, server.side))


SURFACE = Surface(
    NAME,
    (
        Endpoint("POST", MESSAGES, messages, "Answer a conversation, whole or as a stream", document(BODY)),
        Endpoint("POST", COUNT_TOKENS, count, "Count the tokens of a conversation", document(COUNT_BODY)),
    ),
    error_body,
    error_status,
)
