"""Jobs inside a server: checked, run, gone on with and cut short, on an engine that serves others too.

The same Session as `mlxrun batch`: same files, same journal, same records. Its requests run in the
background, nothing is shown, signals stay with the server, and lines may name no files of this machine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrun.batch.job_check import check_lines
from mlxrun.batch.job_file import BadLine, JobLine
from mlxrun.batch.job_run import JobOptions, JobRun, JobSetup
from mlxrun.batch.line_answerer import EngineClientInterface, Prepare, Preparer
from mlxrun.batch.line_index import Index
from mlxrun.batch.line_keys import LineKeys
from mlxrun.batch.progress import ProgressMeter
from mlxrun.batch.run_paths import Paths
from mlxrun.batch.stop_signals import Interrupted, StopSignals
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.errors import JobError, PromptTooLong, RequestError
from mlxrun.scheduler.request import Request, TokenEvent
from mlxrun.text.model_info import ModelInfo

if TYPE_CHECKING:
    from mlxrun.api.prepared import PreparedRequest
    from mlxrun.parsers.model_formats import ModelFormats

log = logging.getLogger(__name__)
PREPARED_AT_ONCE = 2  # lines; the worker threads are for those who wait for their answers
MOST_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class Counts:
    """How many lines there are, were answered, and failed."""

    total: int = 0
    done: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a line, or the whole file (`line` is None), cannot be run."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """What a file holds: how many lines, and the first MOST_PROBLEMS of its problems."""

    total: int
    problems: tuple[LineProblem, ...]


class SpareCapacityClient:
    """The server's engine as a job sees it: in the background, and it runs on when the job ends."""

    def __init__(self, client: EngineClientInterface) -> None:
        self._client = client

    @property
    def model_info(self) -> ModelInfo:
        return self._client.model_info

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        return self._client.generate(replace(request, background=True))

    def read_cache_counters(self) -> Mapping[str, int]:
        return self._client.read_cache_counters()

    async def close(self) -> None:
        """Nothing: the engine is the server's."""


class Bounded:
    """Prepares lines a few at a time, within the limits that the server has for live requests."""

    folder: Path | None = None

    def __init__(self, prepare: Prepare, limits: ServerSettings) -> None:
        self._prepare = prepare
        self._limits = limits
        self._slots = asyncio.Semaphore(PREPARED_AT_ONCE)

    async def __call__(self, line: JobLine) -> PreparedRequest:
        messages, most = line.body.get("messages"), self._limits.max_messages
        if isinstance(messages, list) and len(messages) > most:
            text = f"messages: {len(messages)} items are more than {most} (server.max_messages)"
            raise RequestError(text, param="messages")
        async with self._slots:
            prepared = await self._prepare(line)
        longest = max(len(request.prompt) for request in prepared.requests)
        limit = self._limits.max_prompt_tokens
        if limit is not None and longest > limit:
            raise PromptTooLong(f"the prompt has {longest} tokens; server.max_prompt_tokens is {limit}")
        return prepared


class JobService:
    """Runs job files on the engine of `client`, for whoever queues them. One folder a job, and one call a job
    at a time."""

    def __init__(
        self,
        client: EngineClientInterface,
        config: Config,
        config_hash: str,
        device: Callable[[], Mapping[str, Any]],
        formats: ModelFormats | None = None,
    ) -> None:
        self._client = SpareCapacityClient(client)
        self._config = config
        model_info = client.model_info
        lines_of = Preparer(model_info, config, None, formats=formats, max_tokens=None)
        prepare = Bounded(lines_of, config.server)
        lines = config.batch.concurrency or config.scheduler.max_running
        batch = replace(config.batch, on_invalid="skip", concurrency=lines)  # `check` sees to on_invalid
        self._setup = JobSetup(
            replace(config, batch=batch), config_hash, model_info, prepare, self._start, device
        )

    async def check(self, path: Path, url: str) -> CheckedJob:
        """Look at every line of a file whose lines are all to be for `url`; JobError if it cannot be read."""
        index = await asyncio.to_thread(Index, path, LineKeys("", None, 0), url)
        try:
            with suppress(JobError):  # raised if there are no lines
                await asyncio.to_thread(index.scan)
            if not len(index):
                return CheckedJob(0, (LineProblem("empty_file", "the file has no lines"),))
            problems = await asyncio.to_thread(_bad_lines, index)
            if self._config.batch.on_invalid == "fail" and not problems:
                problems = await self._refused(index)
            return CheckedJob(len(index), tuple(problems))
        finally:
            index.close()

    async def run(self, path: Path, told: Callable[[Counts], None]) -> Counts:
        """Run what is left of a job that was checked. `told` hears of progress several times a second.

        Cancelling keeps what is finished, and the next call goes on. EngineDead, or JobError if its files
        cannot be written.
        """
        return await self._session(path, JobOptions(), told)

    async def repair(self, path: Path) -> Counts:
        """Run nothing more: complete what a kill may have torn, and count it."""
        return await self._session(path, JobOptions(limit=0), lambda counts: None)

    def get_paths(self, path: Path) -> Paths:
        """Where the output, the errors and the manifest of a job are; any of them may not exist."""
        return Paths.of(path)

    async def _session(self, path: Path, options: JobOptions, told: Callable[[Counts], None]) -> Counts:
        def say(text: str) -> None:
            log.info("%s: %s", path.stem, text)

        paths = Paths.of(path)
        stop = StopSignals(say, process=False)
        session = JobRun(paths, self._setup, options, say, lambda meter: _Told(meter, told), stop)
        task = asyncio.create_task(session.run())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.request()
            with suppress(Interrupted):
                await task
            raise
        return await asyncio.to_thread(_counts, paths.manifest)

    async def _start(self) -> SpareCapacityClient:
        return self._client

    async def _refused(self, index: Index) -> list[LineProblem]:
        """What `batch.on_invalid: fail` asks for: bodies too are looked at before anything runs."""
        problems: list[LineProblem] = []

        def report(number: int, reason: str) -> None:
            if len(problems) < MOST_PROBLEMS:
                problems.append(LineProblem("invalid_request", reason, number))

        await check_lines(index, self._setup.prepare, len(index), report)
        return problems


class _Told:
    """A view that only passes counts on."""

    def __init__(self, meter: ProgressMeter, told: Callable[[Counts], None]) -> None:
        self._meter = meter
        self._told = told

    def update(self) -> None:
        self._told(Counts(self._meter.total, self._meter.done, self._meter.failed))

    def close(self) -> None:
        self.update()


def _bad_lines(index: Index) -> list[LineProblem]:
    """The first lines that are no requests."""
    problems: list[LineProblem] = []
    for position in range(len(index)):
        if not index.is_bad(position):
            continue
        line = index.load(position).line
        assert isinstance(line, BadLine)
        problems.append(LineProblem("invalid_line", line.reason, line.number, line.param))
        if len(problems) == MOST_PROBLEMS:
            break
    return problems


def _counts(manifest: Path) -> Counts:
    """What a run has written of itself."""
    found = json.loads(manifest.read_bytes())["counts"]
    return Counts(found["total"], found["done"], found["failed"])
