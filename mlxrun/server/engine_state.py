"""The state of the engine for requests (loading, ready, draining or dead), and its newest statistics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.core.errors import Draining, EngineDead, MlxrunError, NotReady
from mlxrun.core.media_names import list_input_kinds
from mlxrun.core.step_plan import PinnedPrefix
from mlxrun.engine.client import EngineClient

log = logging.getLogger(__name__)
UNREAD_STATS: Mapping[str, Any] = {  # until the model is loaded; every key is always present
    "running": 0,
    "waiting": 0,
    "background": {"running": 0, "waiting": 0},
    "pooling": {"running": 0, "waiting": 0, "finished": 0},
    "transcription": {"running": 0, "waiting": 0, "finished": 0},
    "steps": 0,
    "errors": 0,
    "preemptions": 0,
    "tokens": {"prefilled": 0, "generated": 0},
    "speculation": {
        "method": "off",
        "configured": None,
        "problem": None,
        "steps": 0,
        "drafted": 0,
        "accepted": 0,
        "row_cost": 0.0,
        "model": {"cost": None, "steps": 0, "drafted": 0, "accepted": 0},
    },
    "sparse_prefill": {"method": "off", "waiting": 0, "prompts": 0, "tokens": 0, "left_out": 0},
    "memory": None,
    "load_check": None,
}


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with a model. `context`: turns bodies into Requests. `facts`: the versions and the device
    that /v1/status shows."""

    client: EngineClient
    context: ApiContext
    facts: Mapping[str, Any]


def list_tasks(model: ModelInfo) -> list[str]:
    """List the tasks of a model: `generate`, `transcribe`, `embed`, `score`."""
    tasks = [
        *(["generate"] if model.generates else []),
        *(["transcribe"] if model.speech is not None else []),
    ]
    return tasks if model.pooled is None else [*tasks, model.pooled.task]


def list_modalities(model: ModelInfo) -> list[str]:
    """List what requests to a model may have: `text`, `image`, `video`, `audio`."""
    return ["audio"] if model.speech is not None else ["text", *list_input_kinds(model)]


class EngineState:
    """The engine of one server. `client`, `context` and `model` raise NotReady until the model is loaded.

    `clock` returns seconds, for all times of the server.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started = clock()
        self.draining = False
        self.facts: Mapping[str, Any] = {"versions": None, "device": None}
        self._loaded: LoadedEngine | None = None
        self.active = ActiveCount()  # of requests that need the engine, before their bodies are read

    def attach(self, loaded: LoadedEngine) -> None:
        """Set the loaded engine. Requests are served from now on."""
        self._loaded, self.facts = loaded, loaded.facts or self.facts

    def start_draining(self) -> None:
        """Refuse requests from now on."""
        self.draining = True

    @property
    def client(self) -> EngineClient:
        return self._get_loaded().client

    @property
    def context(self) -> ApiContext:
        return self._get_loaded().context

    @property
    def model(self) -> ModelInfo:
        return self.context.model_info

    def find_model(self) -> ModelInfo | None:
        """Return the model; None until it is loaded."""
        return None if self._loaded is None else self._loaded.context.model_info

    def _get_loaded(self) -> LoadedEngine:
        if self._loaded is None:
            raise NotReady("the model is being loaded: try again soon")
        return self._loaded

    def describe_model(self) -> Mapping[str, Any] | None:
        """Describe the model for /v1/status; None until it is loaded."""
        if self._loaded is None:
            return None
        model = self.model
        return {
            "name": model.name,
            "context_length": model.context_length,
            "vision": model.vision,
            "input_modalities": list_modalities(model),
            "tasks": list_tasks(model),
        }

    def find_unavailability(self) -> MlxrunError | None:
        """Return the error of requests that need the engine; None if the engine can serve them."""
        if self._loaded is not None and self._loaded.client.dead_error is not None:
            return EngineDead(str(self._loaded.client.dead_error))
        if self._loaded is not None and (surprise := self._loaded.client.surprise):
            text = f"the load check, repeated, differs from the one that was kept: {surprise}"
            return EngineDead(f"{text}; start again: the model is then compared anew")
        if self.draining:
            return Draining()
        return None if self._loaded is not None else NotReady("the model is being loaded: try again soon")

    def read_cache_counts(self) -> Mapping[str, int]:
        """Return the counters of the prefix cache; empty until the model is loaded."""
        return self._loaded.client.read_cache_counters() if self._loaded is not None else {}

    def list_pinned_prefixes(self) -> Sequence[PinnedPrefix]:
        """Return the prefixes that are pinned in the prefix cache; none until the model is loaded."""
        return self._loaded.client.pinned_prefixes if self._loaded is not None else ()

    def read_stats(self) -> tuple[Mapping[str, Any], float | None]:
        """Return the engine's statistics, and their age in seconds; None until the model is loaded."""
        if self._loaded is None:
            return UNREAD_STATS, None
        stats = self._loaded.client.read_stats()
        return {**UNREAD_STATS, **stats.describe()}, stats.compute_age()


ENGINE = web.AppKey("engine", EngineState)


class ActiveCount:
    """Counts the blocks of `hold` that run now, waits for them, and ends them."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: dict[asyncio.Task[Any], Exception] = {}

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Count the block while it runs. A task has one block at a time."""
        task = asyncio.current_task()
        assert task is not None
        self.count += 1
        self._idle.clear()
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended or task.uncancel():  # it was cancelled by others, or by both
                raise
            raise self._ended[task] from None
        finally:
            self._tasks.discard(task)
            self._ended.pop(task, None)
            self.count -= 1
            if not self.count:
                self._idle.set()

    def end_all(self, error: Exception) -> None:
        """Make all blocks raise this error where they wait."""
        for task in self._tasks - self._ended.keys():
            self._ended[task] = error
            task.cancel()

    async def wait_idle(self) -> None:
        """Wait until no block runs."""
        await self._idle.wait()
