"""Rows that join the decode batch: those that were filled together are copied into pages together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxrun.model.kv.paged.page_table import PageTable
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import flatten_caches
from mlxrun.model.kv.ragged.row_group import RowKeysValues


@dataclass(frozen=True, slots=True)
class StackedRows:
    """The caches of one row, or of several that were filled together, and these rows by their index in
    them."""

    layers: Sequence[Any]
    rows: dict[int, JoiningRow]

    def find_places(
        self, table: PageTable, known: Mapping[str, int], filled: RowKeysValues
    ) -> tuple[int, np.ndarray[Any, Any]]:
        """The slots of all tokens from some number on, row by row. `known`: tokens of each row in pages that
        have them already. Tokens of no joining row go to page 0. `filled`: of some layer."""
        count, window = filled.keys.shape[0], table.window
        if count == 1:
            (row,) = self.rows.values()
            first = known[row.id]
            start = first if window is None else max(row.length - window, 0)
            return first, table.list_slots(row.id, start, row.length)
        slots = np.zeros((count, filled.length), np.int32)
        for index, row in self.rows.items():
            slots[index, known[row.id] : row.length] = table.list_slots(row.id, known[row.id], row.length)
        return 0, slots.reshape(-1)


def stack_rows(joining: Sequence[JoiningRow], one_by_one: bool) -> list[StackedRows]:
    """The rows, those in one that were filled together. `one_by_one`: each in one of its own, as for layers
    with a window, which do not keep all tokens."""
    stacks: dict[int, StackedRows] = {}
    for row in joining:
        if one_by_one or row.together is None:
            stacks[id(row)] = StackedRows(flatten_caches(row.cache), {0: row})
            continue
        key, layers = id(row.together.cache), flatten_caches(row.together.cache)
        stacks.setdefault(key, StackedRows(layers, {})).rows[row.together.index] = row
    return list(stacks.values())
