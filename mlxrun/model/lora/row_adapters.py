"""Which adapter each row of a forward uses. Whoever makes a forward says so; the adapted layers ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

BASE = 0  # the number of the base model, for rows without an adapter


class RowAdapters:
    """The adapters of one loaded model by number, from 1 on. `names`: theirs, in order. `row_by_row`: compute
    each row with matrices of its own even if all use one adapter, so that no row's result depends on which
    adapters the others use.

    On the engine thread only. Outside of `use`, the base model is computed.
    """

    def __init__(self, names: Sequence[str] = (), *, row_by_row: bool = False) -> None:
        self.names = tuple(names)
        self.row_by_row = row_by_row
        self.numbers: tuple[int, ...] = ()  # of the rows in the forward that is being built; empty: BASE
        self._arrays: dict[tuple[int, ...], mx.array] = {}

    def find(self, name: str | None) -> int:
        """The number of an adapter; BASE for None. KeyError for a name that was not loaded."""
        return (
            BASE if name is None else dict(zip(self.names, range(1, len(self.names) + 1), strict=True))[name]
        )

    @contextmanager
    def use(self, numbers: Sequence[int]) -> Iterator[None]:
        """Let the rows of forwards that are built meanwhile use these adapters: one number for each row, or
        for each token of all rows."""
        before, self.numbers = self.numbers, tuple(numbers)
        try:
            yield
        finally:
            self.numbers = before
            self._arrays.clear()

    def make_array(self, values: Sequence[int] | Sequence[bool]) -> mx.array:
        """An array of these values; the layers of a forward share it."""
        key = (*values, isinstance(values[0], bool))
        if key not in self._arrays:
            self._arrays[key] = mx.array(list(values))
        return self._arrays[key]
