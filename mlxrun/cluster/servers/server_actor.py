"""The actor in which a worker of a server runs: mlxrun's own application on a port of its machine.

Only the front may use the port: it knows the secret. Other machines can reach the port only if the front is
on one.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

from mlxrun.api.openai.response import build_error
from mlxrun.cluster.messages import WorkerFacts
from mlxrun.cluster.ray.ray_actor import describe_worker
from mlxrun.cluster.servers.server_relay import KEY_HEADER, OWNER_DIGITS, SECRET_HEADER
from mlxrun.config.settings import Config
from mlxrun.core.errors import Forbidden, MlxrunError
from mlxrun.core.visible_text import start_logging
from mlxrun.server.app import list_surfaces, make_app
from mlxrun.server.engine_state import ENGINE, LoadedEngine
from mlxrun.server.http.access import NO_KEY, adopt_key, is_same_secret
from mlxrun.server.http.json_bodies import json_response
from mlxrun.server.http.surface import Handler, Surface
from mlxrun.server.lifecycle import drain, listen, set_switch_interval
from mlxrun.server.responses.response_runs import RESPONSES


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What a worker is made of. `front`: the node of the front; `load`: loads the model of a config."""

    config: Config
    number: int
    front: str
    secret: str
    load: Callable[[Config], Awaitable[LoadedEngine]]


def make_worker_app(
    config: Config,
    number: int,
    secret: str,
    responses_path: Path | None = None,
    more: Sequence[Surface] = (),
) -> web.Application:
    """Make the application of a worker: a server's application, for requests that have the secret.
    `responses_path`: as in `make_app`; `more`: surfaces for the front alone."""

    @web.middleware
    async def check_secret(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_same_secret(request.headers.get(SECRET_HEADER, ""), secret):
            return json_response(build_error(Forbidden("only the front may ask")), 403)
        adopt_key(request, request.headers.get(KEY_HEADER, NO_KEY))
        return await handler(request)

    app = make_app(config, responses_path=responses_path, surfaces=[*list_surfaces(), *more])
    app.middlewares.insert(0, check_secret)
    app[RESPONSES].token_prefix = f"{number:0{OWNER_DIGITS}x}"
    return app


class ServerActor:
    """A worker, reached by Ray and by HTTP. Errors that say what is wrong with it are returned, not raised.
    Each method is called once, in their order."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self._node = ""
        self._loaded: LoadedEngine | None = None
        self._app: web.Application | None = None
        self._stack = AsyncExitStack()
        start_logging(spec.config.log.level)

    async def describe(self) -> WorkerFacts | MlxrunError:
        """Describe this worker, before its model's weights are loaded."""
        try:
            facts, _ = await asyncio.to_thread(describe_worker, self._spec.config)
        except MlxrunError as error:
            return error
        self._node = facts.node
        return facts

    async def serve(self) -> str | MlxrunError:
        """Load the model, serve, and return the URL. Call `describe` before."""
        spec = self._spec
        host = "127.0.0.1"
        if self._node != spec.front:
            host = importlib.import_module("ray.util").get_node_ip_address()
        try:
            app = self._app = make_worker_app(spec.config, spec.number, spec.secret)
            self._loaded = loaded = await spec.load(spec.config)
        except MlxrunError as error:
            return error
        self._stack.push_async_callback(loaded.client.close)
        self._stack.enter_context(set_switch_interval())
        app[ENGINE].attach(loaded)
        settings = replace(spec.config.server, host=host, port=0)
        return await self._stack.enter_async_context(listen(app, settings))

    async def wait_dead(self) -> str:
        """Wait until the engine has died, and return why."""
        assert self._loaded is not None
        client = self._loaded.client
        await client.wait_until_dead()
        return f"its engine has died: {client.dead_error}"

    async def drain(self) -> None:
        """Wait until background responses have ended, at most server.drain_timeout seconds."""
        assert self._app is not None
        await drain(self._app)

    async def close(self) -> None:
        """Stop serving, then stop the engine once its prefix cache is written."""
        await self._stack.aclose()
