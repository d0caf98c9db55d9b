"""A clock for time limits, which stands still while the process is suspended.

By SIGSTOP, Ctrl-Z or a paused container, the process computes nothing, while others wait for it or are
suspended with it. A limit that counted this time would fail what has taken no time, as soon as the process
goes on. (While the machine sleeps, the system's own monotonic clock stands still too.)

No system says how long a process was suspended. So the clock is read often, and a time in which nobody has
read it does not count.
"""

from __future__ import annotations

import time

GAP = 1.0  # seconds between two readings that a busy machine may cause; a longer time was a suspension
STEP = 1.0  # seconds at most that are waited between two readings


class RunningClock:
    """Seconds in which this process ran, for one thread."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._suspended = 0.0

    def read(self, waited: float = 0.0) -> float:
        """The time. `waited`: seconds that the caller has meant to wait since the last reading."""
        now = time.monotonic()
        if now - self._last > waited + GAP:
            self._suspended += now - self._last
        self._last = now
        return now - self._suspended
