"""Every part of a Ray on this machine is killed, while it starts and in the middle of a job: the job goes on,
or ends with a sentence; in the end all its lines are there once, with the bytes of one process, and nothing
is left running."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mlxrun.jobs.records.run_paths import JobPaths
from tests.helpers.command_processes import ROOT, read_log, run_program, start_command, wait_until
from tests.helpers.storm_counts import count, make_rng

SETS = ("engine.reproducible=true", "batch.order=input", "scheduler.max_running=4")
OPTIONS = [each for text in SETS for each in ("--set", text)]
LINES = 12
PARTS = {  # of the command lines of their processes
    "cluster": "gcs_server",
    "node": "/raylet/raylet ",
    "worker": "ray::LineActor",
    "agent": "ray::DashboardAgent",
    "environments": "ray::RuntimeEnvAgent",
    "dashboard": "/dashboard/dashboard.py",
    "log": "/log_monitor.py",
    "autoscaler": "/monitor.py",
}


def list_processes(root: int) -> dict[int, str]:
    """The processes of a command, and of what it has started, by their ids."""
    done = run_program(["ps", "-axww", "-o", "pid=,sid=,stat=,args="], check=True)
    rows = (line.split(None, 3) for line in done.stdout.splitlines())
    alive = (row for row in rows if int(row[1]) == root and not row[2].startswith("Z"))
    return {int(pid): args for pid, _, _, args in alive}


def write_eval_job(folder: Path) -> Path:
    """A job, and what one process makes of it in `one.out.jsonl`."""
    path = folder / "job.jsonl"
    lines = (ROOT / "jobs" / "eval.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:LINES]), encoding="utf-8")
    process = start_command(folder, "batch", str(path), "-o", str(folder / "one.out.jsonl"), *OPTIONS)
    assert process.wait(240) == 0, read_log(folder)
    return path


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def end_all(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a command, if the test has failed."""
    process.kill()
    process.wait()
    for pid in list_processes(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_part(process: subprocess.Popen[str], part: str, rng: random.Random) -> bool:
    """Kill a part of a command, or any; whether it was there."""
    found = list_processes(process.pid)
    if part == "driver":
        chosen = [process.pid]
    elif part == "any":
        chosen = sorted(found)
    else:
        chosen = [pid for pid, args in found.items() if PARTS[part] in args]
    if not chosen or process.poll() is not None:
        return False
    with suppress(ProcessLookupError):
        os.kill(rng.choice(chosen), signal.SIGKILL)
    count("kills of parts of Ray")
    return True


def run_and_kill(job: Path, part: str, moment: Callable[[], bool], rng: random.Random) -> int:
    """One start on a Ray of its own, of which a part is killed at a moment; the exit code."""
    process = start_command(job.parent, "batch", str(job), *OPTIONS, "--ray")
    try:
        wait_until(lambda: moment() or process.poll() is not None, lambda: read_log(job.parent))
        kill_part(process, part, rng)
        code = process.wait(240)
        said = read_log(job.parent)
        assert "Traceback" not in said and "this is a bug" not in said, said
        if code not in (0, -signal.SIGKILL):
            last = said.splitlines()[-1]
            # While it is being connected to, Ray itself ends the process, in words of its own.
            by_ray = code == 1 and re.match(r"\[\d{4}-\d\d-\d\d .* E ", last)
            assert by_ray or (code in (2, 3) and last.startswith("mlxrun: ")), said
        # Agents of Ray notice by themselves that their node has ended, after minutes.
        end = time.monotonic() + 600
        while list_processes(process.pid):
            assert time.monotonic() < end, list_processes(process.pid)
            time.sleep(0.2)
        return code
    finally:
        end_all(process)


def check_finished(job: Path) -> None:
    paths = JobPaths(job)
    assert paths.out.read_bytes() == job.with_name("one.out.jsonl").read_bytes()
    assert not paths.errors.exists() and not paths.answers.exists()


@pytest.mark.sweep
def test_a_job_whose_node_is_killed(tmp_path: Path, night: int) -> None:
    """In the middle of it; one process without Ray finishes it."""
    job, rng = write_eval_job(tmp_path), make_rng(0, night)
    out = JobPaths(job).out
    code = run_and_kill(job, "environments", lambda: count_lines(out) >= 1, rng)
    assert code in (0, 3), read_log(tmp_path)
    assert start_command(tmp_path, "batch", str(job), *OPTIONS).wait(240) == 0, read_log(tmp_path)
    check_finished(job)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("part", ["driver", "any", *PARTS])
def test_kills_of_a_part(tmp_path: Path, part: str, seed: int, night: int) -> None:
    """First while it starts, then in the middle; starts on Ray then finish the job."""
    job, rng = write_eval_job(tmp_path), make_rng(seed, night)
    out, until = JobPaths(job).out, time.monotonic() + rng.random() * 20
    run_and_kill(job, part, lambda: time.monotonic() >= until, rng)
    wanted = count_lines(out) + rng.randrange(1, 4)
    run_and_kill(job, part, lambda: count_lines(out) >= wanted, rng)
    codes = []
    while 0 not in codes:  # a busy machine may need another try to start Ray
        assert len(codes) < 4, read_log(tmp_path)
        codes.append(start_command(tmp_path, "batch", str(job), *OPTIONS, "--ray").wait(600))
    check_finished(job)


@pytest.mark.sweep
def test_a_job_that_is_suspended_with_its_ray(tmp_path: Path) -> None:
    """All processes stand still for longer than Ray waits for a node, and go on."""
    job = write_eval_job(tmp_path)
    process = start_command(tmp_path, "batch", str(job), *OPTIONS, "--ray")
    try:
        wait_until(lambda: count_lines(JobPaths(job).out) >= 1, lambda: read_log(tmp_path))
        pids = list_processes(process.pid)
        for number, pause in ((signal.SIGSTOP, 45.0), (signal.SIGCONT, 0.0)):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(pause)
        count("suspensions")
        assert process.wait(600) == 0, read_log(tmp_path)
    finally:
        end_all(process)
    check_finished(job)
