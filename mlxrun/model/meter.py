"""MLX's memory counters as the benchmark reads them: they count on every backend, the CPU too."""

from __future__ import annotations

import gc

import mlx.core as mx


def settle() -> int:
    """Drop garbage and MLX's pool of free buffers, start a new peak; bytes of arrays that are alive."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def peak() -> int:
    """Most bytes that were alive at once since `settle`; the pool of free buffers is not counted."""
    return max(mx.get_peak_memory(), mx.get_active_memory())
