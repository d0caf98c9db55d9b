"""A job whose model never finishes loading says so, and ends with exit code 3; nothing of it is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A lock that the thread has already, as in a library that waits for itself.
PROGRAM = """
import ctypes, sys
from mlxrun.engine import build, watchdog

def hang(*given):
    library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)

build.load_model = hang
watchdog.TICK, watchdog.LIMIT = 0.2, {limit}
from mlxrun.cli.main import main
sys.argv[0] = "mlxrun"
sys.exit(main())
"""


def start(folder: Path, limit: float, *command: str) -> subprocess.Popen[str]:
    program = PROGRAM.format(limit=limit)
    return subprocess.Popen(
        [sys.executable, "-c", program, *command], stderr=subprocess.PIPE, text=True, cwd=folder
    )


def write_job(folder: Path) -> None:
    (folder / "jobs.jsonl").write_text(json.dumps({"id": "a", "prompt": "x", "max_tokens": 2}) + "\n")


@pytest.mark.parametrize("command", [("batch", "jobs.jsonl"), ("serve", "--port", "0")])
def test_loading_that_hangs_ends_with_a_reason(tmp_path: Path, command: tuple[str, ...]) -> None:
    write_job(tmp_path)
    process = start(tmp_path, 1.0, *command, "--set", f"server.data_path={tmp_path / 'data'}")
    text = process.communicate(timeout=200)[1]
    last = text.splitlines()[-1]
    assert process.returncode == 3, text
    assert last.startswith("mlxrun: the engine is stuck: no progress for 1 seconds while loading the model")
    assert "the stack of thread mlxrun-engine:" in text and "this is a bug" not in text
    if command[0] == "batch":
        status = json.loads((tmp_path / "jobs.out.jsonl.run" / "status.json").read_text())
        assert status["state"] == "failed"


def test_the_twin_without_a_limit_stays(tmp_path: Path) -> None:
    """Until it is killed; the job above has ended long before."""
    write_job(tmp_path)
    process = start(tmp_path, 1e9, "batch", "jobs.jsonl")
    status = tmp_path / "jobs.out.jsonl.run" / "status.json"
    until = time.monotonic() + 200
    while not (status.exists() and json.loads(status.read_text())["state"] == "loading"):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=2)
    process.kill()
    process.communicate()
    assert json.loads(status.read_text())["state"] == "loading"
