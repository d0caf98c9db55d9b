"""Attention of one token a row to keys and values in pages: one launch a layer for rows of any lengths.

`attend_pages` uses the kernel of kernel_source.py on CUDA and Metal. `attend_gathered` computes the same with
the library's attention over gathered pages: slow, for tests on machines without a GPU.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlxrun.model.machine.device import get_backend
from mlxrun.model.paged import kernel_source
from mlxrun.model.paged.kernel_source import PAGE
from mlxrun.model.ragged.attention import NotRaggedError

WARPS = 4  # of a block of the first kernel, 32 threads each
TEAMS = 4  # threads that join the parts of a row, for each number of its result
MIN_UNROLL = 2  # keys that a thread reads before it computes; as many as the block has query heads, if more
MAX_HEADS = 4  # query heads of a block, whose sums are in registers


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the tokens of a forward's rows lie. `tables` int32 [rows, columns]: page i of a row is in column
    i % columns; `lengths` int32 [rows]: tokens, the newest included, 0 for a dummy row."""

    tables: mx.array
    lengths: mx.array


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a kernel is compiled for."""

    backend: str
    dtype: mx.Dtype
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    sinks: bool


def can_attend(heads: int, kv_heads: int, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel covers attention of this shape."""
    fits = key_dim <= 256 and 32 <= value_dim <= 256 and heads % kv_heads == 0
    return fits and bool(_list_lanes(key_dim, value_dim))


def attend_pages(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    rows: PagedRows,
    scale: float,
    window: int | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of `queries` [rows, heads, 1, D] to `keys` and `values` [pages * PAGE, KV heads, D], each row
    to its own newest `window` tokens (None: all); as [rows, heads, 1, D], zeros for dummy rows."""
    (count, heads), columns = queries.shape[:2], rows.tables.shape[1]
    if not can_attend(heads, keys.shape[1], keys.shape[2], values.shape[2]):
        raise NotRaggedError(f"{heads} heads of {keys.shape[2]}, which the kernel does not cover")
    kv_heads, key_dim, value_dim = keys.shape[1], keys.shape[2], values.shape[2]
    shape = _Shape(
        get_backend(),
        *(keys.dtype, heads, kv_heads, key_dim, value_dim),
        *(scale, window or 0, sinks is not None),
    )
    split, join = _compile(shape)
    constants, parts = _list_constants(shape), _count_parts(shape)
    partial = split(
        inputs=[queries, keys, values, rows.tables, rows.lengths],
        template=constants,
        grid=(columns * WARPS * 32, kv_heads * parts, count),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(count, heads, columns, value_dim + 2)],
        output_dtypes=[mx.float32],
    )[0]
    attended: mx.array = join(
        inputs=[partial, rows.lengths, rows.lengths if sinks is None else sinks],
        template=constants,
        grid=(heads * value_dim * TEAMS, count, 1),
        threadgroup=(value_dim * TEAMS, 1, 1),
        output_shapes=[(count, heads, 1, value_dim)],
        output_dtypes=[queries.dtype],
    )[0]
    return attended


@lru_cache(maxsize=256)
def _compile(shape: _Shape) -> tuple[Any, Any]:
    """The two kernels; they are compiled when they first run."""
    make = mx.fast.cuda_kernel if shape.backend == "cuda" else mx.fast.metal_kernel
    header = f"{kernel_source.DIALECTS[shape.backend].header}\n#define SCALE {shape.scale!r}f\n"
    name = hashlib.blake2b(repr(shape).encode(), digest_size=6).hexdigest()
    inputs = ["queries", "keys", "values", "tables", "lengths"]
    split = make(
        name=f"paged_split_{name}",
        input_names=inputs,
        output_names=["parts"],
        source=kernel_source.render_split(shape.backend),
        header=header,
    )
    join = make(
        name=f"paged_join_{name}",
        input_names=["parts", "lengths", "sinks"],
        output_names=["attended"],
        source=kernel_source.render_join(shape.backend),
        header=header,
    )
    return split, join


@lru_cache(maxsize=256)
def _list_constants(shape: _Shape) -> list[tuple[str, Any]]:
    lanes = _count_lanes(shape.key_dim, shape.value_dim, shape.dtype.size)
    parts = _count_parts(shape)
    heads = shape.heads // shape.kv_heads // parts
    numbers = {
        "KV_HEADS": shape.kv_heads,
        "NUM_HEADS": shape.heads,
        "PARTS": parts,
        "HEADS": heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "LANES": lanes,
        "KEY_PART": shape.key_dim // lanes,
        "VALUE_PART": shape.value_dim // lanes,
        "KEYS_A_WARP": 32 // lanes,
        "WARPS": WARPS,
        "TEAMS": TEAMS,
        "UNROLL": max(MIN_UNROLL, heads),
        "PAGE_TOKENS": PAGE,
        "WINDOW": shape.window,
        "SINKS": int(shape.sinks),
    }
    return [("T", shape.dtype), *numbers.items()]


def _list_lanes(key_dim: int, value_dim: int) -> list[int]:
    """Numbers of threads that may share a key: powers of two that divide both sizes."""
    return [lanes for lanes in (32, 16, 8, 4) if key_dim % lanes == value_dim % lanes == 0]


def _count_lanes(key_dim: int, value_dim: int, itemsize: int) -> int:
    """Threads that share a key, so that each reads close to 16 bytes of it."""
    return min(_list_lanes(key_dim, value_dim), key=lambda lanes: abs(key_dim // lanes * itemsize - 16))


def _count_parts(shape: _Shape) -> int:
    """Blocks that share a KV head's query heads: as few as registers and shared memory allow."""
    group = shape.heads // shape.kv_heads
    most = kernel_source.DIALECTS[shape.backend].shared_numbers // (WARPS * (shape.value_dim + 2))
    heads = max(n for n in range(1, group + 1) if group % n == 0 and n <= min(MAX_HEADS, most))
    return group // heads


def attend_gathered(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    rows: PagedRows,
    scale: float,
    window: int | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """The same as `attend_pages`, with the library's attention over a copy of all pages."""
    gathered = [_gather(pages, rows.tables) for pages in (keys, values)]
    seen = _find_seen(rows, window)
    extra = {} if sinks is None else {"sinks": sinks}
    out = mx.fast.scaled_dot_product_attention(
        queries, *gathered, scale=scale, mask=seen[:, None, None], **extra
    )
    return mx.where(rows.lengths[:, None, None, None] > 0, out, 0).astype(queries.dtype)


def _gather(pages: mx.array, tables: mx.array) -> mx.array:
    rows, columns = tables.shape
    _, heads, width = pages.shape
    gathered = pages.reshape(-1, PAGE, heads, width)[tables]
    return gathered.reshape(rows, columns * PAGE, heads, width).transpose(0, 2, 1, 3)


def _find_seen(rows: PagedRows, window: int | None) -> mx.array:
    """Bool [rows, columns * PAGE]: the places of the tables that a row attends to."""
    columns = rows.tables.shape[1]
    newest = mx.maximum(rows.lengths[:, None] - 1, 0) // PAGE  # the page that the newest token is in
    column = mx.arange(columns)[None]
    page = newest - (newest - column) % columns  # the newest page of this column
    position = (page[:, :, None] * PAGE + mx.arange(PAGE)).reshape(page.shape[0], -1)
    low = mx.zeros_like(rows.lengths) if window is None else mx.maximum(rows.lengths - window, 0)
    return (position >= low[:, None]) & (position < rows.lengths[:, None])
