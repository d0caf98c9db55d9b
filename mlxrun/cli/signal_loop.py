"""The event loop of commands: a second SIGINT or SIGTERM ends the process, whatever the loop waits for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from mlxrun.cli.interrupts import NUMBERS, expect_last_signal, reset_when_delivered

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine of a command as `asyncio.run` does; the signals that it handles are as above."""
    with asyncio.Runner(loop_factory=SignalLoop) as runner:
        return runner.run(work)


class SignalLoop(asyncio.SelectorEventLoop):
    """An event loop whose handlers of SIGINT and SIGTERM are called for the first signal; the second ends the
    process."""

    _signalled = False

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
        """Whether there was one. After a signal, the next one ends the process all the same."""
        found = super().remove_signal_handler(sig)
        if self._signalled and sig in NUMBERS:
            signal.signal(sig, signal.SIG_DFL)
        return found
