"""Payloads of the prefix cache: parts of a row, copied, that other rows start from.

A Delta holds keys and values of a span of tokens, of the leaves that keep all of them; a State holds all the
rest (windows, recurrent states, caches of other classes) after exactly so many tokens. Both are lazy until
the caller evaluates `arrays(payload)`; from then on they pin nothing and nothing that happens to the row
reaches them. A row restored from payloads never writes into them.

Whatever does not fit raises ValueError or is not `usable`: a cache may cost speed, never correctness.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model.ragged import layer_caches
from mlxrun.model.ragged.layer_caches import LayerKind, RowView
from mlxrun.model.ragged.row_group import BUFFER_STEP, RowKeysValues
from mlxrun.model.snapshot import library_caches
from mlxrun.model.snapshot.library_caches import LibraryCacheState
from mlxrun.model.snapshot.packing import ArrayLayout, Stack, StackPacker
from mlxrun.model.snapshot.serialize import deserialize_array, serialize_array
from mlxrun.scheduler.payload import SerializedPayload
from mlxrun.scheduler.step_plan import CacheHit

log = logging.getLogger(__name__)

FORMAT = "1"


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPayload:
    """Keys and values of `tokens` tokens in a row."""

    tokens: int
    stacks: tuple[Stack, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StatePayload:
    """What a row holds after `length` tokens, beside the keys of all tokens."""

    length: int
    stacks: tuple[Stack, ...]
    others: tuple[LibraryCacheState, ...] = ()


Payload = DeltaPayload | StatePayload


class SnapshotCodec:
    """Made of a cache list that holds a few tokens (adapter.first_look). It keeps none of its arrays.

    `deltas`, `states`: which parts this model's rows have. Not `supported`: nothing can be kept, and
    `problem` says why. `stored_bits`: of keys and values in deltas; ConfigError if the model's dimensions do
    not allow it.
    """

    def __init__(self, caches: Sequence[Any], stored_bits: int | None = None) -> None:
        self.bits = stored_bits
        flat = layer_caches.flatten_caches(caches)
        self._kinds = [layer_caches.get_kind(leaf) for leaf in flat]
        self._windows = [layer_caches.get_window(leaf) for leaf in flat]
        self.has_deltas = LayerKind.KV in self._kinds
        self.has_states = any(k is not LayerKind.KV for k in self._kinds)
        self.problem = _find_problem(flat)
        if self.problem is not None:
            log.warning("the prefix cache is off: %s", self.problem)
            return
        view = layer_caches.view_row(caches)
        length = max((h.length for h in view.layers if isinstance(h, RowKeysValues)), default=0)
        self._slots = [
            [a is not None for a in held] if kind is LayerKind.STATE else []
            for held, kind in zip(view.layers, self._kinds, strict=True)
        ]
        self._classes = [f"{type(leaf).__module__}.{type(leaf).__name__}" for leaf in flat]
        self._keys = StackPacker(
            [ArrayLayout.from_array(a, 0) for a in self._slice_keys(view, 0, length)], stored_bits
        )
        fixed = [ArrayLayout.from_array(a, w) for a, w in self._list_state_arrays(view)]
        self._rest = StackPacker(fixed)
        self._others = [library_caches.capture_state(leaf) for leaf in self._list_library_caches(view)]
        self._layout = hashlib.blake2b("\n".join(self.describe()).encode(), digest_size=16).hexdigest()

    @property
    def supported(self) -> bool:
        return self.problem is None

    def describe(self) -> list[str]:
        """All that payloads depend on beside the weights, for the fingerprint of the cache."""
        if self.problem is not None:
            return [self.problem]
        sort = [f"{c} {k.value} {s}" for c, k, s in zip(self._classes, self._kinds, self._slots, strict=True)]
        others = [f"{o.tree} {[(a.shape, str(a.dtype)) for a in o.arrays]}" for o in self._others]
        planes = [str(plane) for plane in (*self._keys.planes, *self._rest.planes)]
        return [f"format {FORMAT}, bits {self.bits}", *sort, *planes, *others]

    # -- out of a row -----------------------------------------------------------------------------------

    def copy_delta(self, view: RowView, start: int, stop: int) -> DeltaPayload:
        """Copy of tokens [start, stop), which the row holds."""
        if not 0 <= start < stop:
            raise ValueError(f"no tokens {start} to {stop}")
        return DeltaPayload(stop - start, self._keys.pack(self._slice_keys(view, start, stop), stop - start))

    def copy_state(self, view: RowView, length: int) -> StatePayload:
        """Copy of everything else of a row that holds exactly `length` tokens."""
        for part, window in self._list_keys_values(view):
            if part.length != (length if window is None else min(length, window)):
                raise ValueError(f"the row does not hold {length} tokens")
        arrays = [a for a, _ in self._list_state_arrays(view)]
        others = tuple(library_caches.capture_state(leaf) for leaf in self._list_library_caches(view))
        return StatePayload(length, self._rest.pack(arrays, length), others)

    def list_arrays(self, payload: Payload) -> list[mx.array]:
        """What has to be evaluated before the payload is kept."""
        others = payload.others if isinstance(payload, StatePayload) else ()
        return [a for s in payload.stacks for a in s] + [a for o in others for a in o.arrays]

    def _list_keys_values(self, view: RowView) -> list[tuple[RowKeysValues, int | None]]:
        """Keys and values of each KV and WINDOW leaf, with its window."""
        if [_sort(h) for h in view.layers] != [_sorts[k] for k in self._kinds]:
            raise ValueError("the row has other caches than this model")
        pairs = zip(view.layers, self._windows, strict=True)
        return [(held, window) for held, window in pairs if isinstance(held, RowKeysValues)]

    def _slice_keys(self, view: RowView, start: int, stop: int) -> list[mx.array]:
        spans = []
        for part, window in self._list_keys_values(view):
            if window is None:
                if part.length < stop:
                    raise ValueError(f"the row holds {part.length} tokens, not {stop}")
                spans += [part.keys[:, :, start:stop], part.values[:, :, start:stop]]
        return spans

    def _list_state_arrays(self, view: RowView) -> list[tuple[mx.array, int | None]]:
        """Arrays of WINDOW and STATE leaves, leaf by leaf, and the most tokens that they hold."""
        found: list[tuple[mx.array, int | None]] = []
        for held, kind, window, slots in zip(
            view.layers, self._kinds, self._windows, self._slots, strict=True
        ):
            if kind is LayerKind.WINDOW:
                found += [
                    (held.keys[:, :, : held.length], window),
                    (held.values[:, :, : held.length], window),
                ]
            elif kind is LayerKind.STATE:
                if [a is not None for a in held] != slots:
                    raise ValueError("other slots of a recurrent state are filled than this model fills")
                found += [(a, None) for a in held if a is not None]
        return found

    def _list_library_caches(self, view: RowView) -> list[Any]:
        return [h for h, kind in zip(view.layers, self._kinds, strict=True) if kind is LayerKind.OTHER]

    # -- into a row -------------------------------------------------------------------------------------

    def restore(self, hit: CacheHit, room: int, new_cache: Sequence[Any]) -> list[Any]:
        """`new_cache`, empty single-row caches, filled with the first `hit.length` tokens; keys of `room`
        tokens fit in before a buffer grows.

        ValueError if the payloads do not fit the model, the hit or each other.
        """
        self._check(hit)
        fresh = layer_caches.reserve_capacity(new_cache, max(room, hit.length + 1))
        flat = layer_caches.flatten_caches(fresh)
        if [layer_caches.get_kind(leaf) for leaf in flat] != self._kinds:
            raise ValueError("the payloads are for other caches")
        spans = iter(self._restore_keys(hit, max(room, hit.length + 1)) if self.has_deltas else ())
        rest = iter(self._rest.unpack(hit.state.stacks) if self.has_states else ())
        others = iter(hit.state.others if self.has_states else ())
        for index, leaf in enumerate(flat):
            kind = self._kinds[index]
            if kind is LayerKind.KV:
                leaf.keys, leaf.values, leaf.offset = next(spans), next(spans), hit.length
            elif kind is LayerKind.WINDOW:
                leaf.keys, leaf.values, leaf.offset = next(rest), next(rest), hit.length
                leaf._idx = leaf.keys.shape[2]  # oldest first, full or to be grown: see _update_in_place
            elif kind is LayerKind.STATE:
                leaf.cache = [next(rest) if filled else None for filled in self._slots[index]]
            else:
                flat[index] = library_caches.restore_cache(leaf, next(others))
        return layer_caches.unflatten_caches(fresh, flat)

    def _restore_keys(self, hit: CacheHit, room: int) -> Iterable[mx.array]:
        """Keys and values of each KV leaf. Layers of a shape are put together at once: a copy a chunk, not a
        copy a chunk and layer, which is what a GPU's time would go into. A row's first step takes its layers
        apart, as it may not write into what they share."""
        parts = [(stop - start, self._keys.dequantise(payload.stacks)) for start, stop, payload in hit.deltas]
        spare = -(-room // BUFFER_STEP) * BUFFER_STEP - hit.length
        wholes = []
        for pieces in zip(*(stacks for _, stacks in parts), strict=True):
            cut = [s if s.shape[2] == n else s[:, :, :n] for s, (n, _) in zip(pieces, parts, strict=True)]
            planes, heads, _, size = cut[0].shape
            wholes.append(
                mx.concatenate([*cut, mx.zeros((planes, heads, spare, size), cut[0].dtype)], axis=2)
            )
        return self._keys.unstack(wholes)

    def _check(self, hit: CacheHit) -> None:
        if not self.supported or hit.length < 1:
            raise ValueError("there is nothing to restore")
        if bool(hit.deltas) != self.has_deltas or (hit.state is not None) != self.has_states:
            raise ValueError("a part of the row is missing, or there is one that this model has not")
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
        """Bytes of device memory, from shapes alone: nothing is evaluated."""
        return sum(a.nbytes for a in self.list_arrays(payload))

    def count_min_bytes(self, tokens: int) -> int:
        """Bytes of a delta of so many tokens and of a state after them, the smallest useful content."""
        others = sum(a.nbytes for other in self._others for a in other.arrays)
        return self._keys.count_bytes(tokens) + self._rest.count_bytes(tokens) + others

    def is_usable(self, payload: Any, tokens: int) -> bool:
        """Whether it can be restored: of one row, with the right shapes and types; a delta of `tokens` tokens
        at least."""
        if not self.supported:
            return False
        if isinstance(payload, DeltaPayload):
            return payload.tokens >= max(tokens, 1) and self._keys.fits(payload.stacks, payload.tokens)
        if not isinstance(payload, StatePayload) or payload.length < 1:
            return False
        same = len(payload.others) == len(self._others) and all(
            library_caches.has_same_layout(own, template)
            for own, template in zip(payload.others, self._others, strict=True)
        )
        return same and self._rest.fits(payload.stacks, payload.length)

    def encode(self, payload: Payload) -> SerializedPayload:
        """The payload as bytes; waits for its arrays."""
        tensors = {
            f"{i}.{j}": serialize_array(a)
            for i, stack in enumerate(payload.stacks)
            for j, a in enumerate(stack)
        }
        meta = {"layout": self._layout}
        if isinstance(payload, DeltaPayload):
            return SerializedPayload(tensors, meta | {"part": "delta", "tokens": str(payload.tokens)})
        for i, other in enumerate(payload.others):
            tensors |= {f"other {i}.{j}": serialize_array(a) for j, a in enumerate(other.arrays)}
            meta[f"other {i}"] = other.tree
        return SerializedPayload(tensors, meta | {"part": "state", "tokens": str(payload.length)})

    def decode(self, blob: SerializedPayload) -> Payload:
        """The payload again. ValueError if these bytes are not a payload of this model."""
        meta = blob.meta
        if not self.supported or meta.get("layout") != self._layout:
            raise ValueError("a payload of another model")
        if meta.get("part") not in ("delta", "state") or not meta.get("tokens", "").isdecimal():
            raise ValueError("a payload without its part or its tokens")
        tokens, delta = int(meta["tokens"]), meta["part"] == "delta"
        arrays = {name: deserialize_array(tensor) for name, tensor in blob.tensors.items()}
        stacks = tuple(
            _pop_series(arrays, str(i)) for i in range(len((self._keys if delta else self._rest).groups))
        )
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


_sorts: dict[LayerKind, type] = {
    LayerKind.KV: RowKeysValues,
    LayerKind.WINDOW: RowKeysValues,
    LayerKind.STATE: tuple,
    LayerKind.OTHER: object,
}


def _sort(held: Any) -> type:
    return RowKeysValues if isinstance(held, RowKeysValues) else tuple if isinstance(held, tuple) else object


def _find_problem(flat: Sequence[Any]) -> str | None:
    """Why rows of this model cannot be kept; None if they can."""
    for leaf in flat:
        kind, name = layer_caches.get_kind(leaf), f"{type(leaf).__module__}.{type(leaf).__name__}"
        if kind in (LayerKind.KV, LayerKind.WINDOW) and leaf.keys is None:
            return f"a {name} of the model stays empty"
        if kind is LayerKind.OTHER and not library_caches.can_round_trip(leaf):
            return f"caches of {name} do not come back as they were"
    return None if flat else "the model keeps nothing"
