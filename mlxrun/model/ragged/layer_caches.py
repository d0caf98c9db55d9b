"""What the libraries' single-row caches hold, seen as a flat list of leaves of three kinds.

A model has one cache a layer; CacheList packs several. The decode batch only needs to know, for each leaf,
whether it keeps all keys (KV), the newest `max_size` (WINDOW) or a state without length (STATE). Anything
else is OTHER, and such a model decodes row by row with the library's own caches.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model.ragged.row_group import BUFFER_STEP, RowKeysValues

_LIBRARIES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")


class LayerKind(enum.Enum):
    KV = "kv"
    WINDOW = "window"
    STATE = "state"
    OTHER = "other"


def flatten_caches(cache: Sequence[Any]) -> list[Any]:
    """The leaves of a model's cache list, in order."""
    leaves: list[Any] = []
    for entry in cache:
        leaves.extend(flatten_caches(entry.caches) if _is(entry, "CacheList") else [entry])
    return leaves


def unflatten_caches(cache: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """A list shaped like `cache` with these leaves; a real list, as models slice and extend it."""
    return _filled(cache, iter(leaves))


def _filled(cache: Sequence[Any], rest: Iterator[Any]) -> list[Any]:
    # No closure that calls itself: that cycle would hold each step's states until garbage is collected.
    filled: list[Any] = []
    for entry in cache:
        if not _is(entry, "CacheList"):
            filled.append(next(rest))
            continue
        packed = copy.copy(entry)
        packed.caches = tuple(_filled(entry.caches, rest))
        filled.append(packed)
    return filled


def get_kind(leaf: Any) -> LayerKind:
    """Exact classes only: a subclass may mean something else by the same fields."""
    if _is(leaf, "KVCache"):
        return LayerKind.KV
    if _is(leaf, "RotatingKVCache") and leaf.keep == 0:
        return LayerKind.WINDOW
    if _is(leaf, "ArraysCache"):
        return LayerKind.STATE
    return LayerKind.OTHER


def get_window(leaf: Any) -> int | None:
    """Tokens that a WINDOW leaf keeps; None for the others."""
    return int(leaf.max_size) if get_kind(leaf) is LayerKind.WINDOW else None


def read_keys_values(leaf: Any) -> RowKeysValues:
    """Keys and values of a filled KV or WINDOW leaf of one row, oldest first."""
    if get_kind(leaf) is LayerKind.KV:
        return RowKeysValues(leaf.keys, leaf.values, leaf.offset)
    merged = type(leaf).merge([leaf])  # the public way to temporal order
    return RowKeysValues(merged.keys, merged.values, merged.keys.shape[2])


LayerView = Any  # Part of a KV or WINDOW leaf, a tuple of arrays of a STATE; any other leaf as it is


@dataclass(frozen=True, slots=True)
class RowView:
    """A row as the snapshots see it, leaf by leaf: to be used before the row computes on, as nothing is
    copied and the arrays' objects are written into."""

    layers: tuple[LayerView, ...]


def view_row(cache: Sequence[Any]) -> RowView:
    """A row in single-row caches."""
    return RowView(tuple(_held(leaf) for leaf in flatten_caches(cache)))


def _held(leaf: Any) -> LayerView:
    if get_kind(leaf) is LayerKind.STATE:
        return tuple(leaf.cache)
    return leaf if get_kind(leaf) is LayerKind.OTHER else read_keys_values(leaf)


def reserve_capacity(cache: Sequence[Any], tokens: int) -> list[Any]:
    """Let KV leaves grow by that many tokens at once: a prompt's length is known, and new memory is slow."""
    for leaf in flatten_caches(cache):
        if get_kind(leaf) is LayerKind.KV:
            leaf.step = -(-tokens // BUFFER_STEP) * BUFFER_STEP
    return list(cache)


def list_arrays(leaf: Any) -> list[mx.array]:
    """All arrays that a leaf holds: what has to be evaluated after a chunk."""
    if get_kind(leaf) is LayerKind.STATE:
        return [a for a in leaf.cache if a is not None]
    state = leaf.state
    return [a for a in _walk(state) if isinstance(a, mx.array)]


def list_all_arrays(cache: Sequence[Any]) -> list[mx.array]:
    return [a for leaf in flatten_caches(cache) for a in list_arrays(leaf)]


def split_row(cache: Sequence[Any], index: int, length: int, *, copied: bool = True) -> list[Any]:
    """Row `index` of a prefilled batch of single-row-class caches, cut to its first `length` tokens.

    Only for caches whose rows were filled together from empty, unpadded or padded on the right. Not
    `copied`, the row keeps the whole batch's arrays alive: for one that joins the decode batch at once.
    """

    def one(leaf: Any) -> Any:
        row = copy.copy(leaf)
        if get_kind(leaf) is LayerKind.STATE:
            row.cache = [a if a is None else a[index : index + 1] for a in leaf.cache]
            return row
        row.keys, row.values = leaf.keys[index : index + 1], leaf.values[index : index + 1]
        if copied:
            row.keys, row.values = mx.contiguous(row.keys), mx.contiguous(row.values)
        row.trim(leaf.offset - length)  # a ring has not turned yet, so it can be trimmed too
        return row

    return unflatten_caches(cache, [one(leaf) for leaf in flatten_caches(cache)])


def _is(entry: Any, name: str) -> bool:
    return type(entry).__name__ == name and type(entry).__module__ in _LIBRARIES


def _walk(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [x for item in tree for x in _walk(item)]
    return [tree]
