"""The keys and values of all rows in one layer, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxrun.model.kv.paged.kernel_source import PAGE
from mlxrun.model.kv.ragged.row_group import RowKeysValues


class PagePool:
    """`keys` and `values` [pages * PAGE, KV heads, D]; None until the first row shows the shapes. A token's
    slot is its page's number times PAGE and its place in it."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def resize(self, pages: int, like: RowKeysValues | None) -> None:
        """Make the pool as large as that; `like` has the shapes of a row, for a pool that is empty."""
        if self.keys is None or self.values is None:
            assert like is not None
            self.keys, self.values = (
                mx.zeros((pages * PAGE, a.shape[1], a.shape[3]), a.dtype) for a in (like.keys, like.values)
            )
        else:
            self.keys, self.values = (_grow(a, pages * PAGE) for a in (self.keys, self.values))

    def select(self, pages: mx.array) -> None:
        """Keep these pages only, in this order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (
                a.reshape(-1, PAGE, *a.shape[1:])[pages].reshape(-1, *a.shape[1:])
                for a in (self.keys, self.values)
            )

    def write_rows(self, rows: Sequence[RowKeysValues], slots: mx.array) -> None:
        """Copy rows into `slots`, those of all rows one after the other."""
        assert self.keys is not None and self.values is not None
        if not slots.size:
            return
        self.keys[slots] = _join_tokens([row.keys[0, :, : row.length] for row in rows])
        self.values[slots] = _join_tokens([row.values[0, :, : row.length] for row in rows])

    def append(self, keys: mx.array, values: mx.array, slots: mx.array) -> None:
        """Write a token [rows, KV heads, 1, D] for each row of a forward."""
        assert self.keys is not None and self.values is not None
        self.keys[slots] = keys.reshape(-1, *self.keys.shape[1:])
        self.values[slots] = values.reshape(-1, *self.values.shape[1:])

    def read_row(self, slots: mx.array) -> RowKeysValues:
        """Copy of the tokens in these slots, lazy."""
        assert self.keys is not None and self.values is not None
        keys, values = (a[slots].transpose(1, 0, 2)[None] for a in (self.keys, self.values))
        return RowKeysValues(keys, values, int(slots.size))


def find_slots(tables: mx.array, positions: mx.array) -> mx.array:
    """The slots [rows] of tokens at these positions. `tables`: as in PagedRows."""
    columns = (positions // PAGE % tables.shape[1])[:, None]
    return mx.take_along_axis(tables, columns, axis=1)[:, 0] * PAGE + positions % PAGE


def _grow(array: mx.array, tokens: int) -> mx.array:
    return mx.concatenate([array, mx.zeros((tokens - array.shape[0], *array.shape[1:]), array.dtype)])


def _join_tokens(rows: Sequence[mx.array]) -> mx.array:
    """Rows [H, tokens, D] as [all tokens, H, D]."""
    parts = [row.transpose(1, 0, 2) for row in rows]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
