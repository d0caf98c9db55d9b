"""Rows one by one: the library's own caches, each with its own offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlxrun.model.kv.ragged.decode_batch import JoiningRow, RowByRowBatch


def decode(ids: mx.array, cache: list[Any], positions: Sequence[int]) -> mx.array:
    """Stores the token as key, and gives the sum of all keys and the position as logits."""
    keys, _ = cache[0].update_and_fetch(ids[:, None, :, None] * 1.0, ids[:, None, :, None] * 1.0)
    return mx.stack([keys.sum(axis=(1, 2, 3)), mx.array([float(positions[0])])], axis=-1)[:, None]


def make_row(name: str, *tokens: float) -> JoiningRow:
    cache = KVCache()
    array = mx.array(tokens)[None, None, :, None]
    cache.update_and_fetch(array, array)
    return JoiningRow(name, len(tokens), [cache])


def test_rows_keep_their_own_caches() -> None:
    batch = RowByRowBatch()
    batch.update((), [make_row("a", 1, 2), make_row("b", 10)])
    assert (batch.ids, batch.lengths) == (["a", "b"], [2, 1])
    logits = batch.forward(decode, mx.array([3, 20]), [2, 1])
    assert logits.tolist() == [[6, 2], [30, 1]] and batch.lengths == [3, 2]
    batch.update({"b"}, [make_row("c", 5)])
    assert (batch.ids, batch.lengths) == (["b", "c"], [2, 1])
    assert batch.forward(decode, mx.array([1, 1]), [2, 1]).tolist() == [[31, 2], [6, 1]]


def test_a_row_is_viewed_with_all_its_tokens() -> None:
    batch = RowByRowBatch()
    batch.update((), [make_row("a", 1, 2)])
    batch.forward(decode, mx.array([3]), [2])
    length, view = batch.view_row("a")
    assert length == 3 and view is not None
    assert any(array.shape[2] >= 3 for array in batch.list_state_arrays())
