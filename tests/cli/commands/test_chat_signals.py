"""`mlxrun chat` at a terminal: it ends by a signal whenever that comes, and keeps what others have typed."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.helpers.command_processes import run_program, start_program

# Another thread takes signals, as if they had come just before the main thread waits for a key.
PROGRAM = """
import signal, sys, threading
from mlxrun.cli.main import main

def take():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    threading.Event().wait()

signals = [signal.SIGTERM, signal.SIGHUP]
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
threading.Thread(target=take, daemon=True).start()
sys.exit(main())
"""


class _Models(BaseHTTPRequestHandler):
    """Says which models it has."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Terminal:
    """A terminal with `mlxrun chat` in it. `program`: runs the command."""

    def __init__(self, url: str, folder: Path, program: str = PROGRAM) -> None:
        self._screen, self._end = pty.openpty()
        self._environ = os.environ | {"XDG_DATA_HOME": str(folder), "TERM": "dumb"}
        self._command = [sys.executable, "-c", program, "chat", "--url", url]

    @contextmanager
    def run(self) -> Iterator[Terminal]:
        given = dict.fromkeys(("stdin", "stdout", "stderr"), self._end)
        with start_program(self._command, env=self._environ, **given) as self.process:
            os.close(self._end)
            yield self
        os.close(self._screen)

    def wait_for(self, text: str) -> None:
        shown = ""
        while text not in shown:
            shown += os.read(self._screen, 4096).decode(errors="replace")  # OSError once it has ended

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_just_before_it_waits_for_a_key_ends_it(
    tmp_path: Path, url: str, number: signal.Signals
) -> None:
    with Terminal(url, tmp_path).run() as terminal:
        terminal.wait_for(">>> ")
        terminal.process.send_signal(number)
        terminal.wait_for("mlxrun: interrupted")
        assert terminal.process.wait(60) == 130


def test_a_signal_in_a_finaliser_ends_it() -> None:
    """At the next question, as Python prints the exception and goes on."""
    program = """
import os, signal, sys, time
from mlxrun.cli.commands.chat import _converse
from mlxrun.cli.main import click

class Finaliser:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)

class Session:
    def run(self, read_line):
        Finaliser()
        print("went on")
        read_line("")

try:
    _converse(Session())
except click.Abort:
    sys.exit(130)
"""
    done = run_program([sys.executable, "-c", program], stdin=-1)
    assert done.returncode == 130 and done.stdout == "went on\n"


def test_conversations_at_a_time_keep_the_lines_of_each_other(tmp_path: Path, url: str) -> None:
    """Whichever ends first."""
    with Terminal(url, tmp_path).run() as first, Terminal(url, tmp_path).run() as second:
        for terminal, line in ((first, "/stats on"), (second, "/think off")):
            terminal.wait_for(">>> ")
            terminal.type(f"{line}\n")
            terminal.wait_for(">>> ")
        for terminal in (second, first):
            terminal.type("/bye\n")
            assert terminal.process.wait(60) == 0
    lines = (tmp_path / "mlxrun" / "chat_history").read_text().splitlines()
    assert lines == ["/think off", "/bye", "/stats on", "/bye"]
