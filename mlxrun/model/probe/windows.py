"""Sliding windows of the probe's caches are reduced, so that short prompts cross them.

A layer attends to as many tokens as its cache keeps and its mask allows. Both follow from `max_size` and from
the `window_size` that the model passes to `make_mask`, so a reduced cache lowers both by the same number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mlxrun.model.kv.ragged.layer_caches import flatten_caches, get_window

REDUCED = 8  # tokens of the windows that the probe computes with, unless the model's are smaller


def list_windows(cache: Sequence[Any]) -> list[int]:
    """The different sizes of windows, in tokens, smallest first."""
    found = (get_window(layer) for layer in flatten_caches(cache))
    return sorted({window for window in found if window is not None})


def reduce_windows(cache: Sequence[Any]) -> None:
    """Reduce the windows of empty caches."""
    for layer in flatten_caches(cache):
        window = get_window(layer)
        if window is not None and window > REDUCED:
            layer.__class__ = _derive_class(layer.__class__)
            layer.probe_shift, layer.max_size = window - REDUCED, REDUCED


@functools.cache
def _derive_class(library: Any) -> Any:
    """A class of the library's name and module, by which caches are told apart."""

    def make_mask(self: Any, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if window_size is not None:
            window_size = max(window_size - self.probe_shift, 1)
        return library.make_mask(self, N, window_size=window_size, return_array=return_array)

    return type(library.__name__, (library,), {"__module__": library.__module__, "make_mask": make_mask})
