"""The server's state: config, engine, text side, the table of live requests. Made on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlxrun.config.conversion import config_hash
from mlxrun.config.settings import Config
from mlxrun.errors import Draining, EngineDead, MlxrunError, NotReady
from mlxrun.server.access import AllowedSites
from mlxrun.server.auth import ApiKeys
from mlxrun.server.live_requests import LiveRequests
from mlxrun.server.metrics import Metrics

if TYPE_CHECKING:
    from mlxrun.api.context import ApiContext
    from mlxrun.engine.client import EngineClient
    from mlxrun.server.batches.batch_queue import BatchQueue
    from mlxrun.server.surface import Surface
    from mlxrun.text.model_info import ModelInfo

log = logging.getLogger(__name__)
STATS_WAIT = 2.0  # seconds that /v1/status waits for the engine's numbers: a step may take most of that
UNREAD: Mapping[str, Any] = {  # before the first reading; every key is there always
    "running": 0,
    "waiting": 0,
    "background": {"running": 0, "waiting": 0},
    "steps": 0,
    "errors": 0,
    "memory": None,
    "probe": None,
}


class ServerLoad:
    """Counts what is being answered; `idle` waits until that is nothing."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._idle.wait()


class Server:
    """What every handler gets. `client` and `side` are there once the model is loaded: see `attach`."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """`facts`: versions and device, for /v1/status; known once the model is loaded. ConfigError if
        server.allowed_hosts has what is no name."""
        self.config = config
        self.clock = clock
        self.started = clock()
        self.facts = facts or {"versions": None, "device": None}
        self.digest = config_hash(config)
        self.fingerprint = f"fp_{self.digest[:10]}"
        self.draining = False
        self.keys = ApiKeys(config.server.api_keys)
        self.sites = AllowedSites(config.server)
        self.metrics = Metrics(self)
        self.live = LiveRequests(self)
        self.work = ServerLoad()  # requests that need the engine, from before they are read
        self.jobs: BatchQueue | None = None  # where there are /v1/batches
        self.stats = UNREAD  # the newest numbers of the engine
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None  # one for all who ask meanwhile
        self.surfaces: tuple[Surface, ...] = ()  # those that are on; set by make_app
        self.active: set[str] = set()  # ids of all requests that are being answered
        self._client: EngineClient | None = None
        self._side: ApiContext | None = None

    def attach(self, client: EngineClient, side: ApiContext) -> None:
        """The model is loaded: requests are served from now on."""
        self._client, self._side = client, side

    @property
    def client(self) -> EngineClient:
        """The engine. NotReady while the model is being loaded."""
        if self._client is None:
            raise NotReady("the model is being loaded: try again soon")
        return self._client

    @property
    def side(self) -> ApiContext:
        """What turns bodies into requests. NotReady while the model is being loaded."""
        if self._side is None:
            raise NotReady("the model is being loaded: try again soon")
        return self._side

    @property
    def host(self) -> ModelInfo:
        """The model as the host sees it."""
        return self.side.host

    def model_names(self) -> tuple[str, ...]:
        """What may stand as `model`, the real name first."""
        return tuple(dict.fromkeys((self.host.name, *self.host.names)))

    def model_facts(self) -> Mapping[str, Any] | None:
        """What is served, for /v1/status; None while it is being loaded."""
        if self._side is None:
            return None
        host = self.host
        return {"name": host.name, "context_length": host.context_length, "vision": host.vision}

    def limits(self) -> Mapping[str, int]:
        """How many requests may run, and how many may wait; the next one is refused."""
        found = self.config.scheduler
        return {"max_running": found.max_running, "max_queue": found.max_queue}

    def batches(self) -> Mapping[str, Any]:
        """The batch that runs, and how many wait."""
        return {"running": None, "waiting": 0} if self.jobs is None else self.jobs.summary()

    def files(self) -> Mapping[str, int]:
        """How many files are kept, and their bytes; 0 until the folder is open."""
        storage, most = self.jobs and self.jobs.storage, self.config.server.files_max_bytes
        count, used = (len(storage.newest()), storage.used) if storage else (0, 0)
        return {"count": count, "bytes": used, "max_bytes": most}

    def trouble(self) -> MlxrunError | None:
        """Why requests are not served, or None."""
        if self._client is not None and self._client.dead is not None:
            return EngineDead(str(self._client.dead))
        if self.draining:
            return Draining("the server is shutting down: try again soon")
        if self._client is None:
            return NotReady("the model is being loaded: try again soon")
        return None

    def cache_counts(self) -> Mapping[str, int]:
        """What the prefix cache did; empty while there is none."""
        return self._client.cache_counts() if self._client is not None else {}

    async def read_stats(self) -> Mapping[str, Any]:
        """The engine's numbers; older ones if it is in a long step, has died or is not there. What it then
        answers late is what the next one sees."""
        if self._client is not None and self._client.dead is None:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read(self._client))
            await asyncio.wait((self._reading,), timeout=STATS_WAIT)
            if self._reading.done():
                self._reading.result()
        return self.stats

    @property
    def stats_age(self) -> float | None:
        """Seconds since `stats` were read; None if they never were."""
        return None if self._read_at is None else self.clock() - self._read_at

    async def _read(self, client: EngineClient) -> None:
        try:
            self.stats, self._read_at = {**UNREAD, **await client.stats()}, self.clock()
        except EngineDead as error:
            log.debug("no numbers from the engine: %r", error)
