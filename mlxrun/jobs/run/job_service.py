"""Jobs inside a server: validates, runs and stops them on the engine that also serves live requests.

A job runs as with `mlxrun batch`: same files, journal and records. But its requests run in the background, it
shows no progress, it leaves signals to the server, and its lines may name no local files.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.prepared import check_message_counts, check_prompt_lengths
from mlxrun.api.stored_files import ReadFile
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.settings import Config
from mlxrun.core.errors import JobError
from mlxrun.core.field_errors import reject_unsupported
from mlxrun.core.workers import wait_until_done
from mlxrun.jobs.lines.job_check import Report, check_lines
from mlxrun.jobs.lines.job_file import URLS as URLS
from mlxrun.jobs.lines.job_file import BadLine, JobLine, WrongEncoding
from mlxrun.jobs.lines.line_index import LineIndex
from mlxrun.jobs.lines.line_keys import LineKeys
from mlxrun.jobs.records.output_records import BatchStamp as BatchStamp
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.job_run import JobOptions, JobRun, JobSetup
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.jobs.run.line_bodies import Body
from mlxrun.jobs.run.progress import ProgressMeter, ProgressView
from mlxrun.jobs.run.stop_signals import Interrupted, StopSignals

if TYPE_CHECKING:
    from mlxrun.engine.client import EngineClient

log = logging.getLogger(__name__)
PREPARED_AT_ONCE = 2  # lines; the other worker threads are for live requests
MOST_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class JobCounts:
    """Numbers of lines: all, answered, failed."""

    total: int = 0
    done: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class LineProblem:
    """The reason why a line, or the whole file (`line` is None), cannot be run."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """The number of lines of a file, and up to MOST_PROBLEMS of its problems. Without problems the file can
    be run."""

    total: int
    problems: tuple[LineProblem, ...]


class ServerLinePreparer(LinePreparer):
    """Prepares at most PREPARED_AT_ONCE lines at once, within the server's limits for live requests."""

    def __init__(self, model_info: ModelInfo, config: Config, formats: ModelFormats | None) -> None:
        super().__init__(model_info, config, None, formats=formats, max_tokens=None)
        self._limits = config.server
        self._slots = asyncio.Semaphore(PREPARED_AT_ONCE)

    async def prepare(self, line: JobLine, key: str = "") -> Body:
        if line.agent is not None:
            reject_unsupported("agent", "a server calls no tools of clients; `mlxrun batch` does")
        check_message_counts(line.body, self._limits.max_messages)
        async with self._slots:
            body = await super().prepare(line, key)
        check_prompt_lengths(body.prepared, self._limits.max_prompt_tokens)
        return body


class JobService:
    """Runs job files on one setup. Each job has a folder of its own, and one call at a time."""

    def __init__(self, setup: JobSetup) -> None:
        config = setup.config
        lines = config.batch.concurrency or config.scheduler.max_running
        batch = replace(config.batch, on_invalid="skip", concurrency=lines)
        self._is_strict = config.batch.on_invalid == "fail"  # `check` applies it
        self._setup = replace(setup, config=replace(config, batch=batch))

    @classmethod
    def for_engine(
        cls,
        client: EngineClient,
        config: Config,
        config_hash: str,
        device: Callable[[], Mapping[str, Any]],
        formats: ModelFormats | None = None,
    ) -> Self:
        """Make a service that runs jobs on the engine of `client`."""

        async def get_client() -> EngineClient:
            return client

        preparer = ServerLinePreparer(client.model_info, config, formats)
        return cls(JobSetup(config, config_hash, client.model_info, preparer, get_client, device, True))

    async def make_setup(self, stamp: BatchStamp | None, read_file: ReadFile | None) -> JobSetup:
        """Make the setup of one job. `stamp`, `read_file`: as for `run`."""
        return replace(self._setup, preparer=self._setup.preparer.for_batch(stamp, read_file))

    async def check_requests(self, index: LineIndex, read_file: ReadFile | None, report: Report) -> None:
        """Report each line whose request is refused, with its number."""
        await check_lines(index, (await self.make_setup(None, read_file)).preparer, len(index), report)

    async def check(self, path: Path, url: str, read_file: ReadFile | None = None) -> CheckedJob:
        """Validate a file whose lines must all be for `url`. JobError if it cannot be read. `read_file`:
        reads the files that lines may name. Lines that can fail alone are no problem unless
        `batch.on_invalid` is `fail`."""
        # Opened here: what a thread opens for a call that is cancelled stays open.
        try:
            index = LineIndex(path, LineKeys("", None, 0), url)
        except WrongEncoding as error:
            return CheckedJob(0, (LineProblem("invalid_encoding", error.reason),))
        try:
            with suppress(JobError):  # raised if there are no lines
                await asyncio.to_thread(index.scan)
            if not len(index):
                return CheckedJob(0, (LineProblem("empty_file", "the file has no lines"),))
            problems = await asyncio.to_thread(_list_bad_lines, index, self._is_strict)
            if self._is_strict and not problems:

                def report(number: int, reason: str) -> None:
                    if len(problems) < MOST_PROBLEMS:
                        problems.append(LineProblem("invalid_request", reason, number))

                await self.check_requests(index, read_file, report)
            return CheckedJob(len(index), tuple(problems))
        finally:
            index.close()

    async def run(
        self,
        path: Path,
        on_progress: Callable[[JobCounts], None],
        read_file: ReadFile | None = None,
        stamp: BatchStamp | None = None,
    ) -> JobCounts:
        """Run the rest of a validated job. `on_progress` is called several times a second; `read_file` reads
        the files that lines may name. With another `stamp`, finished lines would run again. Cancelling keeps
        finished lines; the next call continues. EngineDead if the engine ends, JobError if the job's files
        cannot be written."""
        setup = await self.make_setup(stamp, read_file)
        return await self._run_job(path, setup, JobOptions(), on_progress)

    async def repair(self, path: Path, stamp: BatchStamp | None = None) -> JobCounts:
        """Complete files that a kill left incomplete, and count their lines; run no lines. `stamp`: the stamp
        of the run."""
        setup = await self.make_setup(stamp, None)
        return await self._run_job(path, setup, JobOptions(limit=0), lambda counts: None)

    async def _run_job(
        self, path: Path, setup: JobSetup, options: JobOptions, on_progress: Callable[[JobCounts], None]
    ) -> JobCounts:
        def say(text: str) -> None:
            log.info("%s: %s", path.stem, text)

        paths = JobPaths(path)
        stop = StopSignals(say, owns_process=False)
        run = JobRun(paths, setup, options, say, stop, lambda meter: _CallbackView(meter, on_progress))
        task = asyncio.create_task(run.run())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.request()
            await wait_until_done(task)
            with suppress(Interrupted):
                task.result()
            raise
        found = json.loads(await asyncio.to_thread(paths.manifest.read_bytes))["counts"]
        return JobCounts(found["total"], found["done"], found["failed"])


@dataclass(frozen=True, slots=True)
class _CallbackView(ProgressView):
    """Passes the counts to a callback."""

    meter: ProgressMeter
    on_progress: Callable[[JobCounts], None]

    def update(self) -> None:
        self.on_progress(JobCounts(self.meter.total, self.meter.done, self.meter.failed))


def _list_bad_lines(index: LineIndex, strict: bool) -> list[LineProblem]:
    """The lines that are not valid requests, in order, if one of them fails the whole file; else none.
    `strict`: each of them does. Those that do are the first to be listed where there are too many."""
    fatal, others, numbers = list[BadLine](), list[BadLine](), dict[int, int]()
    for position in range(len(index)):
        if len(fatal) == MOST_PROBLEMS:
            break
        if not index.get_row(position).bad:
            continue
        line = index.load(position).line
        assert isinstance(line, BadLine)
        line = line if line.spoils_file else _find_repeated_id(line, index, numbers)
        if strict or line.spoils_file:
            fatal.append(line)
        elif len(others) < MOST_PROBLEMS:
            others.append(line)
    listed = sorted((*fatal, *others)[:MOST_PROBLEMS], key=lambda line: line.number) if fatal else []
    return [LineProblem("invalid_line", line.reason, line.number, line.param) for line in listed]


def _find_repeated_id(line: BadLine, index: LineIndex, numbers: dict[int, int]) -> BadLine:
    """The line, or its worse problem if another line has its custom_id; the index compares only those of
    valid lines. `numbers`: line numbers of such bad lines so far, by the hash of their custom_id."""
    first = numbers.setdefault(hash(line.custom_id), line.number)
    valid = index.find(line.custom_id or "")
    if valid is not None:
        first = index.get_row(valid).number
    if first == line.number:
        return line
    reason = f"{line.id_key} {line.custom_id!r} is also used by line {first}"
    return replace(line, reason=reason, param=line.id_key)
