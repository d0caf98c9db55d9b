"""OpenAI's /v1/responses: bodies become chat bodies in api/responses/request.py, answers become events in
api/responses/stream.py; here is what runs, what is stored, and who may see it.

An answer is made while its request is open, so there is no background mode; a running one can be cancelled.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from mlxrun.api.openai.request import prepare
from mlxrun.api.responses.fields import BODY, INCLUDES
from mlxrun.api.responses.request import ReadResponse, blame, read
from mlxrun.errors import Cancelled, MlxrunError, RequestError
from mlxrun.server.auth import key_name
from mlxrun.server.generation import Pieces, answers
from mlxrun.server.pagination import in_order, page, read_query
from mlxrun.server.request_body import json_reply, read_json
from mlxrun.server.response_store import RunningResponse, missing, responses_of
from mlxrun.server.sse import EventStream
from mlxrun.server.surface import Endpoint, Surface
from mlxrun.text.field_errors import bad, quote, unsupported

if TYPE_CHECKING:
    from aiohttp import web

    from mlxrun.api.prepared import PreparedRequest
    from mlxrun.server.state import Server

DONE = "[DONE]"  # the original sends none; its clients skip it, and others wait for it
GRACE = 0.5  # seconds in which a refusal of the engine still gets its own status, as no event went out
_CHAT = "/v1/chat/completions"


async def _prepare(request: web.Request, server: Server, token: str) -> tuple[ReadResponse, PreparedRequest]:
    body = await read_json(request, server)
    memory = responses_of(server).memory(key_name(request))
    asked = await asyncio.to_thread(read, body, server.host, memory, token)
    try:
        return asked, await prepare(_CHAT, asked.chat, server.side, stream=True)
    except RequestError as exc:
        raise blame(exc, asked.paths) from exc


# Making one.


async def create(request: web.Request, server: Server) -> web.StreamResponse:
    """Answers a body: one object, or a stream of events."""
    token = secrets.token_hex(16)
    asked, prepared = await _prepare(request, server, token)
    responses = responses_of(server)
    with server.live.open(request, "responses", prepared) as live:
        run = responses.begin(live, asked, prepared, token)
        try:
            if prepared.stream:
                return await _stream(request, server, run)
            return await _whole(server, run)
        finally:
            responses.end(run)


async def _whole(server: Server, run: RunningResponse) -> web.Response:
    try:
        async with aclosing(answers(server, run.live, run.prepared)) as pieces:
            async for choice, deltas in pieces:
                run.assembly.choice = choice
                run.assembly.feed(deltas)
        run.assembly.end(int(time.time()))
    except Cancelled:
        run.assembly.cancel()
    await responses_of(server).keep(run)
    return json_reply(run.assembly.response)


async def _stream(request: web.Request, server: Server, run: RunningResponse) -> web.StreamResponse:
    assembly = run.assembly
    async with EventStream(request, server, run.live) as stream:
        try:
            async with aclosing(_patient(answers(server, run.live, run.prepared))) as pieces:
                async for piece in pieces:
                    if piece is None:
                        await _send(stream, assembly.start())
                        continue
                    assembly.choice, deltas = piece
                    await _send(stream, assembly.feed(deltas))
            last = assembly.end(int(time.time()))
        except Cancelled:
            last = assembly.cancel()
        except MlxrunError as error:
            if not stream.started:
                raise
            last = assembly.fail(error)
        await responses_of(server).keep(run)
        await _send(stream, last)
        await stream.send(DONE)
    return stream.response


async def _send(stream: EventStream, events: Sequence[Mapping[str, Any]]) -> None:
    for event in events:
        await stream.send(event, event["type"])


async def _patient(pieces: AsyncGenerator[Pieces, None]) -> AsyncGenerator[Pieces | None, None]:
    """The pieces; before them None, if the first one takes long."""
    async with aclosing(pieces):
        first = asyncio.ensure_future(anext(pieces, None))
        try:
            await asyncio.wait({first}, timeout=GRACE)
            if not first.done():
                yield None
            piece = await first
            if piece is not None:
                yield piece
        finally:
            await _over(first)
        async for piece in pieces:
            yield piece


async def _over(task: asyncio.Future[Any]) -> None:
    """Ends a task that nobody waits for any more."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # was seen, or does not matter


async def count(request: web.Request, server: Server) -> web.Response:
    """How many tokens the engine would read for a body, images included."""
    _, prepared = await _prepare(request, server, "count")
    return json_reply({"object": "response.input_tokens", "input_tokens": prepared.prompt_tokens})


# Those that are there.


async def retrieve(request: web.Request, server: Server) -> web.Response:
    """A response as it was sent; one that still runs as it began."""
    query = _query(request, ("stream", "include_obfuscation", "starting_after"))
    if query.get("stream", "false") != "false" or "starting_after" in query:
        raise unsupported("stream", "a response can be streamed while it is made, by its own request")
    response, _ = responses_of(server).find(request)
    return json_reply(response)


async def delete(request: web.Request, server: Server) -> web.Response:
    """Forgets a stored response. Those that went on from it stay as they are."""
    name = request.match_info["id"]
    responses = responses_of(server)
    if not responses.store.delete(key_name(request), name):
        if name in responses.running:
            responses.find(request)
            raise RequestError(f"the response {name} is still being made: cancel it first")
        raise missing(name)
    return json_reply({"id": name, "object": "response", "deleted": True})


async def cancel(request: web.Request, server: Server) -> web.Response:
    """Ends a response that is being made; it keeps what it has, and its own request ends with it."""
    responses = responses_of(server)
    response, _ = responses.find(request)
    run = responses.running.get(response["id"])
    if run is not None:
        server.live.cancel(run.live.id)
        response = await asyncio.shield(run.done)
    if response["status"] != "cancelled":
        raise RequestError(
            f"the response {response['id']} is {response['status']}: nothing is left to cancel"
        )
    return json_reply(response)


async def input_items(request: web.Request, server: Server) -> web.Response:
    """The items that a response was made from, those of the responses before it included; the newest first
    unless `order` says asc."""
    query = _query(request, ("limit", "order", "after"))
    _, items = responses_of(server).find(request)
    rows = in_order(items[::-1], query)
    return json_reply(page(rows, query, dict, usual=20, most=100))


def _query(request: web.Request, known: Sequence[str]) -> dict[str, str]:
    """The query; `include` may name what bodies may include, all of which is there anyway."""
    query = read_query(request, (*known, "include", "include[]"))
    for name in ("include", "include[]"):
        for value in request.query.getall(name, ()):
            if value not in INCLUDES:
                raise bad("include", f"{quote(value)} is not one of {', '.join(INCLUDES)}")
    return query


_COUNTED = (
    *("input", "instructions", "model", "parallel_tool_calls", "previous_response_id"),
    *("reasoning", "text", "tool_choice", "tools"),
)
_ONE = "/v1/responses/{id}"
SURFACE = Surface(
    "responses",
    (
        Endpoint("POST", "/v1/responses", create, "Answer an input, whole or as a stream", BODY.schema),
        Endpoint(
            "POST",
            "/v1/responses/input_tokens",
            count,
            "Count the tokens of an input",
            {"type": "object", "properties": {name: BODY.honoured[name] for name in _COUNTED}},
        ),
        Endpoint("GET", _ONE, retrieve, "A stored response", engine=False),
        Endpoint("DELETE", _ONE, delete, "Forget a stored response", engine=False),
        Endpoint("POST", f"{_ONE}/cancel", cancel, "End a response that is being made", engine=False),
        Endpoint("GET", f"{_ONE}/input_items", input_items, "What a response was made from", engine=False),
    ),
)
