"""Workers as actors of Ray: the driver's side of them, and the pool of a job's workers.

Workers without the job's folder get media with the line that names their paths. The files
are read as the line would read them: below `media.roots`, and not larger than allowed. A path that cannot be
read stays, and the worker refuses it by name.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxrun.api.text.media.media_kinds import AUDIO, IMAGE, PDF, VIDEO, Medium
from mlxrun.api.text.media.media_sources import MediaSources
from mlxrun.cluster.line_worker import LINGER
from mlxrun.cluster.messages import SentLine, WorkerDied, WorkerFacts, WorkerReport
from mlxrun.cluster.pool import DispatchedPool
from mlxrun.cluster.ray.ray_actor import LineActor, WorkerSpec
from mlxrun.cluster.ray.ray_client import RayActor, RayCrew, leave_ray, make_watch, raise_refused
from mlxrun.cluster.ray.ray_cluster import connect, place_workers
from mlxrun.config.settings import Config
from mlxrun.core.errors import JobError, MediaError
from mlxrun.core.text_files import stamp_file
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.lines.line_keys import find_local_images, is_local_path
from mlxrun.jobs.run.line_answerer import count_lines_at_once

log = logging.getLogger(__name__)
# So many workers report each 10 ms at most; more of them wait longer, so that the driver keeps up
WORKERS_A_LINGER = 20


class RayWorker(RayActor):
    """An actor that answers lines. `describe` may be called before `start`, which loads the model."""

    def __init__(self, crew: RayCrew, spec: WorkerSpec, options: Mapping[str, Any]) -> None:
        super().__init__(crew, LineActor, spec, options)
        self._media: MediaSources | None = MediaSources(spec.config.media, spec.job.parent)

    async def start(self) -> WorkerFacts:
        facts = await self.describe()
        if facts.shares_folder:
            self._media = None
        else:
            text = "worker on %s does not see the job's folder: its prefix cache ends with it"
            log.warning(text, facts.host)
        raise_refused(await self.ask("load"))
        log.info("worker on %s runs on %s", facts.host, facts.device.get("name"))
        return facts

    async def submit(self, lines: Sequence[SentLine]) -> None:
        if self._media is not None:
            media = self._media
            lines = await asyncio.to_thread(
                lambda: [replace(sent, line=inline_media(sent.line, media)) for sent in lines]
            )
        await self.ask("submit", lines)

    async def poll(self) -> WorkerReport:
        report: WorkerReport = await self.ask("poll")
        return report

    async def withdraw(self, count: int) -> list[int]:
        found: list[int] = await self.ask("withdraw", count)
        return found


@dataclass(slots=True)
class RayJob:
    """The workers of one job on Ray. Call `connect`, then `describe_first`; then the job runs on `pool`.
    `configs`: a worker's own config by its number, if it has one."""

    address: str
    config: Config
    configs: Mapping[int, Config]
    job: Path
    cache: Path
    mixed: bool
    pool: DispatchedPool = field(init=False)
    _makers: list[Callable[[], RayWorker]] = field(init=False)
    _first: list[RayWorker] = field(default_factory=list)
    _crew: RayCrew | None = None

    def connect(self) -> int:
        """Connect to Ray, and return the number of workers. ConfigError if that fails, JobError if the job
        file cannot be read."""
        ray = connect(self.address)
        places = place_workers(ray, self.config.workers)
        stamp = stamp_file(self.job)
        if stamp is None:
            raise JobError(f"{self.job}: cannot be read")
        crew = self._crew = RayCrew(ray, make_watch(ray), self.mixed)
        linger = LINGER * max(1.0, len(places) / WORKERS_A_LINGER)

        def make_maker(number: int, place: Mapping[str, Any]) -> Callable[[], RayWorker]:
            config = self.configs.get(number, self.config)
            spec = WorkerSpec(config, self.job.absolute(), stamp, self.cache.absolute(), linger)

            def make() -> RayWorker:
                return self._first.pop() if number == 0 and self._first else RayWorker(crew, spec, place)

            return make

        self._makers = [make_maker(number, place) for number, place in enumerate(places)]
        self.pool = DispatchedPool(self._makers, count_lines_at_once(self.config))
        return len(places)

    async def describe_first(self, here: Mapping[str, Any]) -> WorkerFacts:
        """Describe the first worker, whose process stays, and compare it with the driver (`RayCrew.here`).
        WorkerRefused if it cannot be used, JobError if it dies."""
        assert self._crew is not None
        self._crew.here = here
        worker = self._makers[0]()
        self._first.append(worker)
        try:
            return await worker.describe()
        except WorkerDied as error:
            raise JobError(f"the first worker could not be started: {error}") from error

    async def close(self) -> None:
        """Stop all workers, and leave Ray; a local Ray ends."""
        if self._crew is not None:
            for worker in self._first:
                await worker.close()
            await self.pool.close()
            await leave_ray(self._crew.ray, self._crew.watch)


_FIELDS = ("messages", "input")
_IMAGE, _PDF, _VIDEO = (IMAGE, "image/png"), (PDF, "application/pdf"), (VIDEO, "video/mp4")
_AUDIO = (AUDIO, "audio/wav")
_KEYS = {  # of dicts that name a file, in the places that `find_local_images` knows
    "image_url": _IMAGE,
    "video_url": _VIDEO,
    "audio_url": _AUDIO,
    "file_data": _PDF,
    "file_url": _PDF,
}


def inline_media(line: JobLine, sources: MediaSources) -> JobLine:
    """Return the line with data URLs in place of paths; the same line if it has none. This blocks while files
    are read."""
    if not any(True for _ in find_local_images(line.body)):
        return line

    def read(url: str, kind: tuple[Medium, str]) -> str:
        if not is_local_path(url):
            return url
        try:
            data = sources.read_local(url, kind[0])
        except MediaError:
            return url
        return f"data:{kind[1]};base64,{base64.b64encode(data).decode()}"

    body = {name: _replace(value, read) if name in _FIELDS else value for name, value in line.body.items()}
    if isinstance(body.get("file"), str):
        body["file"] = read(body["file"], _AUDIO)
    return replace(line, body=body)


def _replace(value: Any, read: Callable[[str, tuple[Medium, str]], str]) -> Any:
    """A copy of messages or items in which the media are those that `read` returns."""
    if isinstance(value, list):
        return [_replace(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    found = dict(value)
    for name, kind in _KEYS.items():
        given = value.get(name)
        if isinstance(given, str):
            found[name] = read(given, kind)
        elif isinstance(given, dict) and isinstance(given.get("url"), str):
            found[name] = {**given, "url": read(given["url"], kind)}
    for name in ("file", "content", "output"):
        if isinstance(value.get(name), (list, dict)):
            found[name] = _replace(value[name], read)
    return found
