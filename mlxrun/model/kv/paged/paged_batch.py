"""The decode batch in pages: all rows attend in one launch a layer, and no row is ever moved or padded.

It has the members of ragged.decode_batch.DecodeBatch. Besides, a row may take several tokens in one forward
(drafts). Each token is a row of the forward, with the same pages and a length that is greater by one. So its
result equals that of a step for each token. Recurrent layers need hooks/drafted_state.py for that. `accept`
then gives rejected tokens back.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.fused.operations import LayerOperations
from mlxrun.model.hooks.draft_layout import DraftLayout, DraftRecurrence, lay_out_drafts
from mlxrun.model.kv.paged.attention_kernel import PagedRows, attend_gathered, attend_pages
from mlxrun.model.kv.paged.page_table import PageTable
from mlxrun.model.kv.paged.paged_cache import (
    Attend,
    PagedCache,
    PagePool,
    StepNumbers,
    TokenSlots,
    find_slots,
    make_sizes,
)
from mlxrun.model.kv.paged.stacked_rows import stack_rows
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.decode_batch import DecodeCall, ExpectedRow, JoiningRow
from mlxrun.model.kv.ragged.layer_caches import KEYED, RowView, flatten_caches, get_kind
from mlxrun.model.kv.ragged.recurrent_states import RecurrentStates
from mlxrun.model.kv.ragged.row_group import RowKeysValues, round_coarsely
from mlxrun.model.machine.device import uses_cuda, uses_gpu

FEW_PAGES = 64  # a pool of fewer pages is not made smaller
FEW_ROWS, ROW_STEP = (1, 2, 4, 8), 8  # widths of a compiled forward: these, and multiples of ROW_STEP
# Steps in the same shapes before their forward is compiled: tracing takes as long as they gain.
COMPILE_AFTER = 4


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """The tables of rows, `layout`, as PagedRows has them. `sizes`: see make_sizes."""

    layout: tuple[str, ...]
    tables: mx.array
    sizes: mx.array


class PagedDecodeBatch:
    """Decodes rows from pages.

    `template`: an empty cache list of the model. `width`: pad the forward to this many rows, unless rows
    round alike in `any_width`. `compiled`: compile the forward, for each of a few widths; not for models with
    recurrent states. `recurrence`: see ComputeMethods. `attend`: replaces the kernel. `compiled_at_once`:
    compile in the first step, not after some in the same shapes. `operations`: of fused layers (model/fused);
    None: layers are the library's.
    """

    def __init__(
        self,
        template: Sequence[Any],
        *,
        width: int = 0,
        any_width: bool = False,
        compiled: bool = False,
        recurrence: DraftRecurrence = "passes",
        attend: Attend | None = None,
        compiled_at_once: bool = False,
        operations: LayerOperations | None = None,
    ) -> None:
        self._template = template
        self._layers = flatten_caches(template)
        self._keyed = [i for i, x in enumerate(self._layers) if get_kind(x) in KEYED]
        self._windows = [layer_caches.get_window(self._layers[i]) for i in self._keyed]
        self._pools = [PagePool() for _ in self._keyed]
        attend = attend or (attend_pages if uses_gpu() else attend_gathered)
        pairs = zip(self._pools, self._windows, strict=True)
        self._step_caches = [PagedCache(pool, window, attend, operations) for pool, window in pairs]
        self._tables = {window: PageTable(window) for window in self._windows}
        self._columns: dict[int | None, LocatedRows] = {}  # tables as they were last
        self._states = RecurrentStates(self._layers)
        self._width = width
        self._any_width = any_width
        self._recurrence = recurrence
        self._compiles = compiled
        self._compile_after = 0 if compiled_at_once else COMPILE_AFTER
        self._decode: DecodeCall | None = None
        self._compiled: Callable[..., Any] = _compile(self)
        self._steps: Counter[tuple[Any, ...]] = Counter()  # by the shapes of a forward
        self._sizes: tuple[Any, ...] = ()  # of the last step's shapes, besides its rows
        self._lengths: dict[str, int] = {}
        self._ends, self._deltas = StepNumbers(), StepNumbers()  # lengths, and rotary positions less these
        self._layout: DraftLayout | None = None  # of a forward with drafts, for recurrent layers

    @property
    def shared_tokens(self) -> int:
        """Tokens in the layers that keep all of them, whose memory another row counts."""
        return self._tables[None].shared_tokens if None in self._tables else 0

    @property
    def ids(self) -> list[str]:
        """Rows in the order of the forward."""
        return list(self._lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens in each row's cache, in the order of `ids`."""
        return list(self._lengths.values())

    # -- membership -------------------------------------------------------------------------------------

    def update(
        self,
        keep: Collection[str],
        joining: Sequence[JoiningRow],
        expected: Sequence[ExpectedRow] | None = None,
    ) -> None:
        """Remove rows that are not in `keep` and add `joining`. `expected`: rows that will join later, so
        that the pools have pages for them already; None: nothing is new about them."""
        before = self.ids
        leaving = [rid for rid in before if rid not in keep]
        if not leaving and not joining and expected is None:
            return
        for rid in leaving:
            del self._lengths[rid]
            for table in self._tables.values():
                table.remove_row(rid)
        self._columns.clear()
        coming = [*((row.length, row.page_keys) for row in joining), *(expected or ())]
        self._trim(coming)
        if joining:
            self._add_rows(joining, coming)
        self._states.reorder(before, self.ids, {row.id: row.cache for row in joining})

    def _add_rows(self, joining: Sequence[JoiningRow], coming: Sequence[tuple[int, Sequence[bytes]]]) -> None:
        """Copy rows into pages: what none of the pages has yet. `coming`: the tokens and page keys of these,
        and of rows that join later."""
        stacks = stack_rows(joining, any(window is not None for window in self._windows))
        held = [[layer_caches.read_keys_values(stack.layers[i]) for i in self._keyed] for stack in stacks]
        for window, table in self._tables.items():
            self._grow(window, table.count_missing(coming), held[0])
            known = {row.id: table.add_row(row.id, row.length, row.page_keys) for row in joining}
            pools = self._list_pools(window)
            places = [
                stack.find_places(table, known, own[pools[0][0]])
                for stack, own in zip(stacks, held, strict=True)
            ]
            own = np.concatenate([slots for _, slots in places])
            slots = TokenSlots.find(own, pools[0][1].num_slots)
            for layer, pool in pools:
                parts = zip([stack[layer] for stack in held], places, strict=True)
                pool.write_rows([part.drop_first(first) for part, (first, _) in parts], slots)
        self._lengths |= {row.id: row.length for row in joining}

    def _list_pools(self, window: int | None) -> list[tuple[int, PagePool]]:
        """The pools of all layers with this window, with their numbers."""
        pairs = zip(self._windows, self._pools, strict=True)
        return [(layer, pool) for layer, (own, pool) in enumerate(pairs) if own == window]

    def _grow(self, window: int | None, missing: int, like: Sequence[RowKeysValues] | None = None) -> None:
        """Add pages to the pools of all layers with this window."""
        table = self._tables[window]
        if missing:
            table.add_capacity(round_coarsely(table.capacity + missing) - table.capacity)
            for layer, pool in self._list_pools(window):
                pool.resize(table.capacity, like[layer] if like else None)

    def _trim(self, coming: Sequence[tuple[int, Sequence[bytes]]]) -> None:
        """Give memory back where most rows have left, and rows that come will not need it."""
        for window, table in self._tables.items():
            needed = table.used + table.count_needed(coming)
            if table.capacity > max(2 * needed, FEW_PAGES):
                pages = table.compact()
                spare = round_coarsely(needed) - len(pages)
                table.add_capacity(spare)
                chosen = mx.array([*pages, *[0] * spare], dtype=mx.int32)
                for _, pool in self._list_pools(window):
                    pool.select(chosen)
                    # Now, as no step may follow for long: a lazy copy keeps all of the pool in memory.
                    mx.async_eval(*pool.arrays)

    # -- the step ---------------------------------------------------------------------------------------

    def forward(
        self,
        decode: DecodeCall,
        tokens: mx.array,
        positions: Sequence[int],
        counts: Sequence[int] | None = None,
    ) -> mx.array:
        """Logits [tokens, V] of `tokens` at these rotary positions. Row i has one token, or `counts[i]`
        consecutive ones. Each is added to its row."""
        ids, ends = self.ids, [n + 1 for n in self._lengths.values()]
        if counts is None:
            self._lengths = dict(zip(ids, ends, strict=True))
        else:
            rows = list(zip(ids, ends, counts, strict=True))
            self._lengths = {rid: end - 1 + count for rid, end, count in rows}  # a row may have none
            ids = [rid for rid, _, count in rows for _ in range(count)]
            ends = [end + i for _, end, count in rows for i in range(count)]
        padding = [0] * (self._choose_width(len(ids)) - len(ids))
        if padding:
            tokens = mx.pad(tokens, (0, len(padding)))
        tables = [self._locate(table, ids, len(padding)) for table in self._tables.values()]
        lengths = self._ends.follow([*ends, *padding], len(ids))
        deltas = [position - end for position, end in zip(positions, ends, strict=True)]
        turns = self._deltas.follow([*deltas, *padding], 0)
        self._layout = None
        if counts is not None and max(counts) > 1 and self._states.layers:
            self._layout = lay_out_drafts(self._recurrence, counts, tokens.shape[0], self._width)
        pools = [pool.arrays for pool in self._pools]
        for pool in self._pools:
            pool.arrays = ()  # so that the forward may write in place
        if self._decode != decode:
            self._decode, self._compiled = decode, _compile(self)
        compute = self._compiled if self._is_compiled(tables) else self.compute_logits
        sizes = [self._columns[window].sizes for window in self._tables]
        logits, pools = compute(tokens, lengths, turns, tables, sizes, pools)
        self._restore_pools(pools)
        return logits[: len(ids)]

    def compute_logits(
        self,
        tokens: mx.array,
        lengths: mx.array,
        deltas: mx.array,
        tables: Sequence[mx.array],
        sizes: Sequence[mx.array],
        pools: Sequence[tuple[mx.array, ...]],
    ) -> tuple[mx.array, list[tuple[mx.array, ...]]]:
        """Logits [rows, V] and the pools with the new tokens: a function of arrays, which can be compiled.
        `lengths`, and `deltas` of the rotary positions: see StepNumbers. `tables`, `sizes` (make_sizes): for
        each window."""
        self._restore_pools(pools)
        rows = tokens.shape[0]
        positions, lengths = (lengths + deltas)[:rows], lengths[:rows]
        offsets = mx.maximum(lengths - 1, 0)
        located = {
            window: (PagedRows(array, lengths), find_slots(array, offsets, own))
            for window, array, own in zip(self._tables, tables, sizes, strict=True)
        }
        layers = list(self._layers)
        for i, window, cache in zip(self._keyed, self._windows, self._step_caches, strict=True):
            cache.begin_step(*located[window], offsets)
            layers[i] = cache
        count = len(self._lengths)
        drafted = {} if self._layout is None else self._states.make_drafted(self._layout)
        for i, state in (drafted or self._states.make_layers(0, count, rows - count)).items():
            layers[i] = state
        caches = layer_caches.unflatten_caches(self._template, layers)
        assert self._decode is not None
        logits = self._decode(tokens[:, None], caches, positions)[:, -1]
        if self._layout is None:
            self._states.replace([self._states.read(caches, count)])
        else:
            self._states.hold_drafted(drafted, self._layout)
        for step_cache in self._step_caches:
            step_cache.end_step()
        written = [pool.arrays for pool in self._pools]
        return logits, written

    def _is_compiled(self, tables: Sequence[mx.array]) -> bool:
        """Whether this step is computed by the compiled forward: a fixed width always, as all its steps must
        round alike."""
        if not self._compiles or self._width:
            return self._compiles
        self._sizes = tuple(table.capacity for table in self._tables.values()), *(t.shape[1] for t in tables)
        shapes = tables[0].shape[0], *self._sizes
        self._steps[shapes] += 1
        return self._steps[shapes] > self._compile_after

    def _restore_pools(self, pools: Sequence[tuple[mx.array, ...]]) -> None:
        for pool, arrays in zip(self._pools, pools, strict=True):
            pool.arrays = arrays

    def _choose_width(self, rows: int) -> int:
        """Rows of a forward of so many: a compiled forward has one of few widths."""
        if (self._width and not self._any_width) or not self._compiles:
            return max(self._width, rows)
        few = next((width for width in FEW_ROWS if rows <= width), 0)
        own = few or -(-rows // ROW_STEP) * ROW_STEP
        if self._width or not uses_cuda():
            return own
        # A compiled step of more rows takes less time there, where launches do.
        wider = (width for width in (own, own + ROW_STEP, 2 * own) if width <= 2 * own)
        return next((w for w in wider if self._steps[w, *self._sizes] > self._compile_after), own)

    def accept(self, lengths: Mapping[str, int]) -> None:
        """Cut rows to these lengths, since their newest tokens were rejected. ValueError for more tokens than
        a row has. With recurrent states, a row must keep at least one token of the last forward; ValueError
        otherwise."""
        for rid, length in lengths.items():
            if not 0 < length <= self._lengths[rid]:
                raise ValueError(f"row {rid} has {self._lengths[rid]} tokens, not {length}")
        if self._states.layers:
            rows = zip(self._lengths.items(), self._states.counts or [1] * len(self._lengths), strict=True)
            self._states.accept([count - n + lengths.get(rid, n) for (rid, n), count in rows])
        self._lengths |= lengths

    def _locate(self, table: PageTable, ids: Sequence[str], padding: int) -> mx.array:
        """Give the rows pages for their new tokens. Returns the table [rows, columns]; dummy rows have page
        0 alone."""
        outgrown = table.find_outgrown(self._lengths)
        if outgrown:
            self._grow(table.window, table.count_missing_for_step(outgrown))
            for rid, length in outgrown.items():
                table.extend_row(rid, length)
        layout = (*ids, str(padding))
        known = self._columns.get(table.window)
        if known is None or known.layout != layout or outgrown:
            columns = table.list_columns(ids)
            columns += [[0] * len(columns[0])] * padding
            sizes = make_sizes(len(columns[0]), table.capacity)
            known = LocatedRows(layout, mx.array(columns, dtype=mx.int32), sizes)
            self._columns[table.window] = known
        return known.tables

    # -- reading ----------------------------------------------------------------------------------------

    def view_row(self, rid: str) -> tuple[int, RowView]:
        """The number of tokens in a row's cache, and a lazy copy of its content."""
        length = self._lengths[rid]
        layers = self._states.view_row(self.ids.index(rid))
        slots = {
            window: mx.array(table.list_slots(rid, 0 if window is None else max(length - window, 0), length))
            for window, table in self._tables.items()
        }
        for i, window, pool in zip(self._keyed, self._windows, self._pools, strict=True):
            layers[i] = pool.read_row(slots[window])
        return length, RowView(tuple(layers[i] for i in range(len(self._layers))))

    def list_state_arrays(self) -> list[mx.array]:
        """Recurrent states, which the logits of the step that makes them do not consume."""
        return self._states.list_arrays()


def _compile(batch: PagedDecodeBatch) -> Callable[..., Any]:
    """The batch's forward, compiled. It does not keep the batch alive, whose pools would never be freed."""
    reference = weakref.ref(batch)

    def compute(*args: Any) -> Any:
        alive = reference()
        assert alive is not None
        return alive.compute_logits(*args)

    return mx.compile(compute)
