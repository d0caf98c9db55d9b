"""Lets NumPy compute on MLX's memory: on a CPU, MLX computes exponentials one number at a time, NumPy many.

Numbers are replaced in place, so that they take no memory besides, and in blocks that stay in the processor's
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

Block: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


def open_rows(array: mx.array) -> Block | None:
    """Evaluate an array [..., width] of float32. Returns its memory as rows [n, width], which may be written
    to; None if its numbers lie apart."""
    mx.eval(array)
    view: Block = np.array(array, copy=False)  # the same memory, writable, as MLX documents
    return view.reshape(-1, view.shape[-1]) if view.flags.c_contiguous else None


def iterate_blocks(rows: Block, numbers: int, scratch: int = 0) -> Iterator[tuple[Block, ...]]:
    """Consecutive blocks of rows, of at most so many numbers but at least one row. Each comes with so many
    arrays of its shape to compute in."""
    count = max(1, numbers // rows.shape[1])
    spare = [np.empty_like(rows[:count]) for _ in range(scratch)]
    for start in range(0, len(rows), count):
        block = rows[start : start + count]
        yield block, *(array[: len(block)] for array in spare)
