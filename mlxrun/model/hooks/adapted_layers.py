"""Layers that add to each row what its LoRA adapter adds, in one forward for all rows.

An adapter adds `scale * (x @ A) @ B` to the output of a layer (LoRA, arXiv:2106.09685), and may then scale
each output (DoRA, arXiv:2402.09353). Rows without an adapter keep the base layer's result bit for bit. If all
rows use one adapter, two products compute it. Otherwise one product gathers each row's matrices, so that no
row's result depends on the others. Expert layers see tokens in an order of their own, so the module around
them is computed once for each adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.derived_layers import mix_in
from mlxrun.model.hooks.quantized_layers import dequantize_weight

ABSENT = -1  # in place of a slot: the adapter does not change this layer
BASE = 0  # the number of the base model, for rows without an adapter


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one adapter adds to one layer. `b` includes the scale.

    Linear layer: `a` [D, r], `b` [r, N]. Embedding: `a` [V, r], `b` [r, D]. Experts: `a` [E, r, D], `b` [E,
    N, r]. `m`: DoRA's magnitudes of the outputs [N], or of the tokens [V]; None: LoRA.
    """

    a: mx.array
    b: mx.array
    m: mx.array | None = None


@dataclass(frozen=True, slots=True)
class _Places:
    """`slots`: the place in the stack by the number of the adapter. `scaled`: whether DoRA, by place."""

    slots: tuple[int, ...]
    scaled: tuple[bool, ...]


class LayerAdapters(nn.Module):
    """The adapters of one layer: stacked matrices of equal rank. `magnitude` [adapters, N]: factors of the
    adapted layer's outputs, if an adapter is a DoRA."""

    def __init__(self, rows: RowAdapters, weights: Sequence[LayerWeights | None], base: Any) -> None:
        super().__init__()
        own = [each for each in weights if each is not None]
        taken = iter(range(len(own)))
        slots = tuple(ABSENT if each is None else next(taken) for each in weights)
        self.rows = rows
        self.places = _Places((ABSENT, *slots), tuple(each.m is not None for each in own))
        rank = max(each.a.shape[1] for each in own)
        self.lora_a = mx.stack([_widen(each.a, 1, rank) for each in own])
        self.lora_b = mx.stack([_widen(each.b, 2 if each.b.ndim == 3 else 0, rank) for each in own])
        if any(self.places.scaled):
            self.magnitude = mx.stack([_compute_magnitude(each, base) for each in own])

    def _list_slots(self) -> list[int]:
        return [self.places.slots[row] for row in self.rows.numbers]

    def _find_slot(self) -> int | None:
        """The place of the adapter that all rows use, ABSENT for none; None if rows are computed each with
        its own."""
        slots = set(self._list_slots())
        if slots <= {ABSENT}:
            return ABSENT
        return slots.pop() if len(slots) == 1 and not self.rows.row_by_row else None

    def adapt_linear(self, x: mx.array, y: mx.array, bias: mx.array | None) -> mx.array:
        """y [..., N] = base(x) with the rows' adapters added, for x [..., D]. The first axis has the rows."""
        return self._adapt(x, y, bias, "lora_a", "lora_b")

    def adapt_head(self, x: mx.array, y: mx.array) -> mx.array:
        """The products y [..., V] of an embedding that serves as output layer, with the rows' adapters
        added."""
        return self._adapt(x, y, None, "lora_b", "lora_a", turned=True)

    def _adapt(
        self, x: mx.array, y: mx.array, bias: mx.array | None, *names: str, turned: bool = False
    ) -> mx.array:
        """`names`: of the two stacks by which x is multiplied. `turned`: by their transposes."""
        slot = self._find_slot()
        if slot == ABSENT:
            return y
        first, second = (self[name].swapaxes(-1, -2) if turned else self[name] for name in names)
        if slot is not None:
            z = ((x @ first[slot]) @ second[slot]).astype(x.dtype)
            return _scale(y, z, bias, self.magnitude[slot]) if self.places.scaled[slot] else y + z
        index = self._make_index()
        z = mx.gather_mm(_split_rows(x, index), first, rhs_indices=index)
        z = mx.gather_mm(z, second, rhs_indices=index).astype(x.dtype)
        split = _split_rows(y, index)
        joined = split + z
        if any(self.places.scaled):
            scaled = _scale(split, z, bias, self.magnitude[index][:, None])
            joined = mx.where(self._mark_scaled(), scaled, joined)
        return self._select(y, joined)

    def adapt_lookup(self, ids: mx.array, y: mx.array) -> mx.array:
        """The embeddings y [..., D] of `ids` [...] with the rows' adapters added."""
        slot = self._find_slot()
        if slot == ABSENT:
            return y
        if slot is not None:
            z = (self.lora_a[slot][ids] @ self.lora_b[slot]).astype(y.dtype)
            return (y + z) * self.magnitude[slot][ids][..., None] if self.places.scaled[slot] else y + z
        index = self._make_index()
        own = ids.reshape(index.size, -1)
        z = mx.gather_mm(self.lora_a[index[:, None], own], self.lora_b, rhs_indices=index).astype(y.dtype)
        split = _split_rows(y, index)
        plain = split + z
        if any(self.places.scaled):
            scaled = plain * self.magnitude[index[:, None], own][..., None]
            plain = mx.where(self._mark_scaled(), scaled, plain)
        return self._select(y, plain)

    def adapt_experts(self, x: mx.array, y: mx.array, indices: mx.array, is_sorted: bool) -> mx.array:
        """y = base(x) of the experts `indices`, with the adapter added. All rows must use one adapter."""
        slots = set(self._list_slots())
        if slots <= {ABSENT}:
            return y
        (slot,) = slots
        chosen = {"rhs_indices": indices, "sorted_indices": is_sorted}
        z = mx.gather_mm(x, self.lora_a[slot].swapaxes(-1, -2), **chosen)
        z = mx.gather_mm(z, self.lora_b[slot].swapaxes(-1, -2), **chosen)
        return y + z.astype(x.dtype)

    def _select(self, y: mx.array, joined: mx.array) -> mx.array:
        """The rows of `joined` [rows, n, N] that have an adapter here, and those of `y` that have none."""
        adapted = self.rows.make_array([slot != ABSENT for slot in self._list_slots()])
        return mx.where(adapted[:, None, None], joined, y.reshape(joined.shape)).reshape(y.shape)

    def _make_index(self) -> mx.array:
        return self.rows.make_array([max(slot, 0) for slot in self._list_slots()])

    def _mark_scaled(self) -> mx.array:
        """The rows whose adapter is a DoRA, [rows, 1, 1]."""
        marks = [slot >= 0 and self.places.scaled[slot] for slot in self._list_slots()]
        return self.rows.make_array(marks)[:, None, None]


def _split_rows(x: mx.array, index: mx.array) -> mx.array:
    """x as [rows, n, D]: a model may have joined rows and tokens."""
    return x.reshape(index.size, -1, x.shape[-1])


def _scale(y: mx.array, z: mx.array, bias: mx.array | None, magnitude: mx.array) -> mx.array:
    """DoRA: the outputs without bias, adapted and scaled."""
    factor = magnitude.astype(y.dtype)
    return (y + z) * factor if bias is None else (y - bias + z) * factor + bias


def _widen(matrix: mx.array, axis: int, rank: int) -> mx.array:
    """The matrix with zeros up to this rank."""
    widths = [(0, 0)] * matrix.ndim
    widths[axis] = (0, rank - matrix.shape[axis])
    return mx.pad(matrix, widths)


def _compute_magnitude(weights: LayerWeights, base: Any) -> mx.array:
    """The factors of a layer's outputs, or of an embedding's tokens; 1 for LoRA."""
    weight = dequantize_weight(base, mx.float32) if "scales" in base else base["weight"].astype(mx.float32)
    if weights.m is None:
        return mx.ones(weight.shape[:1])
    change = weights.a.astype(mx.float32) @ weights.b.astype(mx.float32)
    adapted = weight + (change if isinstance(base, nn.Embedding | nn.QuantizedEmbedding) else change.T)
    return weights.m.astype(mx.float32) / mx.linalg.norm(adapted, axis=1)


class _AdaptedLinear(nn.Module):
    adapters: LayerAdapters

    def __call__(self, x: mx.array) -> mx.array:
        return self.adapters.adapt_linear(x, super().__call__(x), self.get("bias"))


class _AdaptedEmbedding(nn.Module):
    adapters: LayerAdapters

    def __call__(self, ids: mx.array) -> mx.array:
        return self.adapters.adapt_lookup(ids, super().__call__(ids))

    def as_linear(self, x: mx.array) -> mx.array:
        return self.adapters.adapt_head(x, super().as_linear(x))


class _AdaptedExperts(nn.Module):
    adapters: LayerAdapters

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = super().__call__(x, indices, sorted_indices=sorted_indices)
        return self.adapters.adapt_experts(x, y, indices, sorted_indices)


class _ExpertsParent(nn.Module):
    """The module whose children are expert layers: computed for all rows once with each adapter present."""

    row_adapters: RowAdapters

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        numbers = self.row_adapters.numbers
        output: mx.array | None = None
        for adapter in sorted(set(numbers)) or [BASE]:
            with self.row_adapters.use([adapter] * len(numbers)):
                found = super().__call__(x, *args, **kwargs)
            if output is not None:
                marks = self.row_adapters.make_array([number == adapter for number in numbers])[:, None]
                split = (len(numbers), -1)
                found = mx.where(marks, found.reshape(split), output.reshape(split)).reshape(found.shape)
            output = found
        assert output is not None
        return output


_MIXINS = (
    (nn.Linear | nn.QuantizedLinear, _AdaptedLinear),
    (nn.Embedding | nn.QuantizedEmbedding, _AdaptedEmbedding),
)


def attach_adapters(
    model: nn.Module,
    rows: RowAdapters,
    adapters: Sequence[Mapping[str, LayerWeights]],
    dtype: mx.Dtype | None = None,
) -> int:
    """Make the layers of a model add their rows' adapters. Returns how many layers do. `adapters`: the
    weights of each adapter by layer path, in the order of `rows.names`; `dtype`: their type afterwards."""
    modules = dict(model.named_modules())
    paths = sorted({path for each in adapters for path in each})
    for path in paths:
        layer: Any = modules[path]
        added = LayerAdapters(rows, [each.get(path) for each in adapters], layer)
        if dtype is not None:
            added.set_dtype(dtype)
        layer.adapters = added
        mixin = next((mixin for kinds, mixin in _MIXINS if isinstance(layer, kinds)), _AdaptedExperts)
        mix_in(layer, mixin, "Adapted")
        if mixin is _AdaptedExperts:
            parent: Any = modules[path.rpartition(".")[0]]
            if not isinstance(parent, _ExpertsParent):
                parent.row_adapters = rows
                mix_in(parent, _ExpertsParent, "Adapted")
    return len(paths)


class RowAdapters:
    """The adapters of one loaded model, numbered from 1. `names`: their names in this order. `row_by_row`:
    compute each row with its own matrices even if all use one adapter. Then no row's result depends on the
    adapters of others.

    It is used on the engine thread only. Outside of `use`, the base model is computed.
    """

    def __init__(self, names: Sequence[str] = (), *, row_by_row: bool = False) -> None:
        self.names = tuple(names)
        self.row_by_row = row_by_row
        self.numbers: tuple[int, ...] = ()  # of the rows in the forward that is being built; empty: BASE
        self._arrays: dict[tuple[int, ...], mx.array] = {}

    def find(self, name: str | None) -> int:
        """The number of an adapter; BASE for None. KeyError for a name that was not loaded."""
        return BASE if name is None else dict(zip(self.names, itertools.count(1), strict=False))[name]

    @contextmanager
    def use(self, numbers: Sequence[int]) -> Iterator[None]:
        """Within the block, forwards use these adapters: one number for each row, or for each token of all
        rows."""
        before, self.numbers = self.numbers, tuple(numbers)
        try:
            yield
        finally:
            self.numbers = before
            self._arrays.clear()

    def make_array(self, values: Sequence[int] | Sequence[bool]) -> mx.array:
        """An array of these values, which the layers of a forward share."""
        key = (*values, isinstance(values[0], bool))
        if key not in self._arrays:
            self._arrays[key] = mx.array(list(values))
        return self._arrays[key]
