"""Arrays of one row as few arrays with memory of their own: equal shapes one after the other, in one each.

Everything here is lazy, and what comes out shares no memory with what went in once it is evaluated. Keys and
values may be stored in 8 or 4 bits (`Quantiser`); what is not a function of a span of tokens is kept exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlxrun.errors import ConfigError

Stack = tuple[mx.array, ...]  # one array, or three: quantised values, scales, biases
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class ArrayLayout(NamedTuple):
    """What is known of an array [1, ...] of a row. `window`: tokens, on its axis 2, that it has at most; 0:
    as many as there are; None: its shape is always the same."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    window: int | None

    @staticmethod
    def from_array(array: mx.array, window: int | None) -> ArrayLayout:
        return ArrayLayout(tuple(array.shape), array.dtype, window)

    def get_shape(self, tokens: int) -> tuple[int, ...]:
        """Its shape when the row has so many tokens."""
        if self.window is None:
            return self.shape
        return (*self.shape[:2], min(tokens, self.window or tokens), *self.shape[3:])

    @property
    def stack_key(self) -> tuple[tuple[int, ...], mx.Dtype, int | None]:
        """Planes that agree in this are of equal shape at any length."""
        return self.get_shape(1), self.dtype, self.window

    def __str__(self) -> str:
        sizes = "x".join(str(n) for n in self.get_shape(1))
        return f"{sizes} {self.dtype} window {self.window}"


class StackPacker:
    """How arrays like `planes` are packed; `bits`: of each value, None for exact."""

    def __init__(self, layouts: Sequence[ArrayLayout], bits: int | None = None) -> None:
        self.planes = tuple(layouts)
        groups: dict[tuple[tuple[int, ...], mx.Dtype, int | None], list[int]] = {}
        for index, plane in enumerate(self.planes):
            if not plane.shape or plane.shape[0] != 1:
                raise ValueError(f"an array of shape {plane.shape} is not of one row")
            groups.setdefault(plane.stack_key, []).append(index)
        self.groups = tuple(groups.values())
        firsts = [self.planes[members[0]] for members in self.groups]
        self._quantisers = [None if bits is None else Quantiser.for_layout(plane, bits) for plane in firsts]

    def pack(self, arrays: Sequence[mx.array], tokens: int) -> tuple[Stack, ...]:
        """The arrays as stacks. ValueError if they are not what a row of so many tokens has."""
        for array, plane in zip(arrays, self.planes, strict=True):
            if tuple(array.shape) != plane.get_shape(tokens) or array.dtype != plane.dtype:
                wanted = f"{plane.get_shape(tokens)} {plane.dtype}"
                raise ValueError(f"{tuple(array.shape)} {array.dtype} where {wanted} should be")
        packed = []
        for members, quantiser in zip(self.groups, self._quantisers, strict=True):
            stack = copy_stacked([arrays[i] for i in members])
            packed.append((stack,) if quantiser is None else quantiser.quantise(stack))
        return tuple(packed)

    def unpack(self, stacks: Sequence[Stack]) -> list[mx.array]:
        """New array objects in the order of `planes`, that share the stacks' memory if it is exact."""
        return self.unstack(self.dequantise(stacks))

    def dequantise(self, stacks: Sequence[Stack]) -> list[mx.array]:
        """Each stack as one array [planes, ...] of the row's own type."""
        return [
            stack[0] if quantiser is None else quantiser.dequantise(stack)
            for quantiser, stack in zip(self._quantisers, stacks, strict=True)
        ]

    def unstack(self, wholes: Sequence[mx.array]) -> list[mx.array]:
        """New array objects [1, ...] in the order of `planes`, that share memory with `wholes`."""
        found: dict[int, mx.array] = {}
        for members, whole in zip(self.groups, wholes, strict=True):
            found |= {index: whole[place : place + 1] for place, index in enumerate(members)}
        return [found[i] for i in range(len(self.planes))]

    def fits(self, stacks: Sequence[Stack], tokens: int) -> bool:
        """Whether these are stacks of a row of exactly so many tokens."""
        return len(stacks) == len(self.groups) and all(
            [(tuple(a.shape), a.dtype) for a in stack] == expected
            for stack, expected in zip(stacks, self._list_expected(tokens), strict=True)
        )

    def count_bytes(self, tokens: int) -> int:
        """Bytes of the stacks of a row of so many tokens."""
        return sum(
            math.prod(shape) * dtype.size for stack in self._list_expected(tokens) for shape, dtype in stack
        )

    def _list_expected(self, tokens: int) -> list[list[tuple[tuple[int, ...], mx.Dtype]]]:
        expected = []
        for members, quantiser in zip(self.groups, self._quantisers, strict=True):
            plane = self.planes[members[0]]
            shape = (len(members), *plane.get_shape(tokens)[1:])
            expected.append([(shape, plane.dtype)] if quantiser is None else quantiser.list_shapes(shape))
        return expected


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Stores [planes, H, n, D] in groups of `group` values of D, or of H * D where D alone is too small."""

    bits: int
    group: int
    heads: int
    size: int
    joined: bool
    dtype: mx.Dtype

    @staticmethod
    def for_layout(plane: ArrayLayout, bits: int) -> Quantiser:
        """ConfigError if the model's dimensions allow none."""
        _, heads, _, size = plane.shape
        if plane.dtype in _FLOATS and size > 0:
            for joined, last in ((False, size), (True, heads * size)):
                group = next((g for g in (64, 32) if last % g == 0), None)
                if group is not None:
                    return Quantiser(bits, group, heads, size, joined, plane.dtype)
        raise ConfigError(
            f"cache.stored_bits: {bits} is not possible for this model: its keys or values, "
            f"{heads} x {size} {plane.dtype}, do not divide into groups of 32"
        )

    def quantise(self, stack: mx.array) -> Stack:
        if self.joined:
            stack = stack.transpose(0, 2, 1, 3).flatten(2)
        return tuple(mx.quantize(stack, group_size=self.group, bits=self.bits))

    def dequantise(self, stack: Stack) -> mx.array:
        values, scales, biases = stack
        whole = mx.dequantize(values, scales, biases, group_size=self.group, bits=self.bits)
        if self.joined:
            whole = mx.unflatten(whole, 2, (self.heads, self.size)).transpose(0, 2, 1, 3)
        return whole.astype(self.dtype)

    def list_shapes(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """What `quantise` makes of a stack of this shape."""
        planes, _, tokens, _ = shape
        lead = (planes, tokens) if self.joined else (planes, self.heads, tokens)
        last = self.heads * self.size if self.joined else self.size
        groups = ((*lead, last // self.group), self.dtype)
        return [((*lead, last * self.bits // 32), mx.uint32), groups, groups]


def copy_stacked(arrays: Sequence[mx.array]) -> mx.array:
    """Arrays one after the other along the first axis, in new memory: a copy even of a single one."""
    if len(arrays) > 1:
        return mx.concatenate(list(arrays), axis=0)
    # Concatenating one array gives it back, and a contiguous view stays a view; gathering never does.
    return mx.take(arrays[0], mx.arange(arrays[0].shape[0]), axis=0)
