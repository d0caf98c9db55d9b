"""Notices that the engine's thread hangs inside a library, while a model is loaded or in a step.

Slow is not stuck. Progress is any sign of work: a step that ends, bytes of weights, processor time of the
thread, or bytes that are read. Processor time of the process counts only in its own code, since a library
that tries in vain spends its time in the system.

Without progress for LIMIT seconds, the engine is given up. Compiling kernels takes far less, and downloads
have limits of their own. Time in which the process or the machine is suspended does not count.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxrun.model.load.load_progress import count_progress, describe_progress, is_downloading

log = logging.getLogger(__name__)
LIMIT = 600.0  # seconds without progress
TICK = 5.0  # seconds between two looks
BUSY_SHARE = 0.25  # of one processor: what is less may be other threads, such as the server's loop
READ_BYTES = 1 << 16  # in a tick


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of progress. `counted`: notes, and bytes of weights; `own`: processor seconds of the thread, None
    if unknown; `used`: processor seconds of the process outside the system; `read`: bytes read."""

    counted: tuple[int, int]
    own: float | None
    used: float
    read: int

    def show_progress(self, before: Signs, seconds: float) -> bool:
        """Whether there was progress since `before`, which was read `seconds` earlier."""
        return (
            (self.counted, self.own) != (before.counted, before.own)
            or self.used - before.used >= BUSY_SHARE * seconds
            or self.read - before.read >= READ_BYTES
        )


@contextmanager
def watch(doing: str, on_stuck: Callable[[str], None]) -> Iterator[None]:
    """Watch this thread within the block. `doing`: what it does, for the report; `on_stuck`: as in
    Watchdog."""
    watchdog = Watchdog(on_stuck)
    watchdog.start()
    watchdog.note(doing)
    try:
        yield
    finally:
        watchdog.stop()


class Watchdog:
    """Watches the thread that calls `start`. `on_stuck` gets a sentence, once, on the watchdog's thread."""

    def __init__(self, on_stuck: Callable[[str], None]) -> None:
        self._on_stuck = on_stuck
        self._doing: str | None = None
        self._notes = 0
        self._watched = 0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch this thread from now on."""
        self._watched = threading.get_ident()
        threading.Thread(target=self._run, name="mlxrun-watchdog", daemon=True).start()

    def note(self, doing: str | None) -> None:
        """Note what the thread does now, which counts as progress. None: nothing that could hang."""
        self._doing = doing
        self._notes += 1

    def stop(self) -> None:
        """Stop watching, since the thread ends."""
        self._stopped.set()

    def _run(self) -> None:
        before, still = self._read_signs(), 0
        while not self._stopped.wait(TICK):
            now = self._read_signs()
            is_fine = self._doing is None or is_downloading() or now.show_progress(before, TICK)
            still = 0 if is_fine else still + 1
            before = now
            if still * TICK >= LIMIT:
                self._report()
                return

    def _read_signs(self) -> Signs:
        counted = (self._notes, count_progress())
        return Signs(counted, read_thread_seconds(self._watched), read_used_seconds(), read_bytes())

    def _report(self) -> None:
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in frames.items():
            stack = "".join(traceback.format_stack(frame))
            log.error("the stack of thread %s:\n%s", names.get(ident, ident), stack.rstrip())
        doing, place = describe_progress() or self._doing, ""
        if self._watched in frames:
            last = traceback.extract_stack(frames[self._watched])[-1]
            place = f" (in {last.name}, {Path(last.filename).name}:{last.lineno})"
        self._on_stuck(f"no progress for {LIMIT:.0f} seconds while {doing}{place}")


def read_thread_seconds(ident: int) -> float | None:
    """Processor seconds of a thread; None where the system does not say, as macOS, or if it has ended."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except (AttributeError, OSError):
        return None


def read_used_seconds() -> float:
    """Processor seconds that this process has spent in its own code."""
    return os.times().user


def read_bytes() -> int:
    """Bytes that this process has read from files; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar
    except (OSError, ValueError, IndexError):
        return 0
