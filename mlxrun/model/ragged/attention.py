"""The one attention seam: how a model's own layers attend over ragged rows in one forward.

Models call their module's `scaled_dot_product_attention(queries, keys, values, ...)`. `install` routes that
call, once for each model module, to the keys if they are RaggedKeys, to model/ragged/cpu_attention.py for the engine's own
forwards on a CPU, and to the library's function otherwise. The stand-ins below are what a model sees as its
cache, keys, values and mask while it decodes; a model that looks inside them fails in the parity probe and is
decoded another way (model/compute_methods.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.errors import ModelLoadError
from mlxrun.model.ragged import cpu_attention
from mlxrun.model.ragged.row_group import RowGroup

ATTENTION_FUNCTION = "scaled_dot_product_attention"
_KNOWN = ("queries", "keys", "values", "cache", "scale", "mask")  # the rest (sinks) goes to the kernel
_BASES = ("mlx_lm.models.base", "mlx_vlm.models.base")


class NotRaggedError(TypeError):
    """The model asked something of a stand-in that only a plain array can answer."""


class RaggedMask:
    """What `make_mask` gives: the layer's window; each group makes its own mask from it."""

    def __init__(self, window: int | None) -> None:
        self.window = window


class RaggedKeys:
    """Keys and values of all rows, a pair of arrays for each group, in row order."""

    def __init__(self, groups: list[RowGroup], pairs: list[tuple[mx.array, mx.array]], width: int) -> None:
        self._groups = groups
        self._pairs = pairs
        self._width = width  # rows of the forward; more than the groups hold if it is padded

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, H, longest, D]: what a padded array would have."""
        first = self._pairs[0][0].shape
        return (self._width, first[1], max(k.shape[2] for k, _ in self._pairs), first[3])

    @property
    def dtype(self) -> mx.Dtype:
        return self._pairs[0][0].dtype

    def astype(self, dtype: mx.Dtype) -> RaggedKeys:
        pairs = [(k.astype(dtype), v.astype(dtype)) for k, v in self._pairs]
        return RaggedKeys(self._groups, pairs, self._width)

    def attend(self, queries: mx.array, scale: float, mask: Any, **kwargs: Any) -> mx.array:
        """Attention of one token a row, [rows, Hq, 1, D], one call a group."""
        if mask is not None and not isinstance(mask, RaggedMask):
            raise NotRaggedError(f"the model made its own mask: {type(mask).__name__}")
        window = None if mask is None else mask.window
        outputs, row = [], 0
        for group, (keys, values) in zip(self._groups, self._pairs, strict=True):
            part = queries if len(group.ids) == queries.shape[0] else queries[row : row + len(group.ids)]
            allowed = group.make_mask(keys.shape[2], window)
            outputs.append(_attend(part, keys, values, scale, allowed, **kwargs))
            row += len(group.ids)
        if row < queries.shape[0]:  # dummy rows of a fixed decode width
            shape = (queries.shape[0] - row, *outputs[0].shape[1:])
            outputs.append(mx.zeros(shape, outputs[0].dtype))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


class RaggedCache:
    """One KV or WINDOW leaf of all rows, as the model sees it in a step.

    `offset` is an int32 array [rows]; `_offset` its largest value, which spares some models a device sync.
    """

    def __init__(self, leaf: int, window: int | None) -> None:
        self._leaf = leaf
        self._window = window
        self._groups: list[RowGroup] = []
        self._fetched: RaggedKeys | None = None
        self.offset: mx.array = mx.array([], dtype=mx.int32)
        self._offset = 0

    def begin_step(self, groups: list[RowGroup], offsets: mx.array, longest: int) -> None:
        """Start a step: every group has advanced, `offsets` are the new tokens' positions."""
        self._groups, self.offset, self._offset = groups, offsets, longest
        self._fetched = None

    def end_step(self) -> None:
        """Drop the step's views, so that buffers can be updated in place and go with their rows."""
        self._groups, self._fetched = [], None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RaggedKeys, RaggedKeys]:
        """Add one token [rows, H, 1, D] to every row."""
        if keys.shape[2] != 1:
            raise NotRaggedError("a ragged batch takes one token a row")
        pairs, row = [], 0
        for group in self._groups:
            count = len(group.ids)
            whole = count == keys.shape[0]
            k, v = (keys, values) if whole else (keys[row : row + count], values[row : row + count])
            pairs.append(group.buffers[self._leaf].append(k, v, group.get_width(self._window)))
            row += count
        self._fetched = RaggedKeys(self._groups, pairs, keys.shape[0])
        return self._fetched, self._fetched

    def keys_and_values(self) -> tuple[RaggedKeys, RaggedKeys]:
        """What this step fetched, for layers that share another layer's keys."""
        if self._fetched is None:
            raise NotRaggedError("keys were asked for before the step's update")
        return self._fetched, self._fetched

    @property
    def state(self) -> tuple[RaggedKeys, RaggedKeys]:
        return self.keys_and_values()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> RaggedMask:
        """The mask of one new token a row; `window_size` limits what it sees, as the leaf does."""
        if N != 1 or return_array:
            raise NotRaggedError("the model wants the mask as an array")
        return RaggedMask(window_size)


class GroupCache:
    """One KV or WINDOW leaf of one group with plain padded arrays: for models that look inside.

    Same members as RaggedCache, which stand for the libraries' batch caches.
    """

    def __init__(self, leaf: int, window: int | None) -> None:
        self._leaf = leaf
        self._window = window
        self._group: RowGroup | None = None
        self.offset: mx.array = mx.array([], dtype=mx.int32)
        self._offset = 0

    def begin_step(self, groups: list[RowGroup], offsets: mx.array, longest: int) -> None:
        (self._group,) = groups
        self.offset, self._offset = offsets, longest

    def end_step(self) -> None:
        """Nothing is held beyond the step."""
        self._group = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        assert self._group is not None
        return self._group.buffers[self._leaf].append(keys, values, self._group.get_width(self._window))

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._group is not None
        return self._group.buffers[self._leaf].view(self._group.get_width(self._window))

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self.keys_and_values()

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Bool [rows, 1, 1, width], or None where every row sees everything."""
        assert self._group is not None
        width = self._group.get_width(self._window)
        mask = self._group.make_mask(width, window_size)
        if mask is None and return_array:
            mask = mx.ones((len(self._group.ids), 1, 1, width), dtype=mx.bool_)
        return mask


def route_attention(model: nn.Module) -> int:
    """Route the seam in each module that defines a part of this model; returns how many have it.

    Idempotent. ModelLoadError if a module binds the name to something that is not the library's function.
    """
    modules = list(_find_modules(model))
    for module in modules:
        original = vars(module)[ATTENTION_FUNCTION]
        if not getattr(original, "routes_ragged_keys", False):
            if not callable(original):
                raise ModelLoadError(
                    f"{module.__name__}.{ATTENTION_FUNCTION} is not a function: untested mlx-lm or mlx-vlm"
                )
            setattr(module, ATTENTION_FUNCTION, _make_routed(original))
    return len(modules)


def _find_modules(model: nn.Module) -> Iterator[ModuleType]:
    names = {base.__module__ for m in model.modules() for base in type(m).__mro__}
    for name in sorted(names):
        if name.startswith(("mlx_lm.models.", "mlx_vlm.models.")) or ATTENTION_FUNCTION in vars(
            sys.modules[name]
        ):
            module = sys.modules[name]
            if ATTENTION_FUNCTION in vars(module):
                yield module


class _EngineForward:
    """How attention over plain arrays is computed now; the engine thread's alone."""

    def __init__(self) -> None:
        self.own = False
        self.every = 0
        self.seen = 0

    def after(self, out: mx.array) -> None:
        self.seen += 1
        if self.every and self.seen % self.every == 0:
            mx.async_eval(out)


_forward = _EngineForward()


@contextmanager
def use_engine_attention(calls_per_launch: int = 0) -> Iterator[None]:
    """What a model computes in this block is the engine's: it attends as model/ragged/cpu_attention.py does on a CPU.

    What it builds is launched at each `launched`th attention over plain arrays (0: at none), so that a device
    computes the first layers of a prompt while Python builds the later ones.
    """
    _forward.own, _forward.every, _forward.seen = True, calls_per_launch, 0
    try:
        yield
    finally:
        _forward.own, _forward.every = False, 0


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, **kwargs: Any
) -> mx.array:
    """The engine's own: on a CPU ours, where it knows all that is given, else the library's kernel."""
    if not kwargs and mx.default_device() == mx.cpu and queries.dtype in cpu_attention.FLOATS:
        return cpu_attention.compute_attention(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, **kwargs)


def _make_routed(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    names = tuple(inspect.signature(original).parameters)
    known = original.__module__ in _BASES  # a model's own function may do more than the kernel does

    def attend(queries: mx.array, keys: Any, *args: Any, **kwargs: Any) -> mx.array:
        ragged = isinstance(keys, RaggedKeys)
        if not ragged and not (known and _forward.own and isinstance(keys, mx.array)):
            return original(queries, keys, *args, **kwargs)
        given = dict(zip(names[2:], args, strict=False)) | kwargs
        extra = {name: value for name, value in given.items() if name not in _KNOWN and value is not None}
        if ragged:
            return keys.attend(queries, given["scale"], given.get("mask"), **extra)
        out = _attend(queries, keys, given["values"], given["scale"], given.get("mask"), **extra)
        _forward.after(out)
        return out

    attend.routes_ragged_keys = True  # type: ignore[attr-defined]
    return attend
