"""The responses of /v1/responses that are being generated, and access to the stored ones.

A response runs while its request is open, or in the background. In the background it has a task of its own,
and records its events; any number of streams may follow them. Its conversation is locked meanwhile. From its
begin to its end the file of stored responses has it as failed, which it is if the process ends meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from mlxrun.api.responses.request import ResponseLookup, ResponseRequest
from mlxrun.api.responses.stream import ResponseWriter, build_response
from mlxrun.config.settings import ServerSettings
from mlxrun.core.errors import Cancelled, MlxrunError, NotFound, RequestError
from mlxrun.core.field_errors import shorten
from mlxrun.core.workers import finishes_before
from mlxrun.server.generation import ChoiceDeltas, stream_deltas
from mlxrun.server.http.json_bodies import encode_json
from mlxrun.server.live_requests import LiveRequest
from mlxrun.server.responses.response_file import ResponseFile
from mlxrun.server.responses.response_store import Event, Item, ResponseStore, StoredObject

Events = Sequence[Mapping[str, Any]]
_UNFINISHED = ("queued", "in_progress")
_DAY, _TIDY_SECONDS = 86_400.0, 600.0


@dataclass(eq=False)
class RunningResponse:
    """A response that is being generated. `done`: gets the body at the end."""

    live: LiveRequest
    request: ResponseRequest
    writer: ResponseWriter
    done: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    visible: dict[str, Any] = field(default_factory=dict)  # its body as clients see it, who poll for it
    events: list[Event] = field(default_factory=list)  # of a response in the background: all so far
    _recorded: asyncio.Event = field(default_factory=asyncio.Event)  # another one with each record

    @property
    def body(self) -> dict[str, Any]:
        return self.writer.response

    @property
    def context(self) -> tuple[Item, ...]:
        """The items of the conversation up to its output."""
        return self.request.context

    def __post_init__(self) -> None:
        self.visible = self.body

    def record(self, events: Sequence[Event] = ()) -> None:
        """Show the body so far to clients that poll, and these events to clients that follow."""
        self.visible = self.body
        self.events += events
        recorded, self._recorded = self._recorded, asyncio.Event()
        recorded.set()

    async def follow(self, start: int) -> AsyncIterator[Event]:
        """Yield the recorded events from number `start` on, as they come."""
        while True:
            for event in self.events[start:]:
                yield event
                start += 1
            if start >= len(self.events):
                if self.done.done():
                    return
                await self._recorded.wait()


class Responses:
    """The responses of one server: `running` by id; `store` has the ended ones, and the conversations.
    `path`: the file that they are stored in; None: they end with the process."""

    def __init__(self, settings: ServerSettings, path: Path | None = None) -> None:
        self.running: dict[str, RunningResponse] = {}
        self.token_prefix = ""  # with which the ids of one worker of several begin, hexadecimal
        self.store = ResponseStore(
            settings.store_responses,
            settings.store_bytes,
            lifetime=None if settings.store_days is None else (settings.store_days * _DAY or None),
            file=None if path is None else ResponseFile(path),
        )
        self.stores_any = settings.store_responses > 0
        self.tasks: set[asyncio.Task[None]] = set()  # of responses in the background
        self._locked: set[tuple[str, str]] = set()  # owners and ids of conversations

    def make_token(self) -> str:
        """Make the random part of a new id: 32 hexadecimal digits."""
        return (self.token_prefix + secrets.token_hex(16))[:32]

    def make_lookup(self, owner: str) -> ResponseLookup:
        """Make the lookup of the stored things that a body of this owner may name. `history` raises
        RequestError for a response that is still running."""

        def get_items(name: str, kind: str) -> Sequence[Item] | None:
            if self._get_running(owner, name) is not None:
                text = f"previous_response_id: the response {name} is still running"
                raise RequestError(text, param="previous_response_id")
            stored = self._get_stored(owner, name, kind)
            return None if stored is None else stored.items

        return ResponseLookup(
            history=lambda name: get_items(name, "response"),
            item=lambda name: self.store.get_item(owner, name),
            conversation=lambda name: get_items(name, "conversation"),
        )

    @contextmanager
    def run(self, live: LiveRequest, request: ResponseRequest, token: str) -> Iterator[RunningResponse]:
        """List a response as running within the block. Afterwards it is cancelled unless it has ended."""
        response = build_response(f"resp_{token}", int(time.time()), request, live.prepared)
        response["store"] = request.stored and self.stores_any
        run = RunningResponse(live, request, ResponseWriter(response, request, live.prepared))
        self.running[response["id"]] = run
        try:
            yield run
        finally:
            if run.body["status"] in _UNFINISHED:
                run.record(encode_events(run.writer.cancel()))
            del self.running[response["id"]]
            run.done.set_result(run.body)
            run.record()

    @contextmanager
    def lock_conversation(self, owner: str, name: str | None) -> Iterator[None]:
        """Lock a conversation within the block; None locks nothing. RequestError if it is locked already."""
        if name is None:
            yield
            return
        held = (owner, name)
        if held in self._locked:
            text = "conversation: another request is changing it; try again in a few seconds"
            raise RequestError(text, param="conversation", code="conversation_locked")
        self._locked.add(held)
        try:
            yield
        finally:
            self._locked.discard(held)

    async def keep_failed(self, run: RunningResponse) -> None:
        """Store a response in the background as it is if the process ends before the response has ended."""
        if self.store.is_durable:
            text = "the server ended while the response was running"
            await self._store_failure(run.live.key_name, run.body, text, run.context)
            await self.store.flush()

    async def save(self, run: RunningResponse, last: Sequence[Event] = ()) -> None:
        """Store an ended response if its `store` is true, and add its items to its conversation. `last`:
        events that are not recorded yet."""
        response, owner = run.body, run.live.key_name
        items = (*run.context, *response["output"])
        conversation = None
        if run.request.conversation is not None and response["status"] in ("completed", "incomplete"):
            found = self.store.get(owner, run.request.conversation)
            if found is not None:  # else it was evicted meanwhile
                conversation = await asyncio.to_thread(StoredObject.measure, owner, found.body, items)
        if response["store"]:
            events = (*run.events, *last)
            stored = await asyncio.to_thread(StoredObject.measure, owner, response, items, events)
            if not self.store.add(stored) and run.request.background:
                text = "the response is larger than server.store_bytes and was not stored"
                await self._store_failure(owner, {**response, "instructions": None}, text)
        if conversation is not None:  # at once: a kill leaves both or none
            self.store.add(conversation)
        await self.store.flush()

    async def _store_failure(
        self, owner: str, response: dict[str, Any], text: str, items: Sequence[Item] = ()
    ) -> None:
        """Tell a client that polls for a response why it has none."""
        error = {"code": "server_error", "message": text}
        failed = {**response, "status": "failed", "output": [], "error": error}
        self.store.add(await asyncio.to_thread(StoredObject.measure, owner, failed, items))

    async def store_conversation(self, owner: str, body: dict[str, Any], items: Sequence[Item]) -> bool:
        """Store a conversation in place of its old state; False if it is too large: then neither is
        stored."""
        is_stored = self.store.add(await asyncio.to_thread(StoredObject.measure, owner, body, items))
        await self.store.flush()
        return is_stored

    async def delete(self, owner: str, name: str) -> None:
        """Delete a stored response or a conversation."""
        self.store.delete(owner, name)
        await self.store.flush()

    async def tidy_store(self) -> None:
        """Remove what has expired, again and again."""
        while True:
            await asyncio.sleep(_TIDY_SECONDS)
            await self.store.tidy()

    def find(self, owner: str, name: str) -> RunningResponse | StoredObject:
        """Return the response of this owner and id, running or stored. NotFound if there is none."""
        run = self._get_running(owner, name)
        return self.find_stored(owner, name, "response") if run is None else run

    def find_stored(self, owner: str, name: str, kind: str) -> StoredObject:
        """Return the stored object of this owner and id. NotFound if there is none of this kind."""
        stored = self._get_stored(owner, name, kind)
        if stored is None:
            text = (
                f"the {kind} {shorten(name)!r} does not exist: it was not stored, was deleted, or was evicted"
            )
            raise NotFound(text)
        return stored

    def _get_running(self, owner: str, name: str) -> RunningResponse | None:
        run = self.running.get(name)
        return run if run is not None and run.live.key_name == owner else None

    def _get_stored(self, owner: str, name: str, kind: str) -> StoredObject | None:
        stored = self.store.get(owner, name)
        return stored if stored is not None and stored.body["object"] == kind else None


RESPONSES = web.AppKey("responses", Responses)


async def keep_store_open(app: web.Application) -> AsyncIterator[None]:
    """Open the store, and close it in the end. A context of aiohttp's cleanup_ctx. ConfigError if its file is
    of a newer mlxrun."""
    responses = app[RESPONSES]
    await responses.store.open()
    tidying = asyncio.create_task(responses.tidy_store())
    yield
    tidying.cancel()
    await asyncio.gather(tidying, return_exceptions=True)
    await responses.store.close()


def encode_events(events: Events) -> list[Event]:
    """Encode events as they are stored and sent."""
    return [(each["type"], encode_json(each)) for each in events]


async def generate(
    run: RunningResponse,
    send: Callable[[Events], Awaitable[None]],
    begun: Awaitable[Any],
    has_begun: Callable[[], bool],
) -> Events:
    """Generate an answer. `send` gets the events as they come. The last events are returned instead.

    The first events come with the first delta, or once `begun` is done. An error is raised unless
    `has_begun()`; then it is the last event.
    """
    writer = run.writer
    try:
        async with aclosing(_announce(stream_deltas(run.live), begun)) as stream:
            async for item in stream:
                if item is None:
                    await send(writer.start())
                    continue
                writer.choice, deltas = item
                await send(writer.feed(deltas))
        return writer.end(int(time.time()))
    except Cancelled:
        return writer.cancel()
    except MlxrunError as error:
        if not has_begun():
            raise
        return writer.fail(error)


async def _announce(
    stream: AsyncGenerator[ChoiceDeltas, None], begun: Awaitable[Any]
) -> AsyncGenerator[ChoiceDeltas | None, None]:
    """The items of `stream`, after None if `begun` is done before the first one."""
    async with aclosing(stream):
        first = asyncio.ensure_future(anext(stream, None))
        try:
            if not await finishes_before(first, begun):
                yield None
            item = await first
            if item is not None:
                yield item
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        async for item in stream:
            yield item
