"""What a model sees as its cache and keys while rows decode from pages, and the step's numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.fused.operations import LayerOperations
from mlxrun.model.hooks.attention import NotRaggedError, RowKeys, RowKeysCache
from mlxrun.model.hooks.logit_rule import LogitRule
from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged.attention_kernel import PagedRows, split_pages
from mlxrun.model.kv.ragged.row_group import RowKeysValues

FEWEST = 4
# Numbers of the keys that are written together with the values where one array has both. It is one launch
# instead of two. More of them would need memory for a copy of a long row in each layer.
MOST_TOGETHER = 1 << 18
# Tokens in slots that follow each other, from which on they are copied as a slice. A scatter of 16,384 takes
# an H200 130 us in each layer.
RUN_TOKENS = 1024
MOST_STEPS = 256  # after which the numbers are made anew, should nobody have asked for the last ones
# attention_kernel.attend_pages, or attend_gathered
Attend = Callable[[mx.array, mx.array, mx.array | None, PagedRows, LogitRule], mx.array]


class PagedKeys(RowKeys):
    """Keys and values of all rows in one layer."""

    def __init__(self, pool: PagePool, rows: PagedRows, window: int | None, attend: Attend) -> None:
        self._keys, self._values = pool.pages
        self._rows = rows
        self._window = window
        self._kernel = attend

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, H, places of the tables, D], the shape of a padded array."""
        rows, columns = self._rows.tables.shape
        _, heads, width = self._keys.shape
        return (rows, heads, columns * PAGE, width)

    @property
    def dtype(self) -> mx.Dtype:
        return self._keys.dtype

    def _attend(self, queries: mx.array, rule: LogitRule) -> mx.array:
        windows = [w for w in (self._window, rule.window) if w is not None]
        rule = replace(rule, window=min(windows, default=None))
        return self._kernel(queries, self._keys, self._values, self._rows, rule)


class PagedCache(RowKeysCache):
    """One KV or WINDOW layer in a step. Its members are those of the libraries' caches.

    `offset` int32 [rows]: the new tokens' positions. No Python number here changes from step to step, because
    a compiled forward would keep it. `operations`: those of fused layers, None: layers are the library's.
    """

    # mlx-vlm's `cache_position_offset` reads it, or else evaluates `offset`, which no compiled forward may.
    # It says where a chunk begins in arrays of a whole prompt. A decode step has none: behind the start.
    _offset = 1

    def __init__(
        self, pool: PagePool, window: int | None, attend: Attend, operations: LayerOperations | None = None
    ) -> None:
        self._pool = pool
        self._window = window
        self._attend = attend
        self.operations = operations
        self.offset: mx.array = mx.array([], dtype=mx.int32)

    def begin_step(self, rows: PagedRows, slots: mx.array, offsets: mx.array) -> None:
        """Start a step. `slots` int32 [2 * rows]: of the new tokens' keys, and then of their values where one
        array has both; `offsets`: their positions."""
        self._rows, self._slots, self.offset = rows, slots, offsets

    def end_step(self) -> None:
        """Drop the step's views, so that pages can be written in place."""
        self._fetched = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowKeys, RowKeys]:
        """Add one token [rows, H, 1, D] to every row. NotRaggedError for several tokens a row."""
        if keys.shape[2] != 1:
            raise NotRaggedError("a batch of pages takes one token a row")
        self._pool.append(keys, values, self._slots)
        return self._fetch()

    def update_joined(self, written: mx.array) -> RowKeys:
        """Add one token to every row. `written` [2 * rows, H, D]: keys before values, of one shape."""
        self._pool.append_joined(written, self._slots)
        return self._fetch()[0]

    def _fetch(self) -> tuple[RowKeys, RowKeys]:
        self._fetched = PagedKeys(self._pool, self._rows, self._window, self._attend)
        return self.state


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Where tokens are written in the layers of a window. `array` int32: as in PagedCache. `runs`: the first
    token, the first slot and the number of tokens whose slots follow each other; empty if these are few."""

    array: mx.array
    runs: Sequence[tuple[int, int, int]]

    @classmethod
    def find(cls, own: np.ndarray[Any, np.dtype[np.int32]], num_slots: int) -> TokenSlots:
        """Of tokens in these slots, page 0 for those that nobody reads. `num_slots`: of the pool."""
        array = mx.array(np.concatenate([own, own + num_slots]))
        (read,) = np.nonzero(own >= PAGE)
        begins = np.flatnonzero((np.diff(read, prepend=-2) != 1) | (np.diff(own[read], prepend=-2) != 1))
        if len(read) < RUN_TOKENS * len(begins) or not len(read):
            return cls(array, ())
        counts = np.diff(begins, append=len(read))
        first = read[begins]
        return cls(array, [*zip(first.tolist(), own[first].tolist(), counts.tolist(), strict=True)])


class PagePool:
    """The pages of one layer.

    `arrays`: keys and values [pages * PAGE, KV heads, D]; empty until the first row shows the shapes. If both
    have one shape, they are one array of twice the length, with the values behind the keys. A token's slot is
    its page's number times PAGE plus its place in the page.
    """

    def __init__(self) -> None:
        self.arrays: tuple[mx.array, ...] = ()

    @property
    def num_slots(self) -> int:
        """The number of tokens that the pages hold."""
        return self.arrays[0].shape[0] // (3 - len(self.arrays))

    @property
    def pages(self) -> tuple[mx.array, mx.array | None]:
        """Keys and values; None for values that lie behind the keys."""
        return self.arrays[0], self.arrays[1] if len(self.arrays) == 2 else None

    def resize(self, pages: int, like: RowKeysValues | None) -> None:
        """Make the pool hold this many pages. `like`: a row, for the shapes of an empty pool."""
        if not self.arrays:
            assert like is not None
            shapes = [(a.shape[1], a.shape[3], a.dtype) for a in (like.keys, like.values)]
            planes = ((shapes[0], 2),) if shapes[0] == shapes[1] else tuple((shape, 1) for shape in shapes)
            self.arrays = tuple(
                mx.zeros((count * pages * PAGE, heads, width), dtype)
                for (heads, width, dtype), count in planes
            )
        else:
            self._change(lambda planes: _grow(planes, pages))

    def select(self, pages: mx.array) -> None:
        """Keep only these pages, in this order."""
        self._change(lambda planes: planes[:, pages])

    def _change(self, change: Callable[[mx.array], mx.array]) -> None:
        """Replace each array by what `change` makes of it as [1 or 2, pages, PAGE, KV heads, D]."""
        count = 3 - len(self.arrays)
        changed = (change(a.reshape(count, -1, PAGE, *a.shape[1:])) for a in self.arrays)
        self.arrays = tuple(a.reshape(-1, *a.shape[3:]) for a in changed)

    def write_rows(self, rows: Sequence[RowKeysValues], slots: TokenSlots) -> None:
        """Copy rows, each by itself or several stacked, into `slots`, row after row."""
        if not slots.array.size:
            return
        keys = _join_tokens([row.keys[:, :, : row.length] for row in rows])
        values = _join_tokens([row.values[:, :, : row.length] for row in rows])
        if not slots.runs:
            self._write(keys, values, slots.array)
            return
        first, last = self.arrays[0], self.arrays[-1]
        behind = self.num_slots if len(self.arrays) == 1 else 0
        for at, slot, count in slots.runs:
            first[slot : slot + count] = keys[at : at + count]
            last[behind + slot : behind + slot + count] = values[at : at + count]

    def append(self, keys: mx.array, values: mx.array, slots: mx.array) -> None:
        """Write a token [rows, KV heads, 1, D] for each row of a forward. `slots`: as in PagedCache."""
        self._write(keys[:, :, 0], values[:, :, 0], slots)

    def append_joined(self, written: mx.array, slots: mx.array) -> None:
        """Write a token for each row, [2 * rows, KV heads, D], keys before values, at once."""
        (joined,) = self.arrays
        joined[slots] = written
        self.arrays = (joined,)

    def _write(self, keys: mx.array, values: mx.array, slots: mx.array) -> None:
        count, is_joined = len(keys), len(self.arrays) == 1
        if is_joined and keys.size <= MOST_TOGETHER:
            self.append_joined(mx.concatenate([keys, values]), slots)
            return
        first, last = self.arrays[0], self.arrays[-1]  # the same if they are joined
        first[slots[:count]] = keys
        last[slots[count:] if is_joined else slots[:count]] = values

    def read_row(self, slots: mx.array) -> RowKeysValues:
        """A lazy copy of the tokens in these slots."""
        keys, values = (a[slots].transpose(1, 0, 2)[None] for a in split_pages(*self.pages))
        return RowKeysValues(keys, values, int(slots.size))


def make_sizes(columns: int, pages: int) -> mx.array:
    """The numbers that `find_slots` needs of a table and its pools: int32 [FEWEST]. They change from time to
    time. As Python's numbers, each would be compiled into a kernel of its own, for seconds on CUDA."""
    return mx.array([columns, pages * PAGE, *[0] * (FEWEST - 2)], dtype=mx.int32)


def find_slots(tables: mx.array, positions: mx.array, sizes: mx.array) -> mx.array:
    """The slots [2 * rows] of tokens at these positions: of keys, then of values where one array has both.
    `tables`: as in PagedRows."""
    columns = (positions // PAGE % sizes[0])[:, None]
    slots = mx.take_along_axis(tables, columns, axis=1)[:, 0] * PAGE + positions % PAGE
    return mx.concatenate([slots, slots + sizes[1]])


def _grow(planes: mx.array, pages: int) -> mx.array:
    count, before, *shape = planes.shape
    return mx.concatenate([planes, mx.zeros((count, pages - before, *shape), planes.dtype)], axis=1)


def _join_tokens(rows: Sequence[mx.array]) -> mx.array:
    """Arrays [rows, H, tokens, D] as [all tokens, H, D]."""
    parts = [row.transpose(0, 2, 1, 3).reshape(-1, row.shape[1], row.shape[3]) for row in rows]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


class StepNumbers:
    """int32 numbers of a forward's rows, kept on the device. From step to step they grow by one or stay.

    CUDA shares the memory of an array that Python made between host and device. The first kernel that reads
    it waits until its page has moved, and so does the host when it writes there again. An array of 8 bytes
    never moves, and each read of it takes a microsecond or more. So a step's numbers are computed from the
    last ones where possible, and are at least FEWEST.
    """

    def __init__(self) -> None:
        self._values: list[int] = []
        self._array = mx.zeros(0, dtype=mx.int32)
        self._growing = (0, self._array)  # numbers that grow, and what a step adds to each number
        self._steps = 0

    def follow(self, values: Sequence[int], growing: int) -> mx.array:
        """The numbers as an array [max(len(values), FEWEST)], filled with zeros. The first `growing` ones may
        have grown since the last call; the others are those of dummy rows."""
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
