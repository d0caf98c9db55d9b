"""A server in this process, for a command that is its only client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from mlxrun.config.settings import Config

_JOIN_SECONDS = 10.0  # that the engine may take to end
_WAIT_SECONDS = 0.2  # after which a signal is noticed that came just before a wait, and ended none
# The URL, and what ends the server. RuntimeError if it has ended.
Running = tuple[str, Callable[[], object]]


@contextmanager
def run_local_server(config: Config) -> Iterator[str]:
    """The URL of a server with this config on a free port, for this machine only and without keys.

    ModelLoadError or ConfigError if its model cannot be loaded. The prefix cache is flushed at the end.
    """
    server = replace(config.server, host="127.0.0.1", port=0, api_keys={}, allow_public=False)
    started: Future[Running] = Future()
    apis = replace(config.apis, openai=True)  # whatever its other clients would get
    run = partial(_run, replace(config, server=server, apis=apis), started)
    thread = threading.Thread(target=run, name="mlxrun-chat-server", daemon=True)
    thread.start()
    while not started.done():  # Ctrl-C ends the command at once: nothing is there that must be flushed
        wait([started], _WAIT_SECONDS)
    url, stop = started.result()
    try:
        yield url
    finally:
        with suppress(RuntimeError):
            stop()
        thread.join(_JOIN_SECONDS)


def _run(config: Config, started: Future[Running]) -> None:
    """Serve until the server is stopped; `started` gets it once the model is loaded, or what prevented
    that."""
    try:
        asyncio.run(_serve(config, started))
    except BaseException as error:
        if not started.done():
            started.set_exception(error)


async def _serve(config: Config, started: Future[Running]) -> None:
    from mlxrun.cli.run_setup import load_engine
    from mlxrun.server.app import make_app
    from mlxrun.server.engine_state import ENGINE
    from mlxrun.server.lifecycle import listen

    app, stopped = make_app(config), asyncio.Event()
    stop = partial(asyncio.get_running_loop().call_soon_threadsafe, stopped.set)
    async with listen(app) as url:
        engine = await load_engine(config)
        try:
            app[ENGINE].attach(engine)
            started.set_result((url, stop))
            await stopped.wait()
        finally:
            await engine.client.close()
