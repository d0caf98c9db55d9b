"""A signal that comes just before `input` waits for a key ends that wait."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.helpers.command_processes import start_program

# Another thread takes the signal, so that it does not end the wait of the main thread: as if it had come
# before that.
PROGRAM = """
import readline, signal, sys, threading
from contextlib import nullcontext
from mlxrun.cli.interrupts import wake_main_thread

def end(number, frame):
    raise SystemExit(7)

def take():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    threading.Event().wait()

signal.signal(signal.SIGTERM, end)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
threading.Thread(target=take, daemon=True).start()
with {context}():
    input(">>> ")
"""


@pytest.mark.parametrize("context", ["wake_main_thread", "nullcontext"])
def test_a_signal_ends_the_wait_for_a_key(context: str) -> None:
    """Without the context, only the end of a line does."""
    screen, end = pty.openpty()
    command = [sys.executable, "-c", PROGRAM.format(context=context)]
    with start_program(command, stdin=end, stdout=end, env=os.environ | {"TERM": "dumb"}) as process:
        os.close(end)
        shown = b""
        while b">>> " not in shown:
            shown += os.read(screen, 4096)
        process.send_signal(signal.SIGTERM)
        if context == "nullcontext":
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)
            os.write(screen, b"x\n")
        assert process.wait(60) == 7
    os.close(screen)
