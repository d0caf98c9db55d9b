"""Why `cluster/servers` has a relay of its own.

Ray Serve passes streams on as they are. But it answers requests whose replica dies with a plain 500, where
the relay sends them to another worker; and a stream that is cut has no error event."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from tests.clients.matrix import ENVIRONMENTS, HERE
from tests.helpers.command_processes import run_program

PYTHON = ENVIRONMENTS / "ray-serve/bin/python"
PROGRAM = HERE / "scripts/run_ray_serve.py"
EVENTS = 62  # the replica's process, 60 events, and [DONE]


@pytest.mark.sweep
def test_ray_serve_loses_requests_that_were_not_answered(tmp_path: Path) -> None:
    assert PYTHON.exists(), "make clients"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Ray waits 30 s for its agent, which takes longer where nothing was compiled before.
    run_program([PYTHON, "-m", "compileall", "-q", "-j", "0", PYTHON.parents[1] / "lib"])
    command = [PYTHON, PROGRAM, str(port), tmp_path / "began"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["stream"] == {"events": EVENTS, "last": "[DONE]", "error": None}
    lost = [reply for reply in found["unanswered"] if reply[0] != 200]
    assert lost and all(reply == [500, "text/plain", "Internal Server Error"] for reply in lost)
    assert found["cut"] == {"events": 20, "last": "18", "error": "ClientPayloadError"}
