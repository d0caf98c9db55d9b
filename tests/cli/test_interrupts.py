"""SIGTERM ends a command wherever it is, with the exit code and the words of an interrupt."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxrun.cli import interrupts
from tests.helpers.command_processes import is_asleep, run_program, start_program, wait_until

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
    done = run_program([sys.executable, "-c", program])
    assert done.returncode == 130
    assert done.stderr.strip() == "mlxrun: interrupted"


def test_the_twin_of_a_finaliser_goes_on() -> None:
    """Python prints the interrupt and forgets it."""
    twin = "main.handle_interrupts = lambda: signal.signal(signal.SIGTERM, signal.default_int_handler)"
    program = PROGRAM.format(interrupted=FINALISER, twin=twin, seconds=1)
    done = run_program([sys.executable, "-c", program])
    assert done.stdout == "went on\n" and "KeyboardInterrupt" in done.stderr


TOGETHER = """signal.pthread_sigmask(signal.SIG_BLOCK, main_signals)
    for number in main_signals:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, main_signals)"""
SIGNALS = "main_signals = (signal.SIGINT, signal.SIGTERM)\n"
HIDDEN = "from mlxrun.cli import interrupts; interrupts._is_ignored_signal = lambda error: False\n"


@pytest.mark.parametrize("twin", ["", HIDDEN], ids=["guard", "twin"])
def test_signals_that_come_at_once_print_no_stack(twin: str) -> None:
    """Python has noted both before it calls the handler of the first, which ignores the other."""
    program = PROGRAM.format(interrupted=TOGETHER, twin=SIGNALS + twin, seconds=50)
    done = run_program([sys.executable, "-c", program])
    assert done.returncode == 130
    assert ("Signal 15 ignored due to race condition" in done.stderr) is bool(twin)
    assert done.stderr.splitlines()[-1] == "mlxrun: interrupted"
    assert twin or len(done.stderr.splitlines()) == 1


HANGING = """
import ctypes, os, signal, sys, time
from mlxrun.cli import interrupts
from mlxrun.cli.signal_loop import run_async

def hang():
    "Wait for a lock that this thread has, as a library may, which no signal interrupts."
    library, lock = {library}(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(lock)
    print("hangs", flush=True)
    library.pthread_mutex_lock(lock)

async def work():
    import asyncio
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in interrupts.NUMBERS:
        loop.add_signal_handler(number, stop.set)
    {before}
    print("waits", flush=True)
    await stop.wait()
    print("stops", flush=True)
    {after}

{twin}
interrupts.handle_interrupts()
{run}
"""
TWIN = """
from mlxrun.cli import signal_loop
signal_loop.reset_when_delivered = interrupts.reset_when_delivered = lambda number: None
"""
RUN = "run_async(work())"
ENDS = {"plain": ("", "", "hang()"), "before": ("hang()", "", RUN), "after": ("", "hang()", RUN)}


@contextmanager
def start_hanging(
    where: str, library: str = "ctypes.CDLL", twin: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """A command that waits natively: at once, in its loop, or after the first signal. `library`: whether it
    lets other threads run Python meanwhile. It never ends by itself, and is killed at the end."""
    before, after, run = ENDS[where]
    program = HANGING.format(library=library, before=before, after=after, run=run, twin=twin)
    with start_program([sys.executable, "-c", program]) as process:
        assert process.stdout is not None
        if where == "after":
            assert process.stdout.readline() == "waits\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "stops\n"
        assert process.stdout.readline() == "hangs\n"
        wait_until(lambda: is_asleep(process.pid))
        yield process


def is_pending(pid: int, number: int) -> bool:
    """Whether the process has this signal and was not interrupted by it yet."""
    if not sys.platform.startswith("linux"):
        time.sleep(1)
        return False
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize("library", ["ctypes.CDLL", "ctypes.PyDLL"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["plain", "before"])
def test_the_second_signal_ends_what_waits_in_a_library(where: str, number: int, library: str) -> None:
    """Also one that keeps all Python waiting, as PyDLL does."""
    with start_hanging(where, library) as process:
        process.send_signal(number)
        wait_until(lambda: not is_pending(process.pid, number))
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == -number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_what_waits_after_the_first(number: int) -> None:
    """Of whichever kind, once the first has settled."""
    with start_hanging("after") as process:

        def ends() -> bool:
            if process.poll() is None:
                process.send_signal(number)
            return process.poll() is not None

        wait_until(ends)
        assert process.returncode == -number


@pytest.mark.parametrize("where", ["plain", "before"])
def test_the_twin_of_a_second_signal_waits_on(where: str) -> None:
    with start_hanging(where, twin=TWIN) as process:
        for _ in range(4):
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_pending(process.pid, signal.SIGTERM))
        assert process.poll() is None


def test_signals_that_come_together_are_one() -> None:
    """As of `timeout` and of shells: the command still stops in order."""
    settle = "interrupts.SETTLE = 600.0"
    after = 'os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGINT); print("in order")'
    before = "loop.call_soon(os.kill, os.getpid(), signal.SIGTERM)"
    program = HANGING.format(library="ctypes.CDLL", before=before, after=after, run=RUN, twin=settle)
    done = run_program([sys.executable, "-c", program])
    assert (done.stdout, done.returncode) == ("waits\nstops\nin order\n", 0), done.stderr


REMOVE = """interrupts._Settling.timer.join()  # as in a long drain
    for number in (*interrupts.NUMBERS, signal.SIGHUP):
        loop.remove_signal_handler(number)
    {wait}
    for number in (signal.SIGHUP, *interrupts.NUMBERS):
        os.kill(os.getpid(), number)
    print("in order")"""


@pytest.mark.parametrize("hangs", [False, True])
def test_signals_after_the_work_change_no_exit_code(hangs: bool) -> None:
    """A teardown that takes longer than TEARDOWN is ended by them."""
    before = """loop.add_signal_handler(signal.SIGHUP, print)
    loop.call_soon(os.kill, os.getpid(), signal.SIGTERM)"""
    after = REMOVE.format(wait="interrupts._Settling.timer.join()" if hangs else "")
    twin = f"""
from mlxrun.cli import signal_loop
interrupts.SETTLE, signal_loop.TEARDOWN = 0.0, {0.0 if hangs else 600.0}"""
    program = HANGING.format(library="ctypes.CDLL", before=before, after=after, run=RUN, twin=twin)
    done = run_program([sys.executable, "-c", program])
    wanted = ("waits\nstops\n", -signal.SIGINT) if hangs else ("waits\nstops\nin order\n", 0)
    assert (done.stdout, done.returncode) == wanted, done.stderr


def test_all_commands_run_on_this_loop() -> None:
    folder = Path(interrupts.__file__).parent
    assert [path.name for path in folder.glob("*.py") if "asyncio.run(" in path.read_text()] == []
