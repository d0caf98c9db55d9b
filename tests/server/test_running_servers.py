"""Notes of running servers: they end with their server, however it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxrun.server.running_servers import list_servers, note_server
from tests.helpers.command_processes import start_program

HOLD = """
import sys, time
from pathlib import Path
from mlxrun.server.running_servers import note_server
with note_server(Path(sys.argv[1]), "a-model", "http://127.0.0.1:9"):
    print("noted", flush=True)
    time.sleep(600)
"""


@contextmanager
def start_server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with start_program([sys.executable, "-c", HOLD, str(folder)]) as process:
        assert process.stdout is not None and process.stdout.readline() == "noted\n"
        yield process


def test_a_server_is_listed_while_it_runs(tmp_path: Path) -> None:
    with note_server(tmp_path, "embedded", "http://127.0.0.1:8000"):
        (note,) = list_servers(tmp_path)
        assert (note.pid, note.url, note.model) == (os.getpid(), "http://127.0.0.1:8000", "embedded")
    assert list_servers(tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_server_is_not_listed(tmp_path: Path) -> None:
    """Its note is still there, and goes. The other server's note stays."""
    with start_server(tmp_path) as killed, start_server(tmp_path) as other:
        assert {note.pid for note in list_servers(tmp_path)} == {killed.pid, other.pid}
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert len(list(tmp_path.iterdir())) == 2
        assert [note.pid for note in list_servers(tmp_path)] == [other.pid]
        assert [path.stem for path in tmp_path.iterdir()] == [str(other.pid)]


def test_a_note_of_something_else_is_no_server(tmp_path: Path) -> None:
    """A pipe does not hold up the list; a note that nobody holds is old."""
    os.mkfifo(tmp_path / "1.json")
    (tmp_path / "2.json").write_text(json.dumps({"pid": 1, "url": "u", "model": "m", "started": 1.0}))
    assert list_servers(tmp_path) == []


def test_a_server_runs_where_no_note_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING), note_server(tmp_path / "file", "m", "http://127.0.0.1:1"):
        assert list_servers(tmp_path / "file") == []
    assert "`mlxrun ps` and `mlxrun stop` do not know this server" in caplog.text
