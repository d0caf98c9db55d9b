"""The memory that a forward takes, by its graph alone: shapes are known before anything is computed.

MLX exports the operations of a function, with all shapes. A walk over them allocates each result, and frees
what nobody reads any more, as MLX does when it computes.
"""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

# Results of these are views of their input. Reshaping copies an array that was transposed.
_RESHAPES = ("Reshape", "Flatten", "Unflatten")
_VIEWS = {
    *("Broadcast", "BroadcastAxes", "Transpose", "Slice", "Split", "ExpandDims", "Squeeze", "AsStrided"),
    *("StopGradient", "View", "Copy", "Depends", *_RESHAPES),
}
# The result of any other operation may take the memory of an input that ends with it.
_NEVER_IN_PLACE = (
    *("Matmul", "MM", "Gather", "Concatenate", "Convolution", "Dequantize", "Sort", "Partition", "Reduce"),
)
# MLX launches operations before earlier ones are computed, and an array is freed once its last reader is. Of
# those launched since the last wait, so large a share is computed, and all but so many. Measured on a CPU.
COMPUTED_SHARE = 0.6
MOST_AHEAD = 50
WAITS = "Depends"  # the operation that stands for a wait until all earlier ones are computed

_Array = tuple[str, tuple[int, ...], mx.Dtype]  # name, shape, type


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """An operation of a graph, and what it reads and makes."""

    kind: str
    inputs: Sequence[_Array]
    outputs: Sequence[_Array]


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """The operations of a function in order, and the names of its results."""

    operations: Sequence[TracedOperation]
    results: frozenset[str]


@dataclass(frozen=True, slots=True)
class TracedBytes:
    """`peak`: the most bytes of a function's arrays together, without those that it is given; `results`: the
    bytes of its results, which are a part of the peak."""

    peak: int
    results: int


def trace_function(function: Callable[..., Any], arrays: Mapping[str, mx.array]) -> TracedFunction:
    """Trace a function of these arrays, by name. Nothing is computed, and no array is read. ValueError if the
    function needs a value."""
    operations: list[TracedOperation] = []
    results: set[str] = set()

    def record(part: dict[str, Any]) -> None:
        if part["type"] == "outputs":
            results.update(name for name, *_ in part["outputs"])
        elif part["type"] == "primitive":
            operations.append(TracedOperation(part["name"], part["inputs"], part["outputs"]))

    with _make_exportable():
        mx.export_function(record, function, **arrays)
    return TracedFunction(operations, frozenset(results))


@contextmanager
def _make_exportable() -> Iterator[None]:
    """Within the block, functions have no operations that MLX cannot export: fused ones, and `contiguous`,
    in whose place another one copies. Nothing is evaluated, as towers of images do between their layers."""
    replaced = {name: getattr(mx, name) for name in ("contiguous", "eval", "async_eval")}
    mx.contiguous = lambda array, *_, **__: array * 1
    mx.eval = mx.async_eval = lambda *_: None
    mx.disable_compile()
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(mx, name, function)
        if "MLX_DISABLE_COMPILE" not in os.environ:
            mx.enable_compile()


def measure_traced(traced: TracedFunction) -> TracedBytes:
    """Walk over the operations, and count what is in memory."""
    walk = _Walk(traced)
    for operation in traced.operations:
        walk.run(operation)
    kept = {walk.places[name] for name in traced.results if name in walk.places}
    return TracedBytes(walk.peak, sum(walk.sizes[place] for place in kept))


@dataclass(slots=True)
class _Walk:
    """`places`: the array in whose memory each array is; `sizes`: bytes of these; `readers`: operations that
    have still to read each of them, or results that keep it."""

    traced: TracedFunction
    places: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    readers: Counter[str] = field(default_factory=Counter)
    launched: int = 0
    waited: int = 0
    live: int = 0
    peak: int = 0
    _read: set[str] = field(default_factory=set)  # by an earlier operation, which may not be computed yet
    _ending: deque[tuple[int, int]] = field(default_factory=deque)  # which operation reads last, bytes

    def __post_init__(self) -> None:
        turned: set[str] = set()
        for operation in self.traced.operations:
            self._place(operation, turned)
            self.readers.update(self._list_places(operation))
        self.readers.update(self.places[name] for name in self.traced.results if name in self.places)

    def _place(self, operation: TracedOperation, turned: set[str]) -> None:
        """Decide whose memory the results have. `turned`: arrays that are not contiguous."""
        source = operation.inputs[0][0] if operation.kind in _VIEWS and operation.inputs else None
        is_copied = operation.kind in _RESHAPES and source in turned
        for name, shape, dtype in operation.outputs:
            if source is None or is_copied:
                self.places[name] = name
                self.sizes[name] = math.prod(shape) * dtype.size
            elif source in self.places:  # else a view of what the function was given
                self.places[name] = self.places[source]
            if operation.kind == "Transpose" or (source in turned and not is_copied):
                turned.add(name)

    def _list_places(self, operation: TracedOperation) -> list[str]:
        return [self.places[name] for name, *_ in operation.inputs if name in self.places]

    def run(self, operation: TracedOperation) -> None:
        """Allocate the results, and free what ends."""
        made = [name for name, *_ in operation.outputs if self.places.get(name) == name]
        self.launched += bool(made)
        if operation.kind == WAITS:
            self.waited = self.launched
        since = self.launched - self.waited
        computed = self.waited + max(int(since * COMPUTED_SHARE), since - MOST_AHEAD)
        while self._ending and self._ending[0][0] <= computed:
            self.live -= self._ending.popleft()[1]
        read = self._list_places(operation)
        self.readers.subtract(read)
        ended = [place for place in dict.fromkeys(read) if self.readers[place] == 0]
        for name in made:
            taken = self._find_memory(operation, name, ended)
            if taken is None:
                self.live += self.sizes[name]
            else:
                ended.remove(taken)
        self.peak = max(self.peak, self.live)
        self._read.update(read)
        ended += [name for name in made if self.readers[name] == 0]
        self._ending.extend((self.launched, self.sizes[place]) for place in ended)

    def _find_memory(self, operation: TracedOperation, name: str, ended: Sequence[str]) -> str | None:
        """An array that ends with this operation, and whose memory the result can take."""
        if any(kind in operation.kind for kind in _NEVER_IN_PLACE):
            return None
        return next((p for p in ended if self.sizes[p] == self.sizes[name] and p not in self._read), None)
