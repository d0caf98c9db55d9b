"""The workers of a server: each serves on an engine of its own. The pool keeps one in each place, and
restarts them.

A request belongs to one worker from `reserve` on. A worker that is to be restarted gets no new requests, and
ends once it has none. This module is pure asyncio: ServerWorker decides how a worker is started and reached.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mlxrun.cluster.messages import RayEnded, WorkerDied, WorkerFacts, WorkerRefused
from mlxrun.cluster.servers.prefix_router import PrefixRouter
from mlxrun.core.errors import EngineDead, MlxrunError, NotReady
from mlxrun.core.workers import finishes_before
from mlxrun.server.engine_state import ActiveCount

log = logging.getLogger(__name__)
MOST_STARTS = 5  # workers in a row that end within STEADY_SECONDS; then their place stays empty
STEADY_SECONDS = 60.0
BACKOFF = 1.0  # seconds before the second of them; each further wait is twice as long


class ServerWorker(Protocol):
    """One worker as the pool sees it. Its methods raise WorkerDied if it has ended."""

    async def start(self) -> tuple[WorkerFacts, str]:
        """Load the model, serve, and return the URL. WorkerRefused if the worker must not be used."""

    async def wait_dead(self) -> str:
        """Wait until the engine has died, and return why."""

    async def drain(self) -> None:
        """Wait until nothing runs in its background any more, within its own time limit."""

    async def close(self) -> None:
        """Stop it. This raises nothing."""


@dataclass(slots=True, eq=False)
class ServerSlot:
    """The place of a worker, and the worker that is in it now."""

    number: int
    make: Callable[[], ServerWorker]
    state: Literal["starting", "ready", "draining", "lost", "refused"] = "starting"
    worker: ServerWorker | None = None
    facts: WorkerFacts | None = None
    url: str = ""
    deaths: int = 0
    reason: str = ""
    active: ActiveCount = field(default_factory=ActiveCount)  # of its requests
    to_end: asyncio.Event = field(default_factory=asyncio.Event)  # set while it is to be restarted

    @property
    def running(self) -> int:
        """The number of its requests."""
        return self.active.count

    @property
    def label(self) -> str:
        """What metrics call it."""
        return str(self.number)

    @property
    def load(self) -> float:
        return self.running / (1 if self.facts is None else self.facts.rows)

    def describe(self) -> dict[str, Any]:
        """Describe the worker for /v1/status."""
        found: dict[str, Any] = {"worker": self.number, "state": self.state, "running": self.running}
        found |= {"deaths": self.deaths, **({"reason": self.reason} if self.reason else {})}
        if self.facts is not None:
            facts = self.facts
            found |= {"host": facts.host, "process": facts.process, "visible": facts.visible}
        return found


class ServerPool:
    """Keeps one worker of each of `makers` running. It stands where a server has its engine's client.
    `dead_error`: set once no worker can be started any more; `backoff`: seconds, see BACKOFF."""

    def __init__(self, makers: Sequence[Callable[[], ServerWorker]], backoff: float = BACKOFF) -> None:
        self.slots = [ServerSlot(number, make) for number, make in enumerate(makers)]
        self.router = PrefixRouter()
        self.dead_error: MlxrunError | None = None
        self.surprise = ""  # each process answers for its own load check
        self._backoff = backoff
        self._dead = asyncio.Event()
        self._changed = asyncio.Condition()
        self._restarting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers, and return once one of them is ready. MlxrunError if none will be."""
        self._tasks = [asyncio.create_task(self._keep(slot)) for slot in self.slots]
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_ready or self.dead_error is not None)
        if self.dead_error is not None:
            raise self.dead_error

    @property
    def is_ready(self) -> bool:
        """Whether a worker takes requests."""
        return any(slot.state == "ready" for slot in self.slots)

    @property
    def is_restarting(self) -> bool:
        return self._restarting is not None and not self._restarting.done()

    async def wait_until_dead(self) -> None:
        await self._dead.wait()

    async def close(self) -> None:
        """Stop all workers."""
        tasks = [*self._tasks, *([self._restarting] if self._restarting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Requests

    async def choose(self, prefixes: Sequence[bytes], tried: set[ServerSlot]) -> ServerSlot | None:
        """Choose the worker for a request, among those that were not tried; None if all were. While workers
        are restarted, a request waits for the next one. NotReady if no worker is ready."""
        if not self.is_ready and self.is_restarting:
            async with self._changed:
                await self._changed.wait_for(lambda: self.is_ready or not self.is_restarting)
        ready = [slot for slot in self.slots if slot.state == "ready"]
        if not ready and not tried:
            raise NotReady("no worker is ready: try again soon")
        loads = {slot.number: slot.load for slot in ready if slot not in tried}
        return self.slots[self.router.choose(prefixes, loads)] if loads else None

    @contextmanager
    def reserve(self, slot: ServerSlot, prefixes: Sequence[bytes] = ()) -> Iterator[None]:
        """Count a request of a worker while the block runs."""
        self.router.record(prefixes, slot.number)
        with slot.active.hold():
            yield

    # Workers

    def restart_soon(self, patience: float) -> None:
        """Restart the workers one after the other, each once it has no requests, or after `patience`
        seconds."""
        if self.is_restarting:
            log.info("the workers are being restarted already")
        else:
            log.info("the workers are restarted, one after the other")
            self._restarting = asyncio.create_task(self._restart(patience))

    async def _restart(self, patience: float) -> None:
        try:
            for slot in self.slots:
                if slot.state != "ready":
                    continue
                await self._drain(slot, patience)
                slot.to_end.set()
                if not await self._wait_started(slot):
                    log.error("worker %d did not start again; the others stay as they are", slot.number)
                    return
            log.info("all workers were restarted")
        finally:
            asyncio.get_running_loop().call_soon(asyncio.ensure_future, self._announce())

    async def _drain(self, slot: ServerSlot, patience: float) -> None:
        """Give a worker no more requests, and wait until it has none."""
        slot.state = "draining"
        try:
            if slot.running:
                async with asyncio.timeout(patience):
                    await slot.active.wait_idle()
            if slot.worker is not None:
                await slot.worker.drain()
        except TimeoutError:
            log.warning("worker %d is restarted with %d requests", slot.number, slot.running)
        except (WorkerDied, EngineDead):
            pass  # `_keep` says so

    async def _wait_started(self, slot: ServerSlot) -> bool:
        """Wait for a worker that is to be restarted, and return whether it is ready; its place may stay
        empty."""
        async with self._changed:
            await self._changed.wait_for(lambda: slot.state in ("ready", "lost", "refused"))
        return slot.state == "ready"

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _set_state(self, slot: ServerSlot, state: Any, reason: str = "") -> None:
        slot.state, slot.reason = state, reason
        await self._announce()

    async def _keep(self, slot: ServerSlot) -> None:
        """Have a worker in a slot until none stays alive there."""
        failures, state = 0, "lost"
        while failures < MOST_STARTS:
            if failures:
                await asyncio.sleep(self._backoff * 2 ** (failures - 1))
            began = time.monotonic()
            try:
                await self._serve(slot)
                failures = 0  # it was to be restarted
            except WorkerRefused as error:
                slot.reason, state = str(error), "refused"
                log.warning("worker %d is not used: %s", slot.number, error)
                break
            except RayEnded as error:
                await self._set_state(slot, "lost", str(error))
                await self._end(error)
                return
            except (WorkerDied, MlxrunError) as error:
                slot.deaths += 1
                slot.reason = str(error)
                failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1
                log.warning("worker %d died: %s", slot.number, error)
        await self._set_state(slot, state, slot.reason)
        if all(each.state in ("lost", "refused") for each in self.slots):
            reasons = "; ".join(f"worker {each.number}: {each.reason}" for each in self.slots)
            refused = all(each.state == "refused" for each in self.slots)
            await self._end((WorkerRefused if refused else EngineDead)(f"no worker is left ({reasons})"))

    async def _end(self, error: MlxrunError) -> None:
        self.dead_error = error
        self._dead.set()
        await self._announce()

    async def _serve(self, slot: ServerSlot) -> None:
        """Run one worker until it dies (WorkerDied) or is to be restarted."""
        slot.to_end.clear()
        slot.state, slot.worker = "starting", slot.make()
        try:
            slot.facts, slot.url = await slot.worker.start()
            await self._set_state(slot, "ready")
            log.info("worker %d is ready on %s", slot.number, slot.facts.host)
            dead = asyncio.ensure_future(slot.worker.wait_dead())
            try:
                if await finishes_before(dead, slot.to_end.wait()) and not slot.to_end.is_set():
                    raise WorkerDied(dead.result())
            finally:
                dead.cancel()
        finally:
            slot.state, slot.url, worker, slot.worker = "starting", "", slot.worker, None
            self.router.remove_worker(slot.number)
            if worker is not None:
                await worker.close()
