"""The conditions that need processes: a job that is killed and resumed, and a batch of a server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.reproduce.answers import Answers, read_answers, read_records
from benchmarks.server_process import MLXRUN, start_server
from mlxrun.batch.run_paths import JobPaths
from mlxrun.errors import MlxrunError

KILLS = 10
LIMIT = 3600.0  # seconds that a run may take
POLL = 0.05


def run_killed(job: Path, config: Path, out: Path, lines: int) -> tuple[Answers, int]:
    """Run a job that is killed KILLS times with SIGKILL, each time after some more lines; the number of
    kills, which may be less where lines end faster than they can be counted."""
    paths, kills = JobPaths(job, out), 0
    command = [*MLXRUN, "batch", str(job), "-c", str(config), "-o", str(out)]
    for number in range(1, KILLS + 1):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            kills += _kill_after(process, out, number * lines // (KILLS + 1))
    done = subprocess.run(command, capture_output=True, timeout=LIMIT, check=False)
    if done.returncode:
        raise MlxrunError(
            f"the job that was killed ended with code {done.returncode}: {done.stderr.decode()}"
        )
    return read_answers(paths), kills


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


async def run_batch(job: Path, config: Path, folder: Path) -> Answers:
    """Run a job as a batch of `mlxrun serve`, by its HTTP API."""
    import aiohttp

    async with (
        start_server(config, folder) as server,
        aiohttp.ClientSession(server.url, raise_for_status=True) as http,
    ):
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", job.read_bytes(), filename=job.name)
        file = await _read(http.post("/v1/files", data=form))
        url = json.loads(job.read_text(encoding="utf-8").splitlines()[0])["url"]
        wanted = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        batch = await _read(http.post("/v1/batches", json=wanted))
        end = time.monotonic() + LIMIT
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            if time.monotonic() > end:
                raise MlxrunError(f"the batch has not ended within {LIMIT:.0f} s")
            await asyncio.sleep(0.2)
            batch = await _read(http.get(f"/v1/batches/{batch['id']}"))
        if batch["status"] != "completed" or batch["request_counts"]["failed"]:
            raise MlxrunError(f"the batch is {batch['status']}: {json.dumps(batch['request_counts'])}")
        out = folder / "batch.out.jsonl"
        async with http.get(f"/v1/files/{batch['output_file_id']}/content") as response:
            out.write_bytes(await response.read())
    return read_records(out)


async def _read(request: Any) -> dict[str, Any]:
    async with request as response:
        found: dict[str, Any] = await response.json()
        return found
