"""MLX's memory counters as the benchmark reads them: they count on every backend, the CPU too."""

from __future__ import annotations

import gc

import mlx.core as mx


def start_measuring(drop_pool: bool) -> int:
    """Drop garbage, and the pool of free buffers if asked; start a new peak; bytes of living arrays."""
    gc.collect()
    mx.synchronize()
    if drop_pool:
        mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def read_peak() -> int:
    """Most bytes that were alive at once since `settle`; the pool of free buffers is not counted."""
    return max(mx.get_peak_memory(), mx.get_active_memory())


def read_device_memory() -> dict[str, int]:
    """Bytes of living arrays, of the pool of free buffers, and the most that were alive so far."""
    return {"active": mx.get_active_memory(), "cache": mx.get_cache_memory(), "peak": read_peak()}
