"""Rows decoded one by one with the library's own single-row caches: for models that take no array offset.

Has the same members as decode_batch.DecodeBatch. It is the slowest method, and as exact as the library
itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx

from mlxrun.model.kv.ragged.decode_batch import DecodeCall, ExpectedRow, JoiningRow
from mlxrun.model.kv.ragged.layer_caches import RowView, list_all_arrays, view_row


class RowByRowBatch:
    """Rows in the order in which they joined."""

    shared_tokens = 0  # no row holds what another one has

    def __init__(self) -> None:
        self._rows: dict[str, JoiningRow] = {}
        self._steps: dict[str, int] = {}

    @property
    def ids(self) -> list[str]:
        return list(self._rows)

    @property
    def lengths(self) -> list[int]:
        return [row.length + self._steps[rid] for rid, row in self._rows.items()]

    def update(
        self, keep: Collection[str], joining: Sequence[JoiningRow], expected: Sequence[ExpectedRow] = ()
    ) -> None:
        self._rows = {rid: row for rid, row in self._rows.items() if rid in keep}
        self._rows |= {row.id: row for row in joining}
        self._steps = {rid: self._steps.get(rid, 0) for rid in self._rows}

    def view_row(self, rid: str) -> tuple[int, RowView]:
        """The tokens in a row's cache, and what it holds; valid until the next `update` or `forward`."""
        row = self._rows[rid]
        return row.length + self._steps[rid], view_row(row.cache)

    def forward(self, decode: DecodeCall, tokens: mx.array, positions: Sequence[int]) -> mx.array:
        outputs = []
        for i, (rid, row) in enumerate(self._rows.items()):
            outputs.append(decode(tokens[i : i + 1][:, None], row.cache, [positions[i]])[:, -1])
            self._steps[rid] += 1
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def list_state_arrays(self) -> list[mx.array]:
        return [a for row in self._rows.values() for a in list_all_arrays(row.cache)]
