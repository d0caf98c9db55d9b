"""What a model sees as its cache and keys while rows decode from pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from mlxrun.model.hooks.attention import NotRaggedError, RowKeys, RowKeysCache
from mlxrun.model.hooks.score_rule import ScoreRule
from mlxrun.model.kv.paged.attention_kernel import PagedRows
from mlxrun.model.kv.paged.kernel_source import PAGE
from mlxrun.model.kv.paged.page_pool import PagePool

# attention_kernel.attend_pages, or attend_gathered
Attend = Callable[[mx.array, mx.array, mx.array, PagedRows, ScoreRule], mx.array]


class PagedKeys(RowKeys):
    """Keys and values of all rows in one layer."""

    def __init__(self, pool: PagePool, rows: PagedRows, window: int | None, attend: Attend) -> None:
        assert pool.keys is not None and pool.values is not None
        self._keys, self._values = pool.keys, pool.values
        self._rows = rows
        self._window = window
        self._kernel = attend

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, H, places of the tables, D]: what a padded array would have."""
        rows, columns = self._rows.tables.shape
        _, heads, width = self._keys.shape
        return (rows, heads, columns * PAGE, width)

    @property
    def dtype(self) -> mx.Dtype:
        return self._keys.dtype

    def _attend(self, queries: mx.array, rule: ScoreRule) -> mx.array:
        windows = [w for w in (self._window, rule.window) if w is not None]
        rule = replace(rule, window=min(windows, default=None))
        return self._kernel(queries, self._keys, self._values, self._rows, rule)


class PagedCache(RowKeysCache):
    """One KV or WINDOW layer in a step; the members are those of the libraries' caches.

    `offset` int32 [rows]: the new tokens' positions. Nothing here is a Python number that changes from step
    to step, because a compiled forward would keep it.
    """

    def __init__(self, pool: PagePool, window: int | None, attend: Attend) -> None:
        self._pool = pool
        self._window = window
        self._attend = attend
        self.offset: mx.array = mx.array([], dtype=mx.int32)

    def begin_step(self, rows: PagedRows, slots: mx.array, offsets: mx.array) -> None:
        """Start a step: `slots` int32 [rows] are those of the new tokens, `offsets` their positions."""
        self._rows, self._slots, self.offset = rows, slots, offsets

    def end_step(self) -> None:
        """Drop the step's views, so that pages can be written in place."""
        self._fetched = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowKeys, RowKeys]:
        """Add one token [rows, H, 1, D] to every row."""
        if keys.shape[2] != 1:
            raise NotRaggedError("a batch of pages takes one token a row")
        self._pool.append(keys, values, self._slots)
        self._fetched = PagedKeys(self._pool, self._rows, self._window, self._attend)
        return self.keys_and_values()
