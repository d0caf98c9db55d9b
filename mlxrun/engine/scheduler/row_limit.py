"""How many rows may run together: fewer for a while after the device ran out of memory.

That may happen although the budget says that all rows fit. If all of them ran together again as soon as each
has completed a step alone, that step would fail again, without end.
"""

from __future__ import annotations

STEPS = 256  # successful steps until twice as many rows may run


class RowLimit:
    """`most`: rows that may run where nothing failed."""

    def __init__(self, most: int) -> None:
        self.rows = self._most = most
        self._successes = 0

    def record_shortage(self, rows: int) -> None:
        """Memory ran out while so many rows ran."""
        self.rows, self._successes = max(rows // 2, 1), 0

    def record_success(self) -> None:
        """A step succeeded."""
        if self.rows < self._most:
            self._successes += 1
            if self._successes == STEPS:
                self.rows, self._successes = min(2 * self.rows, self._most), 0
