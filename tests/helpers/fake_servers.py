"""Workers of a server without Ray: each serves real HTTP before a scripted engine, or pretends to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
from aiohttp import web

from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.cluster.messages import WorkerDied, WorkerFacts, WorkerRefused
from mlxrun.cluster.servers.server_actor import make_worker_app
from mlxrun.cluster.servers.server_pool import ServerPool, ServerSlot
from mlxrun.cluster.servers.worker_relay import make_front
from mlxrun.config.settings import ServerSettings
from mlxrun.engine.client import EngineClient
from mlxrun.server.engine_state import ENGINE, LoadedEngine
from mlxrun.server.http.surface import Handler
from mlxrun.server.lifecycle import drain, listen
from tests.helpers.fake_workers import FACTS
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import FakeEngine, Script, Serving, server_config
from tests.helpers.tokenizers import FakeModelInfo

SECRET = "s3cret"


@dataclass
class ServerFleet:
    """All workers of a test. `script`: of each worker by number; `refused`, `deadly`: numbers of those that
    may not be used, or die when they start; `http`: whether they really serve."""

    script: Callable[[int], Script | None] = lambda number: None
    http: bool = True
    refused: set[int] = field(default_factory=set)
    deadly: set[int] = field(default_factory=set)
    workers: list[FakeServer] = field(default_factory=list)
    drained: list[int] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)  # workers start once it is set

    def make_pool(self, count: int) -> ServerPool:
        self.held.set()
        return ServerPool([lambda number=number: self._make(number) for number in range(count)], backoff=0.0)  # type: ignore[misc]

    def _make(self, number: int) -> FakeServer:
        self.workers.append(FakeServer(self, number))
        return self.workers[-1]


class FakeServer:
    """One worker. `transports`: the connections of its requests."""

    def __init__(self, fleet: ServerFleet, number: int) -> None:
        self.fleet = fleet
        self.number = number
        self.engine = FakeEngine(script=fleet.script(number))
        self.transports: set[asyncio.BaseTransport] = set()
        self.closed = False
        self.app: web.Application | None = None
        self._died = asyncio.Event()
        self._stack = AsyncExitStack()

    async def start(self) -> tuple[WorkerFacts, str]:
        await self.fleet.held.wait()
        if self.number in self.fleet.refused:
            raise WorkerRefused("another device")
        if self.number in self.fleet.deadly:
            raise WorkerDied("out of memory")
        return FACTS, await self._serve() if self.fleet.http else f"http://worker-{self.number}"

    async def _serve(self) -> str:
        config = server_config()
        self.app = make_worker_app(config, self.number, SECRET)

        @web.middleware
        async def remember(request: web.Request, handler: Handler) -> web.StreamResponse:
            assert request.transport is not None
            self.transports.add(request.transport)
            return await handler(request)

        self.app.middlewares.insert(0, remember)
        context = ApiContext(FakeModelInfo(), config, MediaLoader(config.media, None))
        self.app[ENGINE].attach(LoadedEngine(cast(EngineClient, self.engine), context, {}))
        return await self._stack.enter_async_context(listen(self.app, ServerSettings(port=0)))

    async def wait_dead(self) -> str:
        await self._died.wait()
        return "killed"

    async def drain(self) -> None:
        self.fleet.drained.append(self.number)
        if self.app is not None:
            await drain(self.app)

    async def close(self) -> None:
        self.closed = True
        await self._stack.aclose()

    def cut(self) -> None:
        """Break the connections of its requests, as the end of its process does."""
        for transport in self.transports:
            cast(asyncio.Transport, transport).abort()

    def kill(self) -> None:
        self._died.set()
        self.cut()


@dataclass
class Front(Serving):
    """A front that listens, and its workers."""

    pool: ServerPool = field(kw_only=True)
    fleet: ServerFleet = field(kw_only=True)

    @property
    def slots(self) -> list[ServerSlot]:
        return self.pool.slots


@asynccontextmanager
async def run_front(fleet: ServerFleet, count: int = 2, **settings: Any) -> AsyncIterator[Front]:
    """A front before `count` workers, all of which are ready."""
    config = server_config(**settings)
    pool = fleet.make_pool(count)
    app = make_front(config, pool, SECRET)
    context = ApiContext(FakeModelInfo(), config, MediaLoader(config.media, None))
    await pool.start()
    app[ENGINE].attach(LoadedEngine(cast(EngineClient, pool), context, {}))
    try:
        async with listen(app) as url, aiohttp.ClientSession() as http:
            await until(lambda: all(slot.state != "starting" for slot in pool.slots))
            yield Front(url, app, pool, http, pool=pool, fleet=fleet)
    finally:
        await pool.close()
