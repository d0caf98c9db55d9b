"""Copies of caches of other classes, through what the libraries promise of each: `state` and `from_state`.

A class may leave something out of its state, so `can_round_trip` tries a filled cache before the class is
trusted. A state is a tree of arrays and plain values: the tree is stored as JSON, the arrays beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model.kv.snapshot.packing import copy_stacked


@dataclass(frozen=True, slots=True, eq=False)
class LibraryCacheState:
    """The state of one cache. `tree`: JSON that says where each array belongs."""

    tree: str
    arrays: tuple[mx.array, ...]


def capture_state(cache: Any) -> LibraryCacheState:
    """Copies of all that a cache holds. ValueError if it holds what cannot be stored."""
    arrays: list[mx.array] = []
    meta = [cache.meta_state] if hasattr(type(cache), "meta_state") else []
    tree = _encode_tree([cache.state, *meta], arrays)
    copies = [copy_stacked([a]) if a.ndim else copy_stacked([a[None]])[0] for a in arrays]
    return LibraryCacheState(json.dumps(tree), tuple(copies))


def restore_cache(template: Any, state: LibraryCacheState) -> Any:
    """A cache of the class of `template`. ValueError if `state` is not of that class."""
    try:
        return type(template).from_state(*_decode_tree(json.loads(state.tree), state.arrays))
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"not the state of a {type(template).__name__}: {error}") from error


def can_round_trip(cache: Any) -> bool:
    """Whether a filled cache is restored as it was, with all its attributes."""
    try:
        state = capture_state(cache)
        restored = restore_cache(cache, state)
        again = capture_state(restored)
        same = vars(restored).keys() == vars(cache).keys() and again.tree == state.tree
    except (ValueError, NotImplementedError, TypeError, AttributeError):
        return False
    return same and all(
        mx.array_equal(a, b, equal_nan=True).item() for a, b in zip(again.arrays, state.arrays, strict=True)
    )


def has_same_layout(state: LibraryCacheState, template: LibraryCacheState) -> bool:
    """Whether both may be states of one cache: as many arrays, of the same types, of one row each."""
    return len(state.arrays) == len(template.arrays) and all(
        a.dtype == b.dtype and a.ndim == b.ndim and a.shape[:1] == b.shape[:1]
        for a, b in zip(state.arrays, template.arrays, strict=True)
    )


def _encode_tree(node: Any, arrays: list[mx.array]) -> Any:
    if isinstance(node, mx.array):
        arrays.append(node)
        return {"array": len(arrays) - 1}
    if isinstance(node, (list, tuple)):
        return {type(node).__name__: [_encode_tree(item, arrays) for item in node]}
    if isinstance(node, dict) and all(isinstance(key, str) for key in node):
        return {"dict": {key: _encode_tree(item, arrays) for key, item in node.items()}}
    if node is None or isinstance(node, (bool, int, float, str)):
        return {"value": node}
    raise ValueError(f"a cache that holds a {type(node).__name__} cannot be stored")


def _decode_tree(node: Any, arrays: Sequence[mx.array]) -> Any:
    ((kind, inside),) = node.items()
    if kind == "array":
        return arrays[inside][...]  # an object of its own: a cache writes into its arrays by item assignment
    if kind == "dict":
        return {key: _decode_tree(item, arrays) for key, item in inside.items()}
    if kind == "value":
        return inside
    items = [_decode_tree(item, arrays) for item in inside]
    return tuple(items) if kind == "tuple" else items
