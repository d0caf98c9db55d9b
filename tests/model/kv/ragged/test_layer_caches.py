"""Layer caches of the libraries: their kinds, their shape and their keys in order."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.decode_batch import RowByRowBatch
from mlxrun.model.kv.ragged.layer_caches import LayerKind
from mlxrun.model.run.compute_methods import ComputeMethods, can_batch, make_decode_batch
from tests.model.kv.ragged.test_decode_batch import WINDOW, template


def test_kinds_of_caches() -> None:
    """Exact classes only; what is not known is decoded row by row."""

    class Special(KVCache):
        pass

    assert [layer_caches.get_kind(layer) for layer in layer_caches.flatten_caches(template())] == [
        LayerKind.KV,
        LayerKind.WINDOW,
        LayerKind.STATE,
        LayerKind.STATE,
        LayerKind.KV,
    ]
    others = [Special(), RotatingKVCache(8, keep=4), QuantizedKVCache()]
    assert {layer_caches.get_kind(layer) for layer in others} == {LayerKind.OTHER}
    assert can_batch(template()) and not any(can_batch([KVCache(), other]) for other in others)
    assert isinstance(make_decode_batch([KVCache(), Special()], ComputeMethods("ragged")), RowByRowBatch)
    assert layer_caches.get_window(RotatingKVCache(8)) == 8 and layer_caches.get_window(KVCache()) is None


def test_a_cache_list_keeps_its_shape() -> None:
    cache = template()
    flat = layer_caches.flatten_caches(cache)
    assert len(flat) == 5
    again = layer_caches.unflatten_caches(cache, flat)
    assert isinstance(again, list) and isinstance(again[3], CacheList)
    assert layer_caches.flatten_caches(again) == flat
    assert again[3] is not cache[3]


@pytest.mark.parametrize("length", [3, 5, 6, 7, 11, 12, 40])
def test_keys_of_a_ring_come_out_in_order(length: int) -> None:
    """Oldest first, `max_size` of them at most, however the ring was filled."""
    for chunk in (1, 2, 5, 64):
        ring = RotatingKVCache(WINDOW)
        for start in range(0, length, chunk):
            new = mx.arange(start, min(start + chunk, length), dtype=mx.float32)
            new = mx.broadcast_to(new[None, None, :, None], (1, 1, new.size, 2))
            ring.update_and_fetch(new, -new)
        part = layer_caches.read_keys_values(ring)
        expected = list(range(max(0, length - WINDOW), length))
        assert part.length == len(expected)
        assert part.keys[0, 0, : part.length, 0].tolist() == expected
        assert part.values[0, 0, : part.length, 1].tolist() == [-n for n in expected]
