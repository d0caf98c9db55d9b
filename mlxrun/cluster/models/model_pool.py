"""Several models that share a machine's memory. Each is loaded when a request needs it, and unloaded when it
is idle or when another one needs its memory.

Requests of a model that is not loaded wait. The model whose request has waited longest is next. If it does
not fit beside the loaded ones, those that are idle are unloaded, the least recently used first. Busy ones go
on until they are idle, or for PATIENCE seconds. Then they get no new requests, finish those that they have,
and are unloaded. So a model that everybody uses delays another one by a bounded time, and both get turns.

Lines of batches wait for spare capacity. A model that only they want is loaded once those in its way have had
no request for PATIENCE seconds. Lines that run let a request's model have its turn at once.

This module is pure asyncio: `model_slot.ModelWorker` decides how a model is started and reached.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from mlxrun.cluster.models.model_slot import ModelSlot, ModelWorker, Record
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import (
    Draining,
    EngineDead,
    MlxrunError,
    ModelLoadError,
    NotFound,
    Overloaded,
    RequestError,
    TimedOut,
)
from mlxrun.core.field_errors import quote, suggest
from mlxrun.core.workers import finishes_before
from mlxrun.server.telemetry import OPERATIONS

log = logging.getLogger(__name__)
PATIENCE = 20.0  # seconds that a request waits at most before busy models are drained for it
STEADY_SECONDS = 60.0  # after which a model that dies has not failed to load
DEATH_SECONDS = 0.2  # in which the end of a process is seen after that of its connections
_TASKS_OF = {"embeddings": "embed", "rerank": "score", "transcription": "transcribe"}  # all others generate
# The task that a model must have for each path, as `list_tasks` names them.
TASKS = {path: _TASKS_OF.get(operation, "generate") for path, operation in OPERATIONS.items()}


class ModelPool:
    """Loads and unloads the models of `slots`, which may take `limit` bytes together; 0: any number. It
    stands where a server has its engine's client, and never dies. `max_waiting`: requests of one model that
    may wait; `timeout`: seconds that one may wait, None: any number."""

    def __init__(
        self,
        slots: Sequence[ModelSlot],
        limit: int,
        max_waiting: int,
        timeout: float | None,
        patience: float = PATIENCE,
    ) -> None:
        self.slots = list(slots)
        self.limit = limit
        self.dead_error: MlxrunError | None = None
        self.surprise = ""  # each process answers for its own load check
        self.is_draining = False
        self._max_waiting = max_waiting
        self._timeout = timeout
        self.patience = patience
        self.before_end: Callable[[ModelSlot], Awaitable[None]] | None = None  # called while it has its URL
        self.follow: Callable[[], AbstractContextManager[Record]] = lambda: nullcontext(lambda report: None)
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._planner: asyncio.Task[None] | None = None
        self._lives: dict[ModelSlot, asyncio.Task[None]] = {}
        self._names: dict[str, ModelSlot] = {}
        for slot in reversed(slots):
            names = () if slot.facts is None else slot.facts.names
            self._names |= dict.fromkeys((slot.name, *names), slot)

    async def start(self) -> None:
        """Load the pinned models, and all others when they are needed. MlxrunError if a pinned one fails."""
        self._planner = asyncio.create_task(self._plan())
        pinned = [slot for slot in self.slots if slot.pinned]
        for slot in pinned:
            self._load(slot)
        async with self._changed:
            await self._changed.wait_for(lambda: all(slot.state != "loading" for slot in pinned))
        for slot in pinned:
            if slot.error is not None:
                raise slot.error

    async def wait_until_dead(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Unload all models."""
        tasks = [*self._lives.values(), *([] if self._planner is None else [self._planner])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Requests

    def find(self, name: str) -> ModelSlot:
        """Find a model by one of its names. NotFound with the nearest one."""
        found = self._names.get(name)
        if found is None:
            near = suggest(name, self._names)
            names = dict.fromkeys(name for slot in self.slots for name in slot.listed_names)
            text = f"model: {quote(name)} is not served here{near}; the names are {', '.join(names)}"
            raise NotFound(text, param="model", code="model_not_found")
        return found

    def find_first(self, path: str) -> ModelSlot:
        """Find the model of requests and lines that name none: the first one with the task of their path."""
        task = TASKS.get(path, "generate")
        known = (slot for slot in self.slots if slot.facts is not None and task in slot.facts.tasks)
        return next(known, self.slots[0])

    def has(self, name: str) -> bool:
        """Whether a model has this name."""
        return name in self._names

    @contextmanager
    def hold(self, slot: ModelSlot) -> Iterator[None]:
        """Count a request of a loaded model while the block runs: it stays loaded so long. Call it as soon as
        `wait_loaded` has returned."""
        loop = asyncio.get_running_loop()
        slot.used = loop.time()
        try:
            with slot.active.hold():
                yield
        finally:
            slot.used = loop.time()
            self._wake.set()

    @contextmanager
    def hold_line(self, slot: ModelSlot) -> Iterator[None]:
        """The same for a line of a batch, which makes room at once for a model that a request waits for."""
        try:
            with slot.active.hold(), slot.lines.hold():
                yield
        finally:
            self._wake.set()

    async def wait_loaded(self, slot: ModelSlot, *, is_line: bool = False) -> None:
        """Wait until a model is loaded. Overloaded if too many requests wait for it, TimedOut if it is not
        loaded in time, ModelLoadError if it cannot be. Draining if the server stops before. Any number of
        lines of batches may wait, for any time."""
        if slot.state == "ready":
            return
        began = asyncio.get_running_loop().time()
        self._check_failure(slot, began)
        waiting = slot.waiting_lines if is_line else slot.waiting
        if not is_line and len(waiting) >= self._max_waiting:
            raise Overloaded(f"{slot.name}: {self._max_waiting} requests wait for it (scheduler.max_queue)")
        task = asyncio.current_task()
        assert task is not None
        waiting[task] = began
        self._wake.set()
        try:
            async with asyncio.timeout(None if is_line else self._timeout), self._changed:
                await self._changed.wait_for(
                    lambda: self.is_draining or slot.state == "ready" or slot.failed >= began
                )
        except TimeoutError:
            text = f"{slot.name} was not loaded within {self._timeout:g} s (server.request_timeout)"
            raise TimedOut(text) from None
        finally:
            del waiting[task]
            self._wake.set()
        if self.is_draining:
            raise Draining()
        if slot.error is not None:  # it is None while the model is loaded
            raise slot.error

    def _check_failure(self, slot: ModelSlot, now: float) -> None:
        """Raise the error of a model that has just failed, also while its process is being closed: loading it
        again would only take memory and time."""
        left = slot.compute_backoff(now)
        if left > 0:
            error = ModelLoadError(f"{slot.name}: {slot.error} (it is tried again in {math.ceil(left)} s)")
            error.retry_after = math.ceil(left)
            raise error

    # What operators ask for

    def drain_all(self) -> None:
        """Have all loaded models finish their requests, which get no new ones, and end. Nothing is loaded any
        more, and requests that wait for that are refused."""
        self.is_draining = True
        self._wake.set()
        for slot in self.slots:
            if slot.worker is not None:
                slot.worker.start_draining()

    async def unload(self, slot: ModelSlot) -> None:
        """Unload a model once its requests have ended. It is loaded again when a request needs it.
        RequestError if it is pinned."""
        if slot.pinned:
            raise RequestError(f"{slot.name} is pinned (models.{slot.name}.pinned)", param="model")
        async with self._changed:
            await self._changed.wait_for(lambda: slot.state != "loading")
        if slot.state == "ready":
            self._drain(slot)
        async with self._changed:
            await self._changed.wait_for(lambda: slot.state not in ("draining", "unloading"))

    # Memory

    async def _plan(self) -> None:
        """Decide what to load and unload, whenever something has changed or a time has come, until the server
        stops."""
        loop = asyncio.get_running_loop()
        while not self.is_draining:
            self._wake.clear()
            pause = self._decide(loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
        await self._announce()

    def _decide(self, now: float) -> float | None:
        """Start what is due, and return the seconds until something else may be; None: until something has
        changed."""
        pauses = [pause for slot in self.slots if (pause := self._expire(slot, now)) is not None]
        pauses += [left for slot in self.slots if slot.pinned and (left := slot.compute_backoff(now)) > 0]
        wanted = [slot for slot in self.slots if slot.state == "unloaded" and slot.is_wanted(now)]
        for slot in sorted(wanted, key=lambda slot: (not slot.is_urgent, slot.oldest)):
            pause = self._make_room(slot, now)
            if pause is not None:  # the next ones wait behind it, or it would wait for ever
                pauses.append(pause)
                break
            self._load(slot)
        return min(pauses, default=None)

    def _expire(self, slot: ModelSlot, now: float) -> float | None:
        """Unload a model that has been idle for its time. Returns the seconds until that, if it is idle."""
        left = slot.compute_lifetime(now)
        if slot.state != "ready" or slot.running or slot.waiting or slot.waiting_lines:
            return None
        if left is None or left > 0:
            return left
        log.info("%s has been idle for %g s", slot.name, slot.keep_alive)
        self._drain(slot)
        return None

    def _make_room(self, wanted: ModelSlot, now: float) -> float | None:
        """None if a model fits beside those that are loaded. Otherwise unload others, and return after how
        many seconds to look again at the latest."""
        if not self.limit:
            return None
        missing = wanted.memory + sum(slot.memory for slot in self.slots if slot.is_loaded) - self.limit
        if missing <= 0:
            return None
        missing -= sum(slot.memory for slot in self.slots if slot.state in ("draining", "unloading"))
        removable = [slot for slot in self.slots if slot.state == "ready" and not slot.pinned]
        pause = self.patience
        for slot in sorted(removable, key=lambda slot: (slot.running > 0, slot.used)):
            if missing <= 0:
                break
            left = self._compute_turn(slot, wanted) - now
            if left > 0:
                pause = min(pause, left)
                continue
            self._drain(slot)
            missing -= slot.memory
        return pause

    def _compute_turn(self, slot: ModelSlot, wanted: ModelSlot) -> float:
        """When a loaded model makes room for another one at the latest."""
        if wanted.is_urgent:
            return max(wanted.oldest, slot.since) + self.patience if slot.is_busy else 0.0
        return math.inf if slot.running else max(slot.used, slot.since) + self.patience

    def _load(self, slot: ModelSlot) -> None:
        slot.to_end.clear()
        self._set_state(slot, "loading")
        self._lives[slot] = asyncio.create_task(self._follow_life(slot))

    def _drain(self, slot: ModelSlot) -> None:
        """Give a model no more requests. It is unloaded once it has none."""
        self._set_state(slot, "draining")
        slot.to_end.set()

    def _set_state(self, slot: ModelSlot, state: Any) -> None:
        slot.state, slot.since = state, asyncio.get_running_loop().time()

    async def _announce(self) -> None:
        self._wake.set()
        async with self._changed:
            self._changed.notify_all()

    # The life of a model

    async def _follow_life(self, slot: ModelSlot) -> None:
        with self.follow() as record:
            await self._live(slot, slot.make(record))

    async def _live(self, slot: ModelSlot, worker: ModelWorker) -> None:
        """Load a model, serve, and unload it, unless it dies before."""
        keep_alive = slot.keep_alive
        slot.worker = worker
        try:
            log.info("loading %s (%s)", slot.name, format_rounded(slot.memory))
            slot.url = await worker.start()
            slot.loads += 1
            slot.error = None
            self._set_state(slot, "ready")
            await self._announce()
            await self._serve(slot, worker)
        except Exception as error:
            if self.is_draining:  # which has ended it
                return
            log.error("%s: %s", slot.name, error, exc_info=not isinstance(error, (MlxrunError, OSError)))
            if not isinstance(error, (ModelLoadError, EngineDead)):  # no fault of a request
                error = ModelLoadError(str(error))
            now = asyncio.get_running_loop().time()
            is_steady = slot.state in ("ready", "draining") and now - slot.since > STEADY_SECONDS
            slot.error, slot.failed = error, now
            slot.failures = 0 if is_steady else slot.failures + 1
        finally:
            if slot.url and self.before_end is not None:
                await self.before_end(slot)
            slot.url, slot.keep_alive = "", keep_alive  # a request may have changed it
            self._set_state(slot, "unloading")
            await worker.close()
            slot.worker = None
            self._set_state(slot, "unloaded")
            await self._announce()

    async def _serve(self, slot: ModelSlot, worker: ModelWorker) -> None:
        """Wait until a model is to be unloaded and its requests have ended. EngineDead if it dies before."""
        dead = asyncio.create_task(worker.wait_dead())
        try:
            await finishes_before(dead, _wait_drained(slot))
            # A death ends its requests too, and so may look as if it had been drained.
            await asyncio.wait((dead,), timeout=0.0 if self.is_draining else DEATH_SECONDS)
            if dead.done() and not self.is_draining:
                raise EngineDead(f"the model has died: {dead.result()}")
            slot.failures = 0
            log.info("unloading %s", slot.name)
        finally:
            dead.cancel()


async def _wait_drained(slot: ModelSlot) -> None:
    await slot.to_end.wait()
    await slot.active.wait_idle()
