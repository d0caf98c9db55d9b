"""SIGTERM ends a command wherever it is, with the exit code and the words of an interrupt."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from mlxrun.cli import main

class Finaliser:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)

def load(*arguments, **options):
    {interrupted}
    time.sleep({seconds})
    print("went on")

{twin}
sys.argv = ["mlxrun", "--version"]
main.click.Group.main = load
sys.exit(main.main())
"""
DIRECTLY, FINALISER = "os.kill(os.getpid(), signal.SIGTERM)", "Finaliser()"


@pytest.mark.parametrize("interrupted", [DIRECTLY, FINALISER])
def test_a_command_that_loads_is_interrupted(interrupted: str) -> None:
    program = PROGRAM.format(interrupted=interrupted, twin="", seconds=50)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr.strip() == "mlxrun: interrupted"


def test_the_twin_of_a_finaliser_goes_on() -> None:
    """Python prints the interrupt and forgets it."""
    twin = "main.handle_interrupts = lambda: signal.signal(signal.SIGTERM, signal.default_int_handler)"
    program = PROGRAM.format(interrupted=FINALISER, twin=twin, seconds=1)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "went on\n" and "KeyboardInterrupt" in done.stderr
