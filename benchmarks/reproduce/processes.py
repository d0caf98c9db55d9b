"""The conditions that need processes: other numbers of threads in the environment, workers on Ray, a job that
is killed and resumed, by other means too, and a batch of a server.

What the environment says of threads must not matter, so each process has another number there.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.reproduce.answers import Answers, read_answers, read_records
from benchmarks.server_process import MLXRUN, start_server
from mlxrun.core.errors import MlxrunError
from mlxrun.jobs.records.run_paths import JobPaths

KILLS = 10
LIMIT = 3600.0  # seconds that a run may take
POLL = 0.05
THREADS = (1, 2, 4)  # in the environments
ON_RAY = ("--ray", "--set", "workers.count=2")


def make_environment(threads: int | None) -> dict[str, str]:
    """The environment of a process, with so many threads for BLAS; None: with nothing said of them."""
    found = {key: value for key, value in os.environ.items() if key not in THREAD_NAMES}
    return found | ({} if threads is None else dict.fromkeys(THREAD_NAMES, str(threads)))


THREAD_NAMES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def run_job(job: Path, config: Path, out: Path, threads: int | None, more: Sequence[str] = ()) -> Answers:
    """Run a job by `mlxrun batch`, with so many threads in the environment."""
    command = [*MLXRUN, "batch", str(job), "-c", str(config), "-o", str(out), *more]
    done = subprocess.run(
        command, capture_output=True, timeout=LIMIT, check=False, env=make_environment(threads)
    )
    if done.returncode:
        raise MlxrunError(f"{out.name}: ended with code {done.returncode}: {done.stderr.decode()[-2000:]}")
    return read_answers(JobPaths(job, out))


def run_killed(job: Path, config: Path, out: Path, lines: int) -> tuple[Answers, int]:
    """Run a job that is killed KILLS times with SIGKILL, each time after some more lines; the number of
    kills, which may be less where lines end faster than they can be counted."""
    starts = [(threads, ()) for threads, _ in zip(cycle(THREADS), range(KILLS + 1), strict=False)]
    return _run_in_turn(job, config, out, lines, starts)


def run_handed_over(job: Path, config: Path, out: Path, lines: int) -> tuple[Answers, int]:
    """Run a job that one process begins, two workers on Ray go on with, and another process finishes, each
    with other threads in its environment."""
    return _run_in_turn(job, config, out, lines, [(4, ()), (None, ON_RAY), (2, ())])


def _run_in_turn(
    job: Path, config: Path, out: Path, lines: int, starts: Sequence[tuple[int | None, Sequence[str]]]
) -> tuple[Answers, int]:
    """Start a job several times, with the threads and options of each start, and kill all but the last; the
    number of kills."""
    kills = 0
    for number, (threads, more) in enumerate(starts[:-1], 1):
        command = [*MLXRUN, "batch", str(job), "-c", str(config), "-o", str(out), *more]
        environment = make_environment(threads)
        with (
            out.with_suffix(".log").open("ab") as log,
            subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
        ):
            kills += _kill_after(process, out, number * lines // len(starts))
    threads, more = starts[-1]
    return run_job(job, config, out, threads, more), kills


def _kill_after(process: subprocess.Popen[bytes], out: Path, lines: int) -> bool:
    """Kill the process once the output has so many lines; whether it was still running."""
    end = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < end:
        if out.exists() and out.read_bytes().count(b"\n") >= lines:
            process.kill()
            return process.wait() == -signal.SIGKILL
        time.sleep(POLL)
    if process.poll() is None:
        process.kill()
        raise MlxrunError(f"the job has not finished {lines} lines within {LIMIT:.0f} s")
    return False


async def run_batch(job: Path, config: Path, folder: Path) -> tuple[Answers, int]:
    """Run a job as a batch of `mlxrun serve`, by its HTTP API. The server is killed halfway, and another one,
    with other threads in its environment, finishes the batch; the number of kills."""
    import aiohttp

    async with start_server(config, folder, make_environment(4)) as server:
        async with aiohttp.ClientSession(server.url, raise_for_status=True) as http:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", job.read_bytes(), filename=job.name)
            file = await _read(http.post("/v1/files", data=form))
            url = json.loads(job.read_text(encoding="utf-8").splitlines()[0])["url"]
            wanted = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
            batch = await _read(http.post("/v1/batches", json=wanted))
            batch = await _wait_for_batch(http, batch["id"], share=0.5)
        killed = batch["status"] not in _ENDED
        if killed:
            os.kill(server.pid, signal.SIGKILL)
    async with (
        start_server(config, folder, make_environment(2)) as server,
        aiohttp.ClientSession(server.url, raise_for_status=True) as http,
    ):
        batch = await _wait_for_batch(http, batch["id"])
        if batch["status"] != "completed" or batch["request_counts"]["failed"]:
            raise MlxrunError(f"the batch is {batch['status']}: {json.dumps(batch['request_counts'])}")
        out = folder / "batch.out.jsonl"
        async with http.get(f"/v1/files/{batch['output_file_id']}/content") as response:
            out.write_bytes(await response.read())
    return read_records(out), int(killed)


_ENDED = ("completed", "failed", "expired", "cancelled")


async def _wait_for_batch(http: Any, name: str, share: float = 1.1) -> dict[str, Any]:
    """The batch once it has ended, or so much of its lines is done."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        batch = await _read(http.get(f"/v1/batches/{name}"))
        counts = batch["request_counts"]
        if batch["status"] in _ENDED or counts["completed"] >= max(1, share * counts["total"]):
            return batch
        await asyncio.sleep(0.2)
    raise MlxrunError(f"the batch has not come so far within {LIMIT:.0f} s")


async def _read(request: Any) -> dict[str, Any]:
    async with request as response:
        found: dict[str, Any] = await response.json()
        return found
