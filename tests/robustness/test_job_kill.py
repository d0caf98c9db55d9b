"""A job in a process of its own that is killed, interrupted, or has a full disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from mlxrun.jobs.records.journal import Journal
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.partial_answers import parse_records
from tests.helpers.batch_fakes import Bench, by_id, chat, chats, run_in_process, write_job
from tests.helpers.batches_server import start_processes
from tests.helpers.model_fixtures import mark_sweep
from tests.helpers.plain_user import obey_permissions
from tests.helpers.storm_counts import count, make_rng


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Forks processes that have all imports done (it finds modules by PYTHONPATH alone)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["batch_fakes", "mlxrun.api.openai.request", "mlxrun.api.text.media.images"]
        )
        forkserver.ensure_running()
    return context


@pytest.fixture
def start(server: ForkServerContext) -> Iterator[Any]:
    with start_processes(server) as start_target:

        def start(*args: Any, target: Any = run_in_process) -> ForkServerProcess:
            return start_target(target, *args)

        yield start


def code(process: ForkServerProcess) -> int | None:
    process.join(120)
    return process.exitcode


def kill(process: ForkServerProcess) -> None:
    """It counts only if there was something to kill."""
    count("kills of jobs", int(process.is_alive()))
    process.kill()
    process.join()


def valid(path: Path) -> bool:
    """Whole records, and after them at most one torn line."""
    data = path.read_bytes() if path.exists() else b""
    return all(json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n"))


def read_whole(path: Path) -> list[bytes]:
    data = path.read_bytes() if path.exists() else b""
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.mark.parametrize(
    ("seed", "kills"), mark_sweep([(0, 5), *((seed, 20) for seed in range(25))], [(0, 5)])
)
def test_kills(tmp_path: Path, start: Any, seed: int, kills: int, night: int) -> None:
    """Kill -9 at random moments of a 400-line job: none lost, none twice, the same bytes in the end. No
    process computes more than a part of it, however late it is killed."""
    lines = [*chats(200), "bad", chat("long", "LONG"), *[chat(f"n-{i}", f"n {i}", n=2) for i in range(198)]]
    whole = write_job(tmp_path, lines, "whole.jsonl")
    assert code(start(whole, 0.0, "input")) == 1
    job = write_job(tmp_path, lines)
    paths, rng, seen = JobPaths(job), make_rng(seed, night), 0
    for _ in range(kills):
        process = start(job, 0.008, "input", None, 170)
        wanted = len(read_whole(paths.out)) + rng.randrange(5)
        until = time.monotonic() + 120
        while len(read_whole(paths.out)) < wanted and process.is_alive() and time.monotonic() < until:
            time.sleep(rng.random() * 0.01)
        kill(process)
        assert valid(paths.out) and valid(paths.errors)
        claimed = {
            entry.custom_id for entry in Journal(paths.journal).read_entries() if entry.state == "done"
        }
        kept = {json.loads(line)["custom_id"] for line in read_whole(paths.out)}
        assert claimed <= kept
        assert len(kept) >= seen  # nothing is lost from one kill to the next
        seen = len(kept)
    assert kills <= seen < 398
    assert code(start(job, 0.0, "input")) == 1
    assert paths.out.read_bytes() == JobPaths(whole).out.read_bytes()
    assert paths.errors.read_bytes() == JobPaths(whole).errors.read_bytes()
    assert len(by_id(paths.out)) == 398


def long_lines() -> list[dict[str, Any]]:
    """Answers of some sixty tokens, of every kind that may be cut."""
    text = "a long answer of many words, one after the other, number {}"
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"n": 2},
        {"stop": ["number"]},
        {"logprobs": True, "top_logprobs": 2},
        {"max_tokens": 50},
    ]
    return [chat(f"l{i}", text.format(i), **kinds[i % len(kinds)]) for i in range(36)]


def held(paths: JobPaths) -> int:
    """Answer tokens that the next start finds: of finished lines, and of partial answers."""
    records = [json.loads(line) for line in read_whole(paths.out)]
    over = {record["id"].removeprefix("batch_req_") for record in records}
    tokens = sum(record["response"]["body"]["usage"]["completion_tokens"] for record in records)
    lines = paths.answers.read_bytes().splitlines(keepends=True) if paths.answers.exists() else []
    partial = [
        each for key, found in parse_records(lines).items() if key not in over for each in found.values()
    ]
    return tokens + sum(len(each.tokens) for each in partial)


@pytest.mark.parametrize(
    ("seed", "kills"), mark_sweep([(0, 5), *((seed, 8) for seed in range(25))], [(0, 5)])
)
def test_kills_in_the_middle_of_answers(
    tmp_path: Path, start: Any, seed: int, kills: int, night: int
) -> None:
    """Partial answers are continued: the same bytes, and only tokens that no file held are computed again."""
    whole = write_job(tmp_path, long_lines(), "whole.jsonl")
    assert code(start(whole, 0.0, "input")) == 0
    needed = whole.with_suffix(".tokens").stat().st_size
    assert needed > 36 * 30
    job = write_job(tmp_path, long_lines())
    paths, tokens, rng = JobPaths(job), job.with_suffix(".tokens"), make_rng(seed, night)
    lost = more = 0
    for _ in range(kills):
        before = tokens.stat().st_size if tokens.exists() else 0
        process = start(job, 0.01, "input", 0.02, 220)
        wanted, until = before + rng.randrange(20, 200), time.monotonic() + 120
        while (tokens.stat().st_size if tokens.exists() else 0) < wanted and time.monotonic() < until:
            time.sleep(rng.random() * 0.01)
        kill(process)
        lost = tokens.stat().st_size - held(paths)
        more = max(more, held(paths) - before)
    assert lost >= 0
    assert more > 0
    assert code(start(job, 0.0, "input")) == 0
    assert paths.out.read_bytes() == JobPaths(whole).out.read_bytes()
    assert tokens.stat().st_size == needed + lost
    assert not paths.answers.exists()


def test_a_signal_keeps_partial_answers(tmp_path: Path, start: Any) -> None:
    """What came since the last record is written before the end, however long ago that was."""
    job = write_job(tmp_path, long_lines())
    paths, tokens = JobPaths(job), job.with_suffix(".tokens")
    process, until = start(job, 0.02, "input", 1000.0, 100), time.monotonic() + 120
    while not (tokens.exists() and tokens.stat().st_size > 60) and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    assert code(process) == 130
    assert tokens.stat().st_size == held(paths) > 60


def wait_for_lines(path: Path, count: int) -> None:
    until = time.monotonic() + 120
    while len(read_whole(path)) < count and time.monotonic() < until:
        time.sleep(0.005)
    assert len(read_whole(path)) >= count


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_in_order(tmp_path: Path, start: Any, number: int) -> None:
    """Nothing new, all finished lines in the journal, exit 130, and the same command goes on."""
    job = write_job(tmp_path, chats(60))
    paths = JobPaths(job)
    process = start(job, 0.02, "completion", None, 150)
    wait_for_lines(paths.out, 8)
    os.kill(process.pid, number)
    assert code(process) == 130
    done = len(by_id(paths.out))
    assert 8 <= done < 60
    assert len({entry.custom_id for entry in Journal(paths.journal).read_entries()}) == done
    status = json.loads(paths.status.read_text())
    assert (status["state"], status["done"]) == ("interrupted", done)
    assert code(start(job, 0.0)) == 0
    assert len(by_id(paths.out)) == 60
    runs = json.loads(paths.manifest.read_text())["runs"]
    assert [(run["exit"], run["done"]) for run in runs] == [(130, done), (0, 60 - done)]


async def test_a_flipped_byte_of_a_killed_job_is_noticed(tmp_path: Path, start: Any) -> None:
    """The process is killed before its first commit: the journal has a digest of each record all the same."""
    job = write_job(tmp_path, chats(40))
    bench = Bench(job)
    process = start(job, 0.02, "completion", None, 150)
    wait_for_lines(bench.paths.out, 6)
    process.kill()
    process.join()
    before, data = read_whole(bench.paths.out), bench.paths.out.read_bytes()
    claimed = sum(1 for _ in Journal(bench.paths.journal).read_entries())
    assert len(before) - claimed in (0, 1)  # 1: the kill came between the last record and its entry
    at = data.index(b'"content": "say') + len(b'"content": "s')
    bench.paths.out.write_bytes(data[:at] + b"A" + data[at + 1 :])
    await bench.run()
    assert any(
        "1 line will run again because the output was edited or damaged" in text for text in bench.said
    )
    after = read_whole(bench.paths.out)
    assert len(after) == 40 and set(before) <= set(after)
    assert not any(b"sAy" in line for line in after)


def stubborn(job: Path, pause: float, seconds: float, grace: float = 600.0) -> None:
    """A job whose engine does not let go; after a signal it is waited for `grace` seconds."""
    import asyncio

    import mlxrun.jobs.run.stop_signals
    from tests.helpers.batch_fakes import FakeClient

    async def close(self: FakeClient) -> None:
        job.with_suffix(".closing").touch()
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, time.sleep, seconds))

    FakeClient.close = close  # type: ignore[method-assign]
    mlxrun.jobs.run.stop_signals.GRACE = grace
    run_in_process(job, pause, stop_after=150)


def test_the_second_signal_ends_it_at_once(tmp_path: Path, start: Any) -> None:
    job = write_job(tmp_path, chats(60))
    paths = JobPaths(job)
    process = start(job, 0.02, 600.0, target=stubborn)
    wait_for_lines(paths.out, 8)
    os.kill(process.pid, signal.SIGINT)
    until = time.monotonic() + 120
    while not job.with_suffix(".closing").exists() and time.monotonic() < until:
        time.sleep(0.005)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    assert code(process) == 130
    assert code(start(job, 0.0)) == 0
    assert len(by_id(paths.out)) == 60


def test_an_engine_that_does_not_let_go_is_left(tmp_path: Path, start: Any) -> None:
    """Within seconds, whatever the engine does."""
    job = write_job(tmp_path, chats(30))
    process = start(job, 0.02, 1.5, target=impatient)
    wait_for_lines(JobPaths(job).out, 4)
    os.kill(process.pid, signal.SIGINT)
    assert code(process) == 130
    status = json.loads(JobPaths(job).status.read_text())
    assert status["state"] == "interrupted"


def impatient(job: Path, pause: float, seconds: float) -> None:
    stubborn(job, pause, seconds, grace=0.2)


def small_disk(job: Path, size: int) -> None:
    """No file may grow beyond `size` bytes, which is how a full disk looks to a writer."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    run_in_process(job, 0.0)


@pytest.mark.parametrize("size", [2_000, 9_000, 12_000])
def test_a_full_disk(tmp_path: Path, start: Any, size: int) -> None:
    """A clear error, exit 3, valid files; when there is room again the job goes on."""
    job = write_job(tmp_path, chats(60))
    paths = JobPaths(job)
    assert code(start(job, size, target=small_disk)) == 3
    said = job.with_suffix(".said").read_text()
    assert "cannot be written: File too large. Finished lines are kept" in said
    for path in (paths.out, paths.journal):
        data = path.read_bytes() if path.exists() else b""
        assert not data or data.endswith(b"\n")
    claimed = {entry.custom_id for entry in Journal(paths.journal).read_entries()}
    assert claimed <= set(by_id(paths.out))
    before = by_id(paths.out)
    assert code(start(job, 0.0)) == 0
    after = by_id(paths.out)
    assert len(after) == 60
    assert all(after[name] == line for name, line in before.items())


async def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    from mlxrun.core.errors import JobError

    job = write_job(tmp_path, chats(2))
    tmp_path.chmod(0o500)
    try:
        with (
            obey_permissions(),
            pytest.raises(JobError, match="cannot be written: Permission denied"),
        ):
            await Bench(job).run()
    finally:
        tmp_path.chmod(0o700)
