"""The runner: a bounded window of lines in flight, each prepared, answered, scored and written.

A line's error becomes its error record; transient errors are tried again first. EngineDead and an
unwritable output end the run: what is finished stays, and the next run goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from contextlib import suppress
from typing import Any, Protocol

from mlxrun.batch import output_records
from mlxrun.batch.job_file import BadLine, JobLine
from mlxrun.batch.line_answerer import LineAnswerer, Spent, first_error
from mlxrun.batch.line_index import TODO, Entry, Index
from mlxrun.batch.lookahead import Lookahead
from mlxrun.batch.output_writer import Writer
from mlxrun.batch.partial_answers import WRITE_EVERY
from mlxrun.batch.progress import ProgressMeter
from mlxrun.batch.scoring import Scores
from mlxrun.config.settings import Config
from mlxrun.errors import EngineDead, JobError, MlxrunError, RequestError

log = logging.getLogger(__name__)
COMMIT_EVERY = 1.0  # seconds a finished line may wait for its journal entry
COMMIT_LINES = 256  # or so many lines
BACKOFF = 0.25  # seconds before the second try; each further wait is twice as long


class Watcher(Protocol):
    """Told several times a second how it goes."""

    def update(self) -> None: ...


class LineRunner:
    """Runs the lines of `index` that are still to do, up to position `end`."""

    def __init__(
        self,
        index: Index,
        writer: Writer,
        answerer: LineAnswerer,
        config: Config,
        meter: ProgressMeter,
        scores: Scores,
    ) -> None:
        self._index = index
        self._writer = writer
        self._answerer = answerer
        self._config = config
        self._meter = meter
        self._scores = scores
        self._lookahead = Lookahead(iter(()), index.likeness)
        self._feeding = asyncio.Lock()
        self._full = asyncio.Event()
        self._over = asyncio.Event()
        self.backoff = BACKOFF

    async def run(self, end: int, watcher: Watcher) -> None:
        """Returns when every line is finished; EngineDead or JobError if that cannot be reached."""
        todo = (at for at in range(end) if self._index.state[at] == TODO)
        self._lookahead = Lookahead(todo, self._index.likeness)
        batch, scheduler = self._config.batch, self._config.scheduler
        window = min(batch.concurrency or 2 * scheduler.max_running, self._index.state.count(TODO))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._commit_now_and_then())
                group.create_task(self._write_partial_answers())
                group.create_task(self._watch(watcher))
                async with asyncio.TaskGroup() as workers:
                    for _ in range(window):
                        workers.create_task(self._work())
                self._over.set()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _work(self) -> None:
        while (entry := await self._next()) is not None:
            self._meter.running += 1
            try:
                await self._one(entry)
            finally:
                self._meter.running -= 1

    async def _next(self) -> Entry | None:
        """The next line, read off the event loop: a line with images in it can be long."""
        async with self._feeding:
            position = self._lookahead.next()
            return None if position is None else await asyncio.to_thread(self._index.load, position)

    async def _one(self, entry: Entry) -> None:
        spent = Spent()
        record = await self._record(entry, spent)
        self._writer.add(entry, record, spent.work)
        if isinstance(entry.line, JobLine):  # a bad one may be the copy, key and all, of one in flight
            self._answerer.answers.drop(entry.key)
        self._scores.add(record)
        usage = output_records.usage(record)
        self._meter.finished(record["error"] is not None, usage.prompt, usage.output, spent.total)
        if self._writer.pending >= COMMIT_LINES:
            self._full.set()

    async def _record(self, entry: Entry, spent: Spent) -> dict[str, Any]:
        """What becomes of a line. The border at which errors of one line end."""
        if isinstance(entry.line, BadLine):
            return output_records.bad_record(entry)
        try:
            body = await self._answer(entry.line, entry.key, spent)
            return output_records.answer_record(entry, body)
        except (EngineDead, JobError):
            raise
        except MlxrunError as error:
            said = error if self._config.log.prompts else error.code
            log.debug("line %d: %s", entry.line.number, said)
            return output_records.error_record(entry, error)
        except Exception as error:
            said = f": {error}" if self._config.log.prompts else ""  # it may quote a prompt
            where = "".join(traceback.format_tb(error.__traceback__))
            kind = type(error).__name__
            log.error("line %d: a bug in mlxrun: %s%s\n%s", entry.line.number, kind, said, where)
            return output_records.error_record(entry, error)

    async def _answer(self, line: JobLine, key: str, spent: Spent) -> dict[str, Any]:
        """One try, and more after transient errors: whatever is not the request's own fault."""
        for attempt in range(self._config.batch.retries):
            try:
                return await self._answerer.answer(line, key, spent)
            except (RequestError, EngineDead, JobError):
                raise
            except MlxrunError as error:
                log.info("line %d: %s; trying again", line.number, error)
                await asyncio.sleep(self.backoff * 2**attempt)
        return await self._answerer.answer(line, key, spent)

    async def _commit_now_and_then(self) -> None:
        over = asyncio.create_task(self._over.wait())
        try:
            while not over.done():
                full = asyncio.create_task(self._full.wait())
                await asyncio.wait((over, full), timeout=COMMIT_EVERY, return_when=asyncio.FIRST_COMPLETED)
                full.cancel()
                self._full.clear()
                await asyncio.to_thread(self._writer.commit)
        finally:
            over.cancel()

    async def _write_partial_answers(self) -> None:
        while not self._over.is_set():
            self._answerer.answers.write()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), WRITE_EVERY)

    async def _watch(self, watcher: Watcher) -> None:
        while not self._over.is_set():
            watcher.update()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), 0.5)
