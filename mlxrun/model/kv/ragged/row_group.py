"""A row group: rows of similar length that share one attention call a layer, so that padding stays small.

For every KV or WINDOW layer it holds one buffer [rows, H, tokens, D], rows aligned on the right at `end`:

      ....aaaaaaaaaa|....       a, b, c: keys of three rows, the newest last
      .........bbbbb|....       . never attended to: masked, as it lies before a row's first key, or spare
      ..cccccccccccc|....       spare space for tokens to come
      ..............|....       and for rows to come
                   end

Adding and removing rows write single rows; a buffer is copied only when it must grow. All lengths are Python
ints; masks depend on lengths only, so one mask serves all layers of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

BUFFER_STEP = 256  # buffers grow by this many tokens, as the libraries' caches do
# A buffer has space for more rows of up to this many tokens in all, or for a quarter more
SPARE_TOKENS = 2048

KeysValues = tuple[mx.array, mx.array]


class RowKeysValues(NamedTuple):
    """Keys and values of one row, [1, H, capacity, D]; the first `length` tokens are filled."""

    keys: mx.array
    values: mx.array
    length: int

    def drop_first(self, tokens: int) -> RowKeysValues:
        """This row without its first `tokens` tokens; lazy."""
        if not tokens:
            return self
        return RowKeysValues(self.keys[:, :, tokens:], self.values[:, :, tokens:], self.length - tokens)


class KVBuffer:
    """Keys and values of one layer for the rows of a group. `window`: tokens attended to; None: all."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.rows = 0
        self.end = 0

    def append(self, keys: mx.array, values: mx.array, width: int) -> KeysValues:
        """Add one token [rows, H, 1, D] to each row. Returns the newest `width` tokens of all rows."""
        assert self.keys is not None and self.values is not None
        if self.end == self.keys.shape[2]:
            self._rebuild([], width - 1, self.end)
        self.keys[: self.rows, :, self.end : self.end + 1] = keys
        self.values[: self.rows, :, self.end : self.end + 1] = values
        self.end += 1
        return self.view(width)

    def view(self, width: int) -> KeysValues:
        """The newest `width` tokens of all rows, [rows, H, width, D]."""
        assert self.keys is not None and self.values is not None
        span = slice(self.end - width, self.end)
        return self.keys[: self.rows, :, span], self.values[: self.rows, :, span]

    def copy_row(self, index: int, width: int) -> RowKeysValues:
        """A copy of one row's newest `width` tokens, evaluated for the reason that `remove_rows` gives."""
        keys, values = (mx.contiguous(x[index : index + 1]) for x in self.view(width))
        mx.eval(keys, values)
        return RowKeysValues(keys, values, width)

    def add_rows(self, rows: Sequence[RowKeysValues], width: int, expected: int = 0) -> None:
        """Add rows. `width`: tokens that the present rows need; `expected`: rows that join later."""
        longest = max(row.length for row in rows)
        full = self.keys is None or self.rows + len(rows) > self.keys.shape[0]
        if self.rows == expected == 0 and len(rows) == 1 and rows[0].keys.shape[2] > longest >= width:
            self.keys, self.values, self.rows, self.end = rows[0].keys, rows[0].values, 1, longest
        elif full or max(longest, width) > self.end:
            self._rebuild(rows, width, max(longest, width), expected)
        else:
            self._write_rows(rows)

    def remove_rows(self, moves: Mapping[int, int], rows: int) -> None:
        """Copy rows over others, from `moves`' keys to their values, and then keep the first `rows`.

        Copies are evaluated first. MLX writes into a buffer in place only if nothing that is still to be
        computed reads it. Else each row that is written costs a copy of the whole buffer.
        """
        assert self.keys is not None and self.values is not None
        self.rows = rows
        if not moves:
            return
        copies = [array[mx.array([*moves])] for array in (self.keys, self.values)]
        mx.eval(copies)
        for n, index in enumerate(moves.values()):
            self.keys[index : index + 1] = copies[0][n : n + 1]
            self.values[index : index + 1] = copies[1][n : n + 1]

    def trim(self, width: int) -> None:
        """Release memory if most rows have left."""
        if self.keys is not None and self.keys.shape[0] > 2 * (
            self.rows + count_spare_rows(self.rows, width)
        ):
            self._rebuild([], width, width)

    def _write_rows(self, rows: Sequence[RowKeysValues]) -> None:
        assert self.keys is not None and self.values is not None
        for keys, values, length in rows:
            start = self.end - length
            self.keys[self.rows, :, start : self.end] = keys[0, :, :length]
            self.values[self.rows, :, start : self.end] = values[0, :, :length]
            self.rows += 1

    def _rebuild(self, rows: Sequence[RowKeysValues], width: int, end: int, expected: int = 0) -> None:
        """Move to a larger buffer that ends rows at `end`; keeps `width` tokens of present rows."""
        present = None if self.rows == 0 else self.view(width)
        count = self.rows + len(rows)
        end = min(end, max([width, *(row.length for row in rows)]))
        tokens = choose_buffer_tokens(end)
        capacity = count + max(expected, count_spare_rows(count, tokens)) if rows else count
        keys, values = present or rows[0][:2]
        self.keys = mx.zeros((capacity, keys.shape[1], tokens, keys.shape[3]), keys.dtype)
        self.values = mx.zeros((capacity, values.shape[1], tokens, values.shape[3]), values.dtype)
        if present is not None:
            self.keys[: self.rows, :, end - width : end] = keys
            self.values[: self.rows, :, end - width : end] = values
        self.end = end
        self._write_rows(rows)


def count_spare_rows(rows: int, tokens: int) -> int:
    """Rows to keep space for: none for the first row, which may well stay the only one. `tokens`: of a row's
    buffer."""
    return max(rows // 4, SPARE_TOKENS // tokens if rows > 1 else 0)


def choose_buffer_tokens(length: int) -> int:
    """The tokens of a new buffer for rows of up to `length` tokens. New memory is slow to get on a GPU, so it
    grows in proportion."""
    return round_up(length + 1 + length // 16)


def round_up(tokens: int) -> int:
    """The capacity of a buffer that holds this many tokens."""
    return -(-tokens // BUFFER_STEP) * BUFFER_STEP


def round_coarsely(count: int, step: int = 1) -> int:
    """The next multiple of `step`, or of a quarter of the largest power of two in `count` where that is more.
    Sizes are then few, since each new shape costs time on a GPU, and at most a quarter is spare."""
    step = max(step, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


class RowGroup:
    """The rows of one length bucket and their buffers, one for each KV or WINDOW layer of the model.

    `ids` and `lengths` (tokens in the cache, the one being computed included) are in row order.
    `make_buffer`: makes the buffer of a layer with this window. `width`: tokens over which every row attends,
    masked ones included, so that it rounds alike in any company. None: as many as the longest row has.
    """

    def __init__(
        self,
        bucket: int,
        windows: Sequence[int | None],
        make_buffer: Callable[[int | None], Any] = KVBuffer,
        width: int | None = None,
    ) -> None:
        self.bucket = bucket
        self.width = width
        self.ids: list[str] = []
        self.lengths: list[int] = []
        self.buffers = [make_buffer(window) for window in windows]
        self._masks: dict[tuple[int | None, int], mx.array | None] = {}

    def add_row(self, rid: str, length: int) -> None:
        """Register a row. Its keys are added to the buffers separately."""
        self.ids.append(rid)
        self.lengths.append(length)

    def remove_rows(self, indices: Collection[int]) -> None:
        """Drop rows. The last of those that stay take their places."""
        rows = len(self.ids) - len(indices)
        last = [i for i in range(rows, len(self.ids)) if i not in indices]
        moves = dict(zip(last, (i for i in indices if i < rows), strict=True))
        for buffer in self.buffers:
            buffer.remove_rows(moves, rows)
        for row, index in moves.items():
            self.ids[index], self.lengths[index] = self.ids[row], self.lengths[row]
        del self.ids[rows:], self.lengths[rows:]

    def trim(self) -> None:
        """Release memory after rows have left."""
        for buffer in self.buffers:
            if self.ids:
                buffer.trim(self.get_width(buffer.window))

    def advance(self) -> None:
        """Count one more token in every row."""
        self.lengths = [n + 1 for n in self.lengths]
        self._masks.clear()

    def get_width(self, window: int | None) -> int:
        """The number of tokens that rows attend over in a layer with this window."""
        longest = max(self.lengths, default=0) if self.width is None else self.width
        return longest if window is None else min(longest, window)

    def make_mask(self, width: int, window: int | None) -> mx.array | None:
        """Bool [rows, 1, 1, width], True where a row attends; None if all attend everywhere. `window`: the
        model's own limit for this layer, which may be tighter than its cache's."""
        key = window if window is not None and window < width else None
        if (key, width) not in self._masks:
            seen = [min(n, width if key is None else key) for n in self.lengths]
            mask = None
            if min(seen) < width:
                first = mx.array([width - n for n in seen])[:, None, None, None]
                mask = mx.arange(width) >= first
            self._masks[key, width] = mask
        return self._masks[key, width]
