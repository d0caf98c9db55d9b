"""Recurrent states of all rows of a decode batch: one plain batch [rows, ...] for each STATE layer.

After a forward with drafts, it has the states after each token of a row until `accept` chooses one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.draft_layout import DraftLayout
from mlxrun.model.hooks.drafted_state import DraftedState, concatenate_filled
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.layer_caches import LayerKind, LayerView, flatten_caches, get_kind


class RecurrentStates:
    """Holds the states. `layers`: all layer caches of the model, empty; those of kind STATE are held by their
    index."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._states = {i: layer for i, layer in enumerate(layers) if get_kind(layer) is LayerKind.STATE}
        self._updaters: dict[int, nn.Module] = {}  # see DraftedState
        self._drafted: dict[int, DraftedState] = {}  # by layer, until tokens are accepted
        self._layout: DraftLayout | None = None  # of these

    @property
    def layers(self) -> list[int]:
        """The indices of the layers that have a state."""
        return list(self._states)

    @property
    def counts(self) -> Sequence[int]:
        """The tokens of each row in a forward with drafts from which `accept` may choose; empty if there is
        none."""
        return () if self._layout is None else self._layout.counts

    def reorder(
        self, before: Sequence[str], after: Sequence[str], joining: Mapping[str, Sequence[Any]]
    ) -> None:
        """Bring the rows `before` and the caches of `joining` into the order of `after`. Other rows leave."""
        if not self._states:
            return
        self.accept()
        position = {rid: i for i, rid in enumerate([*before, *joining])}
        order = mx.array([position[rid] for rid in after], dtype=mx.int32)
        joined = [flatten_caches(cache) for cache in joining.values()]
        for layer, state in self._states.items():
            state.cache = [
                reorder_state([old, *(caches[layer].cache[slot] for caches in joined)], order)
                for slot, old in enumerate(state.cache)
            ]

    def make_layers(self, first: int, count: int, padding: int) -> dict[int, Any]:
        """The layer caches, by index, of rows [first, first + count) and of `padding` dummy rows."""
        self.accept()
        layers = {}
        for i, state in self._states.items():
            layers[i] = copy.copy(state)
            rows = [a if a is None else a[first : first + count] for a in state.cache]
            layers[i].cache = [_pad_rows(a, padding) for a in rows]
        return layers

    def read(self, caches: Sequence[Any], count: int) -> dict[int, list[mx.array | None]]:
        """The states of the first `count` rows after a forward over `caches`."""
        layers = flatten_caches(caches) if self._states else ()  # a model may have replaced an object
        return {i: [a if a is None else a[:count] for a in layers[i].cache] for i in self._states}

    def replace(self, parts: Sequence[Mapping[int, list[mx.array | None]]]) -> None:
        """Replace the states by results of `read`, one part after the other."""
        for i, state in self._states.items():
            slots = zip(*(part[i] for part in parts), strict=True)
            state.cache = [concatenate_filled(slot) for slot in slots]

    def make_drafted(self, layout: DraftLayout) -> dict[int, DraftedState]:
        """The layer caches of a forward with drafts, by index."""
        count = len(layout.counts)
        layers = self.make_layers(0, count, layout.width - count)
        return {i: DraftedState(layer, layout, self._updaters) for i, layer in layers.items()}

    def hold_drafted(self, layers: Mapping[int, DraftedState], layout: DraftLayout) -> None:
        """Keep the states of a forward over `make_drafted`."""
        for layer in layers.values():
            layer.end_forward()
        self._drafted, self._layout = dict(layers), layout

    def accept(self, kept: Sequence[int] = ()) -> None:
        """Make each row continue from its state after its first `kept` tokens of the last forward; empty:
        after all. The other states are dropped. ValueError for a row that would keep no token."""
        if min(kept, default=1) < 1:
            raise ValueError("a recurrent state cannot go back behind the forward before")
        if self._layout is None:
            return
        parts, order = self._layout.choose_states(kept or self._layout.counts)
        for i, drafted in self._drafted.items():
            self._states[i].cache = drafted.choose(parts, order)
        self._drafted, self._layout = {}, None

    def view_row(self, position: int) -> dict[int, LayerView]:
        """The states of one row, by index of the layer."""
        self.accept()
        return {
            i: tuple(a if a is None else a[position : position + 1] for a in state.cache)
            for i, state in self._states.items()
        }

    def list_arrays(self) -> list[mx.array]:
        """All states, which the logits of the step that makes them do not consume."""
        if self._layout is not None:
            return [a for drafted in self._drafted.values() for a in drafted.list_arrays()]
        return [a for state in self._states.values() for a in layer_caches.list_arrays(state)]


def reorder_state(states: Sequence[mx.array | None], order: mx.array) -> mx.array | None:
    """State arrays of all rows, one after the other, in a new order. None: a slot that is never filled."""
    filled = [a for a in states if a is not None]
    return mx.concatenate(filled, axis=0)[order] if filled else None


def _pad_rows(array: mx.array | None, rows: int) -> mx.array | None:
    if array is None or rows == 0:
        return array
    return mx.concatenate([array, mx.zeros((rows, *array.shape[1:]), array.dtype)], axis=0)
