"""Jobs that are suspended (SIGSTOP) at random moments, with their scorers or without, and go on or are
killed: in the end their files have the bytes of a job that was left alone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxrun.jobs.records.run_paths import JobPaths
from tests.helpers.batch_fakes import chat, chats, run_in_process, write_job
from tests.helpers.batches_server import make_processes, start_processes
from tests.helpers.command_processes import suspend, wait_until
from tests.helpers.scorer_bombs import list_scorers, set_guard
from tests.helpers.storm_counts import count, make_rng

LINES = 40
PART = 60  # tokens of a process that is killed, however late: five of them have not all of the job's
Start = Callable[..., Any]


@pytest.fixture
def start() -> Iterator[Start]:
    with make_processes() as context, start_processes(context) as start:
        yield start


def make_lines() -> list[dict[str, Any]]:
    """Every second one is scored in a child process."""
    pattern = {"expected": "", "match": "regex", "pattern": "(say|words) [0-9]+"}
    scored = [chat(f"scored-{i}", f"words {i}", pattern) for i in range(LINES // 2)]
    return [line for pair in zip(chats(LINES // 2), scored, strict=True) for line in pair]


def run_job(job: Path, pause: float, stop_after: int | None = None) -> None:
    """For a process of its own: a job whose scorers have little time."""
    set_guard(30.0)
    run_in_process(job, pause, "input", stop_after=stop_after)


def finish(job: Path, start: Start) -> bytes:
    """Run it to its end; all bytes of its output."""
    process = start(run_job, job, 0.0)
    process.join(240)
    assert process.exitcode == 0
    assert not JobPaths(job).errors.exists()
    return JobPaths(job).out.read_bytes()


def suspend_often(process: Any, rng: random.Random, times: int) -> None:
    """The job, its scorers or all of them, for a moment each."""
    for _ in range(times):
        time.sleep(rng.random() * 0.03)
        if not process.is_alive():
            return
        scorers = list_scorers(process.pid)
        suspend(rng.choice(([process.pid], scorers, [process.pid, *scorers])), rng.random() * 0.1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 16))])
def test_suspended_jobs(tmp_path: Path, start: Start, seed: int, night: int) -> None:
    """One start goes on after each suspension; the starts before it are killed while they are suspended."""
    rng = make_rng(seed, night)
    wanted = finish(write_job(tmp_path, make_lines(), "whole.jsonl"), start)
    job = write_job(tmp_path, make_lines())
    paths = JobPaths(job)
    for _ in range(1 if seed == 0 else 5):
        process = start(run_job, job, 0.02, PART)
        wait_until(lambda: paths.status.exists())
        suspend_often(process, rng, rng.randrange(1, 8))
        os.kill(process.pid, signal.SIGSTOP)
        count("kills of jobs", int(process.is_alive()))
        process.kill()
        process.join()
    process = start(run_job, job, 0.02)
    suspend_often(process, rng, 10 if seed == 0 else 60)
    process.join(240)
    assert process.exitcode == 0
    assert paths.out.read_bytes() == wanted
    assert not paths.errors.exists() and not paths.answers.exists()
