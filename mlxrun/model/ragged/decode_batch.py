"""The decode batch: rows of any lengths, kept in groups, decoded in one forward.

`update` changes who is in it, `forward` computes one token for each row. Memory and time follow the sum
of the lengths, not rows x longest. Rows are ordered by group; `ids` tells the order, which changes in
`update` only.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model.ragged import layer_caches
from mlxrun.model.ragged.attention import GroupCache, RaggedCache
from mlxrun.model.ragged.layer_caches import LayerKind, RowView
from mlxrun.model.ragged.row_group import RowGroup, RowKeysValues

SHORTEST_BUCKET = 256  # rows below the next power of two (512) share a group whatever their length


_EnteringRow = tuple[str, int, list[RowKeysValues]]  # id, length, keys and values of each KV or WINDOW leaf
ModelCall = Callable[[int, int, list[Any]], mx.array]


def find_bucket(length: int, shortest: int | None = None) -> int:
    """Rows in one bucket differ in length by less than a factor of two, or lie below twice `shortest`."""
    return max(length, shortest or SHORTEST_BUCKET).bit_length()


@dataclass(frozen=True, slots=True)
class JoiningRow:
    """A prefilled row that enters the batch: `length` tokens in single-row caches."""

    id: str
    length: int
    cache: list[Any]


class DecodeBatch:
    """All rows of one forward.

    `template`: an empty cache list of the model, for its shape and classes. `one_pass`: all rows in one
    forward through the seam; else one forward a group with plain arrays, for models that look inside.
    `split_rows`: a group a row, so that no row's arithmetic depends on another's length. `width`: pad the
    forward to this many rows. `shortest`: in place of SHORTEST_BUCKET.
    """

    def __init__(
        self,
        template: Sequence[Any],
        *,
        one_pass: bool = True,
        split_rows: bool = False,
        width: int = 0,
        shortest: int | None = None,
    ) -> None:
        self._template = template
        self._layers = layer_caches.flatten_caches(template)
        self._kinds = [layer_caches.get_kind(leaf) for leaf in self._layers]
        self._keyed = [i for i, k in enumerate(self._kinds) if k in (LayerKind.KV, LayerKind.WINDOW)]
        self._windows = [layer_caches.get_window(self._layers[i]) for i in self._keyed]
        stand_in = RaggedCache if one_pass else GroupCache
        self._stand_ins: list[Any] = [stand_in(n, window) for n, window in enumerate(self._windows)]
        self._one_pass = one_pass
        self._states = {i: self._layers[i] for i, k in enumerate(self._kinds) if k is LayerKind.STATE}
        self._split_rows = split_rows
        self._width = width
        self._shortest = shortest
        self.groups: list[RowGroup] = []

    @property
    def ids(self) -> list[str]:
        """Rows in the order of the forward."""
        return [rid for group in self.groups for rid in group.ids]

    @property
    def lengths(self) -> list[int]:
        """Tokens in each row's cache, in the order of `ids`."""
        return [n for group in self.groups for n in group.lengths]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.list_state_arrays()) + sum(group.nbytes for group in self.groups)

    # -- membership -------------------------------------------------------------------------------------

    def update(
        self, keep: Collection[str], joining: Sequence[JoiningRow], coming: Sequence[int] = ()
    ) -> None:
        """Rows not in `keep` leave, `joining` enter, and rows that outgrew their group move on.

        `coming`: lengths of rows that will join later, to make room for them at once.
        """
        if not joining and self._is_unchanged(keep):
            return
        before = self.ids
        moving = self._remove_rows(keep)
        entering = [(row.id, row.length, _list_keys_values(row)) for row in joining]
        expected = Counter() if self._split_rows else Counter(self._find_bucket(n) for n in coming)
        for group, rows in self._assign_groups([*moving, *entering]):
            self._add_rows(group, rows, expected[group.bucket])
        self.groups = sorted((g for g in self.groups if g.ids), key=lambda g: g.bucket)
        self._reorder_states(before, joining)

    def _remove_rows(self, keep: Collection[str]) -> list[_EnteringRow]:
        """Drop rows that leave; returns those that have outgrown their group and must move."""
        moving: list[_EnteringRow] = []
        for group in reversed(self.groups):  # the longest first: they make place
            for index in reversed(range(len(group.ids))):
                if group.ids[index] not in keep:
                    group.remove_row(index)
            group.trim()
            outgrown = [i for i, n in enumerate(group.lengths) if self._find_bucket(n) != group.bucket]
            if outgrown and len(outgrown) == len(group.ids) and self._can_change_bucket(group):
                group.bucket = self._find_bucket(min(group.lengths))  # all of them: the group itself moves up
                outgrown = [i for i, n in enumerate(group.lengths) if self._find_bucket(n) != group.bucket]
            for index in reversed(outgrown):
                moving.append(self._copy_row(group, index))
                group.remove_row(index)
        return moving

    def _find_bucket(self, length: int) -> int:
        """Where a row of that length belongs in the next step."""
        return find_bucket(length + 1, self._shortest)

    def _can_change_bucket(self, group: RowGroup) -> bool:
        """Whether no other group has the bucket that this one's rows need now: a bucket has one group."""
        number = self._find_bucket(min(group.lengths))
        return self._split_rows or all(g is group or not g.ids or g.bucket != number for g in self.groups)

    def _copy_row(self, group: RowGroup, index: int) -> _EnteringRow:
        length = group.lengths[index]
        parts = [
            b.copy_row(index, length if b.window is None else min(length, b.window)) for b in group.buffers
        ]
        return group.ids[index], length, parts

    def _assign_groups(self, entering: Sequence[_EnteringRow]) -> list[tuple[RowGroup, list[_EnteringRow]]]:
        """The group that each row enters; makes those that are missing."""
        present = {} if self._split_rows else {group.bucket: group for group in self.groups if group.ids}
        placed: dict[int, tuple[RowGroup, list[_EnteringRow]]] = {}
        for row in entering:
            number = self._find_bucket(row[1])
            group = present.get(number)
            if group is None:
                group = RowGroup(number, self._windows)
                self.groups.append(group)
                if not self._split_rows:
                    present[number] = group
            placed.setdefault(id(group), (group, []))[1].append(row)
        return list(placed.values())

    def _add_rows(self, group: RowGroup, rows: Sequence[_EnteringRow], coming: int) -> None:
        for leaf, buffer in enumerate(group.buffers):
            buffer.add_rows([parts[leaf] for _, _, parts in rows], group.get_width(buffer.window), coming)
        for rid, length, _ in rows:
            group.add_row(rid, length)

    def _is_unchanged(self, keep: Collection[str]) -> bool:
        """Nobody leaves, and nobody outgrows a group: most steps."""
        rows = sum(len(group.ids) for group in self.groups)
        return (
            rows == len(keep)
            and all(rid in keep for group in self.groups for rid in group.ids)
            and all(self._find_bucket(max(group.lengths)) == group.bucket for group in self.groups)
        )

    def _reorder_states(self, before: Sequence[str], joining: Sequence[JoiningRow]) -> None:
        if not self._states:
            return
        position = {rid: i for i, rid in enumerate([*before, *(row.id for row in joining)])}
        order = mx.array([position[rid] for rid in self.ids], dtype=mx.int32)
        flat = [layer_caches.flatten_caches(row.cache) for row in joining]
        for leaf, state in self._states.items():
            state.cache = [
                _reorder_state([old, *(f[leaf].cache[slot] for f in flat)], order)
                for slot, old in enumerate(state.cache)
            ]

    # -- the step ---------------------------------------------------------------------------------------

    def forward(self, call: ModelCall) -> mx.array:
        """One new token for every row; returns logits [rows, V].

        `call(first, count, caches)` runs the model on rows first..first+count: logits [>= count, 1, V].
        """
        for group in self.groups:
            group.advance()
        passes = [self.groups] if self._one_pass else [[group] for group in self.groups]
        outputs: list[mx.array] = []
        states: dict[int, list[Any]] = {i: [] for i in self._states}
        first = 0
        for groups in passes:
            count = sum(len(group.ids) for group in groups)
            caches = self._make_step_caches(groups, first, count)
            outputs.append(call(first, count, caches)[:count, -1])
            for i, leaf in enumerate(
                layer_caches.flatten_caches(caches)
            ):  # a model may have replaced an object
                if i in states:
                    states[i].append([a if a is None else a[:count] for a in leaf.cache])
            first += count
        for i, parts in states.items():
            self._states[i].cache = [_concatenate_states(slot) for slot in zip(*parts, strict=True)]
        for stand_in in self._stand_ins:
            stand_in.end()
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def count_padding(self, count: int) -> int:
        """Dummy rows that a forward of `count` rows is filled up with."""
        return max(self._width - count, 0)

    def _make_step_caches(self, groups: list[RowGroup], first: int, count: int) -> list[Any]:
        """The caches that stand for these rows in one forward."""
        lengths = [n for group in groups for n in group.lengths]
        padding = self.count_padding(count)
        offsets = mx.array([n - 1 for n in lengths] + [0] * padding, dtype=mx.int32)
        filled = list(self._layers)
        for i, stand_in in zip(self._keyed, self._stand_ins, strict=True):
            stand_in.begin(groups, offsets, max(lengths) - 1)
            filled[i] = stand_in
        for i, state in self._states.items():
            filled[i] = copy.copy(state)
            rows = [a if a is None else a[first : first + count] for a in state.cache]
            filled[i].cache = [_pad_rows(a, padding) for a in rows]
        return layer_caches.unflatten_caches(self._template, filled)

    def view_row(self, rid: str) -> tuple[int, RowView]:
        """Tokens in a row's cache, and what it holds; valid until the next `update` or `forward`."""
        group, index = next((g, g.ids.index(rid)) for g in self.groups if rid in g.ids)
        place, length = self.ids.index(rid), group.lengths[index]
        held: dict[int, layer_caches.LayerView] = {
            i: tuple(a if a is None else a[place : place + 1] for a in leaf.cache)
            for i, leaf in self._states.items()
        }
        for i, buffer in zip(self._keyed, group.buffers, strict=True):
            width = length if buffer.window is None else min(length, buffer.window)
            keys, values = (a[index : index + 1] for a in buffer.view(width))
            held[i] = RowKeysValues(keys, values, width)
        return length, RowView(tuple(held[i] for i in range(len(self._layers))))

    def list_state_arrays(self) -> list[mx.array]:
        """Recurrent state: what the logits of the step that makes it do not consume."""
        return [a for leaf in self._states.values() for a in layer_caches.list_arrays(leaf)]


def _list_keys_values(row: JoiningRow) -> list[RowKeysValues]:
    """Keys and values of each KV or WINDOW leaf of a prefilled row."""
    return [
        layer_caches.read_keys_values(x)
        for x in layer_caches.flatten_caches(row.cache)
        if layer_caches.get_kind(x) is not LayerKind.STATE
    ]


def _reorder_state(parts: Sequence[mx.array | None], order: mx.array) -> mx.array | None:
    """State arrays of all rows, one after the other, in a new order. None: a slot that is never filled."""
    filled = [p for p in parts if p is not None]
    return mx.concatenate(filled, axis=0)[order] if filled else None


def _concatenate_states(slot: Sequence[mx.array | None]) -> mx.array | None:
    filled = [a for a in slot if a is not None]
    return (filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=0)) if filled else None


def _pad_rows(array: mx.array | None, rows: int) -> mx.array | None:
    if array is None or rows == 0:
        return array
    return mx.concatenate([array, mx.zeros((rows, *array.shape[1:]), array.dtype)], axis=0)
