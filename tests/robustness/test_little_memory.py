"""Little memory: a job or a server says what is missing, and ends; it never hangs or crashes.

With less address space than libraries take, OpenBLAS tries for good to get more, and MLX crashes. Each size
is tried in a process of its own (`ulimit -v`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="ulimit -v has an effect on Linux only"
)
LIMIT = 300.0  # seconds that a process may take, whatever else the machine does
SIZES = [300, 900, 1200, 1800]  # MB of address space, of which each ended badly in its own way
SWEPT = [60, 100, 150, 200, 400, *range(500, 2000, 100), 2500, 3000, 4000]
RUN = """
import resource, sys
size = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (size, size))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{twin}
from mlxrun.cli.main import main
sys.argv[0] = "mlxrun"
sys.exit(main())
"""
TWIN = """
from mlxrun.engine import build
from mlxrun.model.machine import device
build.check_memory = lambda *given: None
device.list_limits = list
"""


def start(megabytes: int, *command: str, twin: str = "") -> subprocess.Popen[str]:
    """A command with so much address space."""
    program = [sys.executable, "-c", RUN.format(twin=twin), str(megabytes * 1000_000), *command]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it has printed until it ended. Fails if it does not end."""
    try:
        return process.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it hangs after: {process.communicate()[0]}") from None


def check_end(process: subprocess.Popen[str], text: str) -> None:
    """It has done its work, or said what there is too little of, in a last line and with its exit code."""
    assert process.returncode in (0, 1, 2, 3), text
    for bad in ("Traceback", "Fatal Python error", "this is a bug", "a bug in mlxrun"):
        assert bad not in text, text
    last = text.splitlines()[-1]
    if process.returncode == 3:
        assert last.startswith("mlxrun: ") and "ulimit -v leaves" in last, text
    if process.returncode == 2:
        assert last.startswith("mlxrun: scheduler.memory_limit: weights "), text


def write_jobs(folder: Path) -> Path:
    lines = [{"id": str(i), "prompt": f"What is {i} + 3?", "max_tokens": 8} for i in range(40)]
    path = folder / "jobs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_job(folder: Path, megabytes: int) -> str:
    process = start(megabytes, "batch", str(write_jobs(folder)), "--set", "media.memory_bytes=20MB")
    text = finish(process)
    check_end(process, text)
    return text


@pytest.mark.parametrize("megabytes", SIZES)
def test_a_job_with_little_address_space_ends(tmp_path: Path, megabytes: int) -> None:
    run_job(tmp_path, megabytes)


@pytest.mark.sweep
@pytest.mark.parametrize("megabytes", SWEPT)
def test_a_job_ends_whatever_its_address_space_is(tmp_path: Path, megabytes: int) -> None:
    run_job(tmp_path, megabytes)


def run_server(megabytes: int) -> None:
    """Start a server, stop it once it is ready, and see how it ends."""
    process = start(
        megabytes, "serve", "--port", "0", "--set", "apis.batches=false", "--set", "media.memory_bytes=20MB"
    )
    assert process.stdout is not None
    stuck = threading.Timer(LIMIT, process.kill)
    stuck.start()
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready: "):
            process.send_signal(signal.SIGTERM)
    process.wait()
    process.stdout.close()
    stuck.cancel()
    check_end(process, "".join(lines))


@pytest.mark.parametrize("megabytes", [300, 1200])
def test_a_server_with_little_address_space_ends(megabytes: int) -> None:
    run_server(megabytes)


@pytest.mark.sweep
@pytest.mark.parametrize("megabytes", SWEPT)
def test_a_server_ends_whatever_its_address_space_is(megabytes: int) -> None:
    run_server(megabytes)


def test_the_twin_without_limits_does_not_end_well(tmp_path: Path) -> None:
    """It hangs, crashes, or says what a library says of it. It is given some time, and then it is killed."""
    process = start(700, "batch", str(write_jobs(tmp_path)), twin=TWIN)
    try:
        text = process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return
    with pytest.raises(AssertionError):
        check_end(process, text)
