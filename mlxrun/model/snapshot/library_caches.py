"""Caches of other classes, kept whole through what the libraries promise of each: `state` and `from_state`.

What a class forgets there would come back wrong, so `survives` tries it on a filled cache before one is
trusted. A state is a tree of arrays and plain values; the tree is kept as JSON, the arrays beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model.snapshot.packing import copy_stacked


@dataclass(frozen=True, slots=True, eq=False)
class LibraryCacheState:
    """One cache: `tree` says where each array belongs."""

    tree: str
    arrays: tuple[mx.array, ...]


def capture_state(leaf: Any) -> LibraryCacheState:
    """Copies of all that a cache holds. ValueError if it holds what cannot be stored."""
    arrays: list[mx.array] = []
    tree = _encode_tree([leaf.state, *([leaf.meta_state] if _has_meta(leaf) else [])], arrays)
    return LibraryCacheState(json.dumps(tree), tuple(_copy(a) for a in arrays))


def restore_cache(like: Any, whole: LibraryCacheState) -> Any:
    """A cache of the same class as `like`. ValueError if `whole` is not of such a one."""
    try:
        return type(like).from_state(*_decode_tree(json.loads(whole.tree), whole.arrays))
    except (TypeError, AttributeError, IndexError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"not the state of a {type(like).__name__}: {error}") from error


def can_round_trip(leaf: Any) -> bool:
    """Whether a filled cache comes back as it was, with all its attributes."""
    try:
        whole = capture_state(leaf)
        again = restore_cache(leaf, whole)
        back = capture_state(again)
        same = vars(again).keys() == vars(leaf).keys() and back.tree == whole.tree
    except (ValueError, NotImplementedError, TypeError, AttributeError):
        return False
    return same and all(
        mx.array_equal(a, b, equal_nan=True).item() for a, b in zip(back.arrays, whole.arrays, strict=True)
    )


def has_same_layout(whole: LibraryCacheState, template: LibraryCacheState) -> bool:
    """Whether both may be states of one cache: as many arrays, of the same types, of one row each."""
    return len(whole.arrays) == len(template.arrays) and all(
        a.dtype == b.dtype and a.ndim == b.ndim and a.shape[:1] == b.shape[:1]
        for a, b in zip(whole.arrays, template.arrays, strict=True)
    )


def _has_meta(leaf: Any) -> bool:
    return hasattr(type(leaf), "meta_state")


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


def _copy(array: mx.array) -> mx.array:
    return copy_stacked([array]) if array.ndim else copy_stacked([array[None]])[0]
