"""The front of a server on several equal workers.

A request goes to another worker if its worker died before an answer, or was full. Files and batches are
refused.
"""

from __future__ import annotations

from dataclasses import replace

import aiohttp
from aiohttp import web

from mlxrun.cluster.servers.prefix_router import hash_prefixes
from mlxrun.cluster.servers.relayed_answer import pass_on
from mlxrun.cluster.servers.server_pool import ServerPool, ServerSlot
from mlxrun.cluster.servers.server_relay import Relay, make_relay_app, read_fields
from mlxrun.config.settings import Config
from mlxrun.core.errors import InternalError, MlxrunError, NotFound, NotReady
from mlxrun.server.engine_state import EngineState
from mlxrun.server.http.surface import Surface

MOST_LOST = 2  # workers that die with one request before it fails, as it may be what kills them
_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)  # nothing was sent


class PoolState(EngineState):
    """The engine's state at the front: ready while a worker is."""

    def __init__(self, pool: ServerPool) -> None:
        super().__init__()
        self._pool = pool

    def find_unavailability(self) -> MlxrunError | None:
        found = super().find_unavailability()
        if found is None and not self._pool.is_ready and not self._pool.is_restarting:
            return NotReady("no worker is ready: try again soon")
        return found


def make_front(config: Config, pool: ServerPool, secret: str) -> web.Application:
    """Make the front's application. `secret`: the workers' secret."""
    return make_relay_app(config, WorkerRelay(pool, secret), PoolState(pool))


class WorkerRelay(Relay):
    """The handlers of the front of equal workers."""

    def __init__(self, pool: ServerPool, secret: str) -> None:
        super().__init__(pool.slots, secret)
        self._pool = pool

    def wrap_surface(self, surface: Surface) -> Surface:
        """Files and batches, which belong to one engine, are refused."""
        if "batches" not in surface.switches:
            return super().wrap_surface(surface)
        endpoints = (replace(each, handler=_refuse) for each in surface.endpoints)
        return replace(surface, endpoints=tuple(endpoints), is_api=False)

    async def relay_to_worker(self, request: web.Request) -> web.StreamResponse:
        body, fields = await read_fields(request)
        found = self.find_owner(request, fields)
        owner = None if found is None else self._pool.slots[found.number]
        prefixes = hash_prefixes(fields)
        tried: set[ServerSlot] = set()
        lost = 0
        while True:
            slot = owner or await self._pool.choose(prefixes, tried)
            if slot is None or slot in tried:
                raise NotReady("the worker of this request has ended, and no other is ready: try again soon")
            tried.add(slot)
            with self._pool.reserve(slot, prefixes):
                try:
                    upstream = await self.send(request, slot, body)
                except aiohttp.ClientError as error:  # nothing of an answer has come
                    lost += not isinstance(error, _UNREACHED)
                    if lost == MOST_LOST:
                        text = f"{MOST_LOST} workers died while they had this request"
                        raise InternalError(text, error, code="worker_died") from error
                    continue
                async with upstream:
                    others = (s for s in self._pool.slots if s.state == "ready" and s not in tried)
                    if upstream.status == 503 and owner is None and any(others):
                        continue
                    return await pass_on(request, upstream)


async def _refuse(request: web.Request) -> web.StreamResponse:
    raise NotFound(
        f"{request.path} is not available with --ray: files and batches belong to one engine. Run jobs "
        "with `mlxrun batch --ray`, or a server without --ray"
    )
