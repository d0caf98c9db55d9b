"""Attention over plain arrays in the engine's own forwards, and by what operations prompts are computed.

The engine thread says with `use_engine_attention` that a forward is its own. Outside of such a block the
library attends. Arrays are attended by device_attention.py where that supports the arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlxrun.model.fused.operations import LayerOperations
from mlxrun.model.hooks import device_attention
from mlxrun.model.kv.ragged.quantized_buffer import QuantizedArray, attend_quantized
from mlxrun.model.machine.device import uses_cuda

AttentionCall = Callable[..., Any]  # with the arguments of `attend_plain`


class _EngineAttention(threading.local):
    """How this thread computes attention over plain arrays now. Each engine of a process has a thread."""

    enabled = False
    calls_per_launch = 0
    calls = 0
    check: AttentionCall | None = None
    on_cpu: AttentionCall | None = None
    operations: LayerOperations | None = None
    positions: tuple[tuple[int, ...], mx.array] | None = None  # of the last chunk; layers have the same


_NOW = _EngineAttention()


@contextmanager
def use_engine_attention(
    calls_per_launch: int = 0,
    check: AttentionCall | None = None,
    on_cpu: AttentionCall | None = None,
    operations: LayerOperations | None = None,
) -> Iterator[None]:
    """Within the block, forwards are the engine's own: on a CPU they attend as device_attention.py does.

    `calls_per_launch`: how many results of attention over plain arrays are launched together, 0: none. So a
    device computes the first layers of a prompt while Python builds the later ones. `check`: called before
    each call of the engine's attention, with the same arguments. `on_cpu`: called in place of
    `compute_attention`. `operations`: of fused layers for prompts (model/fused); None: their layers are the
    library's.
    """
    _NOW.enabled, _NOW.calls = True, 0
    _NOW.calls_per_launch, _NOW.check = calls_per_launch, check
    _NOW.operations, _NOW.positions = operations, None
    before, _NOW.on_cpu = _NOW.on_cpu, on_cpu
    try:
        yield
    finally:
        _NOW.enabled, _NOW.check = False, None
        _NOW.operations = _NOW.positions = None
        _NOW.on_cpu = before


def attend_in_engine(
    queries: mx.array,
    keys: Any,
    values: Any,
    scale: float,
    mask: Any,
    usual_rows: int | None = None,
    **kwargs: Any,
) -> mx.array:
    """Attention over plain or quantized arrays in an engine's forward. `usual_rows`: as in
    compute_attention."""
    if isinstance(keys, QuantizedArray):
        return attend_quantized(queries, keys, values, scale, mask, **kwargs)
    if not _NOW.enabled:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, **kwargs)
    if _NOW.check is not None:
        _NOW.check(queries, keys, values, scale, mask, **kwargs)
    return attend_plain(queries, keys, values, scale, mask, usual_rows=usual_rows, **kwargs)


def attend_plain(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any,
    usual_rows: int | None = None,
    **kwargs: Any,
) -> mx.array:
    """The engine's attention over plain arrays: device_attention.py if it supports all arguments, else the
    library."""
    if not kwargs and mx.default_device() == mx.cpu and queries.dtype in device_attention.FLOATS:
        attend = _NOW.on_cpu or device_attention.compute_attention
        attended: mx.array = attend(queries, keys, values, scale, mask, usual_rows=usual_rows)
        return attended
    if isinstance(mask, str) and not kwargs and queries.dtype in device_attention.CUDNN_TYPES and uses_cuda():
        return device_attention.attend_causally(queries, keys, values, scale)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, **kwargs)


def attend_prompt(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, **kwargs: Any
) -> mx.array:
    """Attention over plain arrays in an engine's forward. Every so many calls are launched."""
    out = attend_in_engine(queries, keys, values, scale, mask, **kwargs)
    _NOW.calls += 1
    every = _NOW.calls_per_launch
    if every and _NOW.calls % every == 0:
        mx.async_eval(out)
    return out


def is_engine_attention() -> bool:
    """Whether forwards are the engine's own now."""
    return _NOW.enabled


def get_prompt_operations() -> LayerOperations | None:
    """By what operations fused layers compute the prompts of this forward; None: by the library's code."""
    return _NOW.operations


def find_positions(first: int, tokens: int, rows: int) -> mx.array:
    """The positions int32 [rows * tokens] of a chunk that begins at the `first` one in each row. The layers
    of a forward share them."""
    chunk, known = (first, tokens, rows), _NOW.positions
    if known is None or known[0] != chunk:
        known = chunk, mx.tile(mx.arange(first, first + tokens, dtype=mx.int32), rows)
        _NOW.positions = known
    return known[1]
