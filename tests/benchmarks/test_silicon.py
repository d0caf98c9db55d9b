"""The scripts of benchmarks/silicon: the server starts once, answers, and stops."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.helpers.command_processes import run_program

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "silicon"


def run(name: str, home: Path, port: int, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"MLXRUN_HOME": str(home), "MLXRUN_PORT": str(port)} | variables
    # To a file: what a server keeps open would keep a pipe open.
    with (home / "output.txt").open("w+") as output:
        found = run_program([SCRIPTS / name], env=environment, stdout=output, stderr=subprocess.STDOUT)
        output.seek(0)
        return subprocess.CompletedProcess(name, found.returncode, output.read())


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with an environment whose mlxrun is this one."""
    folder = tmp_path / "mlxrun" / "bin"
    folder.mkdir(parents=True)
    script = folder / "mlxrun"
    script.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; from mlxrun.cli.main import main; '
        'sys.exit(main())" "$@"\n'
    )
    script.chmod(0o755)
    return tmp_path


@pytest.mark.slow
def test_a_server_is_started_once_and_stopped(home: Path) -> None:
    port = find_port()
    try:
        started = run("serve_mlxrun.sh", home, port)
        assert started.returncode == 0 and f"ready on port {port}" in started.stdout
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as response:
            assert json.load(response)["data"][0]["id"] == "embedded"
        again = run("serve_mlxrun.sh", home, port)
        assert again.returncode == 1 and "runs already" in again.stdout
    finally:
        stopped = run("stop_mlxrun.sh", home, port)
    assert (stopped.returncode, stopped.stdout) == (0, "mlxrun is stopped\n")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
    assert run("stop_mlxrun.sh", home, port).stdout == "mlxrun does not run\n"


@pytest.mark.slow
def test_a_server_that_cannot_start_shows_why(home: Path) -> None:
    found = run("serve_mlxrun.sh", home, find_port(), MLX_MODEL=str(home / "nothing"))
    assert found.returncode == 1
    assert "the server has ended" in found.stdout and "nothing" in found.stdout
    assert not (home / "mlxrun_server.pid").exists()


def test_scripts_can_be_read_by_bash() -> None:
    for script in SCRIPTS.glob("*.sh"):
        run_program(["bash", "-n", script], check=True)
    assert len(list(SCRIPTS.glob("*_mlxrun.sh"))) == 4
