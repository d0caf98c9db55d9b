"""OpenAI's /v1/responses: which responses run, which are stored, and who may see them. api/responses turns
bodies into chat bodies, and answers into events.

A response is generated while its request is open. So there is no background mode, but it can be cancelled.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from mlxrun.api.openai.request import prepare_request
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.fields import BODY, INCLUDES
from mlxrun.api.responses.request import ResponseRequest, read_response_request
from mlxrun.errors import Cancelled, MlxrunError, RequestError
from mlxrun.server.access import key_name
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.generation import ChoiceDeltas, stream_deltas
from mlxrun.server.json_bodies import json_response, read_json
from mlxrun.server.live_requests import LIVE_REQUESTS
from mlxrun.server.pagination import make_page, read_query, sort_by_order
from mlxrun.server.response_store import RESPONSES, RunningResponse, make_not_found
from mlxrun.server.sse import EventStream, open_stream
from mlxrun.server.surface import Endpoint, Surface
from mlxrun.text.field_errors import quote, reject, reject_unsupported

DONE = "[DONE]"  # OpenAI sends none; its clients ignore it, and others wait for it
FIRST_EVENT_SECONDS = 0.5  # an error of the engine within this time has its own status, as no event was sent
_CHAT = "/v1/chat/completions"


async def _prepare(request: web.Request, token: str) -> tuple[ResponseRequest, PreparedRequest]:
    engine, body = request.app[ENGINE], await read_json(request)
    lookup = request.app[RESPONSES].make_lookup(key_name(request))
    wanted = await asyncio.to_thread(read_response_request, body, engine.model, lookup, token)
    try:
        return wanted, await prepare_request(_CHAT, wanted.chat, engine.context, stream=True)
    except RequestError as error:
        wanted.rename_error(error)
        raise


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer a body: with one object, or with a stream of events."""
    token = secrets.token_hex(16)
    wanted, prepared = await _prepare(request, token)
    with (
        request.app[LIVE_REQUESTS].open(request, "responses", prepared) as live,
        request.app[RESPONSES].run(live, wanted, token) as run,
    ):
        return await (_stream(request, run) if prepared.stream else _complete(request, run))


async def _complete(request: web.Request, run: RunningResponse) -> web.Response:
    try:
        async with aclosing(stream_deltas(run.live)) as stream:
            async for choice, deltas in stream:
                run.writer.choice = choice
                run.writer.feed(deltas)
        run.writer.end(int(time.time()))
    except Cancelled:
        run.writer.cancel()
    await request.app[RESPONSES].save(run)
    return json_response(run.writer.response)


async def _stream(request: web.Request, run: RunningResponse) -> web.StreamResponse:
    writer = run.writer
    async with open_stream(request, run.live) as events:
        try:
            async with aclosing(_announce_delay(stream_deltas(run.live))) as stream:
                async for item in stream:
                    if item is None:
                        await _send(events, writer.start())
                        continue
                    writer.choice, deltas = item
                    await _send(events, writer.feed(deltas))
            last = writer.end(int(time.time()))
        except Cancelled:
            last = writer.cancel()
        except MlxrunError as error:
            if not events.started:
                raise
            last = writer.fail(error)
        await request.app[RESPONSES].save(run)
        await _send(events, last)
        await events.send(DONE)
    return events.response


async def _send(stream: EventStream, events: Sequence[Mapping[str, Any]]) -> None:
    for event in events:
        await stream.send(event, event["type"])


async def _announce_delay(
    stream: AsyncGenerator[ChoiceDeltas, None],
) -> AsyncGenerator[ChoiceDeltas | None, None]:
    """The items of `stream`, after None if the first one takes longer than FIRST_EVENT_SECONDS."""
    async with aclosing(stream):
        first = asyncio.ensure_future(anext(stream, None))
        try:
            await asyncio.wait({first}, timeout=FIRST_EVENT_SECONDS)
            if not first.done():
                yield None
            item = await first
            if item is not None:
                yield item
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        async for item in stream:
            yield item


async def count_input_tokens(request: web.Request) -> web.Response:
    """Count the tokens that the engine would get for a body, images included."""
    _, prepared = await _prepare(request, "count")
    return json_response({"object": "response.input_tokens", "input_tokens": prepared.prompt_tokens})


async def get_response(request: web.Request) -> web.Response:
    """Retrieve a response as it was sent, or as it began if it is still running."""
    query = _read_query(request, ("stream", "include_obfuscation", "starting_after"))
    if query.get("stream", "false") != "false" or "starting_after" in query:
        reject_unsupported("stream", "a response can only be streamed by the request that creates it")
    response, _ = request.app[RESPONSES].find(request)
    return json_response(response)


async def delete_response(request: web.Request) -> web.Response:
    """Delete a stored response. Those that continued from it stay as they are."""
    name = request.match_info["id"]
    responses = request.app[RESPONSES]
    if not responses.store.delete(key_name(request), name):
        if name in responses.running:
            responses.find(request)
            raise RequestError(f"the response {name} is still running: cancel it first")
        raise make_not_found(name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.Response:
    """End a running response; it keeps what was generated, and its own request ends with it."""
    responses = request.app[RESPONSES]
    response, _ = responses.find(request)
    run = responses.running.get(response["id"])
    if run is not None:
        run.live.cancel()
        response = await asyncio.shield(run.done)
    if response["status"] != "cancelled":
        raise RequestError(f"the response {response['id']} is {response['status']} and cannot be cancelled")
    return json_response(response)


async def list_input_items(request: web.Request) -> web.Response:
    """List the items that a response was generated from, with those of the responses before it; newest first
    unless `order` is asc."""
    query = _read_query(request, ("limit", "order", "after"))
    _, items = request.app[RESPONSES].find(request)
    return json_response(make_page(sort_by_order(items[::-1], query), query, dict, default=20, most=100))


def _read_query(request: web.Request, known: Sequence[str]) -> dict[str, str]:
    """The query; its `include` may name what bodies may include, all of which is always returned."""
    query = read_query(request, (*known, "include", "include[]"))
    for name in ("include", "include[]"):
        for value in request.query.getall(name, ()):
            if value not in INCLUDES:
                reject("include", f"{quote(value)} is not one of {', '.join(INCLUDES)}")
    return query


_COUNTED_FIELDS = (
    *("input", "instructions", "model", "parallel_tool_calls", "previous_response_id"),
    *("reasoning", "text", "tool_choice", "tools"),
)
_COUNT_BODY = {"type": "object", "properties": {name: BODY.honoured[name] for name in _COUNTED_FIELDS}}
_ONE = "/v1/responses/{id}"
SURFACE = Surface(
    "responses",
    (
        Endpoint(
            "POST", "/v1/responses", create_response, "Answer an input, at once or as a stream", BODY.schema
        ),
        Endpoint(
            "POST",
            "/v1/responses/input_tokens",
            count_input_tokens,
            "Count the tokens of an input",
            _COUNT_BODY,
        ),
        Endpoint("GET", _ONE, get_response, "Retrieve a stored response", engine=False),
        Endpoint("DELETE", _ONE, delete_response, "Delete a stored response", engine=False),
        Endpoint("POST", f"{_ONE}/cancel", cancel_response, "End a running response", engine=False),
        Endpoint("GET", f"{_ONE}/input_items", list_input_items, "List a response's input", engine=False),
    ),
)
