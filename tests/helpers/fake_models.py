"""Several models without processes: each serves real HTTP before a scripted engine, or pretends to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import aiohttp

from mlxrun.api.ollama.response import list_tags
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.cluster.models.messages import ModelFacts
from mlxrun.cluster.models.model_lines import LineDesk, ModelsJobService
from mlxrun.cluster.models.model_pool import ModelPool
from mlxrun.cluster.models.model_relay import ModelRelay, make_models_front
from mlxrun.cluster.models.model_slot import ModelSlot, Record
from mlxrun.cluster.models.shared_limits import LimitReporter
from mlxrun.cluster.servers.server_actor import make_worker_app
from mlxrun.config.settings import BatchSettings, ServerSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.engine.client import EngineClient
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.storage import Storage
from mlxrun.server.endpoints.openai import describe_listed
from mlxrun.server.engine_state import ENGINE, LoadedEngine
from mlxrun.server.lifecycle import listen
from mlxrun.server.live_requests import LIVE_REQUESTS
from tests.helpers.server_fakes import FakeEngine, Script, Serving, server_config
from tests.helpers.tokenizers import FakeModelInfo

SECRET = "s3cret"


@dataclass
class FakeModels:
    """All models of a test, by name. `script`: of the engine of each; `sizes`: bytes, 1 if there is none;
    `broken`: names of those that cannot be loaded; `http`: whether they really serve; `held`: models are
    loaded once it is set, and `closing`: closed."""

    names: tuple[str, ...] = ("a", "b")
    script: Callable[[str], Script | None] = lambda name: None
    sizes: dict[str, int] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()
    keep_alive: dict[str, float] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    http: bool = False
    held: asyncio.Event = field(default_factory=asyncio.Event)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    lives: list[FakeModel] = field(default_factory=list)
    tasks: dict[str, str] = field(default_factory=dict)
    digest: str = "as ever"

    def make_pool(self, limit: int = 1, max_waiting: int = 100, timeout: float | None = None) -> ModelPool:
        """A pool in which `limit` bytes fit. Busy models are drained after a tenth of a second."""
        self.held.set()
        self.closing.set()
        slots = [self._make_slot(number, name) for number, name in enumerate(self.names)]
        return ModelPool(slots, limit, max_waiting, timeout, patience=0.1)

    def _make_slot(self, number: int, name: str) -> ModelSlot:
        info = FakeModelInfo(name=name, names=(f"{name}-alias",), aliases=(f"{name}-more",))
        facts = ModelFacts(
            names=(name, f"{name}-alias", f"{name}-more"),
            tasks=[self.tasks.get(name, "generate")],
            context_length=4096,
            modalities=["text"],
            needed=1,
            weights=1,
            shortage=None,
            listed=[describe_listed(name, info)],
            tags=list_tags(info)["models"],
            shown={"details": name},
        )
        size, idle = self.sizes.get(name, 1), self.keep_alive.get(name)

        def make(record: Record) -> FakeModel:
            self.lives.append(FakeModel(self, number, info, record))
            return self.lives[-1]

        return ModelSlot(number, name, facts, make, size, name in self.pinned, idle)


class FakeModel:
    """One life of a model."""

    def __init__(self, models: FakeModels, number: int, info: FakeModelInfo, record: Record) -> None:
        self.models = models
        self.number = number
        self.info = info
        self.record = record
        self.engine = FakeEngine(info, models.script(info.name))
        self.closed = self.is_draining = False
        self._died = asyncio.Event()
        self._stack = AsyncExitStack()

    async def start(self) -> str:
        await self.models.held.wait()
        if self.info.name in self.models.broken:
            raise ModelLoadError("its files are broken")
        if not self.models.http:
            return f"http://{self.info.name}"
        config = server_config()
        context = ApiContext(self.info, config, MediaLoader(config.media, None))
        loaded = LoadedEngine(cast(EngineClient, self.engine), context, {})
        app = make_worker_app(config, self.number, SECRET, more=[LineDesk(loaded, config).surface])
        app[ENGINE].attach(loaded)
        app[LIVE_REQUESTS].limits = LimitReporter(self.record)
        return await self._stack.enter_async_context(listen(app, ServerSettings(port=0)))

    async def wait_dead(self) -> str:
        await self._died.wait()
        return "killed"

    def start_draining(self) -> None:
        self.is_draining = True

    async def close(self) -> None:
        await self.models.closing.wait()
        self.closed = True
        await self._stack.aclose()

    def kill(self) -> None:
        self._died.set()


@dataclass
class ModelsFront(Serving):
    """A front that listens, and its models."""

    pool: ModelPool = field(kw_only=True)
    models: FakeModels = field(kw_only=True)


@asynccontextmanager
async def run_models_front(
    models: FakeModels,
    limit: int = 1,
    data: Path | None = None,
    batch: BatchSettings = BatchSettings(),  # noqa: B008
    **settings: Any,
) -> AsyncIterator[ModelsFront]:
    """A front of several models, none of which is loaded yet. `data`: the folder of files and batches."""
    models.http = True
    pool, config = models.make_pool(limit), replace(server_config(**settings), batch=batch)
    relay = ModelRelay(pool, SECRET)
    queue = None if data is None else BatchQueue(Storage(data, 10**9), retry_seconds=0.01)
    app = make_models_front(relay, config, queue)
    await pool.start()
    app[ENGINE].attach(LoadedEngine(cast(EngineClient, pool), cast(ApiContext, None), {}))

    async def digest() -> str:
        return models.digest

    try:
        async with listen(app) as url, aiohttp.ClientSession() as http:
            if queue is not None:
                await queue.start(ModelsJobService(config, "0" * 64, pool, relay.send_line, digest))
            yield ModelsFront(url, app, pool, http, pool=pool, models=models)
    finally:
        if queue is not None:
            await queue.close()
        await pool.close()
