"""Compares the engine's attention over plain arrays with the library's, whenever it meets a new shape.

A fault of some percent in attention disappears in the rounding that half precision adds layer by layer, and
in scores that are all alike. So each shape is compared by itself, on random arrays whose scores spread, with
the library's attention in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.hooks import attention
from mlxrun.model.machine.device import may_shorten_float32
from mlxrun.model.probe.float32_reads import widen

SPREAD = 2.0  # the standard deviation of scores
# Root mean square of differences, in units of that of the result: so many times that of the library in the
# same precision, and at least so much.
FACTOR = 2.0
LONG = ((1, 5000), (40, 300))  # queries and keys of two more calls for each form of heads: other code
_LEAST = {mx.float32: 1e-5, mx.float16: 5e-4, mx.bfloat16: 4e-3}
_SHORTENED = 2e-3  # of float32, where the GPU multiplies it with the mantissa of float16


def get_least(dtype: mx.Dtype) -> float | None:
    """The largest difference that is rounding whatever the library's own is; None for other types."""
    return _SHORTENED if dtype == mx.float32 and may_shorten_float32() else _LEAST.get(dtype)


class AttentionError(RuntimeError):
    """The engine's attention computes something else than the library's."""


class AttentionCheck:
    """To be called with the arguments of each call of `attention.attend_plain`. AttentionError if it differs
    for such shapes."""

    def __init__(self) -> None:
        self._compared: dict[tuple[Any, ...], str] = {}  # the problem by kind of call, empty: none

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, **kwargs: Any
    ) -> None:
        if get_least(queries.dtype) is None:
            return
        heads = [(*array.shape[1:2], array.shape[3]) for array in (queries, keys, values)]
        self._compare(queries.dtype, heads, (*queries.shape[::2], keys.shape[2]), scale, mask, kwargs)
        for length, tokens in LONG:
            self._compare(queries.dtype, heads, (1, length, tokens), scale, "causal", kwargs)

    def _compare(
        self,
        dtype: mx.Dtype,
        heads: Sequence[tuple[int, ...]],
        sizes: tuple[int, ...],
        scale: float,
        mask: Any,
        extra: Mapping[str, Any],
    ) -> None:
        """`heads`: number and width, of queries, keys and values. `sizes`: rows, queries and keys of each."""
        form = mask if not isinstance(mask, mx.array) else (tuple(mask.shape), mask.dtype)
        names = tuple(name for name, value in extra.items() if value is not None)
        key = (dtype, tuple(heads), sizes, scale, form, names)
        if key not in self._compared:
            rows, length, tokens = sizes
            shapes = zip(heads, (length, tokens, tokens), strict=True)
            given = [
                mx.random.normal((rows, number, count, width), key=mx.random.key(seed))
                for seed, ((number, width), count) in enumerate(shapes)
            ]
            given[0] = given[0] * (SPREAD / (abs(scale) * heads[0][1] ** 0.5 or 1.0))
            arrays = tuple(array.astype(dtype) for array in given)
            self._compared[key] = _find_problem(arrays, scale, mask, extra)
        if self._compared[key]:
            raise AttentionError(self._compared[key])


def _find_problem(arrays: tuple[mx.array, ...], scale: float, mask: Any, extra: Mapping[str, Any]) -> str:
    """Why the engine's attention is not the library's; empty if it is. `arrays`: queries, keys, values."""
    library = mx.fast.scaled_dot_product_attention
    queries, keys, values = arrays
    found = attention.attend_plain(queries, keys, values, scale, mask, **extra)
    own = library(*arrays, scale=scale, mask=mask, **extra)
    wide = {name: widen(value) for name, value in extra.items()}
    exact = library(*map(widen, arrays), scale=scale, mask=widen(mask), **wide)
    seen = _find_seen(exact, mask)
    difference, rounding = (measure_rms(array, exact, seen) for array in (found, own))
    limit = max(FACTOR * rounding, get_least(queries.dtype) or 0.0)
    if difference <= limit:
        return ""
    return f"the engine's attention differs by {difference:.1e} from the library's (limit {limit:.1e})"


def _find_seen(exact: mx.array, mask: Any) -> Any:
    """Which queries attend to anything: what the others get is of no use, and may be NaN."""
    if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
        return np.ones(exact.shape[:-1], dtype=np.bool_)
    return np.broadcast_to(np.array(mask.any(axis=-1)), exact.shape[:-1])


def measure_rms(found: mx.array, exact: mx.array, seen: Any) -> float:
    """The root mean square of differences over the rows that `seen` selects, in units of that of `exact`."""
    wanted = np.array(exact.astype(mx.float32))[seen]
    difference = np.array(found.astype(mx.float32))[seen] - wanted
    return float(np.sqrt(np.square(difference).mean() / (np.square(wanted).mean() + 1e-30)))
