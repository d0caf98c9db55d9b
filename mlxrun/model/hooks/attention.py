"""Routes a model's own attention, so that its layers attend over ragged rows in one forward.

Models call their module's `scaled_dot_product_attention(queries, keys, ...)`. `hook_attention` routes that
call to RowKeys, to engine_attention.py for the engine's own forwards, or to the library. While rows decode, a
model sees the classes below as its cache, keys and mask. A model that looks inside them fails in the load
check, except for those that logit_rule.py and soft_caps.py handle.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.fused.operations import LayerOperations
from mlxrun.model.hooks.device_attention import USUAL_ROWS
from mlxrun.model.hooks.engine_attention import attend_in_engine, attend_prompt, is_engine_attention
from mlxrun.model.hooks.logit_rule import LogitRule, PositionLogits, TurnedParts, attend_arrays
from mlxrun.model.hooks.rotary_angles import StepPositions
from mlxrun.model.kv.ragged.row_group import RowGroup

ATTENTION_FUNCTION = "scaled_dot_product_attention"
_KNOWN = ("queries", "keys", "values", "cache", "scale", "mask")  # the rest (sinks) goes to the kernel
_BASES = ("mlx_lm.models.base", "mlx_vlm.models.base")


class NotRaggedError(TypeError):
    """The model used a ragged object in a way that only a plain array supports."""


class RaggedMask:
    """The result of `make_mask`. It has the layer's window, from which each group makes its own mask."""

    def __init__(self, window: int | None) -> None:
        self.window = window


class RowKeys:
    """Keys and values of all rows of a forward, in place of arrays."""

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None = None, cap: float = 0.0
    ) -> mx.array:
        """Attention of one token a row, [rows, Hq, 1, D]. `mask`: the result of `make_mask`, or
        PositionLogits; `sinks`, `cap`: see LogitRule. NotRaggedError for a mask that the model made
        itself."""
        if isinstance(mask, PositionLogits):
            if sinks is not None or cap:
                raise NotRaggedError("latent attention with sinks or a soft cap")
            return self._attend(queries, LogitRule(scale, positions=mask.positions))
        if mask is not None and not isinstance(mask, RaggedMask):
            raise NotRaggedError(f"the model made its own mask: {type(mask).__name__}")
        return self._attend(queries, LogitRule(scale, None if mask is None else mask.window, sinks, cap))

    def swapaxes(self, *axes: int) -> TurnedParts:
        """The rotary parts of the latent form, whose logits the model adds. NotRaggedError for other axes."""
        if axes not in ((-1, -2), (-2, -1), (2, 3), (3, 2)):
            raise NotRaggedError(f"the model swaps axes {axes} of its keys")
        return TurnedParts()

    def _attend(self, queries: mx.array, rule: LogitRule) -> mx.array:
        raise NotImplementedError


class RaggedKeys(RowKeys):
    """Keys and values of all rows: for each group a pair of arrays (plain or quantized), in row order."""

    def __init__(self, groups: list[RowGroup], pairs: list[tuple[Any, Any]], width: int) -> None:
        self._groups = groups
        self._pairs = pairs
        self._width = width  # rows of the forward; more than the groups hold if it is padded

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, H, longest, D], the shape of a padded array."""
        first = self._pairs[0][0].shape
        return (self._width, first[1], max(k.shape[2] for k, _ in self._pairs), first[3])

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self._pairs[0][0].dtype
        return dtype

    def astype(self, dtype: mx.Dtype) -> RaggedKeys:
        pairs = [(k.astype(dtype), v.astype(dtype)) for k, v in self._pairs]
        return RaggedKeys(self._groups, pairs, self._width)

    def _attend(self, queries: mx.array, rule: LogitRule) -> mx.array:
        """One call a group."""
        outputs, row = [], 0
        for group, (keys, values) in zip(self._groups, self._pairs, strict=True):
            count = len(group.ids)
            whole = count == queries.shape[0]
            own, of_rows = (queries, rule) if whole else _select_rows(queries, rule, row, row + count)
            mask = group.make_mask(keys.shape[2], rule.window)
            fixed = group.width is not None
            attend = partial(attend_in_engine, usual_rows=USUAL_ROWS) if fixed else attend_in_engine
            outputs.append(attend_arrays(own, keys, values, mask, of_rows, attend))
            row += count
        if row < queries.shape[0]:  # dummy rows of a fixed decode width
            shape = (queries.shape[0] - row, *outputs[0].shape[1:])
            outputs.append(mx.zeros(shape, outputs[0].dtype))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


def _select_rows(queries: mx.array, rule: LogitRule, start: int, stop: int) -> tuple[mx.array, LogitRule]:
    if rule.positions is not None:
        rule = replace(rule, positions=rule.positions[start:stop])
    return queries[start:stop], rule


class StepCache:
    """One KV or WINDOW layer as the model sees it in a step. Its members are those of the libraries' caches.

    `offset`: int32 [rows]; `_offset`: its largest value, which spares some models a device sync.
    """

    def __init__(self, layer: int, window: int | None) -> None:
        self._layer = layer
        self._window = window
        self._groups: list[RowGroup] = []
        self.offset = StepPositions([], dtype=mx.int32)
        self._offset = 0

    def begin_step(self, groups: list[RowGroup], offsets: StepPositions, longest: int) -> None:
        """Start a step. Every group has advanced; `offsets` are the positions of the new tokens."""
        self._groups, self.offset, self._offset = groups, offsets, longest

    def end_step(self) -> None:
        """Drop the step's views, so that buffers can be updated in place and freed with their rows."""
        self._groups = []


class RowKeysCache:
    """The common part of caches whose keys and values are RowKeys: all rows are in one forward."""

    _fetched: RowKeys | None = None  # by this step
    operations: LayerOperations | None = None  # of fused layers (model/fused)

    @property
    def state(self) -> tuple[RowKeys, RowKeys]:
        """The keys and values of this step, for layers that share another layer's keys. NotRaggedError before
        the step's update."""
        if self._fetched is None:
            raise NotRaggedError("the model read keys before the step's update")
        return self._fetched, self._fetched

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> RaggedMask | None:
        """The mask of one new token a row, as the libraries' caches give it: None without `window_size`.
        NotRaggedError if the model needs an array."""
        if N != 1 or (return_array and window_size is not None):
            raise NotRaggedError("the model needs the mask as an array")
        return None if window_size is None else RaggedMask(window_size)


class RaggedCache(RowKeysCache, StepCache):
    """A cache for all rows in one forward, in groups. Keys and values are RaggedKeys."""

    def end_step(self) -> None:
        super().end_step()
        self._fetched = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowKeys, RowKeys]:
        """Add one token [rows, H, 1, D] to every row. NotRaggedError for several tokens a row."""
        if keys.shape[2] != 1:
            raise NotRaggedError("a ragged batch takes one token a row")
        pairs, row = [], 0
        for group in self._groups:
            count = len(group.ids)
            all_rows = count == keys.shape[0]
            k, v = (keys, values) if all_rows else (keys[row : row + count], values[row : row + count])
            pairs.append(group.buffers[self._layer].append(k, v, group.get_width(self._window)))
            row += count
        self._fetched = RaggedKeys(self._groups, pairs, keys.shape[0])
        return self.state


class GroupCache(StepCache):
    """A cache for one group in a forward, with plain padded arrays: for models that look inside."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        (group,) = self._groups
        return group.buffers[self._layer].append(keys, values, group.get_width(self._window))

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        (group,) = self._groups
        return group.buffers[self._layer].view(group.get_width(self._window))

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Bool [rows, 1, 1, width], or None if every row attends to everything."""
        (group,) = self._groups
        width = group.get_width(self._window)
        mask = group.make_mask(width, window_size)
        if mask is None and return_array:
            mask = mx.ones((len(group.ids), 1, 1, width), dtype=mx.bool_)
        return mask


def hook_attention(model: nn.Module) -> int:
    """Route attention in each module that defines a part of this model. Returns how many modules have it.
    Idempotent. ModelLoadError if a module binds the name to something that is not a function."""
    modules = _find_modules(model)
    for module in modules:
        original = vars(module)[ATTENTION_FUNCTION]
        if not callable(original):
            raise ModelLoadError(
                f"{module.__name__}.{ATTENTION_FUNCTION} is not a function: untested mlx-lm or mlx-vlm"
            )
        if not getattr(original, "routes_ragged_keys", False):
            setattr(module, ATTENTION_FUNCTION, _make_routed(original))
    return len(modules)


def _find_modules(model: nn.Module) -> list[ModuleType]:
    names = {base.__module__ for m in model.modules() for base in type(m).__mro__}
    return [sys.modules[name] for name in sorted(names) if ATTENTION_FUNCTION in vars(sys.modules[name])]


def _make_routed(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    names = tuple(inspect.signature(original).parameters)
    known = original.__module__ in _BASES  # a model's own function may do more than the kernel does

    def attend(queries: mx.array, keys: Any, *args: Any, **kwargs: Any) -> mx.array:
        ragged = isinstance(keys, RowKeys)
        if not ragged and not (known and is_engine_attention() and isinstance(keys, mx.array)):
            return original(queries, keys, *args, **kwargs)
        given = dict(zip(names[2:], args, strict=False)) | kwargs
        extra = {name: value for name, value in given.items() if name not in _KNOWN and value is not None}
        if ragged:
            if extra.keys() - {"sinks"}:
                raise NotRaggedError(f"attention with {', '.join(extra)}")
            return keys.attend(queries, given["scale"], given.get("mask"), **extra)
        return attend_prompt(queries, keys, given["values"], given["scale"], given.get("mask"), **extra)

    attend.routes_ragged_keys = True  # type: ignore[attr-defined]
    return attend
