"""Workers without processes: each answers its lines after a time, and dies where a test wants it to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxrun.cluster.dispatcher import Dispatcher
from mlxrun.cluster.messages import (
    PROTOCOL,
    LineCounts,
    LineResult,
    SentLine,
    WorkerDied,
    WorkerFacts,
    WorkerRefused,
    WorkerReport,
)
from mlxrun.cluster.worker_slots import LineTicket
from mlxrun.jobs.lines.job_file import JobLine

FACTS = WorkerFacts("here", "node", 1, PROTOCOL, {"mlxrun": "1"}, {"name": "fake"}, "m", "s", 4, 8)


@dataclass
class FakeFleet:
    """All workers of a test, and what they did. `deadly`: lines that kill their worker; `refused`: slots."""

    rows: int = 4
    most: int = 8
    deadly: set[str] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    blameless: bool = False
    held: bool = False  # no line is answered
    workers: list[FakeWorker] = field(default_factory=list)
    answered: list[tuple[str, int]] = field(default_factory=list)  # line and slot, in order

    def list_makers(self, count: int) -> list[Callable[[], FakeWorker]]:
        return [lambda number=number: self._make(number) for number in range(count)]  # type: ignore[misc]

    def _make(self, number: int) -> FakeWorker:
        self.workers.append(FakeWorker(self, number))
        return self.workers[-1]


class FakeWorker:
    """A worker that computes `rows` of its lines at each poll."""

    def __init__(self, fleet: FakeFleet, number: int) -> None:
        self.fleet = fleet
        self.number = number
        self.lines: dict[int, SentLine] = {}
        self.seen: list[set[str]] = []  # the lines that it had at each poll
        self.dead: str | None = None
        self.news = asyncio.Event()

    async def start(self) -> WorkerFacts:
        if self.number in self.fleet.refused:
            raise WorkerRefused("another device")
        return WorkerFacts(
            *(getattr(FACTS, name) for name in FACTS.__slots__[:8]),
            rows=self.fleet.rows,
            most=self.fleet.most,
        )

    async def submit(self, lines: Sequence[SentLine]) -> None:
        self._check()
        self.lines |= {line.number: line for line in lines}
        self.news.set()

    async def poll(self) -> WorkerReport:
        await self.news.wait()
        await asyncio.sleep(0)
        self.seen.append({line.line.custom_id for line in self.lines.values()})
        if self.fleet.deadly & self.seen[-1]:
            self.kill()
        self._check()
        done = [] if self.fleet.held else list(self.lines.values())[: self.fleet.rows]
        for line in done:
            del self.lines[line.number]
            self.fleet.answered.append((line.line.custom_id, self.number))
        if not self.lines or self.fleet.held:
            self.news.clear()
        results = [LineResult(line.number, {"of": line.line.custom_id}, None, LineCounts(1)) for line in done]
        return WorkerReport(results)

    async def withdraw(self, count: int) -> Sequence[int]:
        self._check()
        given = list(self.lines)[self.fleet.rows :][:count]
        for number in given:
            del self.lines[number]
        return given

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Die, as seen by the next call."""
        self.dead = "killed"
        self.news.set()

    def _check(self) -> None:
        if self.dead is not None:
            raise WorkerDied(self.dead, blameless=self.fleet.blameless)


def make_ticket(name: str, prefix: int = 0) -> LineTicket:
    return LineTicket(JobLine(1, name, "/v1/completions", {"prompt": name}), f"key-{name}", prefix)


async def answer_all(
    dispatcher: Dispatcher, tickets: Sequence[LineTicket]
) -> list[LineResult | BaseException]:
    """The results of lines, in their order."""
    return await asyncio.gather(*map(dispatcher.answer, tickets), return_exceptions=True)
