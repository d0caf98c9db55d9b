"""Which compute methods a model's caches allow."""

from __future__ import annotations

from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlxrun.model.run.compute_methods import find_padding_limit


def test_what_may_be_padded() -> None:
    """Attention only, and not past a ring."""
    assert find_padding_limit([KVCache(), KVCache()], 512) == 512
    assert find_padding_limit([KVCache(), RotatingKVCache(64), RotatingKVCache(32)], 512) == 32
    assert find_padding_limit([RotatingKVCache(1024)], 512) == 512
    assert find_padding_limit([KVCache(), ArraysCache(2)], 512) == 0
    assert find_padding_limit([KVCache(), RotatingKVCache(64, keep=4)], 512) == 0
