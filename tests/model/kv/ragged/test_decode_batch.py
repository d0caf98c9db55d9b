"""The decode batch against a reference that keeps each row's full history.

No model: `Toy` attends over KV, windowed and packed layers and updates recurrent state, as a model would,
with arrays that depend on the row's name and position alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxrun.model.hooks.attention import RowKeys
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.decode_batch import (
    DecodeBatch,
    ExpectedRow,
    JoiningRow,
    RowByRowBatch,
    choose_width,
    find_bucket,
)
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch
from tests.helpers import engine_driver
from tests.helpers.model_fixtures import mark_sweep

HEADS, SIZE, WINDOW, NARROW = 2, 8, 6, 3
KEYED = (0, 1, 4)  # positions of KV and WINDOW layers among the flattened ones; 2 and 3 are states


def template() -> list[Any]:
    """KV, WINDOW, STATE, and a packed STATE + KV."""
    return [KVCache(), RotatingKVCache(WINDOW), ArraysCache(2), CacheList(ArraysCache(1), KVCache())]


def count_bytes(batch: Any) -> int:
    """Bytes of all arrays that a decode batch holds."""
    buffers = [buffer for group in getattr(batch, "groups", ()) for buffer in group.buffers]
    arrays = [a for buffer in buffers for a in (buffer.keys, buffer.values) if a is not None]
    return sum(a.nbytes for a in [*arrays, *batch.list_state_arrays()])


@cache
def make_vector(row: str, position: int, layer: int, what: int) -> np.ndarray:
    """[H, D]: what this row's token at this position has in this layer. 0: query, 1: key, 2: value."""
    rng = np.random.default_rng([zlib.crc32(row.encode()), position, layer, what])
    return rng.standard_normal((HEADS, SIZE)).astype(np.float32)


def attended(row: str, length: int, layer: int, window: int | None) -> np.ndarray:
    """[H, D]: attention of the newest of `length` tokens over the newest `window` of them."""
    first = 0 if window is None else max(0, length - window)
    keys = np.stack([make_vector(row, n, layer, 1) for n in range(first, length)], 1)
    values = np.stack([make_vector(row, n, layer, 2) for n in range(first, length)], 1)
    scores = np.einsum("hd,hnd->hn", make_vector(row, length - 1, layer, 0), keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hn,hnd->hd", weights / weights.sum(-1, keepdims=True), values)


@cache
def state_after(row: str, length: int, layer: int) -> np.ndarray:
    """[D]: a state that remembers all of the row's tokens and their order."""
    if length == 0:
        return np.zeros(SIZE, np.float32)
    return np.tanh(0.7 * state_after(row, length - 1, layer) + make_vector(row, length - 1, layer, 1)[0])


@cache
def expected(row: str, length: int) -> np.ndarray:
    """What Toy gives for a row of `length` tokens, the new one included."""
    parts = [
        attended(row, length, 0, None),
        attended(row, length, 0, NARROW),
        attended(row, length, 1, WINDOW),
        attended(row, length, 4, None),
    ]
    states = [state_after(row, length, layer) for layer in (2, 3)]
    return np.concatenate([p.reshape(-1) for p in (*parts, *states)])


def prefilled(row: str, length: int, dtype: mx.Dtype = mx.float32) -> JoiningRow:
    """A row in single-row caches, filled in uneven chunks, as chunked prefill leaves them."""
    cache = template()
    flat = layer_caches.flatten_caches(cache)
    for start in range(0, length, 5):
        span = range(start, min(start + 5, length))
        for layer in KEYED:
            keys, values = (
                mx.array(np.stack([make_vector(row, n, layer, what) for n in span], 1))[None].astype(dtype)
                for what in (1, 2)
            )
            flat[layer].update_and_fetch(keys, values)
    for layer in (2, 3):
        flat[layer].cache[0] = mx.array(state_after(row, length, layer))[None]
    return JoiningRow(row, length, cache)


class Toy:
    """Calls a batch as the runner does, and checks every row of every step."""

    def __init__(self, batch: DecodeBatch | RowByRowBatch) -> None:
        self.batch = batch
        self.widths: list[int] = []

    def step(self) -> None:
        order, lengths = self.batch.ids, self.batch.lengths

        def decode(ids: mx.array, caches: list[Any], places: Sequence[int] | mx.array) -> mx.array:
            places = places.tolist() if isinstance(places, mx.array) else places
            names = [["dummy", *order][i] for i in ids[:, 0].tolist()]
            self.widths.append(len(names))
            return self._forward(names, places, caches)

        tokens = mx.arange(1, len(order) + 1)
        got = np.array(self.batch.forward(decode, tokens, lengths).astype(mx.float32))
        assert got.shape[0] == len(order)
        for row, name in enumerate(order):
            wanted = expected(name, lengths[row] + 1)
            assert np.abs(got[row] - wanted).max() < 1e-5, (name, lengths[row] + 1)
        assert self.batch.ids == order
        assert self.batch.lengths == [n + 1 for n in lengths]

    def _forward(self, names: Sequence[str], places: Sequence[int], caches: list[Any]) -> mx.array:
        flat = layer_caches.flatten_caches(caches)
        outputs = []
        for layer in KEYED:
            offset = flat[layer].offset
            if isinstance(offset, mx.array):
                assert offset.tolist() == list(places)
            query, keys, values = (
                mx.array(
                    np.stack([make_vector(r, n, layer, what) for r, n in zip(names, places, strict=True)])
                )[:, :, None]
                for what in range(3)
            )
            mask = flat[layer].make_mask(1, return_array=False, window_size=WINDOW if layer == 1 else None)
            narrow = flat[layer].make_mask(1, return_array=False, window_size=NARROW)
            keys, values = flat[layer].update_and_fetch(keys, values)
            outputs.append(attend(query, keys, values, mask))
            if layer == 0:
                outputs.append(attend(query, keys, values, narrow))
        for layer in (2, 3):
            new = mx.array(
                np.stack([make_vector(r, n, layer, 1)[0] for r, n in zip(names, places, strict=True)])
            )
            flat[layer][0] = mx.tanh(0.7 * flat[layer][0] + new)
            outputs.append(flat[layer][0])
        return mx.concatenate([x.reshape(len(names), -1) for x in outputs], axis=-1)[:, None]


def attend(query: mx.array, keys: Any, values: Any, mask: Any) -> mx.array:
    if isinstance(keys, RowKeys):
        return keys.attend(query, 1.0, mask)
    return mx.fast.scaled_dot_product_attention(query, keys, values, scale=1.0, mask=mask)


WAYS = {
    "ragged": ComputeMethods("ragged"),
    "grouped": ComputeMethods("grouped"),
    "row by row": ComputeMethods("row_by_row"),
    "fixed width": ComputeMethods("ragged", fixed_width=9),
    "narrow widths": ComputeMethods("ragged", fixed_width=5, narrow_widths=(1, 3)),
    "paged": ComputeMethods("paged"),
    "paged, fixed width": ComputeMethods("paged", fixed_width=9),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", ["small groups", "usual groups"])
@pytest.mark.parametrize("seed", mark_sweep([0, 1, 2], [0]))
def test_rows_join_leave_and_grow(way: str, size: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """120 steps; up to 8 rows of 1 to 80 tokens that come and go at random."""
    if size == "small groups":
        engine_driver.use_small_groups(monkeypatch)
    rng = np.random.default_rng(seed)
    batch = make_decode_batch(template(), WAYS[way])
    toy, born, most = Toy(batch), 0, 0
    for _ in range(120):
        keep = {rid for rid in batch.ids if rng.random() > 0.04}
        joining = []
        while len(keep) + len(joining) < 8 and rng.random() < 0.15:
            joining.append(prefilled(f"row {born}", int(rng.choice([1, 2, 5, 6, 7, 15, 16, 30, 31, 32, 80]))))
            born += 1
        coming = [ExpectedRow(int(n)) for n in rng.choice([1, 20, 40], size=int(rng.integers(0, 3)))]
        batch.update(keep, joining, coming)
        assert sorted(batch.ids) == sorted([*keep, *(row.id for row in joining)])
        if batch.ids:
            toy.step()
        if isinstance(batch, DecodeBatch):
            check_groups(batch, most=WAYS[way].fixed_width)
            most = max(most, len(batch.groups))
    assert born > 10
    if isinstance(batch, DecodeBatch) and size == "small groups":
        assert most >= 3
    if "fixed width" in way:
        assert set(toy.widths) == {9}
    if way == "narrow widths":
        assert set(toy.widths) == {1, 3, 5}
    batch.update(set(), [])
    assert batch.ids == [] and count_bytes(batch) == 0


def check_groups(batch: DecodeBatch, most: int) -> None:
    """Every row is in the group of its bucket, before its next token; a bucket has one group. With a fixed
    width of `most` rows, a group has at most so many, and its rows attend over as many tokens."""
    buckets = [group.bucket for group in batch.groups]
    assert buckets == sorted(buckets)
    assert most or len(set(buckets)) == len(buckets)
    for group in batch.groups:
        if most:
            assert len(group.ids) <= most
            assert {choose_width(n) for n in group.lengths} == {group.bucket} == {group.width}
        else:
            assert all(find_bucket(n) == group.bucket for n in group.lengths)


@pytest.mark.parametrize("way", ["ragged", "grouped"])
def test_every_length_around_a_buffers_growth(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of each length from 1 to 35 grows by 20 tokens: past windows, buckets and buffers' ends."""
    engine_driver.use_small_groups(monkeypatch)
    batch = make_decode_batch(template(), WAYS[way])
    toy = Toy(batch)
    batch.update(set(), [prefilled(f"row {n}", n) for n in range(1, 36)])
    for _ in range(20):
        batch.update(set(batch.ids), [])
        toy.step()


def test_a_row_that_leaves_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemption: the same name with new caches and more tokens."""
    engine_driver.use_small_groups(monkeypatch)
    batch = make_decode_batch(template(), WAYS["ragged"])
    toy = Toy(batch)
    batch.update(set(), [prefilled("a", 3), prefilled("b", 20), prefilled("c", 4)])
    toy.step()
    batch.update({"b", "c"}, [])
    toy.step()
    batch.update({"b", "c"}, [prefilled("a", 9)])
    for _ in range(12):
        toy.step()
        batch.update(set(batch.ids), [])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 255, 256, 257, 511, 512, 1000, 1025, 16_000])
def test_a_row_attends_over_a_quarter_more_at_most(length: int) -> None:
    width = choose_width(length)
    assert length <= width <= max(1.25 * length, length + 63) and choose_width(width) == width


# -- memory -------------------------------------------------------------------------------------------------


TOKEN = 2 * HEADS * SIZE * 4  # bytes


def plain(length: int, dtype: mx.Dtype = mx.float32) -> list[Any]:
    cache = KVCache()
    shape = (1, HEADS, length, SIZE)
    cache.update_and_fetch(mx.zeros(shape, dtype), mx.zeros(shape, dtype))
    return [cache]


def test_memory_follows_the_sum_of_the_lengths() -> None:
    """One row of 16k beside 31 of 300 tokens: far from 32 x 16k."""
    batch = DecodeBatch([KVCache()])
    lengths = [16_000, *[300] * 31]
    batch.update(set(), [JoiningRow(str(i), n, plain(n)) for i, n in enumerate(lengths)])
    assert count_bytes(batch) >= sum(lengths) * TOKEN
    assert count_bytes(batch) < 2 * sum(lengths) * TOKEN
    assert count_bytes(batch) < 0.12 * len(lengths) * max(lengths) * TOKEN


def test_memory_stays_bounded_while_rows_come_and_go() -> None:
    """A row may cost twice its tokens and a step of the buffer; a quarter more rows, and `SPARE`."""
    rng = np.random.default_rng(3)
    batch, born = DecodeBatch([KVCache()]), 0
    for _ in range(60):
        keep = {rid for rid in batch.ids if rng.random() > 0.3}
        joining = []
        for _ in range(int(rng.integers(0, 12 - len(keep)))):
            length = int(rng.choice([10, 255, 256, 600, 1500, 3000]))
            joining.append(JoiningRow(str(born), length, plain(length)))
            born += 1
        batch.update(keep, joining)
        rows = sum(2 * max(n, 256) + 256 for n in batch.lengths)
        spare = sum(2048 + 256 for _ in batch.groups)
        assert count_bytes(batch) <= 2 * (1.25 * rows + spare) * TOKEN
    batch.update(set(batch.ids[:1]), [])
    only = batch.lengths[0]
    assert count_bytes(batch) <= 2 * (only + 257) * TOKEN  # the others' memory has been given back


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("one_pass", [True, False])
def test_the_dtype_is_kept(dtype: mx.Dtype, one_pass: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_driver.use_small_groups(monkeypatch)
    batch = DecodeBatch([KVCache()], one_pass=one_pass)
    batch.update(set(), [JoiningRow(str(n), n, plain(n, dtype)) for n in (3, 12, 40)])
    seen = []

    def decode(ids: mx.array, caches: list[Any], places: Sequence[int]) -> mx.array:
        new = mx.ones((len(places), HEADS, 1, SIZE), dtype)
        keys, values = caches[0].update_and_fetch(new, new)
        seen.extend([keys.dtype, values.dtype])
        out = attend(new, keys, values, caches[0].make_mask(1))
        assert out.dtype == dtype
        return out.reshape(len(places), 1, -1)

    for _ in range(20):  # past a buffer's end and into the next group
        batch.update(set(batch.ids), [])
        batch.forward(decode, mx.zeros(3, mx.int32), batch.lengths)
    assert set(seen) == {dtype}
    assert {b.keys.dtype for group in batch.groups for b in group.buffers if b.keys is not None} == {dtype}


# -- masks --------------------------------------------------------------------------------------------------


# -- what a model sees --------------------------------------------------------------------------------------
