"""The libraries' single-row caches as a flat list of layer caches of three kinds.

A model has one cache a layer; CacheList packs several. For each layer cache, the decode batch must know what
it keeps: all keys (KV), the newest `max_size` (WINDOW) or a recurrent state (STATE). Anything else is OTHER,
and such a model decodes row by row with the library's own caches.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrun.model.kv.ragged.row_group import RowKeysValues, round_up

_LIBRARIES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")


class LayerKind(enum.Enum):
    """What a layer cache keeps."""

    KV = "kv"
    WINDOW = "window"
    STATE = "state"
    OTHER = "other"


KEYED = frozenset({LayerKind.KV, LayerKind.WINDOW})  # what keeps keys and values


def flatten_caches(cache: Sequence[Any]) -> list[Any]:
    """The layer caches of a model's cache list, in order."""
    layers: list[Any] = []
    for item in cache:
        layers.extend(flatten_caches(item.caches) if _is_class(item, "CacheList") else [item])
    return layers


def unflatten_caches(cache: Sequence[Any], layers: Sequence[Any]) -> list[Any]:
    """A list shaped like `cache` with these layer caches. It is a real list, as models slice and extend
    it."""
    return _fill(cache, iter(layers))


def _fill(cache: Sequence[Any], layers: Iterator[Any]) -> list[Any]:
    # No closure that calls itself: that cycle would hold each step's states until garbage is collected.
    filled: list[Any] = []
    for item in cache:
        if not _is_class(item, "CacheList"):
            filled.append(next(layers))
            continue
        packed = copy.copy(item)
        packed.caches = tuple(_fill(item.caches, layers))
        filled.append(packed)
    return filled


def get_kind(layer: Any) -> LayerKind:
    """The kind of a layer cache. Subclasses are OTHER, since their fields may mean something else."""
    if _is_class(layer, "KVCache"):
        return LayerKind.KV
    if _is_class(layer, "RotatingKVCache") and layer.keep == 0:
        return LayerKind.WINDOW
    return LayerKind.STATE if _is_class(layer, "ArraysCache") else LayerKind.OTHER


def get_window(layer: Any) -> int | None:
    """The number of tokens that a WINDOW layer keeps; None for other layers."""
    return int(layer.max_size) if get_kind(layer) is LayerKind.WINDOW else None


def read_keys_values(layer: Any) -> RowKeysValues:
    """Keys and values of a filled KV or WINDOW layer of one row, oldest first."""
    if get_kind(layer) is LayerKind.KV:
        return RowKeysValues(layer.keys, layer.values, layer.offset)
    merged = type(layer).merge([layer])  # the public way to temporal order
    return RowKeysValues(merged.keys, merged.values, merged.keys.shape[2])


@dataclass(frozen=True, slots=True, eq=False)
class FilledTogether:
    """Caches that several rows filled together. One of them is row `index`, with `length` tokens."""

    cache: Sequence[Any]
    index: int
    length: int


# RowKeysValues of a KV or WINDOW layer, a tuple of arrays of a STATE; any other cache as it is
LayerView = Any


@dataclass(frozen=True, slots=True)
class RowView:
    """A row as the snapshots see it, layer by layer. It must be used before the row computes on: nothing is
    copied, and the arrays are written in place."""

    layers: tuple[LayerView, ...]


def view_row(cache: Sequence[Any]) -> RowView:
    """A view of a row in single-row caches."""
    return RowView(tuple(_view_layer(layer) for layer in flatten_caches(cache)))


def _view_layer(layer: Any) -> LayerView:
    kind = get_kind(layer)
    if kind is LayerKind.STATE:
        return tuple(layer.cache)
    return layer if kind is LayerKind.OTHER else read_keys_values(layer)


def reserve_capacity(cache: Sequence[Any], tokens: int) -> list[Any]:
    """Make KV layers grow by this many tokens at once. A prompt's length is known, and allocating is slow."""
    for layer in flatten_caches(cache):
        if get_kind(layer) is LayerKind.KV:
            layer.step = round_up(tokens)
    return list(cache)


def list_arrays(layer: Any) -> list[mx.array]:
    """All arrays of a layer cache, which must be evaluated after a chunk."""
    if get_kind(layer) is LayerKind.STATE:
        return [a for a in layer.cache if a is not None]
    return [a for _, a in tree_flatten(layer.state) if isinstance(a, mx.array)]


def list_all_arrays(cache: Sequence[Any]) -> list[mx.array]:
    return [a for layer in flatten_caches(cache) for a in list_arrays(layer)]


def split_row(cache: Sequence[Any], index: int, length: int, *, copied: bool = True) -> list[Any]:
    """Row `index` of caches that several rows filled together, trimmed to its first `length` tokens.

    It works only for caches that were filled from empty or stacked, unpadded or padded on the right. Without
    `copied`, the row keeps the arrays of all rows alive: for a row that joins the decode batch in the next
    step.
    """
    layers = []
    for layer in flatten_caches(cache):
        row = copy.copy(layer)
        if get_kind(layer) is LayerKind.STATE:
            row.cache = [a if a is None else a[index : index + 1] for a in layer.cache]
        else:
            row.keys, row.values = layer.keys[index : index + 1], layer.values[index : index + 1]
            if copied:
                row.keys, row.values = mx.contiguous(row.keys), mx.contiguous(row.values)
            row.trim(layer.offset - length)  # a ring has not turned yet, so it can be trimmed too
        layers.append(row)
    return unflatten_caches(cache, layers)


def stack_rows(caches: Sequence[Sequence[Any]], new_tokens: int) -> list[Any]:
    """Caches of several rows as one cache with space for `new_tokens` more tokens. All layers must be KV or
    STATE, and hold equally many tokens. Nothing is shared with the rows."""
    stacked = []
    for layers in zip(*map(flatten_caches, caches), strict=True):
        joined = copy.copy(layers[0])
        if get_kind(joined) is LayerKind.STATE:
            slots = zip(*(layer.cache for layer in layers), strict=True)
            joined.cache = [None if slot[0] is None else mx.concatenate(slot) for slot in slots]
        else:
            needed, size = joined.offset + new_tokens, min(layer.keys.shape[2] for layer in layers)
            size = size if size >= needed else joined.offset  # else the cache grows when it is filled
            joined.step = round_up(needed)
            joined.keys = mx.concatenate([layer.keys[:, :, :size] for layer in layers])
            joined.values = mx.concatenate([layer.values[:, :, :size] for layer in layers])
        stacked.append(joined)
    return unflatten_caches(caches[0], stacked)


def _is_class(item: Any, name: str) -> bool:
    return type(item).__name__ == name and type(item).__module__ in _LIBRARIES
