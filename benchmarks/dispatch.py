"""The driver of a job on many workers: how many lines a second it hands out, and where it becomes the limit.

The dispatcher, the line runner, index, journal and output are the real ones; workers are fakes in this
process. `measure_driver`: they answer at once, so all time is the driver's. `simulate`: each line takes its
time on a worker, on an event loop whose waits are skipped and whose clock counts them, beside the processor
time that the driver needs. So 1,000 workers take seconds here, and become slower only where the driver does
not keep up.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from mlxrun.cli.bench.report import write_report
from mlxrun.cli.main import main
from mlxrun.cli.options import add_json_option, say
from mlxrun.cluster.dispatcher import Dispatcher
from mlxrun.cluster.line_worker import LINGER
from mlxrun.cluster.messages import PROTOCOL, LineCounts, LineResult, SentLine, WorkerFacts, WorkerReport
from mlxrun.cluster.pool import DispatchedPool
from mlxrun.cluster.ray.ray_workers import WORKERS_A_LINGER
from mlxrun.cluster.worker_slots import LineTicket
from mlxrun.config.setting_fields import hash_config
from mlxrun.config.settings import Config, SchedulerSettings
from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.job_run import JobOptions, JobRun, JobSetup
from mlxrun.jobs.run.progress import make_view
from mlxrun.jobs.run.stop_signals import StopSignals
from mlxrun.model.load.model_info import load_model_info

ROWS = 32  # lines that a worker computes at once
GROUP = 16  # lines that share a prefix
COUNTS = (1, 2, 8, 32, 100, 300, 1000)
LINES_EACH = 320  # lines of a simulation for each worker
BODY: dict[str, Any] = {
    "id": "chatcmpl-x",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "a"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11},
}


@dataclass(frozen=True, slots=True)
class LinePace:
    """What a line takes on a worker, in seconds: `decode` while up to ROWS of them run; `prefix`: alone, for
    the prefix of a group that the worker has not computed yet. `call`: processor time of the driver for a
    message by Ray."""

    decode: float
    prefix: float
    call: float
    line: float = 0.0


@dataclass(frozen=True, slots=True)
class DispatchResult:
    """One measurement. `busy`: share of the time that the driver computed."""

    workers: int
    lines: int
    seconds: float
    busy: float
    lines_per_second: float
    prefixes: int
    moved: int


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop that skips its waits. Its clock counts them, and the processor time of the process."""

    def __init__(self) -> None:
        self.skipped = self.spent = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        return time.process_time() + self.skipped + self.spent

    def spend(self, seconds: float) -> None:
        """Count processor time of a driver that is not spent here."""
        self.spent += seconds


class _SkippingSelector(selectors.SelectSelector):
    def __init__(self, loop: SkippingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        self._loop.skipped += max(0.0, timeout)
        return super().select(0)


class PacedWorker:
    """A worker whose lines take the time of `pace`; with None they are answered at once."""

    prefixes = 0  # of all workers: how often one was computed
    moved = 0  # lines that all workers gave back

    def __init__(self, pace: LinePace | None, linger: float) -> None:
        self._pace = pace
        self._linger = linger
        self._waiting: deque[SentLine] = deque()
        self._running = 0
        self._known: set[str] = set()
        self._prefill_until = 0.0
        self._finished: list[LineResult] = []
        self._news = asyncio.Event()

    async def start(self) -> WorkerFacts:
        most = 2 * ROWS if self._pace else 256
        return WorkerFacts("here", "node", os.getpid(), PROTOCOL, {}, {}, "m", "s", most // 2, most)

    async def submit(self, lines: Sequence[SentLine]) -> None:
        self._spend_call()
        if self._pace is None:
            self._finished += map(_answer, lines)
            self._news.set()
            return
        self._waiting.extend(lines)
        self._begin()

    async def poll(self) -> WorkerReport:
        self._spend_call()
        await self._news.wait()
        if self._pace is not None:
            await asyncio.sleep(self._linger)
        self._news.clear()
        finished, self._finished = self._finished, []
        return WorkerReport(finished, prompts=[(10, 1)] * len(finished))

    async def withdraw(self, count: int) -> list[int]:
        self._spend_call()
        given = [self._waiting.pop().number for _ in range(min(count, len(self._waiting)))]
        PacedWorker.moved += len(given)
        return given

    async def close(self) -> None:
        """Nothing is left."""

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._pace is not None
        while self._waiting and self._running < ROWS:
            line = self._waiting.popleft()
            self._running += 1
            group = line.line.custom_id.partition("-")[0]
            self._prefill_until = max(self._prefill_until, loop.time())
            if group not in self._known:
                self._known.add(group)
                self._prefill_until += self._pace.prefix
                PacedWorker.prefixes += 1
            loop.call_at(self._prefill_until + self._pace.decode, self._end, line)

    def _end(self, line: SentLine) -> None:
        self._running -= 1
        self._finished.append(_answer(line))
        self._news.set()
        self._begin()

    def _spend_call(self) -> None:
        """Count what the driver's side of a message by Ray costs."""
        loop = asyncio.get_running_loop()
        if self._pace is not None and isinstance(loop, SkippingLoop):
            loop.spend(self._pace.call)


def _answer(line: SentLine) -> LineResult:
    return LineResult(line.number, BODY, None, LineCounts(10, 0, 1))


def _get_loop(loop: asyncio.AbstractEventLoop) -> SkippingLoop:
    assert isinstance(loop, SkippingLoop)
    return loop


def simulate(workers: int, pace: LinePace) -> DispatchResult:
    """A job on so many workers, as a result of the simulation's clock."""
    lines = LINES_EACH * workers
    linger = LINGER * max(1.0, workers / WORKERS_A_LINGER)
    PacedWorker.prefixes = PacedWorker.moved = 0

    async def run() -> float:
        dispatcher = Dispatcher([partial(PacedWorker, pace, linger)] * workers)
        await dispatcher.start()
        loop = _get_loop(asyncio.get_running_loop())
        begun = loop.time()
        numbers = iter(range(lines))

        async def answer_some() -> None:
            for number in numbers:
                name = f"{number // GROUP}-{number}"
                line = JobLine(number, name, "/v1/completions", {"prompt": name})
                await dispatcher.answer(LineTicket(line, name, (number // GROUP) << 32))
                loop.spend(pace.line)

        await asyncio.gather(*(answer_some() for _ in range(workers * 2 * ROWS + 256)))
        took = loop.time() - begun
        await dispatcher.close()
        return took

    used = time.process_time()
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        took = runner.run(run())
        loop = _get_loop(runner.get_loop())
        busy = (time.process_time() - used + loop.spent) / took
    seen = PacedWorker.prefixes, PacedWorker.moved
    return DispatchResult(workers, lines, took, min(1.0, busy), lines / took, *seen)


def measure_dispatcher(lines: int, workers: int) -> DispatchResult:
    """Lines that the dispatcher alone hands to workers that answer at once, and whose results it returns."""

    async def run() -> tuple[float, float]:
        dispatcher = Dispatcher([partial(PacedWorker, None, 0.0)] * workers)
        await dispatcher.start()
        body = {"prompt": "one", "max_tokens": 1}
        numbers = iter(range(lines))

        async def answer_some() -> None:
            for number in numbers:
                line = JobLine(number, str(number), "/v1/completions", body)
                await dispatcher.answer(LineTicket(line, "key", (number // GROUP) << 32))

        begun, used = time.perf_counter(), time.process_time()
        await asyncio.gather(*(answer_some() for _ in range(workers * 256)))
        spent = time.perf_counter() - begun, time.process_time() - used
        await dispatcher.close()
        return spent

    took, used = asyncio.run(run())
    return DispatchResult(workers, lines, took, used / took, lines / used, 0, 0)


def measure_driver(lines: int, workers: int) -> DispatchResult:
    """Lines of a whole job, from the file to output, journal and manifest."""
    config = Config(scheduler=SchedulerSettings(max_running=128))
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.jsonl")
        body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 1}
        with job.open("w") as file:
            for number in range(lines):
                file.write(json.dumps({"id": f"line-{number}", **body}) + "\n")
        info = load_model_info(config.model)

        async def run() -> tuple[float, float]:
            from mlxrun.jobs.run.line_answerer import LinePreparer

            async def start() -> Any:
                raise JobError("the workers have the engines")

            pool = DispatchedPool([partial(PacedWorker, None, 0.0)] * workers, 256)
            preparer = LinePreparer(info, config, None)
            setup = JobSetup(config, hash_config(config), info, preparer, start, dict, pool=pool)
            begun, used = time.perf_counter(), time.process_time()
            with open(os.devnull, "w") as nowhere:
                view = partial(make_view, stream=nowhere)
                stop = StopSignals(_ignore)
                outcome = await JobRun(JobPaths(job), setup, JobOptions(), _ignore, stop, view).run()
            assert outcome.done == lines
            return time.perf_counter() - begun, time.process_time() - used

        took, used = asyncio.run(run())
    return DispatchResult(workers, lines, took, used / took, lines / used, 0, 0)


def _ignore(text: str) -> None:
    """A job's messages."""


def run_dispatch_bench(lines: int, pace: LinePace, say: Callable[[str], None]) -> dict[str, Any]:
    """All measurements as JSON; `say` gets a line for each."""
    measure_driver(100, 1)  # so that imports are done
    alone, job = measure_dispatcher(lines, 2), measure_driver(lines, 2)
    for name, result in (("dispatcher", alone), ("job", job)):
        say(f"{name}: {result.lines_per_second:,.0f} lines for each second of the driver's processor time")
    pace = replace(pace, line=max(0.0, 1 / job.lines_per_second - 1 / alone.lines_per_second))
    found: dict[str, Any] = {"dispatcher": asdict(alone), "job": asdict(job), "pace": asdict(pace)}
    found["simulation"] = []
    say(f"{'workers':>8}{'lines/s':>10}{'of ideal':>10}{'driver':>8}{'prefixes':>10}{'moved':>8}")
    one = 0.0
    for workers in COUNTS:
        result = simulate(workers, pace)
        one = one or result.lines_per_second
        say(
            f"{workers:>8}{result.lines_per_second:>10,.0f}{result.lines_per_second / workers / one:>10.0%}"
            f"{result.busy:>8.0%}{result.prefixes * GROUP / result.lines:>10.2f}{result.moved:>8}"
        )
        found["simulation"].append(asdict(result))
    return found


@click.command(name="dispatch")
@click.option(
    "--lines", default=100_000, show_default=True, type=click.IntRange(100, 10_000_000), help="Lines."
)
@click.option("--decode", default=2.0, show_default=True, help="Seconds of a line among 32 rows.")
@click.option(
    "--prefix", default=0.05, show_default=True, help="Seconds of a prefix that is not computed yet."
)
@click.option(
    "--call", default=150.0, show_default=True, help="Microseconds of the driver for a message by Ray."
)
@add_json_option
def command(lines: int, decode: float, prefix: float, call: float, json_path: Path | None) -> int:
    """Measure the driver of `mlxrun batch --ray` with fake workers, and simulate 1 to 1,000 of them."""
    found = run_dispatch_bench(lines, LinePace(decode, prefix, call / 1e6), say)
    return write_report(found, json_path, lambda report: None)


if __name__ == "__main__":
    sys.exit(main(command=command, program="python -m benchmarks.dispatch"))
