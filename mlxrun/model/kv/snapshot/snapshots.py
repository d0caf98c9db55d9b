"""Payloads of the prefix cache: copied parts of a row from which other rows start.

A delta holds keys and values of a span of tokens, of the layers that keep all of them. A state holds
everything else (windows, recurrent states, other caches) after an exact number of tokens. Both are lazy until
the caller evaluates `list_arrays(payload)`. Then they are independent of the row, and rows that are restored
from them never write into them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.core.step_plan import CacheHit, SerializedPayload
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.layer_caches import KEYED, LayerKind, RowView, flatten_caches, get_kind
from mlxrun.model.kv.ragged.row_group import RowKeysValues, round_up
from mlxrun.model.kv.snapshot.packing import (
    ArrayLayout,
    LibraryCacheState,
    Stack,
    StackPacker,
    can_round_trip,
    capture_state,
    deserialize_array,
    has_same_layout,
    restore_cache,
    serialize_array,
)

log = logging.getLogger(__name__)

FORMAT = "1"


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPayload:
    """Keys and values of `tokens` consecutive tokens."""

    tokens: int
    stacks: tuple[Stack, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StatePayload:
    """What a row holds after `length` tokens, apart from the keys and values of all tokens."""

    length: int
    stacks: tuple[Stack, ...]
    others: tuple[LibraryCacheState, ...] = ()


Payload = DeltaPayload | StatePayload


class SnapshotCodec:
    """Copies, restores and serializes the rows of a model. `caches`: hold a few tokens (run_trial_forward).

    `has_deltas`, `has_states`: the parts that this model's rows have. `problem`: why nothing can be cached.
    `stored_bits`: of keys and values in deltas; ConfigError if the model's dimensions do not allow it.
    """

    def __init__(self, caches: Sequence[Any], stored_bits: int | None = None) -> None:
        self.bits = stored_bits
        layers = flatten_caches(caches)
        self._kinds = [get_kind(layer) for layer in layers]
        self._windows = [layer_caches.get_window(layer) for layer in layers]
        self.has_deltas = LayerKind.KV in self._kinds
        self.has_states = any(kind is not LayerKind.KV for kind in self._kinds)
        self.problem = _find_problem(layers)
        if self.problem is not None:
            log.warning("the prefix cache is off: %s", self.problem)
            return
        view = layer_caches.view_row(caches)
        length = max((x.length for x in view.layers if isinstance(x, RowKeysValues)), default=0)
        self._slots = [
            [a is not None for a in layer] if kind is LayerKind.STATE else []
            for layer, kind in zip(view.layers, self._kinds, strict=True)
        ]
        self._classes = [_name_class(layer) for layer in layers]
        spans = self._slice_keys(view, 0, length)
        self._keys = StackPacker([ArrayLayout(a.shape, a.dtype, 0) for a in spans], stored_bits)
        states = self._list_state_arrays(view)
        self._rest = StackPacker([ArrayLayout(a.shape, a.dtype, w) for a, w in states])
        self._others = self._capture_others(view)
        self._layout = hashlib.blake2b("\n".join(self.describe()).encode(), digest_size=16).hexdigest()

    def describe(self) -> list[str]:
        """Everything besides the weights that payloads depend on, for the fingerprint of the cache."""
        if self.problem is not None:
            return [self.problem]
        rows = zip(self._classes, self._kinds, self._slots, strict=True)
        layers = [f"{name} {kind.value} {slots}" for name, kind, slots in rows]
        others = [f"{o.tree} {[(a.shape, str(a.dtype)) for a in o.arrays]}" for o in self._others]
        layouts = [str(layout) for layout in (*self._keys.layouts, *self._rest.layouts)]
        return [f"format {FORMAT}, bits {self.bits}", *layers, *layouts, *others]

    # -- out of a row -----------------------------------------------------------------------------------

    def copy_delta(self, view: RowView, start: int, stop: int) -> DeltaPayload:
        """A copy of tokens [start, stop). ValueError if the row does not hold them."""
        if not 0 <= start < stop:
            raise ValueError(f"no tokens {start} to {stop}")
        return DeltaPayload(stop - start, self._keys.pack(self._slice_keys(view, start, stop), stop - start))

    def copy_state(self, view: RowView, length: int) -> StatePayload:
        """A copy of everything else of a row. ValueError unless it holds exactly `length` tokens."""
        for row, window in self._list_keys_values(view):
            if row.length != (length if window is None else min(length, window)):
                raise ValueError(f"the row does not hold {length} tokens")
        arrays = [a for a, _ in self._list_state_arrays(view)]
        return StatePayload(length, self._rest.pack(arrays, length), self._capture_others(view))

    def list_arrays(self, payload: Payload) -> list[mx.array]:
        """The arrays that must be evaluated before the payload is cached."""
        others = payload.others if isinstance(payload, StatePayload) else ()
        return [a for s in payload.stacks for a in s] + [a for o in others for a in o.arrays]

    def _list_keys_values(self, view: RowView) -> list[tuple[RowKeysValues, int | None]]:
        """Keys and values of each KV and WINDOW layer, with its window."""
        for layer, kind in zip(view.layers, self._kinds, strict=True):
            expected = {LayerKind.STATE: tuple, LayerKind.OTHER: object}.get(kind, RowKeysValues)
            found = type(layer) if isinstance(layer, tuple) else object
            if found is not expected:
                raise ValueError("the row has other caches than this model")
        pairs = zip(view.layers, self._windows, strict=True)
        return [(layer, window) for layer, window in pairs if isinstance(layer, RowKeysValues)]

    def _slice_keys(self, view: RowView, start: int, stop: int) -> list[mx.array]:
        spans = []
        for row, window in self._list_keys_values(view):
            if window is None:
                if row.length < stop:
                    raise ValueError(f"the row holds {row.length} tokens, not {stop}")
                spans += [row.keys[:, :, start:stop], row.values[:, :, start:stop]]
        return spans

    def _list_state_arrays(self, view: RowView) -> list[tuple[mx.array, int | None]]:
        """Arrays of WINDOW and STATE layers, layer by layer, and the most tokens that they hold."""
        found: list[tuple[mx.array, int | None]] = []
        for i, layer in enumerate(view.layers):
            if self._kinds[i] is LayerKind.WINDOW:
                found += [(a[:, :, : layer.length], self._windows[i]) for a in (layer.keys, layer.values)]
            elif self._kinds[i] is LayerKind.STATE:
                if [a is not None for a in layer] != self._slots[i]:
                    raise ValueError("other slots of a recurrent state are filled than this model fills")
                found += [(a, None) for a in layer if a is not None]
        return found

    def _capture_others(self, view: RowView) -> tuple[LibraryCacheState, ...]:
        pairs = zip(view.layers, self._kinds, strict=True)
        return tuple(capture_state(x) for x, kind in pairs if kind is LayerKind.OTHER)

    # -- into a row -------------------------------------------------------------------------------------

    def restore(self, hit: CacheHit, capacity: int, new_cache: Sequence[Any]) -> list[Any]:
        """Fill `new_cache`, empty single-row caches, with the first `hit.length` tokens. Keys of `capacity`
        tokens fit before a buffer grows. ValueError if the payloads do not fit the model, the hit or each
        other."""
        self._check(hit)
        capacity = max(capacity, hit.length + 1)
        cache = layer_caches.reserve_capacity(new_cache, capacity)
        layers = flatten_caches(cache)
        if [get_kind(layer) for layer in layers] != self._kinds:
            raise ValueError("the payloads are for other caches")
        spans = iter(self.restore_keys(hit, capacity) if self.has_deltas else ())
        rest = iter(self._rest.unstack(self._rest.dequantize(hit.state.stacks)) if self.has_states else ())
        others = iter(hit.state.others if self.has_states else ())
        for index, layer in enumerate(layers):
            kind = self._kinds[index]
            if kind is LayerKind.KV:
                layer.keys, layer.values, layer.offset = next(spans), next(spans), hit.length
            elif kind is LayerKind.WINDOW:
                layer.keys, layer.values, layer.offset = next(rest), next(rest), hit.length
                layer._idx = layer.keys.shape[2]  # oldest first, full or to be grown: see _update_in_place
            elif kind is LayerKind.STATE:
                layer.cache = [next(rest) if filled else None for filled in self._slots[index]]
            else:
                layers[index] = restore_cache(layer, next(others))
        return layer_caches.unflatten_caches(cache, layers)

    def restore_keys(self, hit: CacheHit, capacity: int) -> Iterable[mx.array]:
        """Keys and values of each KV layer.

        Layers of one shape are concatenated together. That is a copy for each chunk, where one for each chunk
        and layer would dominate on a GPU. The row's first step separates the layers, as it may not write into
        shared memory.
        """
        parts = [(stop - start, self._keys.dequantize(payload.stacks)) for start, stop, payload in hit.deltas]
        spare = round_up(capacity) - hit.length
        joined = []
        for stacks in zip(*(stacks for _, stacks in parts), strict=True):
            spans = [s if s.shape[2] == n else s[:, :, :n] for s, (n, _) in zip(stacks, parts, strict=True)]
            layers, heads, _, size = spans[0].shape
            spans.append(mx.zeros((layers, heads, spare, size), spans[0].dtype))
            joined.append(mx.concatenate(spans, axis=2))
        return self._keys.unstack(joined)

    def _check(self, hit: CacheHit) -> None:
        if self.problem is not None or hit.length < 1:
            raise ValueError("there is nothing to restore")
        if bool(hit.deltas) != self.has_deltas or (hit.state is not None) != self.has_states:
            raise ValueError("a part of the row is missing, or there is one that this model does not have")
        reached = 0
        for start, stop, payload in hit.deltas:
            if start != reached or stop <= start or not isinstance(payload, DeltaPayload):
                raise ValueError(f"a delta of tokens {start} to {stop} after token {reached}")
            if not self.is_usable(payload, stop - start):
                raise ValueError(f"the delta of tokens {start} to {stop} is not one of this model")
            reached = stop
        if self.has_deltas and reached != hit.length:
            raise ValueError(f"deltas up to token {reached}, not {hit.length}")
        if self.has_states and not (
            isinstance(hit.state, StatePayload)
            and hit.state.length == hit.length
            and self.is_usable(hit.state, 0)
        ):
            raise ValueError(f"the state is not one of this model after {hit.length} tokens")

    # -- what the cache must know -----------------------------------------------------------------------

    def nbytes(self, payload: Payload) -> int:
        """Bytes of device memory, by the shapes; nothing is evaluated."""
        return sum(a.nbytes for a in self.list_arrays(payload))

    def count_min_bytes(self, tokens: int) -> int:
        """Bytes of a delta of this many tokens and of a state after them, the least useful pair."""
        others = sum(a.nbytes for other in self._others for a in other.arrays)
        return self._keys.count_bytes(tokens) + self._rest.count_bytes(tokens) + others

    def is_usable(self, payload: Any, tokens: int) -> bool:
        """Whether the payload can be restored: one row, with the right shapes and types. `tokens`: the fewest
        tokens of a delta."""
        if self.problem is not None:
            return False
        if isinstance(payload, DeltaPayload):
            return payload.tokens >= max(tokens, 1) and self._keys.fits(payload.stacks, payload.tokens)
        if not isinstance(payload, StatePayload) or payload.length < 1:
            return False
        return (
            len(payload.others) == len(self._others)
            and all(map(has_same_layout, payload.others, self._others))
            and self._rest.fits(payload.stacks, payload.length)
        )

    def encode(self, payload: Payload) -> SerializedPayload:
        """The payload as bytes. Waits for its arrays."""
        meta, series = {"layout": self._layout}, {str(i): stack for i, stack in enumerate(payload.stacks)}
        if isinstance(payload, DeltaPayload):
            meta |= {"part": "delta", "tokens": str(payload.tokens)}
        else:
            meta |= {"part": "state", "tokens": str(payload.length)}
            meta |= {f"other {i}": other.tree for i, other in enumerate(payload.others)}
            series |= {f"other {i}": other.arrays for i, other in enumerate(payload.others)}
        tensors = {f"{k}.{i}": serialize_array(a) for k, stack in series.items() for i, a in enumerate(stack)}
        return SerializedPayload(tensors, meta)

    def decode(self, serialized: SerializedPayload) -> Payload:
        """The payload of these bytes. ValueError if they are not a payload of this model."""
        meta = serialized.meta
        if self.problem is not None or meta.get("layout") != self._layout:
            raise ValueError("a payload of another model")
        if meta.get("part") not in ("delta", "state") or not meta.get("tokens", "").isdecimal():
            raise ValueError("a payload without its part or its tokens")
        tokens, delta = int(meta["tokens"]), meta["part"] == "delta"
        arrays = {name: deserialize_array(tensor) for name, tensor in serialized.tensors.items()}
        groups = (self._keys if delta else self._rest).groups
        stacks = tuple(_pop_series(arrays, str(i)) for i in range(len(groups)))
        others = tuple(
            LibraryCacheState(meta.get(f"other {i}", ""), _pop_series(arrays, f"other {i}"))
            for i in range(0 if delta else len(self._others))
        )
        payload = DeltaPayload(tokens, stacks) if delta else StatePayload(tokens, stacks, others)
        if arrays or not self.is_usable(payload, 0):
            raise ValueError("arrays are missing, or of the wrong shape, or too many")
        return payload


def _pop_series(arrays: dict[str, mx.array], prefix: str) -> tuple[mx.array, ...]:
    """Take `prefix`.0, .1, ... out of the arrays."""
    found: list[mx.array] = []
    while (array := arrays.pop(f"{prefix}.{len(found)}", None)) is not None:
        found.append(array)
    return tuple(found)


def _name_class(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__name__}"


def _find_problem(layers: Sequence[Any]) -> str | None:
    """Why rows of this model cannot be cached; None if they can."""
    for layer in layers:
        kind = get_kind(layer)
        if kind in KEYED and layer.keys is None:
            return f"a {_name_class(layer)} of the model stays empty"
        if kind is LayerKind.OTHER and not can_round_trip(layer):
            return f"caches of {_name_class(layer)} do not come back as they were"
    return None if layers else "the model has no caches"
