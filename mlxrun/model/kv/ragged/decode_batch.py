"""The decode batch: rows of any lengths, in groups of similar length, decoded in one forward.

`update` changes the rows of the batch; `forward` computes one token for each row. Memory and time follow the
sum of the lengths, not rows x longest. Rows are ordered by group (see `ids`); only `update` changes the
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx

from mlxrun.model.hooks.attention import GroupCache, RaggedCache, StepCache
from mlxrun.model.hooks.rotary_angles import StepPositions
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.layer_caches import (
    KEYED,
    FilledTogether,
    LayerKind,
    RowView,
    flatten_caches,
    get_kind,
)
from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization, QuantizedRow, make_buffer
from mlxrun.model.kv.ragged.recurrent_states import RecurrentStates
from mlxrun.model.kv.ragged.row_group import RowGroup, RowKeysValues, round_coarsely

SHORTEST_BUCKET = 256  # rows below the next power of two (512) share a group whatever their length
QUANTIZED = 64  # added to the bucket of a quantized row, which shares no group with others

# id, length, keys and values of each KV or WINDOW layer
_EnteringRow = tuple[str, int, Sequence[RowKeysValues | QuantizedRow]]
DecodeCall = Callable[
    [mx.array, list[Any], Sequence[int] | mx.array], mx.array
]  # see caller.ModelCaller.decode


def find_bucket(length: int, shortest: int | None = None) -> int:
    """The bucket of a length. In a bucket, lengths differ by less than a factor of 2, or are below 2 *
    `shortest`."""
    return max(length, shortest or SHORTEST_BUCKET).bit_length()


def choose_width(length: int, shortest: int | None = None) -> int:
    """The tokens over which a row of this length attends if nothing else may decide it. They are at most a
    quarter more, or a quarter of `shortest` more."""
    return round_coarsely(length, (shortest or SHORTEST_BUCKET) // 4)


@dataclass(frozen=True, slots=True)
class JoiningRow:
    """A prefilled row that joins the batch: `length` tokens in single-row caches. `page_keys`: see
    compute_page_keys. `together`: caches of several rows that have the same tokens of this one."""

    id: str
    length: int
    cache: list[Any]
    page_keys: Sequence[bytes] = ()
    together: FilledTogether | None = None


class ExpectedRow(NamedTuple):
    """A row that will join later, when it has `length` tokens."""

    length: int
    page_keys: Sequence[bytes] = ()


class DecodeBatch:
    """Decodes rows in groups.

    `template`: an empty cache list of the model, for its shape and classes. `one_pass`: all rows in one
    forward with RaggedCache; else one forward a group with GroupCache, for models that look inside.
    `widths`: pad each forward to the first of these numbers of rows that is enough, and take at most the last
    one. Then a row's own length decides how many tokens it attends over, so that no row's arithmetic depends
    on another's. `shortest`: replaces SHORTEST_BUCKET. `quantization`: of long rows, only with `one_pass`.
    """

    shared_tokens = 0  # no row holds what another one has

    def __init__(
        self,
        template: Sequence[Any],
        *,
        one_pass: bool = True,
        widths: Sequence[int] = (),
        shortest: int | None = None,
        quantization: KVQuantization | None = None,
    ) -> None:
        self._template = template
        self._layers = flatten_caches(template)
        kinds = [get_kind(layer) for layer in self._layers]
        self._keyed = [i for i, kind in enumerate(kinds) if kind in KEYED]
        self._states = RecurrentStates(self._layers)
        self._windows = [layer_caches.get_window(self._layers[i]) for i in self._keyed]
        cache_class: type[StepCache] = RaggedCache if one_pass else GroupCache
        self._step_caches = [cache_class(n, window) for n, window in enumerate(self._windows)]
        self._one_pass = one_pass
        self._widths = widths
        self._shortest = shortest
        self._quantization = quantization
        self.groups: list[RowGroup] = []

    @property
    def ids(self) -> list[str]:
        """Rows in the order of the forward."""
        return [rid for group in self.groups for rid in group.ids]

    @property
    def lengths(self) -> list[int]:
        """Tokens in each row's cache, in the order of `ids`."""
        return [n for group in self.groups for n in group.lengths]

    # -- membership -------------------------------------------------------------------------------------

    def update(
        self,
        keep: Collection[str],
        joining: Sequence[JoiningRow],
        expected: Sequence[ExpectedRow] | None = None,
    ) -> None:
        """Remove rows that are not in `keep`, add `joining`, and move rows that outgrew their group.
        `expected`: rows that will join later, so that buffers get space for them at once."""
        if not joining and self._is_unchanged(keep):
            return
        before = self.ids
        moving = self._remove_rows(keep)
        entering = list[_EnteringRow]()
        for row in joining:
            layers = [layer for layer in flatten_caches(row.cache) if get_kind(layer) is not LayerKind.STATE]
            entering.append((row.id, row.length, [layer_caches.read_keys_values(layer) for layer in layers]))
        later = Counter(self.pick_bucket(row.length) for row in expected or ())
        for group, rows in self._assign_groups([*moving, *entering]):
            self._add_rows(group, rows, later[group.bucket])
        self.groups = sorted((g for g in self.groups if g.ids), key=lambda g: g.bucket)
        self._states.reorder(before, self.ids, {row.id: row.cache for row in joining})

    def _remove_rows(self, keep: Collection[str]) -> list[_EnteringRow]:
        """Drop rows that leave; returns those that have outgrown their group and must move."""
        moving: list[_EnteringRow] = []
        for group in reversed(self.groups):  # the longest first, so that their memory is free for the others
            group.remove_rows([i for i, rid in enumerate(group.ids) if rid not in keep])
            group.trim()
            outgrown = [i for i, n in enumerate(group.lengths) if self.pick_bucket(n) != group.bucket]
            if outgrown and len(outgrown) == len(group.ids) and self._can_change_bucket(group):
                group.bucket = self.pick_bucket(min(group.lengths))  # all rows have: the group itself moves
                outgrown = [i for i, n in enumerate(group.lengths) if self.pick_bucket(n) != group.bucket]
            moving += [self._copy_row(group, index) for index in outgrown]
            group.remove_rows(outgrown)
        return moving

    def pick_bucket(self, length: int) -> int:
        """The bucket of a row of that length in the next step."""
        if self._widths:
            return choose_width(length + 1, self._shortest)
        bucket, quantization = find_bucket(length + 1, self._shortest), self._quantization
        return bucket if quantization is None or length < quantization.start else bucket + QUANTIZED

    def _can_change_bucket(self, group: RowGroup) -> bool:
        """Whether no other group has the bucket that this one's rows need now: a bucket has one group. Rows
        that are to be quantized, or to attend over more tokens, move."""
        bucket = self.pick_bucket(min(group.lengths))
        if self._widths or bucket - group.bucket > QUANTIZED // 2:
            return False
        return all(g is group or not g.ids or g.bucket != bucket for g in self.groups)

    def _copy_row(self, group: RowGroup, index: int) -> _EnteringRow:
        length = group.lengths[index]
        widths = [length if b.window is None else min(length, b.window) for b in group.buffers]
        copies = [b.copy_row(index, width) for b, width in zip(group.buffers, widths, strict=True)]
        return group.ids[index], length, copies

    def _assign_groups(self, entering: Sequence[_EnteringRow]) -> list[tuple[RowGroup, list[_EnteringRow]]]:
        """The group that each row enters; makes those that are missing."""
        present = {group.bucket: group for group in self.groups if self._has_place(group)}
        placed: dict[int, tuple[RowGroup, list[_EnteringRow]]] = {}
        for row in entering:
            bucket = self.pick_bucket(row[1])
            group = present.get(bucket)
            count = 0 if group is None else len(placed.get(id(group), (group, []))[1])
            if group is None or not self._has_place(group, count):
                form = self._quantization if bucket > QUANTIZED else None
                make, width = partial(make_buffer, form), bucket if self._widths else None
                group = RowGroup(bucket, self._windows, make, width)
                self.groups.append(group)
                present[bucket] = group
            placed.setdefault(id(group), (group, []))[1].append(row)
        return list(placed.values())

    def _has_place(self, group: RowGroup, entering: int = 0) -> bool:
        """Whether a group that has rows, `entering` ones included, takes one more."""
        count = len(group.ids) + entering
        return count > 0 and (not self._widths or count < self._widths[-1])

    def _add_rows(self, group: RowGroup, rows: Sequence[_EnteringRow], expected: int) -> None:
        for layer, buffer in enumerate(group.buffers):
            buffer.add_rows([row[2][layer] for row in rows], group.get_width(buffer.window), expected)
        for rid, length, _ in rows:
            group.add_row(rid, length)

    def _is_unchanged(self, keep: Collection[str]) -> bool:
        """Whether no row leaves or outgrows its group, as in most steps."""
        rows = sum(len(group.ids) for group in self.groups)
        return (
            rows == len(keep)
            and all(rid in keep for group in self.groups for rid in group.ids)
            and all(self.pick_bucket(max(group.lengths)) == group.bucket for group in self.groups)
        )

    # -- the step ---------------------------------------------------------------------------------------

    def forward(self, decode: DecodeCall, tokens: mx.array, positions: Sequence[int]) -> mx.array:
        """Add one token to every row, `tokens` [rows] at these rotary positions. Returns logits [rows, V]."""
        for group in self.groups:
            group.advance()
        outputs: list[mx.array] = []
        states = []
        first = 0
        for groups in self._list_passes():
            count = sum(len(group.ids) for group in groups)
            dummies = self._list_dummies(count)
            caches = self._make_step_caches(groups, first, len(dummies))
            ids = tokens[first : first + count]
            if dummies:
                ids = mx.concatenate([ids, mx.array(dummies, ids.dtype)])
            logits = decode(ids[:, None], caches, [*positions[first : first + count], *dummies])
            outputs.append(logits[:count, -1])
            states.append(self._states.read(caches, count))
            first += count
        self._states.replace(states)
        for step_cache in self._step_caches:
            step_cache.end_step()
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def pad_rows(self, values: Iterable[int]) -> Iterator[int]:
        """Iterate over values of all rows, with 0 for each dummy row of the next step's forwards."""
        left = iter(values)
        for groups in self._list_passes():
            count = sum(len(group.ids) for group in groups)
            yield from islice(left, count)
            yield from self._list_dummies(count)

    def _list_dummies(self, count: int) -> list[int]:
        """A 0 for each dummy row of a forward of so many rows."""
        return [0] * (next((width for width in self._widths if width >= count), count) - count)

    def _list_passes(self) -> list[list[RowGroup]]:
        """The groups of each forward."""
        most = self._widths[-1] if self._widths else sum(len(group.ids) for group in self.groups)
        passes: list[list[RowGroup]] = []
        count = most
        for group in self.groups:
            count += len(group.ids)
            if count > most or not self._one_pass:
                passes.append([])
                count = len(group.ids)
            passes[-1].append(group)
        return passes

    def _make_step_caches(self, groups: list[RowGroup], first: int, padding: int) -> list[Any]:
        """The cache list that the model sees for these rows and so many dummy rows in one forward."""
        lengths = [n for group in groups for n in group.lengths]
        offsets = StepPositions([n - 1 for n in lengths] + [0] * padding, dtype=mx.int32)
        layers = list(self._layers)
        for i, step_cache in zip(self._keyed, self._step_caches, strict=True):
            step_cache.begin_step(groups, offsets, max(lengths) - 1)
            layers[i] = step_cache
        for i, state in self._states.make_layers(first, len(lengths), padding).items():
            layers[i] = state
        return layer_caches.unflatten_caches(self._template, layers)

    def view_row(self, rid: str) -> tuple[int, RowView] | None:
        """The number of tokens in a row's cache, and its content, valid until the next `update` or `forward`.
        None for a quantized row, whose content differs from what its tokens would give alone."""
        group, index = next((g, g.ids.index(rid)) for g in self.groups if rid in g.ids)
        if self._quantization is not None and group.bucket > QUANTIZED:
            return None
        position, length = self.ids.index(rid), group.lengths[index]
        layers = self._states.view_row(position)
        for i, buffer in zip(self._keyed, group.buffers, strict=True):
            width = length if buffer.window is None else min(length, buffer.window)
            keys, values = (a[index : index + 1] for a in buffer.view(width))
            layers[i] = RowKeysValues(keys, values, width)
        return length, RowView(tuple(layers[i] for i in range(len(self._layers))))

    def list_state_arrays(self) -> list[mx.array]:
        """Recurrent states, which the logits of the step that makes them do not consume."""
        return self._states.list_arrays()


class RowByRowBatch:
    """Rows decoded one by one with the library's own single-row caches, for models that take no array offset.
    It has the members of DecodeBatch. It is the slowest method, and as exact as the library. Rows are in the
    order in which they joined."""

    shared_tokens = 0  # no row holds what another one has

    def __init__(self) -> None:
        self._rows: dict[str, JoiningRow] = {}
        self._steps: dict[str, int] = {}

    @property
    def ids(self) -> list[str]:
        return list(self._rows)

    @property
    def lengths(self) -> list[int]:
        return [row.length + self._steps[rid] for rid, row in self._rows.items()]

    def update(
        self,
        keep: Collection[str],
        joining: Sequence[JoiningRow],
        expected: Sequence[ExpectedRow] | None = None,
    ) -> None:
        self._rows = {rid: row for rid, row in self._rows.items() if rid in keep}
        self._rows |= {row.id: row for row in joining}
        self._steps = {rid: self._steps.get(rid, 0) for rid in self._rows}

    def view_row(self, rid: str) -> tuple[int, RowView]:
        row = self._rows[rid]
        return row.length + self._steps[rid], layer_caches.view_row(row.cache)

    def forward(self, decode: DecodeCall, tokens: mx.array, positions: Sequence[int]) -> mx.array:
        outputs = []
        for i, (rid, row) in enumerate(self._rows.items()):
            outputs.append(decode(tokens[i : i + 1][:, None], row.cache, [positions[i]])[:, -1])
            self._steps[rid] += 1
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def list_state_arrays(self) -> list[mx.array]:
        return [a for row in self._rows.values() for a in layer_caches.list_all_arrays(row.cache)]
