"""Attention over plain arrays where the library's own is slow: on CPUs, and of prompts on CUDA.

On CPUs the library spends most of its time in a scalar `exp`. NumPy computes the softmax in place, on the
logits of a few queries at a time. They stay in the processor's cache, and a long prompt needs no memory for
all of them. A few logits stay in the graph, where a power of two costs half of an `exp`. Everything is
computed in float32; results differ from the library's by rounding only.

On CUDA, cuDNN computes the attention of prompts in half precision. It prepares a plan for each new shape and
layout: 45 ms on an H200, where the attention itself takes less than 1. Chunks have all lengths and begin
anywhere. So queries get dummies before and behind them, keys and values behind them, and all are contiguous.
The mask is causal, so no token attends to the dummies behind it. Results of dummies are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from mlxrun.model.machine.numpy_blocks import Block, iterate_blocks, open_rows

BLOCK_LOGITS = 1 << 21  # logits that are computed together: 8 MB
MIN_QUERIES = 8  # in a block: matrix products of fewer rows are slow
NUMPY_LOGITS = 1 << 17  # logits that NumPy makes several passes over
GRAPH_LOGITS = 1 << 15  # a decode step with fewer logits stays in the graph
USUAL_ROWS = 8  # of a decode step, where one row may not be computed otherwise than many
MASKED_LOGIT = -1e30  # finite, so that a row that attends to nothing does not become NaN
LOG2E = math.log2(math.e)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
STEP = 256  # tokens: queries begin at a multiple of it
CUDNN_TYPES = (mx.bfloat16, mx.float16)

Mask: TypeAlias = mx.array | str | None


def compute_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask,
    *,
    usual_rows: int | None = None,
) -> mx.array:
    """Same as mx.fast.scaled_dot_product_attention, and of the queries' dtype, one of FLOATS. Shapes: queries
    [B, Hq, L, D], keys [B, H, N, D], values [B, H, N, Dv] -> [B, Hq, L, Dv].

    `mask`: bool or to be added, broadcast to [B, Hq, L, N]; "causal": the last query attends to all keys. It
    evaluates at once where that is faster, so compiled functions cannot use it. `usual_rows`: choose as for
    so many rows, so that each row rounds alike in any company; None: as for those that there are.
    """
    q, k, v = (x.astype(mx.float32) for x in (queries, keys, values))
    rows, heads, length, _ = q.shape
    seen = None if length == 1 and isinstance(mask, str) else mask  # the last query sees all keys
    few = length == 1 and (usual_rows or rows) * heads * k.shape[2] < GRAPH_LOGITS
    out = _attend_in_graph(q, k, v, scale, seen) if few else _attend_in_blocks(q, k, v, scale, seen)
    return out.astype(queries.dtype)


def _attend_in_graph(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    """Attention of one query a row. Heads stay folded, as each operation is a node that costs time."""
    logits = _fold_heads(q * (scale * LOG2E), k.shape[1]) @ k.swapaxes(-1, -2)
    if mask is not None:
        unfolded = logits.reshape(*q.shape[:3], -1)
        logits = _mask_logits(unfolded, mask, LOG2E).reshape(logits.shape)
    weights = mx.power(2.0, logits - logits.max(axis=-1, keepdims=True))
    return ((weights @ v) / weights.sum(axis=-1, keepdims=True)).reshape(*q.shape[:3], -1)


def _attend_in_blocks(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Mask) -> mx.array:
    outputs = list[mx.array]()
    for logits in _iterate_blocks(q * scale, k, mask):
        if outputs:
            mx.async_eval(outputs[-1])  # frees its logits; the next block does not depend on it
        sums = _exponentiate(logits, causal=isinstance(mask, str))
        outputs.append(_sum_values(logits, v[:, :, : logits.shape[-1]]) / mx.array(sums))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _iterate_blocks(q: mx.array, k: mx.array, mask: Mask) -> Iterator[mx.array]:
    """Logits [B, Hq, l, n] of some queries at a time; causal: only of keys that one of them attends to."""
    (batch, heads, length, _), width = q.shape, k.shape[2]
    rows = max(MIN_QUERIES, BLOCK_LOGITS // (batch * heads * width))
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        keys = width - length + stop if isinstance(mask, str) else width
        own = mask if isinstance(mask, mx.array) else None
        if own is not None and own.ndim > 1 and own.shape[-2] > 1:
            own = own[..., start:stop, :]
        yield _compute_logits(q[:, :, start:stop], k[:, :, :keys], own)


def _compute_logits(q: mx.array, k: mx.array, mask: mx.array | None) -> mx.array:
    """Logits [B, Hq, l, n], masked."""
    logits = (_fold_heads(q, k.shape[1]) @ k.swapaxes(-1, -2)).reshape(*q.shape[:3], -1)
    return logits if mask is None else _mask_logits(logits, mask)


def _fold_heads(q: mx.array, groups: int) -> mx.array:
    """Queries [B, groups, heads of a group * l, D]: heads that share keys are one product."""
    batch, heads, length, _ = q.shape
    return q.reshape(batch, groups, heads // groups * length, -1)


def _mask_logits(logits: mx.array, mask: mx.array, unit: float = 1.0) -> mx.array:
    """Masked logits [B, Hq, l, n]. `unit`: factor of an added mask."""
    if mask.dtype == mx.bool_:
        return mx.where(mask, logits, MASKED_LOGIT)
    return logits + mask.astype(mx.float32) * unit


def _exponentiate(logits: mx.array, *, causal: bool) -> Block:
    """Turn logits [B, H, l, n] into weights, in place; returns the weights' sums [B, H, l, 1]."""
    rows, (length, width) = open_rows(logits), logits.shape[2:]
    assert rows is not None, "numbers of a product lie side by side"
    if causal and length > 1:
        newest = rows.reshape(-1, length, width)[..., -length:]
        newest[:, ~np.tri(length, dtype=np.bool_)] = MASKED_LOGIT
    sums = list[Block]()
    for (block,) in iterate_blocks(rows, NUMPY_LOGITS):
        block -= block.max(axis=-1, keepdims=True)
        np.exp(block, out=block)
        sums.append(block.sum(axis=-1, keepdims=True))
    return np.concatenate(sums).reshape(*logits.shape[:-1], 1)


def _sum_values(weights: mx.array, v: mx.array) -> mx.array:
    """Sums of the values by these weights, [B, Hq, l, Dv]."""
    return (_fold_heads(weights, v.shape[1]) @ v).reshape(*weights.shape[:3], -1)


def round_length(tokens: int) -> int:
    """The padded number of queries: STEP times 1, 2, 3, 4, 6, 8, 12, ..."""
    power: int = STEP << max(-(-tokens // STEP) - 1, 0).bit_length()
    return power // 4 * 3 if power > 2 * STEP and tokens <= power // 4 * 3 else power


def count_dummies(start: int, tokens: int) -> int:
    """Tokens to be added behind a chunk, so that the attention of its layers needs fewer of its own. 0 if it
    would need more than STEP."""
    behind = round_length(start % STEP + tokens) - start % STEP - tokens
    return behind if behind < STEP else 0


def attend_causally(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention [rows, Hq, n, D] of the newest n tokens to `keys` [rows, H, tokens, D]."""
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
