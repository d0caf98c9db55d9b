"""The event loop of commands. A second SIGINT or SIGTERM ends the process, whatever the loop waits for, but
not once the command has ended in order. The loop's clock stands still while the process is suspended.
"""

from __future__ import annotations

import asyncio
import selectors
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from mlxrun.cli.interrupts import NUMBERS, TEARDOWN, expect_last_signal, reset_when_delivered
from mlxrun.core.processes import STEP, RunningClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine of a command as `asyncio.run` does, on a SignalLoop."""
    with asyncio.Runner(loop_factory=SignalLoop) as runner:
        return runner.run(work)


class _SteppingSelector(selectors.DefaultSelector):
    """Waits in steps, after which the clock is read. What came while the process was suspended is found
    before any timer ends: the system interrupts a wait then, and does not say what has come."""

    def __init__(self, clock: RunningClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._clock.read()
        step = timeout if timeout is None else min(timeout, STEP)
        found = super().select(step)
        self._clock.read(float("inf") if step is None else step)
        return found if found or not step else super().select(0)


class SignalLoop(asyncio.SelectorEventLoop):
    """An event loop that calls handlers of SIGINT and SIGTERM for the first signal; the second ends the
    process. Its time limits count only time in which the process runs."""

    _signalled = False
    _ended = False

    def __init__(self) -> None:
        self._clock = RunningClock()
        super().__init__(_SteppingSelector(self._clock))

    def time(self) -> float:
        """The time of the loop's timers, in seconds."""
        return self._clock.read()

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call the callback for the signal; for SIGINT and SIGTERM, only for the first of both."""

        def handle() -> None:
            if not self._signalled:
                self._signalled = True
                expect_last_signal()
                callback(*args)

        if sig not in NUMBERS:
            super().add_signal_handler(sig, callback, *args)
            return
        super().add_signal_handler(sig, handle)
        reset_when_delivered(sig)

    def remove_signal_handler(self, sig: int) -> bool:
        """Remove the handler, and return whether there was one. After a signal, the work that it stopped has
        ended: further ones are ignored, so that the exit code stays. They end a teardown that hangs."""
        if not self._signalled:
            return super().remove_signal_handler(sig)
        if not self._ended:
            self._ended = True
            expect_last_signal(TEARDOWN)
        if sig not in NUMBERS:
            signal.signal(sig, signal.SIG_IGN)
        return True
