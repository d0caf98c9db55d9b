"""Jobs on a real Ray with two simulated nodes: processes die, and the bytes are those of one process."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from mlxrun.jobs.records.run_paths import JobPaths
from tests.helpers.batch_fakes import by_id, read
from tests.helpers.command_processes import run_program

ROOT = Path(__file__).parents[3]
SETS = ("--set", "engine.reproducible=true", "--set", "batch.order=input", "--set", "scheduler.max_running=4")
SECONDS = 300
IMAGE = {"type": "image_url", "image_url": {"url": "images/none.png"}}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, with its output as one process writes it in `one.out.jsonl`."""
    folder = tmp_path_factory.mktemp("ray")
    path = folder / "job.jsonl"
    lines = (ROOT / "jobs" / "eval.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:32]), encoding="utf-8")
    assert main(["batch", str(path), "-o", str(folder / "one.out.jsonl"), *SETS]) == 0
    return path


@pytest.fixture(scope="module")
def logprobs_job(job: Path) -> Path:
    """The same job with all digits of logprobs, and its output as one process writes it."""
    path = job.with_name("logprobs") / "job.jsonl"
    path.parent.mkdir()
    lines = [json.loads(line) for line in job.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["body"] |= {"logprobs": True, "top_logprobs": 2}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert main(["batch", str(path), "-o", str(path.with_name("one.out.jsonl")), *SETS]) == 0
    return path


def start(job: Path, out: Path, address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mlxrun", "batch", str(job), "-o", str(out), *SETS]
    with out.with_suffix(".log").open("a") as log:
        return subprocess.Popen([*command, "--ray", address], stdout=log, stderr=log, text=True)


def list_running(paths: JobPaths, driver: subprocess.Popen[str]) -> list[int]:
    """The processes of the workers that this driver has now, by its status."""
    with suppress(OSError, ValueError):
        status = json.loads(paths.status.read_bytes())
        if status["pid"] == driver.pid:
            return [each["process"] for each in status.get("workers", ()) if each["state"] == "running"]
    return []


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def run_with_kills(job: Path, out: Path, address: str, kills: int, rng: random.Random) -> int:
    """Run a job until it is done, and kill a worker, or the driver, each time some lines more are finished.
    Returns how many kills there were; the first is of a worker."""
    paths, killed = JobPaths(job, out), 0
    driver, until = start(job, out, address), time.monotonic() + SECONDS * (1 + kills)
    wanted = 1
    while driver.poll() is None or (driver.returncode != 0 and killed):
        assert time.monotonic() < until, out.with_suffix(".log").read_text()
        if driver.poll() is not None:
            assert driver.returncode == -signal.SIGKILL, out.with_suffix(".log").read_text()
            driver = start(job, out, address)
        finished = paths.out.read_bytes().count(b"\n") if paths.out.exists() else 0
        if killed < kills and wanted <= finished < 32 and (running := list_running(paths, driver)):
            if killed and rng.random() < 0.3:
                driver.kill()
                driver.wait()
            else:
                kill(rng.choice(running))
            killed, wanted = killed + 1, finished + rng.randrange(1, 2 + 32 // (kills + 1))
        time.sleep(0.02)
    assert driver.returncode == 0, out.with_suffix(".log").read_text()
    return killed


@pytest.mark.slow
def test_two_nodes_write_the_bytes_of_one_process_though_a_worker_dies(address: str, job: Path) -> None:
    out = job.with_name("two.out.jsonl")
    assert run_with_kills(job, out, address, 1, random.Random(1)) == 1
    assert out.read_bytes() == job.with_name("one.out.jsonl").read_bytes()
    workers = json.loads(JobPaths(job, out).manifest.read_bytes())["runs"][-1]["workers"]
    assert len(workers) == 2 and sum(each["deaths"] for each in workers) >= 1
    assert sum(each["done"] for each in workers) == 32
    seen = [each for each in workers if "device" in each]
    assert seen and all(each["device"]["backend"] == "cpu" for each in seen)


@pytest.mark.sweep
@pytest.mark.parametrize("order", ["ray first", "ray last"])
def test_one_process_and_two_workers_finish_what_the_other_has_begun(
    address: str, logprobs_job: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same digits in all logprobs, though Ray gives each worker one thread of BLAS and this process
    asks for four. Nothing is refused or mixed."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    out = logprobs_job.with_name(f"{order.replace(' ', '-')}.out.jsonl")
    command = [sys.executable, "-m", "mlxrun", "batch", str(logprobs_job), "-o", str(out), *SETS]
    starts: list[list[str]] = [["--ray", address], []]
    for more in starts if order == "ray first" else starts[::-1]:
        limit = [] if out.exists() else ["--limit", "10"]
        done = run_program([*command, *more, *limit])
        assert done.returncode == 0, done.stderr
    assert out.read_bytes() == logprobs_job.with_name("one.out.jsonl").read_bytes()
    manifest = json.loads(JobPaths(logprobs_job, out).manifest.read_bytes())
    assert manifest["mixed"] is False and [run["lines"] for run in manifest["runs"]] == [10, 22]
    assert [run["device"].get("blas_threads", 1) for run in manifest["runs"]] == [1, 1]


@pytest.mark.sweep
def test_twenty_kills_of_workers_and_drivers(address: str, job: Path) -> None:
    """Nothing is lost or doubled, and the bytes are the same."""
    out, rng, kills = job.with_name("kills.out.jsonl"), random.Random(7), 0
    for number in range(5):
        out = job.with_name(f"kills{number}.out.jsonl")
        kills += run_with_kills(job, out, address, 5, rng)
        assert out.read_bytes() == job.with_name("one.out.jsonl").read_bytes()
        assert len(by_id(out)) == 32 and not read(JobPaths(job, out).errors)
    assert kills >= 20


@pytest.mark.sweep
def test_more_workers_than_there_is_room_for(address: str, job: Path) -> None:
    """Exit 2, with what was requested and what there is."""
    command = [
        sys.executable,
        "-m",
        "mlxrun",
        "batch",
        str(job),
        "-o",
        str(job.with_name("no.jsonl")),
    ]
    command += ["--ray", address, "--set", "workers.resources={GPU: 1}"]
    done = run_program(command)
    assert done.returncode == 2 and "the cluster has room for 0 (2 nodes" in done.stderr


@pytest.mark.sweep
def test_workers_without_the_folder_get_the_images(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of one process; a file that is missing fails its line by name."""
    shutil.copytree(ROOT / "jobs" / "images", tmp_path / "images")
    path, lines = tmp_path / "vision.jsonl", (ROOT / "jobs" / "vision.jsonl").read_text().splitlines(True)
    missing = {"id": "missing", "messages": [{"role": "user", "content": [IMAGE]}]}
    path.write_text("".join(lines[:6]) + json.dumps(missing) + "\n")
    one, two = tmp_path / "one.out.jsonl", tmp_path / "two.out.jsonl"
    assert main(["batch", str(path), "-o", str(one), *SETS]) == 1
    monkeypatch.setattr("mlxrun.cluster.ray.ray_workers.stamp_file", lambda path: (0, 0))  # seen by no worker
    assert main(["batch", str(path), "-o", str(two), *SETS, "--ray", address]) == 1
    assert two.read_bytes() == one.read_bytes() and len(by_id(two)) == 6
    errors = [JobPaths(path, out).errors.read_text() for out in (one, two)]
    assert errors[0] == errors[1] and "'images/none.png' does not exist" in errors[0]


def kill_raylet(driver: subprocess.Popen[str]) -> None:
    """Kill the process of the only node of a driver's own Ray."""
    listed = run_program(("ps", "-axww", "-o", "pid=,ppid=,args="), check=True)
    for process, parent, command in (line.split(None, 2) for line in listed.stdout.splitlines()):
        if int(parent) == driver.pid and "/raylet/raylet " in command:
            kill(int(process))


@pytest.mark.sweep
def test_a_job_ends_with_its_own_ray_and_continues(tmp_path: Path) -> None:
    """Exit 3 soon after the node has died; the next start has a Ray of its own again."""
    out, job = tmp_path / "ended.out.jsonl", tmp_path / "job.jsonl"
    shutil.copy(ROOT / "jobs" / "eval.jsonl", job)
    log, until = out.with_suffix(".log"), time.monotonic() + SECONDS
    driver = start(job, out, "local")
    while " runs on " not in log.read_text():
        assert driver.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    kill_raylet(driver)
    assert driver.wait(60) == 3 and "Ray on this machine has ended" in log.read_text()
    assert start(job, out, "local").wait(SECONDS) == 0, log.read_text()
    assert len(by_id(out)) == len(job.read_text().splitlines())
