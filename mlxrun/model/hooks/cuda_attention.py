"""Attention of prompts on CUDA, in few shapes.

MLX gives the attention of prompts in half precision to cuDNN, which prepares a plan for each new shape and
layout: 45 ms on an H200, where the attention itself takes less than 1. Chunks have all lengths and begin
anywhere, so queries get dummies before and behind them, keys and values behind them, and all are contiguous.
The mask is causal: no token attends to what comes behind it, and what dummies find is dropped.
"""

from __future__ import annotations

import mlx.core as mx

STEP = 256  # tokens: queries begin at a multiple of it
CUDNN_TYPES = (mx.bfloat16, mx.float16)


def round_length(tokens: int) -> int:
    """The number of queries for so many tokens: STEP times 1, 2, 3, 4, 6, 8, 12, ..."""
    power: int = STEP << max(-(-tokens // STEP) - 1, 0).bit_length()
    return power // 4 * 3 if power > 2 * STEP and tokens <= power // 4 * 3 else power


def attend_causally(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention [rows, Hq, n, D] of the newest n tokens to all of `keys` [rows, H, tokens, D]."""
    rows, _, tokens, _ = queries.shape
    more_rows = (1 << (rows - 1).bit_length()) - rows
    before = (keys.shape[2] - tokens) % STEP
    behind = round_length(before + tokens) - before - tokens
    queries = _pad(queries, more_rows, before, behind)
    keys, values = (_pad(a, more_rows, 0, behind) for a in (keys, values))
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")
    return out[:rows, :, before : before + tokens]


def _pad(array: mx.array, rows: int, before: int, behind: int) -> mx.array:
    if not (rows or before or behind):
        return mx.contiguous(array)  # the layout of a slice has the capacity of its buffer
    return mx.pad(array, [(0, rows), (0, 0), (before, behind), (0, 0)])
