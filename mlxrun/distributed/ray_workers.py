"""Workers as actors of Ray: the driver's side of them, and the pool of a job's workers."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrun.batch.line_answerer import count_lines_at_once
from mlxrun.config.settings import Config
from mlxrun.distributed.line_worker import LINGER
from mlxrun.distributed.messages import SentLine, WorkerDied, WorkerFacts, WorkerRefused, WorkerReport
from mlxrun.distributed.pool import DispatchedPool
from mlxrun.distributed.ray_actor import LineActor, WorkerSpec, stamp_job
from mlxrun.distributed.ray_cluster import Placement, connect, is_node_alive, place_workers
from mlxrun.distributed.worker_checks import check_worker
from mlxrun.errors import EngineDead, JobError, MlxrunError

log = logging.getLogger(__name__)
WORKERS_A_LINGER = (
    20  # so many report each 10 ms at most; more of them wait longer, so that the driver keeps up
)
CLOSE_SECONDS = 20.0  # that engines may take to write their prefix caches


@dataclass(slots=True)
class RayCrew:
    """What the workers of a job have in common. `first`: the facts that all others are compared with."""

    ray: Any
    mixed: bool
    first: WorkerFacts | None = None


class RayWorker:
    """An actor; `describe` may be called before `start`, which loads the model."""

    def __init__(self, crew: RayCrew, spec: WorkerSpec, placement: Placement) -> None:
        self._crew = crew
        self._errors = importlib.import_module("ray.exceptions")
        options = {"max_restarts": 0, "max_concurrency": 64, **placement.options}
        self._actor = crew.ray.remote(LineActor).options(**options).remote(spec)
        self._facts: WorkerFacts | None = None

    async def describe(self) -> WorkerFacts:
        """What the worker is. WorkerRefused if it must not be used."""
        if self._facts is None:
            self._facts = _raise_refused(await self._call(self._actor.describe.remote()))
            self._crew.first = self._crew.first or self._facts
            found = check_worker(self._facts, self._crew.first, mixed=self._crew.mixed)
            if found:
                log.warning("worker on %s is accepted by --mixed: %s", self._facts.host, "; ".join(found))
            if not self._facts.shares_folder:
                log.warning(
                    "worker on %s does not see the job's folder: it refuses images that are paths, and its "
                    "prefix cache ends with it",
                    self._facts.host,
                )
        return self._facts

    async def start(self) -> WorkerFacts:
        facts = await self.describe()
        _raise_refused(await self._call(self._actor.load.remote()))
        log.info("worker on %s runs on %s", facts.host, facts.device.get("name"))
        return facts

    async def submit(self, lines: Sequence[SentLine]) -> None:
        await self._call(self._actor.submit.remote(lines))

    async def poll(self) -> WorkerReport:
        found: WorkerReport = await self._call(self._actor.poll.remote())
        return found

    async def withdraw(self, count: int) -> list[int]:
        found: list[int] = await self._call(self._actor.withdraw.remote(count))
        return found

    async def close(self) -> None:
        with suppress(WorkerDied, TimeoutError):
            if self._facts is not None:
                await asyncio.wait_for(self._call(self._actor.close.remote()), CLOSE_SECONDS)
        with suppress(Exception):
            self._crew.ray.kill(self._actor, no_restart=True)

    async def _call(self, reply: Awaitable[Any]) -> Any:
        """The reply of the actor. WorkerDied if there is none."""
        try:
            return await reply
        except self._errors.RayTaskError as error:  # a bug, and no line's fault
            raise EngineDead(f"a worker failed: {type(error.cause).__name__}: {error.cause}") from error
        except self._errors.RayError as error:
            node = "" if self._facts is None else self._facts.node
            gone = bool(node) and not await asyncio.to_thread(is_node_alive, self._crew.ray, node)
            text = [line.strip() for line in str(error).splitlines() if line.strip()] or [
                "no reason is known"
            ]
            raise WorkerDied(
                text[0] if len(text) == 1 else f"{text[0]} {text[-1]}", blameless=gone
            ) from error


def _raise_refused(found: Any) -> Any:
    """What an actor has returned, unless it is why the worker cannot be used."""
    if isinstance(found, MlxrunError):
        raise WorkerRefused(str(found)) from found
    return found


@dataclass(slots=True)
class RayJob:
    """The workers of one job on Ray: `connect`, then `describe_device`, then `pool` is what the job runs on.
    `configs`: of each worker by number where it has its own."""

    address: str
    config: Config
    configs: Mapping[int, Config]
    job: Path
    cache: Path
    mixed: bool
    pool: DispatchedPool = field(init=False)
    _makers: list[Callable[[], RayWorker]] = field(init=False)
    _first: list[RayWorker] = field(default_factory=list)
    _ray: Any = None

    def connect(self) -> int:
        """Connect to Ray; returns the number of workers. ConfigError if that is not possible."""
        self._ray = connect(self.address)
        places = place_workers(self._ray, self.config.workers)
        stamp = stamp_job(self.job)
        if stamp is None:
            raise JobError(f"{self.job}: cannot be read")
        crew = RayCrew(self._ray, self.mixed)
        linger = LINGER * max(1.0, len(places) / WORKERS_A_LINGER)

        def make_maker(number: int, place: Placement) -> Callable[[], RayWorker]:
            config = self.configs.get(number, self.config)
            spec = WorkerSpec(config, self.job.absolute(), stamp, self.cache.absolute(), linger)

            def make() -> RayWorker:
                return self._first.pop() if number == 0 and self._first else RayWorker(crew, spec, place)

            return make

        self._makers = [make_maker(number, place) for number, place in enumerate(places)]
        self.pool = DispatchedPool(self._makers, count_lines_at_once(self.config))
        return len(places)

    async def describe_first(self) -> WorkerFacts:
        """What the first worker is, whose process stays. WorkerRefused or WorkerDied's text as JobError."""
        worker = self._makers[0]()
        self._first.append(worker)
        try:
            return await worker.describe()
        except WorkerDied as error:
            raise JobError(f"the first worker could not be started: {error}") from error

    async def close(self) -> None:
        """Stop all workers, and leave Ray; a local one ends."""
        if self._ray is not None:
            for worker in self._first:
                await worker.close()
            await self.pool.close()
            await asyncio.to_thread(self._ray.shutdown)
