"""Hands lines to workers and collects their results: each line has exactly one result, whatever dies.

A worker has a bounded number of lines. Lines of one prefix go to one worker (prefix_queue.py). Once no line
waits, an idle worker gets lines that others have not begun. A result counts only from the worker that has the
line now.

If a worker dies, its lines go to others, and a new worker takes its place. A line that was running at two
deaths runs alone on its worker. At the third death it fails, if workers can finish other lines. This module
is pure asyncio: `messages.Worker` decides how workers are reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from mlxrun.cluster.messages import (
    LineCounts,
    LineResult,
    SentLine,
    Worker,
    WorkerDied,
    WorkerRefused,
    WorkerReport,
)
from mlxrun.cluster.prefix_queue import PrefixQueue
from mlxrun.cluster.worker_slots import LineTicket, WorkerSlot, report_counts
from mlxrun.core.errors import EngineDead, InternalError, JobError
from mlxrun.core.workers import run_together

log = logging.getLogger(__name__)
MOST_DEATHS = 3  # of workers that had a line; then it fails
ALONE_FROM = 2  # deaths after which a line has its worker for itself
MOST_STARTS = 5  # workers in a row that die before they finish a line; then their place stays empty
BACKOFF = 1.0  # seconds before the second of them; each further wait is twice as long


class Dispatcher:
    """Keeps one worker of each of `makers` running. `on_report` gets every report of a worker, before its
    results; `backoff`: seconds, see BACKOFF."""

    def __init__(
        self,
        makers: Sequence[Callable[[], Worker]],
        on_report: Callable[[WorkerSlot, WorkerReport], None] = lambda slot, report: None,
        backoff: float = BACKOFF,
    ) -> None:
        self.slots = [WorkerSlot(number, make) for number, make in enumerate(makers)]
        self._on_report = on_report
        self._backoff = backoff
        self._waiting: PrefixQueue[LineTicket] = PrefixQueue()
        self._suspects: deque[LineTicket] = deque()  # each is to run alone
        self._numbers = count(1)
        self._is_feeding = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None
        self._has_worker = asyncio.Event()

    async def start(self) -> None:
        """Start all workers, and return once the first of them is ready. MlxrunError if none will be."""
        for slot in self.slots:
            self._spawn(self._keep_slot(slot))
        await self._has_worker.wait()
        if self._failed is not None:
            raise self._failed

    async def answer(self, ticket: LineTicket) -> LineResult:
        """Return the result of a line. EngineDead if no worker is left."""
        if self._failed is not None:
            raise _describe_end(self._failed)
        self._waiting.add(ticket.prefix, ticket)
        self._feed_soon()
        return await ticket.result

    async def close(self) -> None:
        """Stop all workers. Unfinished lines get no result."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        workers = [slot.worker for slot in self.slots if slot.worker is not None]
        await asyncio.gather(*(worker.close() for worker in workers))
        for slot in self.slots:
            slot.worker = None
            slot.state = "closed" if slot.state in ("starting", "running") else slot.state

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the job: nobody will answer its lines."""
        if self._failed is None:
            self._failed = error
        self._has_worker.set()
        while tickets := self._waiting.take(-1, 1, idle=True):
            self._suspects += tickets
        had = (ticket for slot in self.slots for ticket in slot.has.values())
        for ticket in (*self._suspects, *had):
            if not ticket.result.done():
                ticket.result.set_exception(_describe_end(self._failed))

    # A worker's life

    async def _keep_slot(self, slot: WorkerSlot) -> None:
        """Have a worker in a slot until the job ends, or until no worker stays alive there."""
        failures = 0
        while failures < MOST_STARTS:
            if failures:
                await asyncio.sleep(self._backoff * 2 ** (failures - 1))
            done, slot.state, slot.worker = slot.done, "starting", slot.make()
            try:
                slot.facts = slot.seen = await slot.worker.start()
                await self._serve(slot, slot.worker)
            except WorkerRefused as error:
                slot.reason = str(error)
                if not slot.done:
                    slot.state = "refused"
                    log.warning("worker %d is not used: %s", slot.number, error)
                    break
                failures += 1  # it has served: what keeps it from starting again may pass
            except WorkerDied as error:
                slot.reason = str(error)
                failures = 1 if slot.done > done else failures + 1
                self._on_death(slot, error)
            # Where another one will start, the job does not end while this one is being closed.
            slot.state = "starting" if failures < MOST_STARTS else "lost"
            await self._close_worker(slot)
        await self._close_worker(slot)
        if all(each.state in ("lost", "refused") and each.worker is None for each in self.slots):
            reasons = "; ".join(f"worker {each.number}: {each.reason}" for each in self.slots)
            kind = WorkerRefused if all(each.state == "refused" for each in self.slots) else EngineDead
            raise kind(f"no worker is left ({reasons})")

    async def _close_worker(self, slot: WorkerSlot) -> None:
        worker, slot.worker = slot.worker, None
        if worker is not None:
            await worker.close()

    async def _serve(self, slot: WorkerSlot, worker: Worker) -> None:
        """Exchange lines and results with a worker until it dies."""
        slot.state = "running"
        self._has_worker.set()
        self._feed_soon()
        await run_together((self._send_lines(slot, worker), self._read_reports(slot, worker)))

    async def _send_lines(self, slot: WorkerSlot, worker: Worker) -> None:
        while True:
            await slot.to_send.wait()
            slot.to_send.clear()
            lines, slot.unsent = slot.unsent, []
            await worker.submit(lines)

    async def _read_reports(self, slot: WorkerSlot, worker: Worker) -> None:
        while True:
            report = await worker.poll()
            self._on_report(slot, report)
            for number, counts in report.running.items():
                if ticket := slot.has.get(number):
                    report_counts(ticket, counts)
            for result in report.finished:
                self.finish_line(slot, result)
            if report.dead is not None:
                raise WorkerDied(report.dead)
            if report.finished:
                self._feed_soon()

    def finish_line(self, slot: WorkerSlot, result: LineResult) -> None:
        """Give a result to whoever waits for it, unless the line went to another worker meanwhile."""
        ticket = slot.has.pop(result.number, None)
        if ticket is None:  # it was given to another worker
            return
        slot.runs_alone = False
        slot.done += 1
        report_counts(ticket, result.counts)
        if not ticket.result.done():  # nobody waits any more if the job is being stopped
            ticket.result.set_result(result)

    def _on_death(self, slot: WorkerSlot, error: WorkerDied) -> None:
        """Give the lines of a dead worker to others."""
        slot.deaths += 1
        log.warning("worker %d died with %d lines: %s", slot.number, len(slot.has), error)
        tickets, slot.has, was_alone = list(slot.has.values()), {}, slot.runs_alone
        unsent = {line.number for line in slot.unsent}  # they cannot be the reason
        slot.unsent, slot.runs_alone, slot.facts = [], False, None
        self._waiting.remove_worker(slot.number)
        works = any(each.done for each in self.slots)  # some worker has shown that it does
        for ticket in reversed(tickets):
            ticket.deaths += not error.blameless and ticket.number not in unsent
            if ticket.result.done():
                continue  # the job is being stopped
            if ticket.deaths >= MOST_DEATHS and works:
                text = f"{ticket.deaths} workers died while they had this line; the last one: {error}"
                ticket.result.set_exception(InternalError(text, error, code="worker_died"))
            elif was_alone:
                self._suspects.append(ticket)
            elif ticket.deaths >= ALONE_FROM:
                self._suspects.appendleft(ticket)
            else:
                self._waiting.add(ticket.prefix, ticket, first=True)
        self._feed_soon()

    # Which worker has which line

    def _feed_soon(self) -> None:
        """Hand out lines once all callbacks of this turn of the event loop have run."""
        if not self._is_feeding:
            self._is_feeding = True
            asyncio.get_running_loop().call_soon(self._feed)

    def _feed(self) -> None:
        self._is_feeding = False
        with_room = [slot for slot in self.slots if slot.room > 0]
        for slot in with_room:
            if self._suspects and not slot.has:
                self._give(slot, (self._suspects.popleft(),))
                slot.runs_alone = True
        # First all get what they compute at once, in small portions, and only then what they keep ready.
        hungry = deque(sorted((slot for slot in with_room if slot.idle_rows > 0), key=lambda s: len(s.has)))
        while hungry and self._waiting:
            slot = hungry.popleft()
            assert slot.facts is not None
            most = min(max(1, slot.facts.rows // 4), slot.room, max(1, slot.idle_rows))
            self._give(slot, self._waiting.take(slot.number, most, idle=True))
            if slot.room > 0 and slot.idle_rows > 0:
                hungry.append(slot)
        for slot in with_room:
            while slot.room > 0 and (tickets := self._waiting.take(slot.number, slot.room, idle=False)):
                self._give(slot, tickets)
        if not self._waiting:
            self._withdraw_for([slot for slot in with_room if slot.room > 0 and slot.idle_rows > 0])

    def _give(self, slot: WorkerSlot, tickets: Iterable[LineTicket]) -> None:
        for ticket in tickets:
            if ticket.result.done():
                continue  # nobody waits for it any more
            ticket.number, ticket.counts = next(self._numbers), LineCounts()
            slot.has[ticket.number] = ticket
            slot.unsent.append(SentLine(ticket.number, ticket.line, ticket.key, ticket.find_partial()))
            slot.to_send.set()

    def _withdraw_for(self, idle: Sequence[WorkerSlot]) -> None:
        """Have the workers with most lines that wait behind others give some of them back."""
        wanted = sum(slot.idle_rows for slot in idle)
        rich = [slot for slot in self.slots if slot.state == "running" and slot.idle_rows < 0]
        for slot in sorted(rich, key=lambda each: each.idle_rows):
            if wanted <= 0:
                return
            if not slot.is_giving:
                spare = min(wanted, -(slot.idle_rows // 2))
                wanted -= spare
                slot.is_giving = True
                self._spawn(self._withdraw(slot, spare))

    async def _withdraw(self, slot: WorkerSlot, number: int) -> None:
        worker = slot.worker
        try:
            with suppress(WorkerDied):  # whoever polls it sees that too
                for given in await worker.withdraw(number) if worker is not None else ():
                    if slot.worker is worker and (ticket := slot.has.pop(given, None)):
                        self._waiting.add(ticket.prefix, ticket, first=True)
        finally:
            slot.is_giving = False
        self._feed_soon()


def _describe_end(error: BaseException) -> BaseException:
    """What lines are told when the job ends: not an error of theirs, which would be journaled as one."""
    if isinstance(error, (EngineDead, JobError)):
        return error
    return EngineDead(f"the workers ended: {type(error).__name__}: {error}")
