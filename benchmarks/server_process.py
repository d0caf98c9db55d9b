"""A real `mlxrun serve` in a process of its own, for benchmarks that measure or test it from outside."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxrun.core.errors import MlxrunError

LIMIT = 3600.0  # seconds until the model is loaded
MLXRUN = (sys.executable, "-m", "mlxrun")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """`url`: without a path."""

    url: str
    pid: int

    def read_cpu_seconds(self) -> float | None:
        """Processor time of the process up to now; None where the system has no /proc."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except FileNotFoundError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def start_server(
    config: Path,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = MLXRUN,
) -> AsyncIterator[ServerProcess]:
    """Run a server until the block ends, ready to answer. Its log is in `folder`, and its files, which it
    finds there again; MlxrunError with the log if it does not start. `environment`: default, this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "server"
    data.mkdir(exist_ok=True)
    command = [*program, "serve", "-c", str(config), "--port", str(port), "--set", f"server.data_path={data}"]
    log = folder / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=dict(environment or os.environ))
    try:
        url = f"http://127.0.0.1:{port}"
        await _wait_until_ready(url, process, log)
        yield ServerProcess(url, process.pid)
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    import aiohttp

    end = time.monotonic() + LIMIT
    async with aiohttp.ClientSession() as http:
        while process.poll() is None and time.monotonic() < end:
            try:
                async with http.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise MlxrunError(f"the server did not start: {log.read_text()[-2000:]}")
