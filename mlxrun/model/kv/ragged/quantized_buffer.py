"""Keys and values in 8 or 4 bits, for rows of the decode batch, and the attention over them.

A row is prefilled in its model's own precision, and quantized when it joins a group of quantized rows. Each
token that it decodes is quantized before it is attended to, as in mlx-lm's QuantizedKVCache. Values are
quantized along the head size, each token by itself, so a row never depends on the others. Packed values are
moved unchanged, never quantized twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from mlxrun.model.kv.ragged.row_group import KVBuffer, RowKeysValues

GROUP_SIZES = (64, 32)  # values that share a scale: tried in this order where the config gives none


class KVQuantization(NamedTuple):
    """How rows are quantized. `bits`: of each value; `group_size`: values of a head that share a scale and a
    bias; `start`: a row is quantized once its cache has this many tokens."""

    bits: int
    group_size: int
    start: int = 0

    def quantize(self, array: mx.array) -> QuantizedArray:
        """An array [rows, H, tokens, D], packed along D."""
        return QuantizedArray(self, *mx.quantize(array, self.group_size, self.bits))


@dataclass(frozen=True, slots=True)
class QuantizedArray:
    """[rows, H, tokens, D] in packed form. It has the members that attention reads of an array."""

    form: KVQuantization
    packed: mx.array
    scales: mx.array
    biases: mx.array

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.packed, self.scales, self.biases

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 32 // self.form.bits)

    @property
    def dtype(self) -> mx.Dtype:
        return self.scales.dtype

    def astype(self, dtype: mx.Dtype) -> QuantizedArray:
        return replace(self, scales=self.scales.astype(dtype), biases=self.biases.astype(dtype))

    def multiply(self, vectors: mx.array, *, transpose: bool) -> mx.array:
        """`vectors` times this array, or its transpose."""
        bits, group_size, _ = self.form
        return mx.quantized_matmul(
            vectors, *self.parts, transpose=transpose, group_size=group_size, bits=bits
        )


class QuantizedRow(NamedTuple):
    """A row that moves between groups: keys and values of each part of the packed form."""

    parts: tuple[RowKeysValues, ...]


class QuantizedBuffer:
    """Keys and values of one layer for the rows of a group, with the members of KVBuffer. Each part of the
    packed form has its own KVBuffer."""

    window = None

    def __init__(self, form: KVQuantization) -> None:
        self._form = form
        self._parts = (KVBuffer(None), KVBuffer(None), KVBuffer(None))

    def append(self, keys: mx.array, values: mx.array, width: int) -> tuple[QuantizedArray, QuantizedArray]:
        """As KVBuffer.append. The new tokens are quantized."""
        for buffer, k, v in zip(self._parts, *self._quantize(keys, values), strict=True):
            buffer.append(k, v, width)
        return self.view(width)

    def view(self, width: int) -> tuple[QuantizedArray, QuantizedArray]:
        """The newest `width` tokens of all rows."""
        keys, values = zip(*(buffer.view(width) for buffer in self._parts), strict=True)
        return QuantizedArray(self._form, *keys), QuantizedArray(self._form, *values)

    def copy_row(self, index: int, width: int) -> QuantizedRow:
        """A copy of one row's newest `width` tokens, in packed form."""
        return QuantizedRow(tuple(buffer.copy_row(index, width) for buffer in self._parts))

    def add_rows(self, rows: Sequence[RowKeysValues | QuantizedRow], width: int, expected: int = 0) -> None:
        """As KVBuffer.add_rows. Rows that are not packed yet are quantized."""
        packed = [row if isinstance(row, QuantizedRow) else self._quantize_row(row) for row in rows]
        for part, buffer in enumerate(self._parts):
            buffer.add_rows([row.parts[part] for row in packed], width, expected)

    def remove_rows(self, moves: Mapping[int, int], rows: int) -> None:
        """As KVBuffer.remove_rows."""
        for buffer in self._parts:
            buffer.remove_rows(moves, rows)

    def trim(self, width: int) -> None:
        """Release memory if most rows have left."""
        for buffer in self._parts:
            buffer.trim(width)

    def _quantize(self, keys: mx.array, values: mx.array) -> tuple[tuple[mx.array, ...], ...]:
        return self._form.quantize(keys).parts, self._form.quantize(values).parts

    def _quantize_row(self, row: RowKeysValues) -> QuantizedRow:
        # The spare space too: it is zeros, and a lone row's arrays become the buffer without a copy.
        parts = zip(*self._quantize(row.keys, row.values), strict=True)
        return QuantizedRow(tuple(RowKeysValues(k, v, row.length) for k, v in parts))


def make_buffer(form: KVQuantization | None, window: int | None) -> KVBuffer | QuantizedBuffer:
    """The buffer of a layer. A window bounds its memory by itself, so its tokens are not quantized."""
    return KVBuffer(window) if form is None or window is not None else QuantizedBuffer(form)


def attend_quantized(
    queries: mx.array,
    keys: QuantizedArray,
    values: QuantizedArray,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of one token a row, [rows, Hq, 1, D] -> [rows, Hq, 1, Dv], over packed keys and values.

    `mask`: bool [rows, 1, 1, tokens]. `sinks` [Hq]: a logit of each head that belongs to no value. On a CPU
    it computes in float32, since quantized products are slow and coarse there in half precision.
    """
    if mx.default_device() == mx.cpu and queries.dtype != mx.float32:
        keys, values = keys.astype(mx.float32), values.astype(mx.float32)
        full = attend_quantized(queries.astype(mx.float32), keys, values, scale, mask, sinks)
        return full.astype(queries.dtype)
    rows, heads, length, size = queries.shape
    folded = (queries * scale).reshape(rows, keys.shape[1], -1, size)  # heads that share keys: one product
    logits = keys.multiply(folded, transpose=True)
    if mask is not None:
        logits = mx.where(mask, logits, mx.finfo(logits.dtype).min)
    if sinks is not None:
        own = sinks.astype(logits.dtype).reshape(1, logits.shape[1], -1, 1)
        logits = mx.concatenate([logits, mx.broadcast_to(own, (*logits.shape[:-1], 1))], axis=-1)
    weights = mx.softmax(logits, axis=-1, precise=True)[..., : keys.shape[2]]
    return values.multiply(weights, transpose=False).reshape(rows, heads, length, -1)
