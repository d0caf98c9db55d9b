"""The workers of a server as actors of Ray."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxrun.cluster.messages import WorkerFacts
from mlxrun.cluster.ray.ray_client import RayActor, RayCrew, leave_ray, make_watch, raise_refused
from mlxrun.cluster.ray.ray_cluster import connect, place_workers
from mlxrun.cluster.servers.server_actor import ServerActor, ServerSpec
from mlxrun.cluster.servers.server_pool import ServerPool
from mlxrun.config.settings import Config

if TYPE_CHECKING:
    from mlxrun.server.engine_state import LoadedEngine

log = logging.getLogger(__name__)


class RayServer(RayActor):
    """An actor that serves: a `server_pool.ServerWorker`."""

    async def start(self) -> tuple[WorkerFacts, str]:
        return await self.describe(), raise_refused(await self.ask("serve"))

    async def wait_dead(self) -> str:
        return str(await self.ask("wait_dead"))

    async def drain(self) -> None:
        await self.ask("drain")


@dataclass(slots=True)
class RayServers:
    """The workers of one server. `configs`: a worker's own config by its number, if it has one; `load`: loads
    the model of a config; `secret`: what workers demand from the front."""

    address: str
    config: Config
    configs: Mapping[int, Config]
    load: Callable[[Config], Awaitable[LoadedEngine]]
    mixed: bool
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    pool: ServerPool = field(init=False)
    _crew: RayCrew = field(init=False)

    def connect(self) -> int:
        """Connect to Ray, and return the number of workers. ConfigError if that fails, or if it has no
        room."""
        ray = connect(self.address)
        places = place_workers(ray, self.config.workers)
        self._crew = RayCrew(ray, make_watch(ray), self.mixed)
        front = ray.get_runtime_context().get_node_id()
        makers = []
        for number, place in enumerate(places):
            config = self.configs.get(number, self.config)
            config = replace(config, apis=replace(config.apis, batches=False))
            spec = ServerSpec(config, number, front, self.secret, self.load)
            makers.append(partial(RayServer, self._crew, ServerActor, spec, place))
        self.pool = ServerPool(makers)
        return len(places)

    def expect(self, here: Mapping[str, Any]) -> None:
        """Compare the first worker with these facts (`WorkerFacts`) of the front."""
        self._crew.here = here

    async def disconnect(self) -> None:
        """Leave Ray; a Ray that this process has started ends."""
        await leave_ray(self._crew.ray, self._crew.watch)
