"""The decode batch: rows of any lengths, kept in groups, decoded in one forward.

`update` changes who is in it, `forward` computes one token for each row. Memory and time follow the sum of the lengths, not rows x longest. Rows are ordered by group; `ids` tells
the order, which changes in `update` only.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model import leaves
from mlxrun.model.attention import GroupCache, RaggedCache
from mlxrun.model.group import RowGroup
from mlxrun.model.leaves import Kind

SHORTEST_BUCKET = 256  # rows shorter than this share a group whatever their length


Forward = Callable[[int, int, list[Any]], mx.array]


def bucket(length: int) -> int:
    """Rows in one bucket differ in length by less than a factor of two."""
    return max(length, SHORTEST_BUCKET).bit_length()


@dataclass(frozen=True, slots=True)
class Joining:
    """A prefilled row that enters the batch: `length` tokens in single-row caches."""

    id: str
    length: int
    cache: list[Any]


class DecodeBatch:
    """All rows of one forward.

    `template`: an empty cache list of the model, for its shape and classes. `one_pass`: all rows in one
    forward through the seam; else one forward a group with plain arrays, for models that look inside.
    `split_rows`: a group a row, so that no row's arithmetic depends on another's length. `width`: pad the
    forward to this many rows.
    """

    def __init__(
        self,
        template: Sequence[Any],
        *,
        one_pass: bool = True,
        split_rows: bool = False,
        width: int = 0,
    ) -> None:
        self._template = template
        self._leaves = leaves.flatten(template)
        self._kinds = [leaves.kind(leaf) for leaf in self._leaves]
        self._keyed = [i for i, k in enumerate(self._kinds) if k in (Kind.KV, Kind.WINDOW)]
        self._windows = [leaves.window(self._leaves[i]) for i in self._keyed]
        stand_in = RaggedCache if one_pass else GroupCache
        self._stand_ins: list[Any] = [stand_in(n, window) for n, window in enumerate(self._windows)]
        self._one_pass = one_pass
        self._states = {i: self._leaves[i] for i, k in enumerate(self._kinds) if k is Kind.STATE}
        self._split_rows = split_rows
        self._width = width
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
        return sum(a.nbytes for a in self.state_arrays()) + sum(group.nbytes for group in self.groups)

    # -- membership -------------------------------------------------------------------------------------

    def update(self, keep: Collection[str], joining: Sequence[Joining]) -> None:
        """Rows not in `keep` leave, `joining` enter, and rows that outgrew their group move on."""
        before = self.ids
        wanted = self._sort(keep, joining)
        fits = [w for w in wanted.values() if w.is_whole]
        if not joining and len(fits) == len(wanted) == len(self.groups):
            for w in wanted.values():
                w.sources[0][0].bucket = w.bucket
            return
        self.groups = [w.build(self._windows) for _, w in sorted(wanted.items(), key=lambda kv: kv[1].bucket)]
        self._reorder_states(before, joining)

    def _sort(self, keep: Collection[str], joining: Sequence[Joining]) -> dict[Any, _Wanted]:
        """Which rows make up each group of the next step."""
        wanted: dict[Any, _Wanted] = {}

        def place(rid: str, length: int) -> _Wanted:
            number = bucket(length + 1)
            return wanted.setdefault(rid if self._split_rows else number, _Wanted(number))

        for group in self.groups:
            chosen: dict[int, tuple[_Wanted, list[int]]] = {}
            for index, (rid, length) in enumerate(zip(group.ids, group.lengths, strict=True)):
                if rid in keep:
                    target = place(rid, length)
                    chosen.setdefault(id(target), (target, []))[1].append(index)
            for target, rows in chosen.values():
                target.sources.append((group, rows))
        for row in joining:
            place(row.id, row.length).joining.append(row)
        return wanted

    def _reorder_states(self, before: Sequence[str], joining: Sequence[Joining]) -> None:
        if not self._states:
            return
        position = {rid: i for i, rid in enumerate([*before, *(row.id for row in joining)])}
        order = mx.array([position[rid] for rid in self.ids], dtype=mx.int32)
        flat = [leaves.flatten(row.cache) for row in joining]
        for leaf, state in self._states.items():
            state.cache = [
                _stacked([old, *(f[leaf].cache[slot] for f in flat)], order)
                for slot, old in enumerate(state.cache)
            ]

    # -- the step ---------------------------------------------------------------------------------------

    def forward(self, call: Forward) -> mx.array:
        """One new token for every row; returns logits [rows, V].

        `call(first, count, caches)` runs the model on rows first..first+count and gives logits [>= count, 1, V].
        """
        for group in self.groups:
            group.advance()
        passes = [self.groups] if self._one_pass else [[group] for group in self.groups]
        outputs: list[mx.array] = []
        states: dict[int, list[Any]] = {i: [] for i in self._states}
        first = 0
        for groups in passes:
            count = sum(len(group.ids) for group in groups)
            caches = self._begin(groups, first, count)
            outputs.append(call(first, count, caches)[:count, -1])
            for i, leaf in enumerate(leaves.flatten(caches)):  # a model may have replaced an object
                if i in states:
                    states[i].append([a if a is None else a[:count] for a in leaf.cache])
            first += count
        for i, parts in states.items():
            self._states[i].cache = [_joined(slot) for slot in zip(*parts, strict=True)]
        for stand_in in self._stand_ins:
            stand_in.end()
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def padding(self, count: int) -> int:
        """Dummy rows that a forward of `count` rows is filled up with."""
        return max(self._width - count, 0)

    def _begin(self, groups: list[RowGroup], first: int, count: int) -> list[Any]:
        """The caches that stand for these rows in one forward."""
        lengths = [n for group in groups for n in group.lengths]
        padding = self.padding(count)
        offsets = mx.array([n - 1 for n in lengths] + [0] * padding, dtype=mx.int32)
        filled = list(self._leaves)
        for i, stand_in in zip(self._keyed, self._stand_ins, strict=True):
            stand_in.begin(groups, offsets, max(lengths) - 1)
            filled[i] = stand_in
        for i, state in self._states.items():
            filled[i] = copy.copy(state)
            rows = [a if a is None else a[first : first + count] for a in state.cache]
            filled[i].cache = [_padded(a, padding) for a in rows]
        return leaves.unflatten(self._template, filled)

    def state_arrays(self) -> list[mx.array]:
        """Recurrent state: what the logits of the step that makes it do not consume."""
        return [a for leaf in self._states.values() for a in leaves.arrays(leaf)]


class _Wanted:
    """A group of the next step, and where its rows come from."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.sources: list[tuple[RowGroup, list[int]]] = []
        self.joining: list[Joining] = []

    @property
    def is_whole(self) -> bool:
        """Exactly the rows of one present group: nothing has to be copied."""
        if self.joining or len(self.sources) != 1:
            return False
        group, rows = self.sources[0]
        return len(rows) == len(group.ids)

    def build(self, windows: Sequence[int | None]) -> RowGroup:
        if self.is_whole:
            self.sources[0][0].bucket = self.bucket
            return self.sources[0][0]
        group = RowGroup(self.bucket, windows)
        parts: dict[int, list[tuple[mx.array, mx.array]]] = defaultdict(list)
        for source, rows in self.sources:
            group.ids += [source.ids[i] for i in rows]
            group.lengths += [source.lengths[i] for i in rows]
            for leaf, window in enumerate(windows):
                longest = max(source.lengths[i] for i in rows)
                width = longest if window is None else min(longest, window)
                parts[leaf].append(source.buffers[leaf].take(rows, width))
        for row in self.joining:
            group.ids.append(row.id)
            group.lengths.append(row.length)
            keyed = [x for x in leaves.flatten(row.cache) if leaves.kind(x) is not Kind.STATE]
            for leaf, single in enumerate(keyed):
                parts[leaf].append(leaves.keys_values(single))
        for leaf, buffer in enumerate(group.buffers):
            buffer.fill(parts[leaf])
        return group


def _stacked(parts: Sequence[mx.array | None], order: mx.array) -> mx.array | None:
    """State arrays of all rows, one after the other, in a new order. None: a slot that the model never fills."""
    filled = [p for p in parts if p is not None]
    return mx.concatenate(filled, axis=0)[order] if filled else None


def _joined(slot: Sequence[mx.array | None]) -> mx.array | None:
    filled = [a for a in slot if a is not None]
    return (filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=0)) if filled else None


def _padded(array: mx.array | None, rows: int) -> mx.array | None:
    if array is None or rows == 0:
        return array
    return mx.concatenate([array, mx.zeros((rows, *array.shape[1:]), array.dtype)], axis=0)
