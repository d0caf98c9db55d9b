"""OpenAI's /v1/responses; api/responses reads the bodies and builds the events.

A response is generated while its request is open, or in the background. In the background its client polls it
or follows its events, and its task goes on when the client disconnects. It is queued like every other
request, with the same priority and time limit. The server's shutdown waits for it as for others; after
server.drain_timeout it fails. If the process ends without that, the response is stored as failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.fields import BODY
from mlxrun.api.responses.request import ResponseRequest, find_conversation_id, prepare_response
from mlxrun.api.responses.stream import build_error
from mlxrun.core.errors import InternalError, RequestError, TimedOut
from mlxrun.core.field_errors import quote, reject, reject_unsupported
from mlxrun.core.visible_text import FIELDS
from mlxrun.server.batches.queue_access import read_body_with_files
from mlxrun.server.endpoints.conversations import ENDPOINTS as CONVERSATIONS
from mlxrun.server.endpoints.conversations import read_include_query
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.http.access import ACTIVE_IDS, CONFIG, key_name, request_id
from mlxrun.server.http.json_bodies import json_response
from mlxrun.server.http.pagination import make_page, parse_number, sort_by_order
from mlxrun.server.http.sse import DONE, EventStream, open_stream, wants_stream
from mlxrun.server.http.surface import Endpoint, Surface
from mlxrun.server.live_requests import LIVE_REQUESTS, count_from_arrival
from mlxrun.server.responses.response_runs import RESPONSES, Events, RunningResponse, encode_events, generate
from mlxrun.server.responses.response_store import Event, StoredObject
from mlxrun.server.telemetry import record_background

log = logging.getLogger(__name__)

START_SECONDS = 0.05  # an error of the engine within this time is that of the request which creates it
SURFACE_NAME = "responses"


@dataclass(eq=False)
class BackgroundResponse:
    """A response that will run in the background. `held`: contexts that are left when it has ended."""

    app: web.Application
    owner: str
    token: str
    request: ResponseRequest
    prepared: PreparedRequest
    held: ExitStack
    headers: Mapping[str, str]
    parent: str  # the id of the HTTP request
    _begun: asyncio.Future[RunningResponse] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _answered: bool = False  # its client knows it: from now on an error is part of the response

    async def start(self) -> RunningResponse:
        """Start the task. Raises the engine's errors of the first START_SECONDS, such as Overloaded."""
        tasks = self.app[RESPONSES].tasks
        task = asyncio.create_task(self._run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            both: set[asyncio.Future[Any]] = {task, self._begun}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # wait until the engine has begun with it, or some time has passed
                started = asyncio.ensure_future(self._begun.result().live.started.wait())
                both = {task, started}
                try:
                    await asyncio.wait(both, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    started.cancel()
            if task.done():
                task.result()
        finally:
            self._answered = True
        return self._begun.result()

    async def _run(self) -> None:
        app, live_requests = self.app, self.app[LIVE_REQUESTS]
        rid, active = f"resp_{self.token}", self.app[ACTIVE_IDS]
        active.add(rid)  # which clients know, and may send as the id of a request
        self.held.callback(active.discard, rid)
        with (
            self.held,
            app[ENGINE].active.hold(),
            live_requests.open_as(rid, self.owner, SURFACE_NAME, self.prepared, self.parent) as live,
            app[RESPONSES].run(live, self.request, self.token) as run,
        ):
            run.record(encode_events(run.writer.queue()))
            await app[RESPONSES].keep_failed(run)
            self._begun.set_result(run)
            last = encode_events(await self._generate(run))
            await app[RESPONSES].save(run, last)
            run.record(last)
            name, status, work = run.body["id"], run.body["status"], live.describe_work()
            fields = {"request_id": name, "key": self.owner or None, "response_status": status, **work}
            log.info("%s background response %s %.3fs", name, status, live.age, extra={FIELDS: fields})
            record_background(app, live, self.headers)

    async def _generate(self, run: RunningResponse) -> Events:
        async def send(events: Events) -> None:
            run.record(encode_events(events))

        try:
            return await generate(run, send, run.live.started.wait(), lambda: self._answered)
        except Exception as error:  # of the parser, for example: nobody else would get to know it
            if not self._answered:
                await self.app[RESPONSES].delete(self.owner, run.body["id"])
                raise
            log.exception("the response %s failed", run.body["id"])
            return run.writer.fail(InternalError("the response failed", error))


async def cancel_background_responses(app: web.Application) -> None:
    """End all responses in the background. A handler of aiohttp's on_shutdown."""
    tasks = tuple(app[RESPONSES].tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_MOST_EVENTS = 999_999_999  # of one stream, in `starting_after`
FIRST_EVENT_SECONDS = 0.5  # an error of the engine within this time has its own status, as no event was sent


async def _prepare(request: web.Request, body: Any, token: str) -> tuple[ResponseRequest, PreparedRequest]:
    lookup = request.app[RESPONSES].make_lookup(key_name(request))
    return await prepare_response(body, request.app[ENGINE].context, lookup, token, stream=True)


@count_from_arrival
async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer a body with one object, with a stream of events, or in the background."""
    body = await read_body_with_files(request)
    if not wants_stream(body):
        return await _answer(request, body)
    async with open_stream(request) as stream:
        await _answer(request, body, stream)
    return stream.response


def _describe_error(error: BaseException, request_id: str) -> tuple[str, dict[str, Any]]:
    """The event of an error before those of a response."""
    param = error.param if isinstance(error, RequestError) else None
    return "error", {"type": "error", "sequence_number": 0, "param": param, **build_error(error)}


async def _answer(request: web.Request, body: Any, stream: EventStream | None = None) -> web.StreamResponse:
    """Answer a body, by the events of a stream if there is one."""
    responses, owner = request.app[RESPONSES], key_name(request)
    token = responses.make_token()
    with ExitStack() as stack:
        stack.enter_context(responses.lock_conversation(owner, find_conversation_id(body)))
        wanted, prepared = await _prepare(request, body, token)
        if wanted.background:
            if not responses.stores_any:
                reject_unsupported("background", "the server stores no responses (server.store_responses)")
            held = stack.pop_all()
            rid, headers = request_id(request), request.headers
            new = BackgroundResponse(request.app, owner, token, wanted, prepared, held, headers, rid)
            run = await new.start()
            return json_response(run.visible) if stream is None else await _follow(request, stream, run, 0)
        live = stack.enter_context(request.app[LIVE_REQUESTS].open(request, SURFACE_NAME, prepared))
        run = stack.enter_context(responses.run(live, wanted, token))
        return await (_complete(request, run) if stream is None else _stream(request, stream, run))


async def _complete(request: web.Request, run: RunningResponse) -> web.Response:
    async def skip(events: Events) -> None:
        pass

    await generate(run, skip, asyncio.sleep(FIRST_EVENT_SECONDS), lambda: False)
    await request.app[RESPONSES].save(run)
    return json_response(run.body)


async def _stream(request: web.Request, stream: EventStream, run: RunningResponse) -> web.StreamResponse:
    stream.live = run.live

    async def send(events: Events) -> None:
        for event in events:
            await stream.send(event, event["type"])

    last = await generate(run, send, asyncio.sleep(FIRST_EVENT_SECONDS), lambda: stream.started)
    await request.app[RESPONSES].save(run)
    await send(last)
    await stream.send(DONE)  # OpenAI sends none; its clients ignore it, and others wait for it
    return stream.response


async def _follow(
    request: web.Request, stream: EventStream, found: RunningResponse | StoredObject, start: int
) -> web.StreamResponse:
    """Send the events of a response in the background from number `start` on, as they come."""
    limit = request.app[CONFIG].server.request_timeout
    if isinstance(found, RunningResponse):
        events, stream.live = found.follow(start), found.live
    else:
        events = _iterate(_list_events(found, start))
    try:
        async with asyncio.timeout(limit):
            async for name, text in events:
                await stream.send(text, name)
            await stream.send(DONE)
    except TimeoutError as error:
        raise TimedOut(f"the stream took longer than {limit:g} s (server.request_timeout)") from error
    return stream.response


def _list_events(found: StoredObject, start: int) -> Sequence[Event]:
    """The events from number `start` on. Those of a response that the server's end has cut off are lost; it
    has a last one."""
    if found.events:
        return found.events[start:]
    last = {"type": "response.failed", "sequence_number": start, "response": found.body}
    return encode_events([last])


async def _iterate(events: Sequence[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


async def count_input_tokens(request: web.Request) -> web.Response:
    """Count the tokens that the engine would get for a body, with those of images."""
    _, prepared = await _prepare(request, await read_body_with_files(request), "count")
    return json_response({"object": "response.input_tokens", "input_tokens": prepared.prompt_tokens})


def _find(request: web.Request) -> RunningResponse | StoredObject:
    return request.app[RESPONSES].find(key_name(request), request.match_info["id"])


async def get_response(request: web.Request) -> web.StreamResponse:
    """Return a response, finished or so far. With `stream`, send the events of one in the background."""
    query = read_include_query(request, ("stream", "include_obfuscation", "starting_after"))
    start = _read_start(query)
    found = _find(request)
    if start is None:
        return json_response(found.visible if isinstance(found, RunningResponse) else found.body)
    if not found.events and not found.body["background"]:
        reject_unsupported("stream", "only a response in the background can be streamed again")
    async with open_stream(request) as stream:
        if request.method == "HEAD":
            await stream.send_headers()
        else:
            await _follow(request, stream, found, start)
    return stream.response


def _read_start(query: dict[str, str]) -> int | None:
    """The number of the first event to send; None if no stream is wanted."""
    stream, after = query.get("stream", "false").lower(), query.get("starting_after")
    if stream not in ("true", "false"):
        reject("stream", f"{quote(stream)} is neither 'true' nor 'false'")
    if after is None:
        return 0 if stream == "true" else None
    if stream == "false":
        reject("starting_after", "needs stream=true")
    return parse_number(after, "starting_after", 0, _MOST_EVENTS, "the number of an event") + 1


async def delete_response(request: web.Request) -> web.Response:
    """Delete a stored response. Responses that continued it stay as they are."""
    responses, owner, name = request.app[RESPONSES], key_name(request), request.match_info["id"]
    if isinstance(responses.find(owner, name), RunningResponse):
        raise RequestError(f"the response {name} is still running: cancel it first")
    await responses.delete(owner, name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.Response:
    """End a running response. It keeps the output so far, and its own request ends with it."""
    found = _find(request)
    response = found.body
    if isinstance(found, RunningResponse):
        found.live.cancel()
        response = await asyncio.shield(found.done)
    if response["status"] != "cancelled":
        raise RequestError(f"the response {response['id']} is {response['status']} and cannot be cancelled")
    return json_response(response)


async def list_input_items(request: web.Request) -> web.Response:
    """List the input items of a response, with those of the responses before it. They are newest first unless
    `order` is asc. An id that two items have is listed once: clients that follow pages by ids would not
    end."""
    query = read_include_query(request, ("limit", "order", "after"))
    unique = {item["id"]: item for item in _find(request).context}
    items = sort_by_order([*unique.values()][::-1], query)
    return json_response(make_page(items, query, dict))


_COUNTED_FIELDS = (
    *("input", "instructions", "model", "parallel_tool_calls", "previous_response_id", "conversation"),
    *("reasoning", "text", "tool_choice", "tools", "truncation"),
)
_COUNT_BODY = {"type": "object", "properties": {name: BODY.honoured[name] for name in _COUNTED_FIELDS}}
_ONE = "/v1/responses/{id}"
SURFACE = Surface(
    SURFACE_NAME,
    (
        Endpoint(
            "POST",
            "/v1/responses",
            create_response,
            "Answer an input, at once, as a stream or in the background",
            BODY.schema,
        ),
        Endpoint(
            "POST",
            "/v1/responses/input_tokens",
            count_input_tokens,
            "Count the tokens of an input",
            _COUNT_BODY,
        ),
        Endpoint("GET", _ONE, get_response, "Retrieve a response, or follow its events", engine=False),
        Endpoint("DELETE", _ONE, delete_response, "Delete a stored response", engine=False),
        Endpoint("POST", f"{_ONE}/cancel", cancel_response, "End a running response", engine=False),
        Endpoint("GET", f"{_ONE}/input_items", list_input_items, "List a response's input", engine=False),
        *CONVERSATIONS,
    ),
    lacking={"/v1/responses/compact": "conversations are not compacted; truncation: auto leaves out items"},
    error_event=_describe_error,
)
