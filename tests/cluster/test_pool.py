"""Whole jobs on workers in this process: the line workers of real ones, over an engine that echoes."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from mlxrun.cluster import line_worker
from mlxrun.cluster.line_worker import LineWorker
from mlxrun.cluster.messages import SentLine, WorkerDied, WorkerFacts, WorkerReport
from mlxrun.cluster.pool import DispatchedPool
from mlxrun.jobs.run.job_run import JobOptions, JobOutcome, JobRun
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.jobs.run.partial_answers import PartialAnswerTable
from mlxrun.jobs.run.progress import make_view
from mlxrun.jobs.run.stop_signals import Interrupted, StopSignals
from tests.helpers.batch_fakes import Bench, FakeClient, by_id, chat, chats, make_config, read, write_job
from tests.helpers.fake_workers import FACTS
from tests.helpers.raw_clients import until


class LocalWorker:
    """A line worker that can be killed: whatever it had is gone, and so is its engine."""

    def __init__(self, crew: Crew, number: int) -> None:
        self.crew, self.number = crew, number
        self.client = FakeClient(crew.bench.model_info, crew.pause)
        self.dead = asyncio.Event()
        self._worker: LineWorker | None = None

    async def start(self) -> WorkerFacts:
        self.crew.prepare(self)
        bench = self.crew.bench
        preparer = LinePreparer(bench.model_info, bench.config, bench.job.parent)
        self._worker = LineWorker(self.client, preparer, bench.config, 0.0)  # type: ignore[arg-type]
        return replace(FACTS, rows=4, most=8)

    async def submit(self, lines: Sequence[SentLine]) -> None:
        self._get().submit(lines)

    async def poll(self) -> WorkerReport:
        poll = asyncio.create_task(self._get().poll())
        dead = asyncio.create_task(self.dead.wait())
        await asyncio.wait((poll, dead), return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if self.dead.is_set():
            poll.cancel()
            raise WorkerDied("killed")
        return poll.result()

    async def withdraw(self, count: int) -> list[int]:
        return self._get().withdraw(count)

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()

    def runs(self, key: str) -> bool:
        """Whether it has the line with this key."""
        return self._worker is not None and any(line.sent.key == key for line in self._worker._lines.values())

    def _get(self) -> LineWorker:
        if self.dead.is_set():
            raise WorkerDied("killed")
        assert self._worker is not None
        return self._worker


@dataclass
class Crew:
    """Runs a job on such workers."""

    bench: Bench
    count: int = 2
    pause: float = 0.0
    workers: list[LocalWorker] = field(default_factory=list)
    prepare: Callable[[LocalWorker], object] = lambda worker: None
    pool: DispatchedPool = field(init=False)
    stop: StopSignals = field(init=False)

    async def run(self) -> JobOutcome:
        def make(number: int) -> LocalWorker:
            self.workers.append(LocalWorker(self, number))
            return self.workers[-1]

        self.pool = DispatchedPool([partial(make, number) for number in range(self.count)], 8)
        setup = replace(self.bench.make_setup(), pool=self.pool)
        with open(os.devnull, "w") as nowhere:
            view = partial(make_view, stream=nowhere)
            self.stop = StopSignals(self.bench.said.append)
            run = JobRun(
                self.bench.paths, setup, JobOptions(), self.bench.said.append, self.stop, view, backoff=0.0
            )
            return await run.run()


def make_lines() -> list[object]:
    """Lines of every outcome: scored, bad, refused, busy at first, with several choices and logprobs."""
    return [
        *chats(40),
        "bad",
        chat("long", "LONG"),
        chat("busy", "BUSY 1"),
        chat("bug", "BUG"),
        *[chat(f"n-{i}", f"several {i}", n=2, logprobs=True, top_logprobs=2) for i in range(20)],
        chat("texts", "x" * 40, max_tokens=30),
    ]


async def test_two_workers_write_what_one_process_writes(tmp_path: Path) -> None:
    """The same bytes in output and errors, the same tokens and scores in the manifest."""
    (tmp_path / "one").mkdir()
    one = Bench(write_job(tmp_path / "one", make_lines()), make_config(order="input"), no_sleep=True)
    assert (await one.run()).exit_code == 1
    crew = Crew(Bench(write_job(tmp_path, make_lines()), make_config(order="input")))
    outcome = await crew.run()
    assert (outcome.exit_code, outcome.done, outcome.failed) == (1, 62, 3)
    assert crew.bench.paths.out.read_bytes() == one.paths.out.read_bytes()
    assert crew.bench.paths.errors.read_bytes() == one.paths.errors.read_bytes()
    was, now = (json.loads(each.paths.manifest.read_bytes()) for each in (one, crew.bench))
    assert was["scores"] == now["scores"] and was["tokens"]["prompt"] == now["tokens"]["prompt"]
    assert was["tokens"]["output"] == now["tokens"]["output"]
    workers = now["runs"][-1]["workers"]
    assert [each["worker"] for each in workers] == [0, 1] and sum(each["done"] for each in workers) >= 62
    assert workers[0]["device"] == {"name": "fake"}
    assert sum(now["cache"]["hits"].values()) >= 62  # the sum over both
    assert all(worker.client.closed for worker in crew.workers)


async def run_with_kills(folder: Path, kills: int) -> tuple[Bench, Crew]:
    """A job during which workers are killed in the middle of answers."""
    texts = [chat(f"l{i}", f"a long answer of many words, number {i}", logprobs=True) for i in range(40)]
    crew = Crew(Bench(write_job(folder, texts), make_config(order="input")), pause=0.002)
    rng = random.Random(5)

    def has_known_answer(worker: LocalWorker) -> bool:
        """Whether the driver knows the beginning of an answer that this worker has not finished."""
        known = getattr(crew.pool._answers, "_lines", {})
        return not worker.dead.is_set() and any(
            choices[0].tokens for key, choices in known.items() if worker.runs(key) and 0 in choices
        )

    async def kill_some() -> None:
        for _ in range(kills):
            while not (found := [each for each in crew.workers if has_known_answer(each)]):
                await asyncio.sleep(0.001)
            rng.choice(found).dead.set()
            await asyncio.sleep(0)

    killing = asyncio.create_task(kill_some())
    assert (await crew.run()).exit_code == 0
    killing.cancel()
    return crew.bench, crew


async def test_lines_of_dead_workers_go_on_inside_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes as without deaths; the echoing engine checks what it continues."""
    monkeypatch.setattr(line_worker, "REPORT_EVERY", 0.01)
    (tmp_path / "one").mkdir()
    whole, _ = await run_with_kills(tmp_path / "one", 0)
    bench, crew = await run_with_kills(tmp_path, 3)
    assert bench.paths.out.read_bytes() == whole.paths.out.read_bytes()
    assert len(by_id(bench.paths.out)) == 40
    assert any(worker.client.answered for worker in crew.workers), "no answer was continued"


async def test_the_check_sees_partial_answers_of_other_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation twin: tokens are sent with a line that are not those of its answer."""
    dump = PartialAnswerTable.dump_line

    def dump_shifted(self: PartialAnswerTable, key: str) -> bytes:
        for answer in self._lines.get(key, {}).values():
            answer.tokens[:] = [token + 1 for token in answer.tokens]
        return dump(self, key)

    monkeypatch.setattr(line_worker, "REPORT_EVERY", 0.01)
    monkeypatch.setattr(PartialAnswerTable, "dump_line", dump_shifted)
    with pytest.raises(AssertionError):
        bench, _ = await run_with_kills(tmp_path, 3)


async def test_an_interrupted_job_goes_on_with_other_workers(tmp_path: Path) -> None:
    """The driver stops in the middle; the same command finishes the job, here even without workers."""
    bench = Bench(write_job(tmp_path, chats(60)), make_config(order="input"))
    crew = Crew(bench, pause=0.005)
    running = asyncio.create_task(crew.run())
    await until(lambda: read(bench.paths.out))
    crew.stop.request()
    with pytest.raises(Interrupted):
        await running
    done = len(read(bench.paths.out))
    assert 0 < done < 60 and all(worker.client.closed for worker in crew.workers)
    assert (await bench.run()).done == 60
    assert bench.ran <= 60 - done  # answers that were known to their end need no engine
    assert list(by_id(bench.paths.out)) == [f"line-{i}" for i in range(60)]


async def test_a_line_that_kills_three_workers_is_an_error_record(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, [*chats(20), chat("deadly", "die now")]))
    crew = Crew(bench)

    def prepare(worker: LocalWorker) -> None:
        def die(text: str) -> bool:
            if text == "die now":
                worker.dead.set()
            return text == "die now"

        worker.client.waits = die

    crew.prepare = prepare
    outcome = await crew.run()
    assert (outcome.exit_code, outcome.done, outcome.failed) == (1, 20, 1)
    (record,) = read(bench.paths.errors)
    assert record["custom_id"] == "deadly" and record["error"]["code"] == "worker_died"
    assert sum(each["deaths"] for each in crew.pool.list_workers()) == 3
