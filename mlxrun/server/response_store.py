"""Responses of /v1/responses: those being made, and those that clients may ask for again or go on from, which
are kept in memory and bounded by count and bytes.

The least recently used goes first. Items that responses of one conversation share are held and counted once.
A response belongs to the API key that asked for it: for others it does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mlxrun.api.responses.request import Memory, ReadResponse
from mlxrun.api.responses.response import new_response
from mlxrun.api.responses.stream import Assembly
from mlxrun.errors import NotFound
from mlxrun.server.auth import key_name
from mlxrun.text.field_errors import shorten

if TYPE_CHECKING:
    from aiohttp import web

    from mlxrun.api.prepared import PreparedRequest
    from mlxrun.server.live_requests import LiveRequest
    from mlxrun.server.state import Server

log = logging.getLogger(__name__)

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response and the items that its prompt was made of; nobody changes either."""

    owner: str
    response: dict[str, Any]
    context: tuple[Item, ...]
    shell: int  # bytes without the items

    @property
    def items(self) -> tuple[Item, ...]:
        """What a response after this one begins with."""
        return (*self.context, *self.response["output"])


class ResponseStore:
    """`most` responses of together `size` bytes. Any thread may call it, as bodies are read beside the event
    loop; nothing here takes long."""

    def __init__(self, most: int, size: int) -> None:
        self.bytes = 0
        self._most = most
        self._size = size
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()  # the next to go first
        self._held: dict[int, list[int]] = {}  # by id() of an item: how many entries hold it, and its bytes
        self._index: dict[tuple[str, str], Item] = {}  # by owner and the item's own id: the newest such item

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, response: dict[str, Any], context: Sequence[Item]) -> bool:
        """Keeps a response; False if it alone is more than there is room for."""
        return self.add(*measured(owner, response, context))

    def add(self, entry: StoredResponse, sizes: Sequence[int]) -> bool:
        """The same of what was measured before, which takes long for a long conversation."""
        name = entry.response["id"]
        own = {id(item): size for item, size in zip(entry.items, sizes, strict=True)}
        if entry.shell + sum(own.values()) > self._size:  # else all others would go before it
            log.warning("response %s is too large for server.store_bytes and was not stored", name)
            return False
        with self._lock:
            self._entries[name] = entry
            self.bytes += entry.shell
            for item, size in zip(entry.items, sizes, strict=True):
                self._hold(entry.owner, item, size)
            while self._entries and (len(self._entries) > self._most or self.bytes > self._size):
                self._drop(next(iter(self._entries)))
            return name in self._entries

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response of this owner, which becomes the last to go."""
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is None or entry.owner != owner:
                return None
            self._entries.move_to_end(response_id)
            return entry

    def item(self, owner: str, item_id: str) -> Item | None:
        """An item of a response of this owner."""
        with self._lock:
            return self._index.get((owner, item_id))

    def delete(self, owner: str, response_id: str) -> bool:
        """Forgets a response; those that went on from it keep its items. False if there is none."""
        with self._lock:
            found = self.get(owner, response_id) is not None
            if found:
                self._drop(response_id)
            return found

    def _hold(self, owner: str, item: Item, size: int) -> None:
        held = self._held.get(id(item))
        if held is None:
            held = self._held[id(item)] = [0, size]
            self.bytes += held[1]
        held[0] += 1
        self._index[owner, item["id"]] = item

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        self.bytes -= entry.shell
        for item in entry.items:
            held = self._held[id(item)]
            held[0] -= 1
            if held[0] == 0:
                self.bytes -= held[1]
                del self._held[id(item)]
                if self._index.get((entry.owner, item["id"])) is item:
                    del self._index[entry.owner, item["id"]]


def measured(
    owner: str, response: dict[str, Any], context: Sequence[Item]
) -> tuple[StoredResponse, list[int]]:
    """A response as it is stored, and the bytes of each of its items."""
    shell = _bytes({**response, "output": None}) + 8 * len(context)
    entry = StoredResponse(owner, response, tuple(context), shell)
    return entry, [_bytes(item) for item in entry.items]


def _bytes(value: Any) -> int:
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
    """A response that is being made. `done` gets its body at the end."""

    owner: str
    live: LiveRequest
    asked: ReadResponse
    prepared: PreparedRequest
    assembly: Assembly
    done: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def context(self) -> tuple[Item, ...]:
        return (*self.asked.history, *self.asked.items)


class Responses:
    """The responses of one server: those that run, by id, and those that are stored."""

    def __init__(self, server: Server) -> None:
        settings = server.config.server
        self.running: dict[str, RunningResponse] = {}
        self.store = ResponseStore(settings.store_responses, settings.store_bytes)
        self._keeps = settings.store_responses > 0

    def memory(self, owner: str) -> Memory:
        """What a body of this owner may refer to."""

        def history(name: str) -> Sequence[Item] | None:
            entry = self.store.get(owner, name)
            return None if entry is None else entry.items

        return Memory(history, lambda name: self.store.item(owner, name))

    def begin(
        self, live: LiveRequest, asked: ReadResponse, prepared: PreparedRequest, token: str
    ) -> RunningResponse:
        """Enter a response."""
        response = new_response(f"resp_{token}", int(time.time()), asked, prepared)
        response["store"] = asked.stored and self._keeps
        run = RunningResponse(live.key_name, live, asked, prepared, Assembly(response, asked, prepared))
        self.running[response["id"]] = run
        return run

    async def keep(self, run: RunningResponse) -> None:
        """Store what is ended, before anybody is told of it."""
        if run.assembly.response["store"]:
            self.store.add(*await asyncio.to_thread(measured, run.owner, run.assembly.response, run.context))

    def end(self, run: RunningResponse) -> None:
        """Nothing more comes, be it because the client went away."""
        del self.running[run.assembly.response["id"]]
        if run.assembly.response["status"] == "in_progress":
            run.assembly.cancel()
        run.done.set_result(run.assembly.response)

    def find(self, request: web.Request) -> tuple[dict[str, Any], tuple[Item, ...]]:
        """The body and the input of the response that is asked for. NotFound if this owner has none."""
        name = request.match_info["id"]
        run = self.running.get(name)
        if run is not None and run.owner == key_name(request):
            return run.assembly.response, run.context
        entry = self.store.get(key_name(request), name)
        if entry is None:
            raise missing(name)
        return entry.response, entry.context


# Weak: a server that is gone leaves nothing behind.
_OF: WeakKeyDictionary[Server, Responses] = WeakKeyDictionary()


def responses_of(server: Server) -> Responses:
    """The responses of a server."""
    found = _OF.get(server)
    if found is None:
        found = _OF[server] = Responses(server)
    return found


def missing(name: str) -> NotFound:
    """The error for a response that is not there."""
    return NotFound(f"there is no response {shorten(name)!r}: not stored, deleted, or made room for others")
