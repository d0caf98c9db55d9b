"""The exact GELU and attention of encoders on MLX's CPU backend, whose `erf` and `exp` are scalar there.

The library's GELU takes almost half of the processor time of an encoder of MiniLM's shape. NumPy computes the
same in an eighth of it, in blocks that stay in the processor's cache. Other devices and dtypes get the
library's own.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.model.hooks.cpu_attention import FLOATS, GRAPH_SCORES, compute_attention

BLOCK_NUMBERS = 1 << 15  # that are computed together: three arrays of 128 KB
# The tail u * P(X > u) of the normal distribution is u * exp(-u * u / 2) * (c1 * t + ... + c6 * t**6) with
# t = 1 / (1 + RATE * u): a fit by least squares, within 3e-9 for all u of 0 and more.
RATE = 0.28089943
FACTORS = (0.11713305, 0.0667151, 0.27063728, -0.23673073, 0.38880221, -0.10655708)
LAST_TAIL = 13.0  # the tail of larger numbers is below 1e-36, and their squares may overflow


def compute_gelu(x: mx.array) -> mx.array:
    """x * P(X <= x) of the normal distribution, within 1e-6, of any shape. On a CPU float32 is evaluated
    at once, and may be written into `x`, which nothing else may use."""
    if x.dtype != mx.float32 or mx.default_device() != mx.cpu:
        return nn.gelu(x)
    mx.eval(x)
    view = np.array(x, copy=False)  # the same memory, writable, as MLX documents
    rows = view.reshape(-1, view.shape[-1])
    count = max(1, BLOCK_NUMBERS // rows.shape[1])
    size, power, tail = (np.empty((min(count, len(rows)), rows.shape[1]), np.float32) for _ in range(3))
    for start in range(0, len(rows), count):
        block = rows[start : start + count]
        _subtract_tail(block, *(scratch[: len(block)] for scratch in (size, power, tail)))
    return x if np.may_share_memory(rows, view) else mx.array(rows).reshape(x.shape)


def _subtract_tail(block: np.ndarray, size: np.ndarray, power: np.ndarray, tail: np.ndarray) -> None:
    """Turn numbers into their GELU: max(x, 0) - |x| * P(X > |x|). The others are scratch."""
    np.abs(block, out=size)
    np.minimum(size, LAST_TAIL, out=size)
    np.multiply(size, RATE, out=power)
    power += 1
    np.reciprocal(power, out=power)
    np.multiply(power, FACTORS[-1], out=tail)
    for factor in FACTORS[-2::-1]:
        tail += factor
        tail *= power
    tail *= size
    size *= size
    size *= -0.5
    np.exp(size, out=size)
    tail *= size
    np.maximum(block, 0, out=block)
    block -= tail


def attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array) -> mx.array:
    """Attention [B, H, T, D] of queries, keys and values of this shape; `mask` is added to the scores, and
    hides no query's keys all."""
    rows, heads, length, _ = q.shape
    few = rows * heads * length * length < GRAPH_SCORES
    if few or q.dtype not in FLOATS or mx.default_device() != mx.cpu:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask.astype(q.dtype))
    return compute_attention(q, k, v, scale, mask)
