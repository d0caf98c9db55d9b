"""MLX's memory counters, which count on every backend, the CPU included."""

from __future__ import annotations

import gc

import mlx.core as mx


def start_measuring(drop_pool: bool) -> int:
    """Collect garbage, drop the pool of free buffers if wanted, and reset the peak; returns bytes in use."""
    gc.collect()
    mx.synchronize()
    if drop_pool:
        mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def read_peak() -> int:
    """The most bytes in use since `start_measuring`, without the pool of free buffers."""
    return max(mx.get_peak_memory(), mx.get_active_memory())


def read_active() -> int:
    """The bytes in use now, without the pool of free buffers."""
    return mx.get_active_memory()


def read_device_memory() -> dict[str, int]:
    """Bytes in use, in the pool of free buffers, and the most that were in use so far."""
    return {"active": mx.get_active_memory(), "cache": mx.get_cache_memory(), "peak": read_peak()}
