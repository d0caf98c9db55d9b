"""The dispatcher's records of lines that somebody waits for, and of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from mlxrun.cluster.messages import LineCounts, LineResult, SentLine, Worker, WorkerFacts
from mlxrun.jobs.lines.job_file import JobLine

State = Literal["starting", "running", "lost", "refused", "closed"]


@dataclass(slots=True, eq=False)
class LineTicket:
    """A line that somebody waits for. `prefix`: its prefix hash; `find_partial`: returns the records of its
    partial answers; `counts`: tokens of this sending; `deaths`: the number of workers that died with it."""

    line: JobLine
    key: str
    prefix: int
    find_partial: Callable[[], bytes] = bytes
    on_counts: Callable[[LineCounts], None] = lambda counts: None
    deaths: int = 0
    number: int = 0
    counts: LineCounts = field(default_factory=LineCounts)
    result: asyncio.Future[LineResult] = field(default_factory=lambda: asyncio.Future())


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """The place of a worker, and the worker that is in it now."""

    number: int
    make: Callable[[], Worker]
    state: State = "starting"
    worker: Worker | None = None
    facts: WorkerFacts | None = None  # of the worker that runs
    seen: WorkerFacts | None = None  # of the last one
    has: dict[int, LineTicket] = field(default_factory=dict)  # by number of the sending
    unsent: list[SentLine] = field(default_factory=list)
    to_send: asyncio.Event = field(default_factory=asyncio.Event)
    runs_alone: bool = False  # it has one line, and gets no other beside it
    is_giving: bool = False  # lines are being withdrawn from it
    done: int = 0
    deaths: int = 0
    reason: str = ""

    @property
    def idle_rows(self) -> int:
        return 0 if self.facts is None else self.facts.rows - len(self.has)

    @property
    def room(self) -> int:
        """The number of further lines that the worker should have."""
        if self.state != "running" or self.facts is None or self.runs_alone:
            return 0
        return self.facts.most - len(self.has)


def report_counts(ticket: LineTicket, now: LineCounts) -> None:
    """Report the tokens of a line since its last report."""
    old, ticket.counts = ticket.counts, now
    new = LineCounts(now.computed - old.computed, now.reused - old.reused, now.output - old.output)
    if new != LineCounts():
        ticket.on_counts(new)
