"""Impure twins: engines with a fault that the test has to find, or it would prove nothing.

Each is what other engines do: sampling from the process's random state, so that a token depends on how many
were sampled before; and continuing from any cached prefix, so that the rest of a prompt is computed in other
chunks than alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GLOBAL_RANDOM, OFF_GRID = "global random state", "hit off the grid"


@contextmanager
def sample_from_global_state() -> Iterator[None]:
    """Sampled tokens depend on the random state of the process."""
    import mlx.core as mx

    from mlxrun.model import sampler

    def make_key(seed: int, position: int) -> tuple[int, int]:
        high, low = mx.random.randint(0, 2**31 - 1, (2,)).tolist()
        return int(high), int(low)

    with _replace(sampler, "_make_key", make_key):
        yield


@contextmanager
def hit_off_the_grid() -> Iterator[None]:
    """Cached prefixes are used up to any token, not only up to a multiple of the chunk."""
    from mlxrun.cache.prefix_cache import PrefixCache
    from mlxrun.engine import cache_factory

    def make_cache(*arguments: Any, **options: Any) -> Any:
        return PrefixCache(*arguments, **{**options, "grid_only": False})

    with _replace(cache_factory, "PrefixCache", make_cache):
        yield


TWINS: dict[str, Callable[[], Any]] = {GLOBAL_RANDOM: sample_from_global_state, OFF_GRID: hit_off_the_grid}


@contextmanager
def _replace(module: Any, name: str, value: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
