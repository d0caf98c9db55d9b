"""Responses of /v1/responses: those being generated, and those that clients may retrieve or continue from,
which are stored in memory within limits of count and bytes.

The least recently used one is evicted first. Items that responses of one conversation share are stored and
counted once. A response belongs to the API key that created it: for others it does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from mlxrun.api.responses.request import ResponseLookup, ResponseRequest
from mlxrun.api.responses.response import build_response
from mlxrun.api.responses.stream import ResponseWriter
from mlxrun.config.settings import ServerSettings
from mlxrun.errors import NotFound
from mlxrun.server.access import key_name
from mlxrun.server.live_requests import LiveRequest
from mlxrun.text.field_errors import shorten

log = logging.getLogger(__name__)

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response and the items of its prompt; neither is ever changed."""

    owner: str
    response: dict[str, Any]
    context: tuple[Item, ...]
    base_bytes: int  # without the items
    item_bytes: tuple[int, ...]

    @classmethod
    def measure(cls, owner: str, response: dict[str, Any], context: Sequence[Item]) -> StoredResponse:
        """Measure a response; for a long conversation this takes long, so call it on a worker thread."""
        base_bytes = _count_bytes({**response, "output": None}) + 8 * len(context)
        item_bytes = tuple(_count_bytes(item) for item in (*context, *response["output"]))
        return cls(owner, response, tuple(context), base_bytes, item_bytes)

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that a response after this one begins with."""
        return (*self.context, *self.response["output"])

    def iterate_sizes(self) -> Iterator[tuple[Item, int]]:
        """Every item with its bytes."""
        return zip(self.items, self.item_bytes, strict=True)


class ResponseStore:
    """At most `max_responses` of together `max_bytes`. Bodies are read on worker threads, so any thread may
    call it; no method takes long."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # the least recently used one first
        self._references: Counter[int] = Counter()  # by id() of an item: how many responses have it
        self._index: dict[tuple[str, str], Item] = {}  # by owner and the item's own id: the newest such item

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, stored: StoredResponse) -> bool:
        """Store a response; False if it alone exceeds the limits."""
        name = stored.response["id"]
        own = {id(item): size for item, size in stored.iterate_sizes()}
        if stored.base_bytes + sum(own.values()) > self._max_bytes:  # or all others would be evicted first
            log.warning("response %s is too large for server.store_bytes and was not stored", name)
            return False
        with self._lock:
            self._stored[name] = stored
            self.bytes += stored.base_bytes
            for item, size in stored.iterate_sizes():
                self.bytes += 0 if self._references[id(item)] else size
                self._references[id(item)] += 1
                self._index[stored.owner, item["id"]] = item
            while self._stored and (len(self) > self._max_responses or self.bytes > self._max_bytes):
                self._remove(next(iter(self._stored)))
            return name in self._stored

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response of this owner, which becomes the most recently used one."""
        with self._lock:
            stored = self._stored.get(response_id)
            if stored is None or stored.owner != owner:
                return None
            self._stored.move_to_end(response_id)
            return stored

    def get_item(self, owner: str, item_id: str) -> Item | None:
        """An item of a response of this owner."""
        with self._lock:
            return self._index.get((owner, item_id))

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response; those that continued from it keep its items. False if there is none."""
        with self._lock:
            found = self.get(owner, response_id) is not None
            if found:
                self._remove(response_id)
            return found

    def _remove(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        self.bytes -= stored.base_bytes
        for item, size in stored.iterate_sizes():
            self._references[id(item)] -= 1
            if not self._references[id(item)]:
                self.bytes -= size
                del self._references[id(item)]
                if self._index.get((stored.owner, item["id"])) is item:
                    del self._index[stored.owner, item["id"]]


def _count_bytes(value: Any) -> int:
    """Memory of a JSON value, without its keys, which are shared."""
    total, stack = 0, [value]
    while stack:
        each = stack.pop()
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            stack.extend(each.values())
        elif isinstance(each, list):
            stack.extend(each)
    return total


@dataclass(eq=False)
class RunningResponse:
    """A response that is being generated. `done` gets its body at the end."""

    live: LiveRequest
    request: ResponseRequest
    writer: ResponseWriter
    done: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def context(self) -> tuple[Item, ...]:
        """The items of its prompt."""
        return (*self.request.history, *self.request.items)


class Responses:
    """The responses of one server: the running ones by id, and the stored ones."""

    def __init__(self, settings: ServerSettings) -> None:
        self.running: dict[str, RunningResponse] = {}
        self.store = ResponseStore(settings.store_responses, settings.store_bytes)
        self._stores_any = settings.store_responses > 0

    def make_lookup(self, owner: str) -> ResponseLookup:
        """What a body of this owner may refer to."""

        def get_history(name: str) -> Sequence[Item] | None:
            stored = self.store.get(owner, name)
            return None if stored is None else stored.items

        return ResponseLookup(get_history, lambda name: self.store.get_item(owner, name))

    @contextmanager
    def run(self, live: LiveRequest, request: ResponseRequest, token: str) -> Iterator[RunningResponse]:
        """List a response as running; after the block it is cancelled unless it has ended."""
        response = build_response(f"resp_{token}", int(time.time()), request, live.prepared)
        response["store"] = request.stored and self._stores_any
        run = RunningResponse(live, request, ResponseWriter(response, request, live.prepared))
        self.running[response["id"]] = run
        try:
            yield run
        finally:
            del self.running[response["id"]]
            if run.writer.response["status"] == "in_progress":
                run.writer.cancel()
            run.done.set_result(run.writer.response)

    async def save(self, run: RunningResponse) -> None:
        """Store a finished response, if it is to be stored, before its client gets its end."""
        response = run.writer.response
        if response["store"]:
            measure = StoredResponse.measure
            self.store.add(await asyncio.to_thread(measure, run.live.key_name, response, run.context))

    def find(self, request: web.Request) -> tuple[dict[str, Any], tuple[Item, ...]]:
        """The body and the prompt's items of the response in the URL. NotFound if its owner has none."""
        name = request.match_info["id"]
        run = self.running.get(name)
        if run is not None and run.live.key_name == key_name(request):
            return run.writer.response, run.context
        stored = self.store.get(key_name(request), name)
        if stored is None:
            raise make_not_found(name)
        return stored.response, stored.context


RESPONSES = web.AppKey("responses", Responses)


def make_not_found(name: str) -> NotFound:
    """The error for a response that does not exist."""
    return NotFound(
        f"the response {shorten(name)!r} does not exist: it was not stored, was deleted, or was evicted"
    )
