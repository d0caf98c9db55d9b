"""From start to exit code: listen, load, serve, drain.

The server listens at once and answers 503 until the model is loaded. SIGINT or SIGTERM drains: new requests
get 503, running ones finish until the deadline, the prefix cache is flushed. A second signal is the end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from mlxrun.api.context import ApiContext
from mlxrun.config.settings import ServerSettings
from mlxrun.engine.client import EngineClient
from mlxrun.errors import ConfigError, Draining, EngineDead
from mlxrun.server.app import make_app
from mlxrun.server.connection import HttpConnection, RefusedConnection
from mlxrun.server.state import Server

log = logging.getLogger(__name__)
http_log = logging.getLogger("mlxrun.server.http")  # aiohttp's, of a connection
Say = Callable[[str], None]
Load = Callable[[], Coroutine[Any, Any, tuple[EngineClient, ApiContext]]]

GRACE = 5.0  # seconds for what was cut off to say so, and for a thread to let go
IDLE = 75.0  # seconds that a connection may wait for its next request
BACKLOG = 1024
SWITCH = 0.0005  # seconds after which a thread that wants the interpreter asks for it
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _briefly(record: logging.LogRecord) -> bool:
    """What a client did wrong is no error here, and the text of what it sent is not for the log."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
        record.msg, record.args, record.exc_info = f"no HTTP: {type(error).__name__}", (), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


http_log.addFilter(_briefly)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """For a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@asynccontextmanager
async def listening(app: web.Application, settings: ServerSettings) -> AsyncIterator[Address]:
    """The application on its address while the block runs. ConfigError if the address cannot be had."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=GRACE)
    await runner.setup()
    http, loop = runner.server, asyncio.get_running_loop()
    assert http is not None
    options: dict[str, Any] = {"keepalive_timeout": IDLE, "access_log": None, "logger": http_log}

    def connect() -> asyncio.BaseProtocol:
        if len(http.connections) >= settings.max_connections:
            return RefusedConnection()
        return HttpConnection(http, loop=loop, **options)

    try:
        listener = await _listen(connect, settings)
        try:
            yield Address(settings.host.strip("[]"), listener.sockets[0].getsockname()[1])
        finally:
            listener.close()
    finally:
        await runner.cleanup()


async def _listen(connect: Callable[[], asyncio.BaseProtocol], settings: ServerSettings) -> asyncio.Server:
    host, port = settings.host.strip("[]"), settings.port
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(connect, host, port, backlog=BACKLOG, reuse_address=True)
    except socket.gaierror as error:
        raise ConfigError(f"server.host: {host!r} is no address of this machine: {error.strerror}") from error
    except OSError as error:
        key = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"server.{key}: cannot listen on {host}:{port}: {reason}") from error


class Signals:
    """The first SIGINT or SIGTERM asks the server to stop, the second ends the process at once."""

    def __init__(self, say: Say) -> None:
        self.asked = asyncio.Event()
        self._say = say

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def request(self, number: int = signal.SIGTERM) -> None:
        """What a signal does."""
        if self.asked.is_set():
            os._exit(128 + number)
        self.asked.set()
        self._say("stopping: running requests may finish, new ones are refused (once more to stop at once)")


async def run(server: Server, load: Load, say: Say, *, stop: asyncio.Event | None = None) -> int:
    """Serve until a signal (exit code 0) or until the engine dies (3). `stop` stands for a signal in tests.

    ModelLoadError or ConfigError if the model cannot be loaded, or the address cannot be had.
    """
    app = make_app(server)
    with _quick_switches():
        if stop is not None:
            return await _run(server, app, load, say, stop)
        with Signals(say) as signals:
            return await _run(server, app, load, say, signals.asked)


@contextmanager
def _quick_switches() -> Iterator[None]:
    """The engine's thread and the event loop hand each other the interpreter many times a step: at Python's
    own 5 ms a wait for it shows in the time between tokens."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def _run(server: Server, app: web.Application, load: Load, say: Say, stop: asyncio.Event) -> int:
    settings = server.config.server
    async with listening(app, settings) as address:
        if settings.allow_public and not server.keys:
            log.warning("no API key is asked for: whoever reaches %s may use it", address.url)
        say(f"listening on {address.url}; loading {server.config.model.path}")
        client = await _load(server, load, stop)
        if client is None:
            say("stopped before the model was loaded")
            return 0
        try:
            say(_ready(server, address))
            await _serve(server, client, stop)
            if client.dead is not None and not stop.is_set():
                say(f"the engine has died: {client.dead}")
            await drain(server, settings.drain_timeout)
        finally:
            died = client.dead
            await client.close()
    return 0 if died is None else EngineDead.exit_code


async def _load(server: Server, load: Load, stop: asyncio.Event) -> EngineClient | None:
    """The engine, attached to the server; None if the server is to stop."""
    loading = asyncio.create_task(load())
    if await _first(loading, stop):
        loading.cancel()
        if (await asyncio.wait((loading,), timeout=GRACE))[1]:
            log.warning("stopped while the model was being loaded")
            os._exit(0)  # a thread that loads cannot be interrupted, and holds nothing that must be saved
        return None
    client, side = loading.result()
    server.attach(client, side)
    await server.read_stats()  # so that there are numbers to show, however long the first steps take
    return client


async def _first(task: asyncio.Task[Any], stop: asyncio.Event) -> bool:
    """Wait for either; whether it was `stop`, and the task is not done."""
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
    return not task.done()


async def _serve(server: Server, client: EngineClient, stop: asyncio.Event) -> None:
    """Until the server is to stop, or the engine has died and the process is to end with it."""
    died = asyncio.create_task(client.died())
    try:
        if not await _first(died, stop) and server.config.server.on_engine_failure == "stay":
            log.error("the engine has died; requests are answered 503 (server.on_engine_failure: stay)")
            await stop.wait()
    finally:
        died.cancel()


async def drain(server: Server, seconds: float) -> None:
    """Refuse what is new, let what runs finish for so long, then end it with an error that says so."""
    server.draining = True
    if server.jobs is not None and not await _within(server.jobs.close(), GRACE):
        log.warning("a batch did not let itself be stopped; it goes on from its journal with the next start")
    if await _within(server.work.idle(), seconds):
        return
    log.warning("%d requests are aborted: the deadline has passed (server.drain_timeout)", len(server.live))
    server.live.fail_all(Draining("the server is shutting down; the request was aborted"))
    await _within(server.work.idle(), GRACE)


async def _within(waiting: Awaitable[None], seconds: float) -> bool:
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return False
    return True


def _ready(server: Server, address: Address) -> str:
    """What is served, and the first request to try."""
    host, config = server.host, server.config
    kind = "images and text" if host.vision else "text"
    surfaces = ", ".join(surface.name for surface in server.surfaces if surface.name != "health")
    keys = f"{len(config.server.api_keys)} API keys" if server.keys else "no API key is asked for"
    secret = "-H 'Authorization: Bearer YOUR_KEY' " if server.keys else ""
    body = '{"messages": [{"role": "user", "content": "What is 2 + 3?"}]}'
    return (
        f"ready: {host.name}, {kind}, context of {host.context_length} tokens; {surfaces}; {keys}\n"
        f"  curl {address.url}/v1/chat/completions {secret}-H 'Content-Type: application/json' -d '{body}'"
    )
