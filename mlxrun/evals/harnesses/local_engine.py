"""An engine in this process for programs that have another event loop, or none.

The engine's client belongs to a loop of its own, on a daemon thread, which lives until the process ends. The
functions that answer the lines of a job answer the requests.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mlxrun.config.loading import LoadedConfig, load_config
from mlxrun.engine.client import EngineClient
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.records.output_records import LineTokens
from mlxrun.jobs.run.job_cache import lift_step_limit
from mlxrun.jobs.run.line_answerer import LineAnswerer, LinePreparer
from mlxrun.jobs.run.partial_answers import PartialAnswers
from mlxrun.jobs.run.progress import ProgressMeter
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info

T = TypeVar("T")
DEFAULT_NAME = "default"
_CONFIG_SUFFIXES = (".yaml", ".yml")


def load_harness_config(name: str, sets: Mapping[str, Any]) -> LoadedConfig:
    """Load the config that a harness names: a config file, `default`, or a model. ConfigError as for a
    command. `default` is the config of a command without -c. The path or hub id of a model uses it with that
    model. `sets`: values by key, such as `scheduler.max_running`."""
    path = Path(name) if name.endswith(_CONFIG_SUFFIXES) else None
    values = dict(sets)
    if path is None and name != DEFAULT_NAME:
        values.setdefault("model.path", name)
    flags = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return load_config(path, flags, os.environ)


class LocalEngine:
    """A running engine with its own event loop. Its methods may be called on any thread. `open` makes one. It
    stops when the process ends, or once each `open` had its `close`."""

    _running: ClassVar[dict[str, LocalEngine]] = {}  # by the digest of their config
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, loaded: LoadedConfig) -> None:
        self.digest = loaded.digest
        self.config = loaded.config
        self._users = 0
        self._client: EngineClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mlxrun-harness", daemon=True)
        self._thread.start()
        atexit.register(self._stop_at_exit)
        try:
            self.submit(self._start()).result()
        except BaseException:
            self._stop()
            raise

    @classmethod
    def open(cls, loaded: LoadedConfig) -> LocalEngine:
        """Return the engine of this config, which all that open it share. ModelLoadError or ConfigError if
        its model cannot be loaded."""
        with cls._lock:
            engine = cls._running.get(loaded.digest)
            if engine is None or engine.client.dead_error is not None:
                engine = cls._running[loaded.digest] = cls(loaded)
            engine._users += 1
            return engine

    def close(self) -> None:
        """Stop the engine if nobody else has it open."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                if self._running.get(self.digest) is self:
                    del self._running[self.digest]
                self._stop()

    @property
    def client(self) -> EngineClient:
        """The engine's client, for coroutines that `submit` runs."""
        assert self._client is not None
        return self._client

    @property
    def model_info(self) -> LoadedModelInfo:
        return self.client.model_info

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's loop. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def answer(self, url: str, body: dict[str, Any], key: str) -> Future[dict[str, Any]]:
        """Return the response body of an endpoint that job lines may use. The future raises the errors of a
        line. `key`: what the response's id is made of, and its seed, if the body has none."""
        return self.submit(self._answerer.answer(JobLine(0, key, url, body), key, LineTokens()))

    async def _start(self) -> None:
        model_info = load_model_info(self.config.model, weights=True)
        self._client = await EngineClient.start(lift_step_limit(self.config), model_info)
        preparer = LinePreparer(model_info, self.config, None, max_tokens=None)
        answers = PartialAnswers(Path(os.devnull), keep=False)
        meter = ProgressMeter(time.monotonic)
        self._answerer = LineAnswerer(self._client, preparer, self.config, meter, answers)

    def _stop(self) -> None:
        atexit.unregister(self._stop_at_exit)
        if self._client is not None:
            self.submit(self._client.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _stop_at_exit(self) -> None:
        if self._client is not None:
            self._client.stop_at_exit()
