"""Attention of prompts on CUDA, in few shapes.

MLX gives the attention of prompts in half precision to cuDNN, which prepares a plan for each new shape: 45 ms
on an H200, where the attention itself takes less than 1. Prompts have all lengths, so queries, keys and
values are padded to a few of them. Padding comes last and the mask is causal: no token attends to it.
"""

from __future__ import annotations

import mlx.core as mx

STEP = 256  # tokens to whose multiples queries are padded
CUDNN_TYPES = (mx.bfloat16, mx.float16)


def attend_causally(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention [rows, Hq, n, D] of the newest n tokens to all of `keys` [rows, H, tokens, D]."""
    rows, _, tokens, _ = queries.shape
    more_rows = (1 << (rows - 1).bit_length()) - rows
    more_tokens = -tokens % STEP
    if more_rows or more_tokens:
        padding = [(0, more_rows), (0, 0), (0, more_tokens), (0, 0)]
        queries, keys, values = (mx.pad(a, padding) for a in (queries, keys, values))
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")
    return out[:rows, :, :tokens]
