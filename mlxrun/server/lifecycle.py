"""Runs the server: it listens, loads the model, serves and drains.

The server answers 503 until the model is loaded. SIGINT or SIGTERM drains it. Then new requests get 503,
running ones finish within a time limit, and the prefix cache is flushed. A second signal exits at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, web
from aiohttp.http_exceptions import HttpProcessingError

from mlxrun.config.server_settings import explain_unknown_host, find_weak_keys
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.core.errors import ConfigError, Draining, EngineDead
from mlxrun.core.workers import finishes_before, ignore_error
from mlxrun.engine.client import EngineClient
from mlxrun.server.batches.batch_queue import BATCH_QUEUE
from mlxrun.server.certificate import ServerCertificate, read_certificate, reload_config
from mlxrun.server.engine_state import ENGINE, LoadedEngine
from mlxrun.server.http.access import CONFIG
from mlxrun.server.http.connection import HttpConnection
from mlxrun.server.live_requests import LIVE_REQUESTS
from mlxrun.server.welcome import describe_models, welcome_model

log = logging.getLogger(__name__)
http_log = logging.getLogger("mlxrun.server.http")  # aiohttp's own messages about connections
Say = Callable[[str], None]
LoadEngine = Callable[[], Coroutine[Any, Any, LoadedEngine]]
Welcome = Callable[[web.Application, str], list[str]]

GRACE_SECONDS = 5.0  # for aborted requests to send their errors, and for a thread to end
KEEPALIVE_SECONDS = 75.0  # that a connection may wait for its next request
HANDSHAKE_SECONDS = 10.0  # that a client of https may take until it can send a request
BACKLOG = 1024
SWITCH_INTERVAL = 0.0005  # seconds after which a thread that waits for the interpreter asks for it
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _describe_client_error(error: Exception) -> str:
    if isinstance(error, web.RequestPayloadError):
        return "A client's request body could not be read: it ended early or is badly encoded."
    if isinstance(error, ConnectionError):
        return "A client disconnected."
    return f"A client sent an invalid HTTP request ({type(error).__name__})."


def _shorten_client_errors(record: logging.LogRecord) -> bool:
    """Log a client's mistakes without the bytes that it sent, and not as errors of the server."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError)):
        record.msg, record.args, record.exc_info = _describe_client_error(error), (), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


http_log.addFilter(_shorten_client_errors)


def make_url(host: str, port: int, scheme: str = "http") -> str:
    """Make the URL of a server that listens there, for a client on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@asynccontextmanager
async def listen(
    app: web.Application,
    settings: ServerSettings | None = None,
    certificate: ServerCertificate | None = None,
    port_key: str = "server.port",
) -> AsyncIterator[str]:
    """Serve the application at the yielded URL. ConfigError if the address cannot be used. `settings`: None
    takes those of the application's config. `certificate`: serve https with it; None: http. `port_key`: what
    an error calls the port. The address is taken before the application opens its files."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=GRACE_SECONDS)
    settings, loop = settings or app[CONFIG].server, asyncio.get_running_loop()
    most = settings.max_connections
    options: dict[str, Any] = {"keepalive_timeout": KEEPALIVE_SECONDS, "access_log": None, "logger": http_log}

    def connect() -> HttpConnection:
        assert runner.server is not None
        return HttpConnection(runner.server, most=most, loop=loop, **options)

    host = settings.host.strip("[]")
    with _convert_errors(host, settings.port, port_key):
        listener = await _bind(connect, host, settings.port, certificate)
    try:
        await runner.setup()
        with _convert_errors(host, settings.port, port_key):
            await listener.start_serving()
        port, scheme = listener.sockets[0].getsockname()[1], "https" if certificate else "http"
        yield make_url(host, port, scheme)
    finally:
        listener.close()
        await runner.cleanup()


async def _bind(
    connect: Callable[[], asyncio.BaseProtocol], host: str, port: int, certificate: ServerCertificate | None
) -> asyncio.Server:
    """Take the address for a server that does not listen yet."""
    options: dict[str, Any] = {"backlog": BACKLOG, "reuse_address": True, "start_serving": False}
    if certificate is not None:
        options |= {"ssl": certificate.context, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
    return await asyncio.get_running_loop().create_server(connect, host, port, **options)


@contextmanager
def _convert_errors(host: str, port: int, port_key: str) -> Iterator[None]:
    """Raise ConfigError for an address that cannot be used."""
    try:
        yield
    except (socket.gaierror, UnicodeError) as error:
        text = explain_unknown_host(host) or f"{host!r} is not an address of this machine: {error.args[-1]}"
        raise ConfigError(f"server.host: {text}") from error
    except OSError as error:
        key = port_key if error.errno in (errno.EADDRINUSE, errno.EACCES) else "server.host"
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = "; `--port 0` takes any free port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"{key}: cannot listen on {host}:{port}: {reason}{hint}") from error


def has_terminal() -> bool:
    """Whether this process can reach its terminal. It cannot if it has none, or after a hang-up."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


@contextmanager
def handle_signals(stop: asyncio.Event, say: Say, reload: Callable[[], None] | None = None) -> Iterator[None]:
    """Within the block the first SIGINT or SIGTERM sets `stop`, and the second ends the process at once.

    SIGHUP calls `reload`, if there is one. If it came because the terminal is gone, it stops the server, as
    it would without a handler, unless SIGHUP was ignored (nohup).
    """

    def handle(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        say("stopping: running requests may finish, new ones are refused (signal again to stop at once)")

    stops_at_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()

    def handle_hangup() -> None:
        if stops_at_hangup and not has_terminal():
            signal.raise_signal(signal.SIGTERM)
        elif reload is not None:
            reload()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, handle, number)
    if reload is not None:
        loop.add_signal_handler(signal.SIGHUP, handle_hangup)
    try:
        yield
    finally:
        for number in (*_SIGNALS, signal.SIGHUP) if reload is not None else _SIGNALS:
            loop.remove_signal_handler(number)


async def run(
    app: web.Application,
    load: LoadEngine,
    say: Say,
    *,
    stop: asyncio.Event | None = None,
    note: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    read_config: Callable[[], Config] | None = None,
    welcome: Welcome = welcome_model,
) -> int:
    """Serve until a signal or `stop` (exit code 0), or until the engine dies (3). Return the exit code.
    `note`: called with the URL; what it returns is open while the server listens. `read_config`: reads the
    config again at SIGHUP, for its API keys; then the files of `server.tls` are read again too. `welcome`:
    makes the lines that are said once it is ready.

    ModelLoadError if the model cannot be loaded; ConfigError if the address or the certificate cannot be
    used.
    """
    signalled = asyncio.Event()
    for category in (BadContentDispositionHeader, BadContentDispositionParam):
        warnings.simplefilter("ignore", category)  # of clients' forms, which get an error besides
    certificate = read_certificate(app[CONFIG].server)
    reload = None if read_config is None else partial(reload_config, app, read_config, certificate)
    with set_switch_interval(), nullcontext() if stop else handle_signals(signalled, say, reload):
        async with listen(app, certificate=certificate) as url:
            with note(url):
                return await _serve(app, load, say, stop or signalled, url, welcome)


@contextmanager
def set_switch_interval() -> Iterator[None]:
    """Switch threads often within the block. The engine's thread and the event loop take turns many times a
    step: Python's default of 5 ms would show in the time between tokens."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def _serve(
    app: web.Application, load: LoadEngine, say: Say, stop: asyncio.Event, url: str, welcome: Welcome
) -> int:
    config = app[CONFIG]
    if config.server.allow_public and not config.server.api_keys:
        log.warning("no API key is required: everybody who can reach %s may use it", url)
    for warning in find_weak_keys(config.server):
        log.warning("%s", warning)
    say(f"listening on {url}; {'models' if config.models else 'loading'} {describe_models(config)}")
    client = await _load(app, load, stop)
    if client is None:
        say("stopped before the model was loaded")
        return 0
    try:
        for line in welcome(app, url):
            say(line)
        await _wait_for_end(client, stop, config.server.on_engine_failure == "stay")
        if client.dead_error is not None and not stop.is_set():
            say(f"the engine has died: {client.dead_error}")
        await drain(app)
    finally:
        died = client.dead_error
        await client.close()
    return 0 if died is None else EngineDead.exit_code


async def _load(app: web.Application, load: LoadEngine, stop: asyncio.Event) -> EngineClient | None:
    """Load the engine and attach it to the application; None if the server is to stop meanwhile."""
    loading = asyncio.create_task(load())
    if not await finishes_before(loading, stop.wait()):
        loading.cancel()
        if (await asyncio.wait((loading,), timeout=GRACE_SECONDS))[1]:
            log.warning("stopped while the model was being loaded")
            os._exit(0)  # a thread that loads cannot be interrupted, and has nothing that must be saved
        return None
    loaded = loading.result()
    app[ENGINE].attach(loaded)
    return loaded.client


async def _wait_for_end(client: EngineClient, stop: asyncio.Event, stay: bool) -> None:
    """Wait until the server is to stop, or until the engine has died unless the server is to `stay`."""
    died = asyncio.create_task(client.wait_until_dead())
    try:
        if await finishes_before(died, stop.wait()) and stay:
            log.error("the engine has died; requests are answered 503 (server.on_engine_failure: stay)")
            await stop.wait()
    finally:
        died.cancel()


async def drain(app: web.Application) -> None:
    """Refuse new requests. Let running ones finish within server.drain_timeout, then abort them."""
    engine, live = app[ENGINE], app[LIVE_REQUESTS]
    engine.start_draining()
    queue = app.get(BATCH_QUEUE)
    if queue is not None and not await _finishes_within(queue.close(), GRACE_SECONDS):
        log.warning("a batch could not be stopped in time; it continues from its journal at the next start")
    if await _finishes_within(engine.active.wait_idle(), app[CONFIG].server.drain_timeout):
        return
    log.warning(
        "the time limit has passed (server.drain_timeout): %d requests are aborted", engine.active.count
    )
    error = Draining("the server is shutting down; the request was aborted")
    for each in live:
        each.fail(error)
    if not await _finishes_within(engine.active.wait_idle(), GRACE_SECONDS):
        engine.active.end_all(error)  # of those that are not prepared yet
        await _finishes_within(engine.active.wait_idle(), GRACE_SECONDS)


async def _finishes_within(work: Coroutine[Any, Any, None], seconds: float) -> bool:
    """Whether work ends within so many seconds. If not, it is cancelled, and its end is not waited for."""
    task = asyncio.create_task(work)
    try:
        if (await asyncio.wait((task,), timeout=seconds))[0]:
            task.result()
            return True
        return False
    finally:
        task.cancel()
        task.add_done_callback(ignore_error)
