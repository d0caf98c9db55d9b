"""Runs the lines of a job, a bounded number at once. Each line is prepared, answered, scored and written.

A line's error becomes its error record; transient errors are retried first. EngineDead and an unwritable
output end the run: finished lines stay finished, and the next run continues from there.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mlxrun.config.settings import Config
from mlxrun.core.errors import EngineDead, JobError, MlxrunError, RequestError
from mlxrun.core.workers import find_first_error
from mlxrun.jobs.lines.job_file import BadLine, JobLine
from mlxrun.jobs.lines.line_index import IndexedLine, LineIndex
from mlxrun.jobs.lines.lookahead import look_ahead
from mlxrun.jobs.records import output_records
from mlxrun.jobs.records.journal import LineTimes
from mlxrun.jobs.records.output_records import LineTokens
from mlxrun.jobs.records.output_writer import OutputWriter
from mlxrun.jobs.run.line_answerer import Answerer
from mlxrun.jobs.run.partial_answers import WRITE_EVERY
from mlxrun.jobs.run.progress import ProgressMeter
from mlxrun.jobs.scoring.line_scores import run_scorers, runs_long
from mlxrun.jobs.scoring.score_groups import Scores

log = logging.getLogger(__name__)
COMMIT_EVERY = 1.0  # seconds that a finished line may wait for its journal entry
COMMIT_LINES = 256  # finished lines that may wait for it
UPDATE_EVERY = 0.5  # seconds
LOAD_LINES = 64  # that are read together, if they are short
LOAD_BYTES = 1 << 18  # of the lines that are read together
BACKOFF = 0.25  # seconds before the second try; each further wait is twice as long


@dataclass(slots=True)
class LineRunner:
    """Runs the unfinished lines of `index`. `backoff`: seconds before the second try; each later wait is
    twice as long."""

    index: LineIndex
    writer: OutputWriter
    answerer: Answerer
    config: Config
    meter: ProgressMeter
    scores: Scores
    backoff: float = BACKOFF
    _commit_due: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _finished: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def run(self, end: int, update: Callable[[], None]) -> None:
        """Run the lines before position `end`. `update` is called several times a second. EngineDead or
        JobError if the lines cannot all be finished."""
        todo = self.index.iterate_todo(end)
        positions = look_ahead(todo, lambda position: self.index.get_row(position).grouped_prefix)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._commit_regularly())
                group.create_task(self._repeat(WRITE_EVERY, self.answerer.answers.write))
                group.create_task(self._repeat(UPDATE_EVERY, update))
                async with asyncio.TaskGroup() as lines:
                    await self._start_lines(positions, lines)
                self._finished.set()
                self._commit_due.set()
        except BaseExceptionGroup as errors:
            raise find_first_error(errors) from errors

    async def _start_lines(self, positions: Iterator[int], lines: asyncio.TaskGroup) -> None:
        """Start each line in `lines` once there is room. The next ones are read meanwhile."""
        room = asyncio.Semaphore(self.answerer.concurrency)
        loading = lines.create_task(self._load_next(positions))
        while loaded := await loading:
            loading = lines.create_task(self._load_next(positions))
            for indexed in loaded:
                await room.acquire()
                lines.create_task(self._work(indexed)).add_done_callback(lambda _: room.release())

    async def _work(self, indexed: IndexedLine) -> None:
        tokens = LineTokens(times=LineTimes(self.meter.clock()))
        self.meter.start_line(tokens)
        try:
            record = await self._make_record(indexed, tokens)
            self.writer.add(indexed, record, tokens)
            # A bad line may have the key of a running one that it copies.
            if isinstance(indexed.line, JobLine):
                self.answerer.answers.remove_line(indexed.key)
            self.scores.add(record)
            output_records.warn_unscored(record, indexed.line, self.index.path, self.scores)
            prompt, output = output_records.read_usage(record)
            self.meter.stop_line(tokens)
            self.meter.finish_line(record["error"] is not None, prompt, output)
            if self.writer.pending >= COMMIT_LINES:
                self._commit_due.set()
        finally:
            self.meter.stop_line(tokens)

    async def _load_next(self, positions: Iterator[int]) -> list[IndexedLine]:
        """The next lines; none after the last. Short ones are read together, in a thread: a line that
        contains images can be long."""
        chosen: list[int] = []
        size = 0
        while len(chosen) < LOAD_LINES and size < LOAD_BYTES and (at := next(positions, None)) is not None:
            chosen.append(at)
            size += self.index.get_size(at)
        return await asyncio.to_thread(lambda: [self.index.load(at) for at in chosen])

    async def _make_record(self, indexed: IndexedLine, tokens: LineTokens) -> dict[str, Any]:
        """The record of a line, with its answer or its error. Only errors that end the run are raised."""
        line = indexed.line
        if isinstance(line, BadLine):
            return output_records.build_bad_line_record(indexed)
        with_prompts = self.config.log.prompts  # an error's message may quote a prompt
        try:
            body = await self._answer(line, indexed.key, tokens)
            if line.eval is None:
                return output_records.build_answer_record(indexed, body)
            run = run_scorers if runs_long(line.eval) else asyncio.to_thread
            return await run(output_records.build_answer_record, indexed, body)
        except (EngineDead, JobError):
            raise
        except MlxrunError as error:
            log.debug("line %d: %s", line.number, error if with_prompts else error.code)
            return output_records.build_error_record(indexed, error)
        except Exception as error:
            message = f": {error}" if with_prompts else ""
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error(
                "line %d: a bug in mlxrun: %s%s\n%s", line.number, type(error).__name__, message, frames
            )
            return output_records.build_error_record(indexed, error)

    async def _answer(self, line: JobLine, key: str, tokens: LineTokens) -> dict[str, Any]:
        """Answer a line, and retry after transient errors: all that are not the request's own fault."""
        for attempt in range(self.config.batch.retries):
            tokens.times.tries += 1
            try:
                return await self.answerer.answer(line, key, tokens)
            except (RequestError, EngineDead, JobError):
                raise
            except MlxrunError as error:
                log.info("line %d: %s; trying again", line.number, error)
                await asyncio.sleep(self.backoff * 2**attempt)
        tokens.times.tries += 1
        return await self.answerer.answer(line, key, tokens)

    async def _commit_regularly(self) -> None:
        while not self._finished.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_EVERY):
                    await self._commit_due.wait()
            self._commit_due.clear()
            await asyncio.to_thread(self.writer.commit)

    async def _repeat(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` now and every so many seconds until all lines are finished."""
        while not self._finished.is_set():
            action()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._finished.wait()
