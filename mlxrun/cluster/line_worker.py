"""A worker: an engine that prepares and answers lines as `mlxrun batch` does in one process.

It gets lines, and keeps their results until somebody polls. It does not know how it is reached.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxrun.cluster.messages import LineCounts, LineResult, SentLine, WorkerReport
from mlxrun.config.settings import Config
from mlxrun.core.errors import EngineDead, InternalError, MlxrunError, describe_error
from mlxrun.jobs.records.output_records import LineTokens
from mlxrun.jobs.run.line_answerer import LineAnswerer, LinePreparer
from mlxrun.jobs.run.partial_answers import PartialAnswerTable
from mlxrun.jobs.run.progress import ProgressMeter

if TYPE_CHECKING:
    from mlxrun.engine.client import EngineClient

log = logging.getLogger(__name__)
REPORT_EVERY = 1.0  # seconds between reports while no line is finished
LINGER = 0.01  # seconds that a finished line waits for others


class _PromptRecorder(ProgressMeter):
    """A meter that keeps what lines report of their prompts."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.prompts: list[tuple[int, int]] = []

    def add_prompt(self, prompt: int, max_tokens: int) -> None:
        self.prompts.append((prompt, max_tokens))

    def add_tokens(self, computed: int, reused: int, output: int) -> None:
        """Nothing: lines are counted one by one."""


@dataclass(slots=True, eq=False)
class _RunningLine:
    """A line that is being answered."""

    sent: SentLine
    tokens: LineTokens
    task: asyncio.Task[None] = field(init=False)


class LineWorker:
    """Answers lines on the engine of `client`. All methods belong to one event loop. `linger`: seconds that a
    finished line waits for others, so that many workers do not report more often than a driver reads."""

    def __init__(
        self, client: EngineClient, preparer: LinePreparer, config: Config, linger: float = LINGER
    ) -> None:
        self._client = client
        self._meter = _PromptRecorder()
        self._table = PartialAnswerTable(keep=not config.engine.reproducible)
        self._answerer = LineAnswerer(client, preparer, config, self._meter, self._table)
        self._linger = linger
        self._lines: dict[int, _RunningLine] = {}
        self._finished: list[LineResult] = []
        self._dead: str | None = None
        self._news = asyncio.Event()

    def submit(self, lines: Sequence[SentLine]) -> None:
        """Begin to answer lines."""
        for sent in lines:
            self._table.add_records(sent.partial)
            line = _RunningLine(sent, LineTokens())
            line.tokens.times.started = time.monotonic()
            self._lines[sent.number] = line
            line.task = asyncio.create_task(self._run(line))

    async def poll(self) -> WorkerReport:
        """Return what happened since the last call. This waits for a finished line, but at most REPORT_EVERY
        and `linger` seconds."""
        try:
            async with asyncio.timeout(REPORT_EVERY):
                await self._news.wait()
            await asyncio.sleep(self._linger)
        except TimeoutError:
            pass
        self._news.clear()
        finished, self._finished = self._finished, []
        prompts, self._meter.prompts = self._meter.prompts, []
        return WorkerReport(
            finished,
            {number: _count(line.tokens) for number, line in self._lines.items()},
            self._table.take_records(),
            prompts,
            dict(self._client.read_cache_counters()),
            self._dead,
        )

    def withdraw(self, count: int) -> list[int]:
        """Stop up to `count` lines that are not begun, the newest first, and return their numbers."""
        waiting = [line for line in self._lines.values() if line.tokens.times.computed is None]
        given = waiting[::-1][:count]
        for line in given:
            self._remove(line)
            line.task.cancel()
        return [line.sent.number for line in given]

    async def close(self) -> None:
        """Stop the engine, once its prefix cache is written."""
        for line in tuple(self._lines.values()):
            line.task.cancel()
        await self._client.close()

    def _remove(self, line: _RunningLine) -> None:
        self._lines.pop(line.sent.number, None)
        self._table.remove_line(line.sent.key)

    async def _run(self, line: _RunningLine) -> None:
        try:
            result = await answer_line(self._answerer, line.sent, line.tokens)
        except EngineDead as error:
            self._dead = str(error)
            self._news.set()
            return  # the driver gives the line to another worker
        self._remove(line)
        self._finished.append(result)
        self._news.set()


async def answer_line(answerer: LineAnswerer[Any], sent: SentLine, tokens: LineTokens) -> LineResult:
    """Answer a line, or describe its error. `tokens`: counts its tokens, and knows when it was started.
    EngineDead if the engine has ended."""
    body, failure = None, None
    try:
        body = await answerer.answer(sent.line, sent.key, tokens)
    except EngineDead:
        raise
    except MlxrunError as error:
        failure = error
    except Exception as error:
        log.exception("line %d: a bug in mlxrun", sent.line.number)
        failure = InternalError(describe_error(error), error)
    times = tokens.times
    computed, answered = (at and at - times.started for at in (times.computed, times.answered))
    took = time.monotonic() - times.started
    return LineResult(sent.number, body, failure, _count(tokens), took, computed, answered)


def _count(tokens: LineTokens) -> LineCounts:
    return LineCounts(tokens.computed, tokens.reused, tokens.output)
