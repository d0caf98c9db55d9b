"""Packs the arrays of one row into few arrays with their own memory: arrays of equal shape are stacked.

Packing is lazy. Evaluated packed arrays share no memory with the row. Keys and values may be stored in 8 or 4
bits (`Quantizer`); recurrent states and windows are stored exactly.

Caches of other classes are copied through `state` and `from_state`, as the libraries promise. A class may
leave something out of its state, so `can_round_trip` tries a filled cache first. A state is a tree of arrays
and plain values. The tree is stored as JSON, with the arrays beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxrun.core.errors import ConfigError
from mlxrun.core.step_plan import SerializedTensor

Stack = tuple[mx.array, ...]  # one array, or three: quantized values, scales, biases
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# name in safetensors: dtype here, and the numpy dtype that has as many bytes (numpy has no bfloat16)
_DTYPES: dict[str, tuple[mx.Dtype, str]] = {
    "BOOL": (mx.bool_, "|b1"),
    "U8": (mx.uint8, "|u1"),
    "I8": (mx.int8, "|i1"),
    "U16": (mx.uint16, "<u2"),
    "I16": (mx.int16, "<i2"),
    "U32": (mx.uint32, "<u4"),
    "I32": (mx.int32, "<i4"),
    "U64": (mx.uint64, "<u8"),
    "I64": (mx.int64, "<i8"),
    "F16": (mx.float16, "<f2"),
    "BF16": (mx.bfloat16, "<u2"),
    "F32": (mx.float32, "<f4"),
}
_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}


class ArrayLayout(NamedTuple):
    """Shape and type of an array [1, ...] of a row. `window`: the most tokens on its axis 2; 0: as many as
    the row has; None: the shape never changes."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    window: int | None

    def get_shape(self, tokens: int) -> tuple[int, ...]:
        """The shape when the row has this many tokens."""
        if self.window is None:
            return self.shape
        return (*self.shape[:2], min(tokens, self.window or tokens), *self.shape[3:])

    def __str__(self) -> str:
        sizes = "x".join(str(n) for n in self.get_shape(1))
        return f"{sizes} {self.dtype} window {self.window}"


class StackPacker:
    """Stacks arrays: those of equal layout share a stack. `bits`: of each value, None for exact."""

    def __init__(self, layouts: Sequence[ArrayLayout], bits: int | None = None) -> None:
        self.layouts = tuple(layouts)
        groups: dict[ArrayLayout, list[int]] = {}
        for index, layout in enumerate(self.layouts):
            if not layout.shape or layout.shape[0] != 1:
                raise ValueError(f"an array of shape {layout.shape} is not of one row")
            groups.setdefault(layout._replace(shape=layout.get_shape(1)), []).append(index)
        self.groups = tuple(groups.values())
        firsts = [self.layouts[members[0]] for members in self.groups]
        self._quantizers = [None if bits is None else Quantizer.for_layout(first, bits) for first in firsts]

    def pack(self, arrays: Sequence[mx.array], tokens: int) -> tuple[Stack, ...]:
        """The arrays as stacks. ValueError if a row of `tokens` tokens has other shapes or types."""
        for array, layout in zip(arrays, self.layouts, strict=True):
            expected = (layout.get_shape(tokens), layout.dtype)
            if (tuple(array.shape), array.dtype) != expected:
                raise ValueError(f"{tuple(array.shape)} {array.dtype} where {expected} should be")
        packed = []
        for members, quantizer in zip(self.groups, self._quantizers, strict=True):
            stack = copy_stacked([arrays[i] for i in members])
            packed.append((stack,) if quantizer is None else quantizer.quantize(stack))
        return tuple(packed)

    def dequantize(self, stacks: Sequence[Stack]) -> list[mx.array]:
        """Each stack as one array [layouts, ...] of the row's own type."""
        return [
            stack[0] if quantizer is None else quantizer.dequantize(stack)
            for quantizer, stack in zip(self._quantizers, stacks, strict=True)
        ]

    def unstack(self, stacks: Sequence[mx.array]) -> list[mx.array]:
        """New array objects [1, ...] in the order of `layouts`. They share memory with `stacks`."""
        found: dict[int, mx.array] = {}
        for members, stack in zip(self.groups, stacks, strict=True):
            found |= {index: stack[i : i + 1] for i, index in enumerate(members)}
        return [found[i] for i in range(len(self.layouts))]

    def fits(self, stacks: Sequence[Stack], tokens: int) -> bool:
        """Whether these are stacks of a row of exactly this many tokens."""
        found = [[(tuple(a.shape), a.dtype) for a in stack] for stack in stacks]
        return found == self._list_expected(tokens)

    def count_bytes(self, tokens: int) -> int:
        """Bytes of the stacks of a row of this many tokens."""
        arrays = [array for stack in self._list_expected(tokens) for array in stack]
        return sum(math.prod(shape) * dtype.size for shape, dtype in arrays)

    def _list_expected(self, tokens: int) -> list[list[tuple[tuple[int, ...], mx.Dtype]]]:
        expected = []
        for members, quantizer in zip(self.groups, self._quantizers, strict=True):
            layout = self.layouts[members[0]]
            shape = (len(members), *layout.get_shape(tokens)[1:])
            expected.append([(shape, layout.dtype)] if quantizer is None else quantizer.list_shapes(shape))
        return expected


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Stores [layouts, H, n, D] in groups of `group` values of D, or of H * D if D is too small."""

    bits: int
    group: int
    heads: int
    size: int
    joined: bool
    dtype: mx.Dtype

    @staticmethod
    def for_layout(layout: ArrayLayout, bits: int) -> Quantizer:
        """The quantizer of arrays of a layout. ConfigError if the dimensions allow none."""
        _, heads, _, size = layout.shape
        if layout.dtype in _FLOATS and size > 0:
            for joined, last in ((False, size), (True, heads * size)):
                group = next((g for g in (64, 32) if last % g == 0), None)
                if group is not None:
                    return Quantizer(bits, group, heads, size, joined, layout.dtype)
        raise ConfigError(
            f"cache.stored_bits: {bits} is not possible for this model: its keys or values, "
            f"{heads} x {size} {layout.dtype}, do not divide into groups of 32"
        )

    def quantize(self, stack: mx.array) -> Stack:
        if self.joined:
            stack = stack.transpose(0, 2, 1, 3).flatten(2)
        return tuple(mx.quantize(stack, group_size=self.group, bits=self.bits))

    def dequantize(self, stack: Stack) -> mx.array:
        values, scales, biases = stack
        exact = mx.dequantize(values, scales, biases, group_size=self.group, bits=self.bits)
        if self.joined:
            exact = mx.unflatten(exact, 2, (self.heads, self.size)).transpose(0, 2, 1, 3)
        return exact.astype(self.dtype)

    def list_shapes(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """The shapes and types that `quantize` makes of a stack of this shape."""
        count, _, tokens, _ = shape
        lead = (count, tokens) if self.joined else (count, self.heads, tokens)
        last = self.heads * self.size if self.joined else self.size
        groups = ((*lead, last // self.group), self.dtype)
        return [((*lead, last * self.bits // 32), mx.uint32), groups, groups]


def copy_stacked(arrays: Sequence[mx.array]) -> mx.array:
    """The arrays concatenated along the first axis, in new memory even for a single array."""
    if len(arrays) > 1:
        return mx.concatenate(list(arrays), axis=0)
    # Concatenating one array returns that array, and `contiguous` may return a view; `take` always copies.
    return mx.take(arrays[0], mx.arange(arrays[0].shape[0]), axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class LibraryCacheState:
    """The state of one cache. `tree`: JSON that says where each array belongs."""

    tree: str
    arrays: tuple[mx.array, ...]


def capture_state(cache: Any) -> LibraryCacheState:
    """A copy of a cache's state. ValueError if it contains something that cannot be stored."""
    arrays: list[mx.array] = []
    meta = [cache.meta_state] if hasattr(type(cache), "meta_state") else []
    tree = _encode_tree([cache.state, *meta], arrays)
    copies = [copy_stacked([a]) if a.ndim else copy_stacked([a[None]])[0] for a in arrays]
    return LibraryCacheState(json.dumps(tree), tuple(copies))


def restore_cache(template: Any, state: LibraryCacheState) -> Any:
    """A cache of the class of `template`. ValueError if `state` is not of that class."""
    try:
        return type(template).from_state(*_decode_tree(json.loads(state.tree), state.arrays))
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"not the state of a {type(template).__name__}: {error}") from error


def can_round_trip(cache: Any) -> bool:
    """Whether a filled cache is restored unchanged, with all its attributes."""
    try:
        state = capture_state(cache)
        restored = restore_cache(cache, state)
        again = capture_state(restored)
        same = vars(restored).keys() == vars(cache).keys() and again.tree == state.tree
    except (ValueError, NotImplementedError, TypeError, AttributeError):
        return False
    return same and all(
        mx.array_equal(a, b, equal_nan=True).item() for a, b in zip(again.arrays, state.arrays, strict=True)
    )


def has_same_layout(state: LibraryCacheState, template: LibraryCacheState) -> bool:
    """Whether both may be states of one cache: as many arrays, of the same types, each of one row."""
    return len(state.arrays) == len(template.arrays) and all(
        a.dtype == b.dtype and a.ndim == b.ndim and a.shape[:1] == b.shape[:1]
        for a, b in zip(state.arrays, template.arrays, strict=True)
    )


def _encode_tree(node: Any, arrays: list[mx.array]) -> Any:
    if isinstance(node, mx.array):
        arrays.append(node)
        return {"array": len(arrays) - 1}
    if isinstance(node, (list, tuple)):
        return {type(node).__name__: [_encode_tree(item, arrays) for item in node]}
    if isinstance(node, dict) and all(isinstance(key, str) for key in node):
        return {"dict": {key: _encode_tree(item, arrays) for key, item in node.items()}}
    if node is None or isinstance(node, (bool, int, float, str)):
        return {"value": node}
    raise ValueError(f"a cache that holds a {type(node).__name__} cannot be stored")


def _decode_tree(node: Any, arrays: Sequence[mx.array]) -> Any:
    ((kind, inside),) = node.items()
    if kind == "array":
        return arrays[inside][...]  # an object of its own: a cache writes into its arrays by item assignment
    if kind == "dict":
        return {key: _decode_tree(item, arrays) for key, item in inside.items()}
    if kind == "value":
        return inside
    items = [_decode_tree(item, arrays) for item in inside]
    return tuple(items) if kind == "tuple" else items


def serialize_array(array: mx.array) -> SerializedTensor:
    """The array's bytes, which may leave the engine thread. Waits for the array. ValueError if safetensors
    has no name for its dtype."""
    if array.dtype not in _NAMES:
        raise ValueError(f"arrays of {array.dtype} cannot be stored")
    raw = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return SerializedTensor(_NAMES[array.dtype], tuple(array.shape), np.asarray(raw).tobytes())


def deserialize_array(tensor: SerializedTensor) -> mx.array:
    """The array, in its own memory. ValueError unless the bytes are exactly those that dtype and shape
    need."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {tensor.dtype!r}")
    dtype, raw = _DTYPES[tensor.dtype]
    if any(n < 0 for n in tensor.shape):
        raise ValueError(f"impossible shape {tensor.shape}")
    size = math.prod(tensor.shape) * np.dtype(raw).itemsize
    if len(tensor.data) != size:
        raise ValueError(f"{len(tensor.data)} bytes where {tensor.shape} of {tensor.dtype} has {size}")
    array = mx.array(np.frombuffer(tensor.data, raw).reshape(tensor.shape))
    return array.view(dtype) if array.dtype != dtype else array
