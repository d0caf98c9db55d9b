"""Scorers that take forever, in jobs and in batches: nobody waits for them, and nothing else is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxrun.jobs.records.run_paths import JobPaths
from tests.helpers.batch_fakes import Bench, by_id, chat, chats, read, write_job
from tests.helpers.batches_server import ServerSetup, make_processes, start_processes
from tests.helpers.command_processes import PATIENCE
from tests.helpers.raw_clients import until
from tests.helpers.scorer_bombs import (
    is_running,
    list_scorers,
    make_bomb_line,
    run_job,
    serve_batches,
    set_limits,
)

FOREVER = 600.0  # seconds: a test that waited for it would fail
SOON = 0.5
STAYS = 2.0  # seconds: with the guard, a process has ended long before
NO_GUARD = 0.0
NOTE = "the scorer was ended 2 times: it took more than 0.5 s"


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    with make_processes() as context, start_processes(context) as start:
        yield start


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for_bomb(process: Any, paths: JobPaths, lines: int) -> list[int]:
    """Wait until all lines but the bomb are finished; the processes of scorers."""
    wait_until(lambda: paths.out.exists() and len(read_complete(paths.out)) == lines)
    wait_until(lambda: bool(list_scorers(process.pid)))
    return list_scorers(process.pid)


def read_complete(path: Path) -> list[Any]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def find_eval(path: Path, custom_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(by_id(path)[custom_id])["eval"]
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_job(tmp_path: Path, start: Any, number: int) -> None:
    """At once, and its scorers with it; the same command then finishes the job."""
    job = write_job(tmp_path, [make_bomb_line(), *chats(20)])
    paths = JobPaths(job)
    process = start(run_job, job, FOREVER)
    scorers = wait_for_bomb(process, paths, 20)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (-9 if number == signal.SIGKILL else 130)
    wait_until(lambda: not any(map(is_running, scorers)))
    before = by_id(paths.out)
    process = start(run_job, job, SOON)
    process.join(120)
    assert process.exitcode == 1  # an answer could not be scored
    after = by_id(paths.out)
    assert len(after) == 21 and all(after[name] == line for name, line in before.items())
    assert find_eval(paths.out, "bomb")["note"] == NOTE
    assert not paths.errors.exists()


def test_without_a_process_a_signal_does_not_end_it(tmp_path: Path, start: Any) -> None:
    """The twin of the test above: the guard is what ends the job."""
    job = write_job(tmp_path, [make_bomb_line(), *chats(20)])
    process = start(run_job, job, NO_GUARD)
    wait_until(lambda: JobPaths(job).out.exists() and len(read_complete(JobPaths(job).out)) == 20)
    os.kill(process.pid, signal.SIGINT)
    process.join(STAYS)
    assert process.is_alive()


def test_a_signal_while_old_answers_are_scored(tmp_path: Path, start: Any) -> None:
    """The `eval` of a finished line has become a bomb, which is scored before the engine starts."""
    line = chat("line", "{}", {"expected": "{}", "match": "contains"})
    job = write_job(tmp_path, [line, *chats(5)])
    paths = JobPaths(job)
    process = start(run_job, job, SOON)
    process.join(120)
    assert process.exitcode == 0
    write_job(tmp_path, [make_bomb_line("line"), *chats(5)])
    process = start(run_job, job, FOREVER)
    wait_until(lambda: bool(list_scorers(process.pid)))
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    process = start(run_job, job, SOON)
    process.join(120)
    assert process.exitcode == 1
    assert len(by_id(paths.out)) == 6
    assert find_eval(paths.out, "line")["note"] == NOTE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_scoring_again(tmp_path: Path, number: int) -> None:
    """`mlxrun score`, which scores on its main thread."""
    bench = Bench(write_job(tmp_path, [chat("line", "{}", {"expected": "{}", "match": "contains"})]))
    await bench.run()
    write_job(tmp_path, [make_bomb_line("line")])
    before, code = (
        bench.paths.out.read_bytes(),
        "import sys; from mlxrun.cli.main import main; sys.exit(main())",
    )
    with subprocess.Popen([sys.executable, "-c", code, "score", str(bench.job)]) as process:
        wait_until(lambda: bool(list_scorers(process.pid)))
        scorers = list_scorers(process.pid)
        process.send_signal(number)
        assert process.wait(60) == 130
    wait_until(lambda: not any(map(is_running, scorers)))
    assert bench.paths.out.read_bytes() == before


async def test_bombs_hold_up_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, SOON)
    schema = {"expected": {"type": "object", "required": ["a"]}, "match": "json_schema"}
    lines = [make_bomb_line(f"bomb-{at}") for at in range(6)]
    good = [chat(f"good-{at}", f'{{"a": {at}}}', schema) for at in range(20)]
    bench = Bench(write_job(tmp_path, [*lines, *good]))
    outcome = await bench.run()
    assert (outcome.exit_code, outcome.done, outcome.failed) == (1, 26, 0)
    assert outcome.scores.broken == 6
    for record in read(bench.paths.out):
        is_bomb = record["custom_id"].startswith("bomb")
        assert record["eval"]["score"] == (0 if is_bomb else 1)
        assert record["eval"].get("note") == (NOTE if is_bomb else None)


async def test_a_batch_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb is killed with its batch; the next batch runs, and the server stops."""
    pool, place = set_limits(monkeypatch, FOREVER), ServerSetup(tmp_path)
    others = set(list_scorers(os.getpid()))  # idle ones of other tests
    async with place.run() as site:
        made = (await site.create(await site.upload([make_bomb_line(), *chats(5)])))["id"]
        async with asyncio.timeout(PATIENCE):
            while (await site.send("GET", f"/v1/batches/{made}"))["request_counts"]["completed"] < 5:
                pass
        await until(lambda: not set(list_scorers(os.getpid())) <= others)
        await site.send("POST", f"/v1/batches/{made}/cancel")
        assert (await site.wait_until_ended(made))["status"] == "cancelled"
        assert set(list_scorers(os.getpid())) <= others and not pool._idle
        other = (await site.create(await site.upload(chats(5))))["id"]
        assert (await site.wait_until_ended(other))["request_counts"]["completed"] == 5
        await site.create(await site.upload([make_bomb_line()]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_server_stops_and_goes_on(
    tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It does not wait for a bomb, and the next one finishes the batch."""
    place = ServerSetup(tmp_path, engine=False)
    async with place.run() as site:
        made = (await site.create(await site.upload([make_bomb_line(), *chats(10)])))["id"]
    process = start(serve_batches, tmp_path, FOREVER)
    (job,) = tmp_path.glob("batches/*/job/*.jsonl")
    scorers = wait_for_bomb(process, JobPaths(job), 10)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (0 if number == signal.SIGTERM else -9)
    wait_until(lambda: not any(map(is_running, scorers)))
    set_limits(monkeypatch, SOON)
    place.engine = True
    async with place.run() as site:
        done = await site.wait_until_ended(made)
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 11)
        records = {each["custom_id"]: each for each in await site.records(done["output_file_id"])}
        assert records["bomb"]["eval"]["note"] == NOTE


async def test_without_a_process_a_server_does_not_stop(tmp_path: Path, start: Any) -> None:
    """The twin of the test above."""
    async with ServerSetup(tmp_path, engine=False).run() as site:
        await site.create(await site.upload([make_bomb_line(), *chats(10)]))
    process = start(serve_batches, tmp_path, NO_GUARD)
    (job,) = tmp_path.glob("batches/*/job/*.jsonl")
    wait_until(lambda: JobPaths(job).out.exists() and len(read_complete(JobPaths(job).out)) == 10)
    os.kill(process.pid, signal.SIGTERM)
    process.join(STAYS)
    assert process.is_alive()
