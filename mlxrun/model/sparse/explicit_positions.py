"""Lets a model compute tokens at given positions, where the libraries count them from the cache's length.

A row whose prompt has gaps holds fewer tokens than its positions say. Caches, masks and the decode batch go
on counting tokens; only the rotary embeddings take the positions that `use_positions` gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.run.adapter import Adapter
from mlxrun.model.run.prompt_inputs import PromptInputs


class _Positions:
    """Of the forward that is being built, or None. Only the engine thread uses it."""

    current: mx.array | None = None


@contextmanager
def use_positions(positions: mx.array) -> Iterator[None]:
    """Forwards in this block have these positions: int32 [tokens] of one row, or [rows] of one token each."""
    _Positions.current = positions
    try:
        yield
    finally:
        _Positions.current = None


class PositionedRope(nn.Module):
    """A rotary embedding that takes the positions of `use_positions` in place of the cache's offset."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """`x` [rows, heads, tokens, D]."""
        positions = _Positions.current
        if positions is None:
            return self.rope(x, *args, **kwargs)
        if args:
            args = args[1:]
        kwargs = {**kwargs, "offset": positions}
        rows, _, tokens, _ = x.shape
        if tokens == 1 and rows == positions.size:
            return self.rope(x, *args, **kwargs)
        if rows != 1 or tokens != positions.size:
            raise ValueError(f"{positions.size} positions for {rows} rows of {tokens} tokens")
        turned: mx.array = self.rope(x.swapaxes(0, 2), *args, **kwargs)  # the tokens as rows
        return turned.swapaxes(0, 2)


def position_ropes(model: nn.Module) -> int:
    """Make the model's rotary embeddings take explicit positions; returns how many do. Idempotent."""
    count = 0
    for module in model.modules():
        if isinstance(module, PositionedRope):
            continue
        for name, value in list(module.items()):
            if isinstance(value, PositionedRope):
                count += 1
            elif isinstance(value, nn.Module) and _is_rope(value):
                module[name] = PositionedRope(value)
                count += 1
    return count


def _is_rope(module: nn.Module) -> bool:
    kind = type(module)
    return "rope" in kind.__name__.lower() and "offset" in inspect.signature(kind.__call__).parameters


class PositionedAdapter(Adapter):
    """A text model, whose rows may have gaps."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter.model, adapter.weights, adapter.row_adapters)
        self.num_ropes = position_ropes(adapter.model)

    def prefill(
        self,
        ids: mx.array,
        cache: list[Any],
        start: int,
        inputs: PromptInputs,
        model: nn.Module | None = None,
    ) -> mx.array:
        if inputs.positions is None:
            return super().prefill(ids, cache, start, inputs, model)
        stop, known = start + ids.shape[1], inputs.positions.shape[0]
        positions = inputs.positions[start:stop]
        if stop > known:  # a preempted row: its answer so far goes on behind the whole prompt
            answer = mx.arange(max(start, known), stop, dtype=mx.int32) + inputs.position_delta
            positions = mx.concatenate([positions, answer])
        with use_positions(positions):
            return super().prefill(ids, cache, start, inputs, model)

    def decode(self, ids: mx.array, cache: list[Any], positions: Sequence[int] | mx.array) -> mx.array:
        rows = positions if isinstance(positions, mx.array) else mx.array(positions, dtype=mx.int32)
        with use_positions(rows):
            return super().decode(ids, cache, rows)
