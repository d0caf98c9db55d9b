"""How many cores other processes leave free, on Linux.

A product on several threads ends when the last one does. A thread that waits for a core on which another
process computes holds up all the others, and those wait by spinning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

STAT = Path("/proc/stat")
INTERVAL = 0.25  # seconds; the system counts in hundredths
_BUSY = (1, 2, 3, 6, 7, 8)  # of a line of /proc/stat: user, nice, system, irq, softirq, steal


class FreeCores:
    """Measures over the time between two calls, of the cores that this process may use. OSError,
    AttributeError, ValueError or IndexError where the system does not say it."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._time, self._used = time.monotonic(), self._read_others()

    def count(self) -> int | None:
        """The number of free cores, at least 1. None if the last one was counted less than INTERVAL ago, or
        if the system does not say it now."""
        now = time.monotonic()
        if now - self._time < INTERVAL:
            return None
        try:
            used = self._read_others()
        except (OSError, ValueError, IndexError):  # such as too many open files
            return None
        others = (used - self._used) / (now - self._time)
        self._time, self._used = now, used
        return max(1, round(len(self._cores) - others))

    def _read_others(self) -> float:
        """Seconds for which other processes have used the cores."""
        return read_busy_seconds(STAT.read_text(encoding="ascii"), self._cores) - time.process_time()


def read_busy_seconds(stat: str, cores: Collection[int]) -> float:
    """The seconds for which these cores were busy. `stat`: the text of /proc/stat (see proc_stat(5))."""
    names = {f"cpu{core}" for core in cores}
    rows = [row for row in map(str.split, stat.splitlines()) if row and row[0] in names]
    return sum(int(row[place]) for row in rows for place in _BUSY) / os.sysconf("SC_CLK_TCK")
