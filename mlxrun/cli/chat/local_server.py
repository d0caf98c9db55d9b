"""A server in this process, for a command that is its only client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mlxrun.config.settings import Config

_JOIN_SECONDS = 10.0  # that the engine may take to end


@contextmanager
def run_local_server(config: Config) -> Iterator[str]:
    """The URL of a server with this config on a free port, for this machine only and without keys.

    ModelLoadError or ConfigError if its model cannot be loaded. The prefix cache is flushed at the end.
    """
    server = replace(config.server, host="127.0.0.1", port=0, api_keys={}, allow_public=False)
    thread = _ServerThread(replace(config, server=server))
    thread.start()
    url = thread.wait_for_url()  # Ctrl-C ends the command at once: nothing is there that must be flushed
    try:
        yield url
    finally:
        thread.stop()
        thread.join(_JOIN_SECONDS)


class _ServerThread(threading.Thread):
    def __init__(self, config: Config) -> None:
        super().__init__(name="mlxrun-chat-server", daemon=True)
        self._config = config
        self._ready = threading.Event()
        self._url: str | None = None
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # it is raised where the URL is waited for
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        from mlxrun.cli.run_setup import load_engine
        from mlxrun.server.app import make_app
        from mlxrun.server.engine_state import ENGINE
        from mlxrun.server.lifecycle import listen

        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        app = make_app(self._config)
        async with listen(app) as url:
            engine = await load_engine(self._config)
            try:
                app[ENGINE].attach(engine)
                self._url = url
                self._ready.set()
                await self._stopped.wait()
            finally:
                await engine.client.close()

    def wait_for_url(self) -> str:
        """The URL, once the model is loaded; raises what prevented that."""
        self._ready.wait()
        if self._url is None:
            raise self._error or RuntimeError("the server ended before its model was loaded")
        return self._url

    def stop(self) -> None:
        """End the server; does nothing if it has ended."""
        loop, stopped = self._loop, self._stopped
        if loop is not None and stopped is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stopped.set)
