"""A job's workers: hands the job's lines to a dispatcher, and gives it answers, counts and partial answers
back.

The job runs on the driver as without workers: index, journal, manifest, scores and outputs are there alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mlxrun.cluster.dispatcher import Dispatcher
from mlxrun.cluster.messages import LineCounts, LineResult, Worker, WorkerReport
from mlxrun.cluster.worker_slots import LineTicket, WorkerSlot
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.lines.lookahead import WINDOW, hash_prefix
from mlxrun.jobs.records.output_records import LineTokens
from mlxrun.jobs.run.partial_answers import PartialAnswers
from mlxrun.jobs.run.progress import ProgressMeter

_NOW = ("entries", "memory_bytes", "disk_bytes")  # counters of what is there, and not of what happened


class DispatchedAnswerer:
    """Answers lines by a dispatcher's workers. `concurrency`: the lines of all workers, and WINDOW lines that
    wait, so that there is a choice among prefixes."""

    def __init__(
        self, dispatcher: Dispatcher, meter: ProgressMeter, answers: PartialAnswers, lines_each: int
    ) -> None:
        self.answers = answers
        self.concurrency = len(dispatcher.slots) * lines_each + WINDOW
        self._dispatcher = dispatcher
        self._meter = meter

    async def answer(self, line: JobLine, key: str, tokens: LineTokens) -> dict[str, Any]:
        """Return the response body of `line`. `tokens` counts its tokens on all workers that had it."""

        def count(new: LineCounts) -> None:
            tokens.add(new.computed, new.reused, new.output)
            self._meter.add_tokens(new.computed, new.reused, new.output)
            if new.computed or new.reused or new.output:
                tokens.times.mark_progress(self._meter.clock(), new.output)

        bare = line if line.eval is None else replace(line, eval=None)  # answers are scored by the driver
        ticket = LineTicket(bare, key, hash_prefix(line), lambda: self.answers.dump_line(key), count)
        result = await self._dispatcher.answer(ticket)
        return take_result(result, tokens, self._meter.clock())


def take_result(result: LineResult, tokens: LineTokens, now: float) -> dict[str, Any]:
    """Return the body of a result, or raise its error. The times of reports, which come late, are replaced by
    those that the last worker has measured."""
    arrived, times = now - result.took, tokens.times
    if result.computed is not None:
        times.computed = min(times.computed or math.inf, arrived + result.computed)
    if result.answered is not None:
        times.answered = min(times.answered or math.inf, arrived + result.answered)
    if result.error is not None:
        raise result.error
    assert result.body is not None
    return result.body


class DispatchedPool:
    """The workers of a job, made by `makers`. `lines_each`: the most lines that one worker has at once."""

    def __init__(self, makers: Sequence[Callable[[], Worker]], lines_each: int) -> None:
        self._makers = makers
        self._lines_each = lines_each
        self._dispatcher: Dispatcher | None = None
        self._answers: PartialAnswers | None = None
        self._meter: ProgressMeter | None = None
        self._counters: dict[int, Mapping[str, int]] = {}  # of the worker in each slot
        self._earlier: Counter[str] = Counter()  # of those before it

    async def start(self, meter: ProgressMeter, answers: PartialAnswers) -> DispatchedAnswerer:
        """Start the workers, and return once the first is ready. MlxrunError if none will be."""
        self._meter, self._answers = meter, answers
        self._dispatcher = Dispatcher(self._makers, self._read_report)
        await self._dispatcher.start()
        return DispatchedAnswerer(self._dispatcher, meter, answers, self._lines_each)

    def list_workers(self) -> list[dict[str, Any]]:
        """List the workers: where each is, its device, and what it did."""
        return [_describe_slot(slot) for slot in self._dispatcher.slots] if self._dispatcher else []

    def read_cache_counters(self) -> Mapping[str, int]:
        """Sum the counters of all workers, dead ones included."""
        total = self._earlier.copy()
        for counters in self._counters.values():
            total.update(counters)
        return total

    async def close(self) -> None:
        """Stop the workers."""
        if self._dispatcher is not None:
            await self._dispatcher.close()

    def _read_report(self, slot: WorkerSlot, report: WorkerReport) -> None:
        assert self._meter is not None and self._answers is not None
        for prompt, max_tokens in report.prompts:
            self._meter.add_prompt(prompt, max_tokens)
        if report.partial:
            self._answers.add_records(report.partial)
        old = self._counters.get(slot.number, {})
        if any(report.counters.get(name, 0) < number for name, number in old.items() if name not in _NOW):
            self._earlier.update({name: number for name, number in old.items() if name not in _NOW})
        self._counters[slot.number] = report.counters


def _describe_slot(slot: WorkerSlot) -> dict[str, Any]:
    """A worker as status and manifest contain it; its device and versions once they are known."""
    found: dict[str, Any] = {"worker": slot.number, "state": slot.state, "done": slot.done}
    found |= {"lines": len(slot.has), "deaths": slot.deaths}
    if slot.reason:
        found["reason"] = slot.reason
    if slot.seen is not None:
        facts = asdict(slot.seen)
        found |= {name: facts[name] for name in ("host", "process", "visible", "versions", "device")}
    return found
