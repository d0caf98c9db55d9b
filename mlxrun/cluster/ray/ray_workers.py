"""Workers as actors of Ray: the driver's side of them, and the pool of a job's workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxrun.api.text.media.media_sources import MediaSources
from mlxrun.cluster.line_media import inline_media
from mlxrun.cluster.line_worker import LINGER
from mlxrun.cluster.messages import SentLine, WorkerDied, WorkerFacts, WorkerReport
from mlxrun.cluster.pool import DispatchedPool
from mlxrun.cluster.ray.ray_actor import LineActor, WorkerSpec, stamp_job
from mlxrun.cluster.ray.ray_client import RayActor, RayCrew, raise_refused
from mlxrun.cluster.ray.ray_cluster import Placement, connect, place_workers
from mlxrun.cluster.ray.ray_watch import RayWatch, leave_ray, make_watch
from mlxrun.config.settings import Config
from mlxrun.core.errors import JobError
from mlxrun.jobs.run.line_answerer import count_lines_at_once

log = logging.getLogger(__name__)
WORKERS_A_LINGER = (
    20  # so many report each 10 ms at most; more of them wait longer, so that the driver keeps up
)


class RayWorker:
    """An actor that answers lines; `describe` may be called before `start`, which loads the model."""

    def __init__(self, crew: RayCrew, spec: WorkerSpec, placement: Placement) -> None:
        self._remote = RayActor(crew, LineActor, spec, placement)
        self._media: MediaSources | None = MediaSources(spec.config.media, spec.job.parent)

    async def describe(self) -> WorkerFacts:
        """What the worker is. WorkerRefused if it must not be used."""
        return await self._remote.describe()

    async def start(self) -> WorkerFacts:
        facts = await self.describe()
        if facts.shares_folder:
            self._media = None
        else:
            text = "worker on %s does not see the job's folder: its prefix cache ends with it"
            log.warning(text, facts.host)
        raise_refused(await self._call("load"))
        log.info("worker on %s runs on %s", facts.host, facts.device.get("name"))
        return facts

    async def submit(self, lines: Sequence[SentLine]) -> None:
        if self._media is not None:
            lines = await asyncio.to_thread(_inline_media, lines, self._media)
        await self._call("submit", lines)

    async def poll(self) -> WorkerReport:
        found: WorkerReport = await self._call("poll")
        return found

    async def withdraw(self, count: int) -> list[int]:
        found: list[int] = await self._call("withdraw", count)
        return found

    async def close(self) -> None:
        await self._remote.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._remote.call(getattr(self._remote.actor, method).remote(*arguments))


def _inline_media(lines: Sequence[SentLine], media: MediaSources) -> list[SentLine]:
    return [replace(sent, line=inline_media(sent.line, media)) for sent in lines]


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
    _watch: RayWatch = field(init=False)

    def connect(self) -> int:
        """Connect to Ray; returns the number of workers. ConfigError if that is not possible."""
        self._ray = connect(self.address)
        places = place_workers(self._ray, self.config.workers)
        stamp = stamp_job(self.job)
        if stamp is None:
            raise JobError(f"{self.job}: cannot be read")
        self._watch = make_watch(self._ray)
        crew = RayCrew(self._ray, self._watch, self.mixed)
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
            await leave_ray(self._ray, self._watch)
