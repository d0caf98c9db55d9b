"""Attention of one token a row to keys and values in pages: one launch a layer for rows of any lengths.

`attend_pages` uses the kernels of `kernels/` on CUDA and Metal. `attend_gathered` computes the same with
the library's attention over gathered pages. It is slow, and is for tests on machines without a GPU.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlxrun.model.hooks.attention import NotRaggedError
from mlxrun.model.hooks.logit_rule import LogitRule, attend_arrays
from mlxrun.model.kernels import kernel_source
from mlxrun.model.kernels.kernel_source import PAGE, make_kernel
from mlxrun.model.machine.device import get_backend

WARPS = 4  # of a block of the first kernel, 32 threads each
TEAMS = 4  # threads for each number of a result that join the parts of a row; fewer for large values
# Of a block of the second kernel, at most. Apple's GPUs refuse 1024 where a kernel needs many registers.
JOIN_THREADS = {"cuda": 1024, "metal": 512}
# Keys that a thread reads before it computes: as many as the block has query heads, within these bounds. Both
# numbers take registers. A thread has 255 on CUDA, where 4 and 4 were measured. On Apple's GPUs it has some
# 128, and nobody has measured there. What does not fit goes to memory, which costs more than late keys.
MIN_UNROLL = 2
MAX_UNROLL = {"cuda": 4, "metal": 2}
MAX_HEADS = {"cuda": 4, "metal": 4}  # query heads of a block, whose sums are in registers
MAX_DIM = 512  # numbers of a key or value


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the tokens of a forward's rows are.

    `tables` int32 [rows, columns]: page i of a row is in column i % columns. `lengths` int32 [rows]: tokens
    with the newest included, 0 for a dummy row.
    """

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
    turn_dim: int  # of rotary parts; 0: not the latent form
    scale: float
    window: int
    sinks: bool
    cap: float
    joined: bool  # keys and values are one array


def can_attend(heads: int, kv_heads: int, key_dim: int, value_dim: int, turn_dim: int = 0) -> bool:
    """Whether the kernel covers attention of this shape. `turn_dim`: of rotary parts, in the latent form."""
    fits = key_dim <= MAX_DIM and 32 <= value_dim <= MAX_DIM and heads % kv_heads == 0
    return fits and bool(_list_lanes(key_dim, value_dim, turn_dim))


def attend_pages(
    queries: mx.array, keys: mx.array, values: mx.array | None, rows: PagedRows, rule: LogitRule
) -> mx.array:
    """Attention of `queries` [rows, heads, 1, D] to `keys` and `values` [pages * PAGE, KV heads, D], as
    [rows, heads, 1, D]. `values` None: `keys` [2 * pages * PAGE, KV heads, D] have them behind the keys.
    Dummy rows get zeros. NotRaggedError if the kernel does not cover the shape."""
    (count, heads), columns = queries.shape[:2], rows.tables.shape[1]
    shape = _describe_shape(queries, keys, values, rule)
    if not can_attend(heads, shape.kv_heads, shape.key_dim, shape.value_dim, shape.turn_dim):
        raise NotRaggedError(f"{heads} heads of {shape.key_dim}, which the kernel does not cover")
    split, join = _compile(shape)
    constants, parts, width = _list_constants(shape), _count_parts(shape), shape.value_dim
    pages = [keys] if values is None else [keys, values]
    positions = [] if rule.positions is None else [rule.positions]
    partial = split(
        inputs=[queries, *pages, rows.tables, rows.lengths, *positions],
        template=constants,
        grid=(columns * WARPS * 32, shape.kv_heads * parts, count),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(count, heads, columns, width + 2)],
        output_dtypes=[mx.float32],
    )[0]
    teams = _count_teams(shape)
    attended: mx.array = join(
        inputs=[partial, rows.lengths, rows.lengths if rule.sinks is None else rule.sinks],
        template=constants,
        grid=(heads * width * teams, count, 1),
        threadgroup=(width * teams, 1, 1),
        output_shapes=[(count, heads, 1, width)],
        output_dtypes=[queries.dtype],
    )[0]
    return attended


def _describe_shape(queries: mx.array, keys: mx.array, values: mx.array | None, rule: LogitRule) -> _Shape:
    heads, (_, kv_heads, key_dim), joined = queries.shape[1], keys.shape, values is None
    width = key_dim if values is None else values.shape[2]
    latent = rule.positions is not None
    value_dim, turn_dim = (key_dim, width) if latent else (width, 0)
    backend, window, sinks = get_backend(), rule.window or 0, rule.sinks is not None
    sizes = (heads, kv_heads, key_dim, value_dim, turn_dim)
    return _Shape(backend, keys.dtype, *sizes, float(rule.scale), window, sinks, float(rule.cap), joined)


@lru_cache(maxsize=256)
def _compile(shape: _Shape) -> tuple[Any, Any]:
    """The two kernels."""
    latent = shape.turn_dim > 0
    header = f"{kernel_source.HEADERS[shape.backend]}\n#define SCALE {shape.scale!r}f\n"
    header += f"#define LATENT {latent:d}\n#define JOINED {shape.joined:d}\n"
    header += f"#define CAPPED {shape.cap > 0:d}\n#define CAP {shape.cap!r}f\n"
    name = hashlib.blake2b(repr(shape).encode(), digest_size=6).hexdigest()
    pages = ["keys"] if shape.joined else ["keys", "values"]
    inputs = ["queries", *pages, "tables", "lengths", *(["positions"] if latent else [])]
    parts = ["parts", "lengths", "sinks"]
    return (
        make_kernel(shape.backend, f"paged_split_{name}", inputs, ["parts"], kernel_source.SPLIT, header),
        make_kernel(shape.backend, f"paged_join_{name}", parts, ["attended"], kernel_source.JOIN, header),
    )


@lru_cache(maxsize=256)
def _list_constants(shape: _Shape) -> list[tuple[str, Any]]:
    lanes = _count_lanes(shape)
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
        "TEAMS": _count_teams(shape),
        "UNROLL": max(MIN_UNROLL, min(heads, MAX_UNROLL[shape.backend])),
        "PAGE_TOKENS": PAGE,
        "WINDOW": shape.window,
        "SINKS": int(shape.sinks),
    }
    if shape.turn_dim:
        numbers |= {"TURN_DIM": shape.turn_dim, "TURN_PART": shape.turn_dim // lanes}
    return [("T", shape.dtype), *numbers.items()]


def _list_lanes(*sizes: int) -> list[int]:
    """Numbers of threads that may share a key: powers of two that divide all sizes."""
    return [lanes for lanes in (32, 16, 8, 4) if all(size % lanes == 0 for size in sizes)]


def _count_lanes(shape: _Shape) -> int:
    """Threads that share a key, so that each reads close to 16 bytes of it."""
    size, itemsize = shape.key_dim, shape.dtype.size
    fitting = _list_lanes(size, shape.value_dim, shape.turn_dim)
    return min(fitting, key=lambda lanes: abs(size // lanes * itemsize - 16))


def _count_teams(shape: _Shape) -> int:
    return min(TEAMS, JOIN_THREADS[shape.backend] // shape.value_dim)


def _count_parts(shape: _Shape) -> int:
    """Blocks that share a KV head's query heads: as few as registers and shared memory allow."""
    group = shape.heads // shape.kv_heads
    most = kernel_source.SHARED_NUMBERS[shape.backend] // (WARPS * (shape.value_dim + 2))
    heads = max(n for n in range(1, group + 1) if group % n == 0 and n <= min(MAX_HEADS[shape.backend], most))
    return group // heads


def split_pages(keys: mx.array, values: mx.array | None) -> tuple[mx.array, mx.array]:
    """Keys and values [pages * PAGE, KV heads, D]; views of one array take no memory."""
    if values is not None:
        return keys, values
    tokens = keys.shape[0] // 2
    return keys[:tokens], keys[tokens:]


def attend_gathered(
    queries: mx.array, keys: mx.array, values: mx.array | None, rows: PagedRows, rule: LogitRule
) -> mx.array:
    """The same as `attend_pages`, with the library's attention over a copy of all pages."""
    pages = split_pages(keys, values)
    gathered_keys, gathered_values = (_gather(array, rows.tables) for array in pages)
    seen = _find_seen(rows, rule.window)[:, None, None]
    out = attend_arrays(queries, gathered_keys, gathered_values, seen, rule)
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
