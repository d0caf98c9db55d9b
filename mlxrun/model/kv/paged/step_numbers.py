"""Numbers of a forward's rows that grow by one from step to step, kept on the device.

An array made from Python's numbers lies in memory that CUDA shares between host and device. The first kernel
that reads it waits until its page has moved, and so does the host when it writes there again; an array of 8
bytes never moves, and each read of it takes a microsecond or more. So what a step needs is computed from what
the last one had, where that is possible, and has at least FEWEST numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

FEWEST = 4
MOST_STEPS = 256  # after which the numbers are made anew, should nobody have asked for the last ones


class StepNumbers:
    """int32 numbers that grow by one from step to step, or stay as they are."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._array = mx.zeros(0, dtype=mx.int32)
        self._growing = (0, self._array)  # numbers that grow, and what a step adds to each number
        self._steps = 0

    def follow(self, values: Sequence[int], growing: int) -> mx.array:
        """The numbers as an array [max(len(values), FEWEST)] with zeros at its end. The first `growing` ones
        may have grown since the last call; the others are those of dummy rows."""
        values = [*values, *[0] * (FEWEST - len(values))]
        last, self._values = self._values, values
        if values == last:
            return self._array
        if values == [n + 1 for n in last[:growing]] + last[growing:] and self._steps < MOST_STEPS:
            if self._growing[0] != growing:
                added = [1] * growing + [0] * (len(values) - growing)
                self._growing = growing, mx.array(added, dtype=mx.int32)
            self._array, self._steps = self._array + self._growing[1], self._steps + 1
        else:
            self._array, self._steps = mx.array(values, dtype=mx.int32), 0
            self._growing = 0, self._array
        return self._array
