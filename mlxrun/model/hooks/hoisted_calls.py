"""What a recurrent layer computes for all rows of a forward at once although it is called for some at a time.

Its layers of weights are called with all rows where that is possible: those that take the layer's inputs
(in-projections), and the one that gives its output (the out-projection). So a forward with drafts reads these
weights once. Both are found by the objects that pass: arrays are lazy, so a result that is made again from
all rows was never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxrun.model.hooks.draft_layout import DraftLayout, LayerCall


class _StandIn:
    """Stands in for a layer inside the one that is called several times."""

    def __init__(self, layer: nn.Module, calls: HoistedCalls) -> None:
        self._layer, self._calls = layer, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._calls.call(self._layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class HoistedCalls:
    """The calls of the layers inside `module` while that is called by a layout."""

    def __init__(self, module: nn.Module, layout: DraftLayout) -> None:
        self._module, self._layout = module, layout
        self._layers = {name: x for name, x in module.children().items() if isinstance(x, nn.Module)}
        self._rows = next((m.adapters.rows for m in module.modules() if "adapters" in m), None)
        self._numbers = () if self._rows is None else self._rows.numbers  # of the adapters of all rows
        self._whole: dict[int, tuple[mx.array, mx.array]] = {}  # by id: an array of a call, and of all rows
        self._found: dict[tuple[int, ...], Any] = {}  # what layers gave for all rows
        self._made: dict[int, tuple[mx.array, nn.Module, mx.array]] = {}  # by id: result, its layer and input

    @contextmanager
    def begin_call(self, call: LayerCall) -> Iterator[None]:
        """In this block the module is called for these rows, and calls its layers through this object."""
        self._call = call
        for name, layer in self._layers.items():
            dict.__setitem__(self._module, name, _StandIn(layer, self))
        try:
            with self._use_adapters([self._numbers[row] for row in call.firsts] if self._numbers else ()):
                yield
        finally:
            for name, layer in self._layers.items():
                dict.__setitem__(self._module, name, layer)

    def take(self, array: mx.array) -> mx.array:
        """The rows of this call of an array of all rows."""
        part = self._call.take(array)
        self._whole[id(part)] = part, array
        return part

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's result for the rows of this call."""
        known = [self._whole.get(id(arg)) for arg in args]
        if args and not kwargs and all(known):
            arrays = [pair[1] for pair in known if pair is not None]
            key = (id(layer), *map(id, arrays))
            if key not in self._found:
                with self._use_adapters(self._numbers):
                    self._found[key] = layer(*arrays)
            found = self._found[key]
            if isinstance(found, mx.array) and found.shape[:2] == (self._layout.total, 1):
                return self.take(found)
        result = layer(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(result, mx.array):
            self._made[id(result)] = result, layer, args[0]
        return result

    def join(self, outputs: Sequence[Any]) -> Any:
        """What the module gave in all calls, for all rows in their order."""
        joined = outputs[0] if outputs[0] is None else tree_map(self._join_arrays, outputs[0], *outputs[1:])
        self.forget()
        return joined

    def forget(self) -> None:
        """Drop what the calls made so far, but for results of all rows, which later calls may use."""
        self._whole.clear()
        self._made.clear()

    def _join_arrays(self, *parts: Any) -> Any:
        if not isinstance(parts[0], mx.array):
            return parts[0]
        made = [self._made.get(id(part)) for part in parts]
        layers = {id(each[1]): each[1] for each in made if each is not None}
        if all(made) and len(layers) == 1:
            (layer,) = layers.values()
            with self._use_adapters(self._numbers):
                return layer(self._gather([each[2] for each in made if each is not None]))
        return self._gather(parts)

    def _gather(self, parts: Sequence[mx.array]) -> mx.array:
        pairs = zip(self._layout.calls, parts, strict=True)
        return self._layout.results.take(mx.concatenate([call.flatten(part) for call, part in pairs], axis=0))

    def _use_adapters(self, numbers: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext() if self._rows is None else self._rows.use(numbers)
