"""A model whose parameters are read as float32: its own code then computes without the rounding of halves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.derived_layers import forget_view
from mlxrun.model.hooks.quantized_layers import list_modules

_SHORT_FLOATS = (mx.float16, mx.bfloat16)
LARGE = 1 << 20  # bytes of a parameter for which it is worth to wait


@contextmanager
def read_in_float32(model: nn.Module) -> Iterator[None]:
    """Within the block, each half-precision parameter is float32 wherever a module reads it.

    Nothing is stored: a parameter is converted at each use and freed behind it. A layer with a large one is
    evaluated before the next begins, so that the most memory is that of the largest one. Packed weights stay
    packed; their scales are converted.
    """
    changed: list[tuple[Any, Any]] = [(module, type(module)) for module in list_modules(model)]
    for module, kind in changed:
        module.__class__ = _derive_class(kind)
    try:
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


@functools.cache
def _derive_class(kind: Any) -> Any:
    """A class of the same name and module, since libraries tell modules apart by them."""

    def get(self: Any, key: str, default: Any = None) -> Any:
        return widen(dict.get(self, key, default))

    def __getitem__(self: Any, key: str) -> Any:
        return widen(dict.__getitem__(self, key))

    members: dict[str, Any] = {"__module__": kind.__module__, "get": get, "__getitem__": __getitem__}
    for name in ("__call__", "as_linear"):
        if hasattr(kind, name):
            members[name] = _make_waiting(getattr(kind, name))
    return type(kind.__name__, (kind,), members)


def _make_waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which evaluates its result if the module has a large parameter of its own."""

    def call_and_wait(self: Any, *given: Any, **more: Any) -> Any:
        result = call(self, *given, **more)
        if any(isinstance(value, mx.array) and value.nbytes >= LARGE for value in self.values()):
            mx.eval(result)
            forget_view(self)
        return result

    return call_and_wait


def widen(value: Any) -> Any:
    """The array in float32, if it is of half precision; anything else as it is."""
    is_short = isinstance(value, mx.array) and value.dtype in _SHORT_FLOATS
    return value.astype(mx.float32) if is_short else value
