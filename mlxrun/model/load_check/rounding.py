"""Decides which differences of logits are rounding.

In half precision, the library's model is also computed in float32. The difference of both is rounding, and a
method may differ as much from float32. So a limit never depends on the compared method. In float32 the limit
is fixed. If the GPU shortens float32, it follows from two methods of the library itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.model.hooks.derived_layers import forget_view
from mlxrun.model.hooks.quantized_layers import list_modules

CheckLogits = dict[tuple[int, int], mx.array]  # logits [V], lazy, by prompt and step

# Largest difference of logits, in units of their standard deviation, that counts as rounding whatever was
# measured; in half precision only where nothing better is known (images, quantized rows).
TOLERANCE = {mx.float32: 5e-3, mx.bfloat16: 0.25, mx.float16: 0.1}
# At least so many times the rounding that was measured, at most so many times TOLERANCE.
NOISE_FACTOR, MAX_TOLERANCE = 2.0, 4.0
# Of the root mean square of differences over the vocabulary. The median of n rows of logits may be
# 1 + SPREAD / sqrt(n) times the library's. In a mixture of experts, rounding chooses other experts at times,
# and rows differ by chance. If the logarithms of the library's rows have a standard deviation s, that of the
# ratio of two medians is 1.253 * sqrt(2) * s / sqrt(n). CHANCE is three times that factor. A single row may
# be WORST_FACTOR times the library's worst, at most MOST_WORST; but OWN_FACTOR times is always allowed. Below
# LEAST and LEAST_WORST, it is rounding.
SPREAD, CHANCE, WORST_FACTOR, OWN_FACTOR = 1.5, 5.3, 3.0, 2.0
LEAST = {mx.bfloat16: 4e-3, mx.float16: 5e-4}
LEAST_WORST = {mx.bfloat16: 0.06, mx.float16: 0.015}
MOST_WORST = {mx.bfloat16: 0.25, mx.float16: 0.1}
LARGE = 1 << 20  # bytes of a parameter for which it is worth to wait


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """`difference`: of logits, in their standard deviations. `limit`: the largest one that is rounding."""

    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # false for NaN

    @property
    def ratio(self) -> float:
        """The difference in units of the limit."""
        if math.isnan(self.difference):
            return math.inf
        return self.difference / self.limit if self.limit else math.inf


class LowPrecisionRounding:
    """Compares logits of half precision with those of float32. `library`: logits of the library's model in
    half precision; `exact`: in float32, with the same keys."""

    def __init__(self, dtype: mx.Dtype, library: CheckLogits, exact: CheckLogits) -> None:
        self._dtype = dtype
        self._exact = dict(exact)
        self._own = measure_rows(library, exact)

    def add(self, library: CheckLogits, exact: CheckLogits) -> None:
        """Add rows of logits."""
        self._exact |= exact
        self._own |= measure_rows(library, exact)

    def compare(self, found: CheckLogits) -> LogitDifference:
        """The statistic of `found` that is nearest to its limit, or farthest beyond it."""
        rows = measure_rows(found, self._exact)
        same = [self._own[key] for key in rows]
        return compare_rows(list(rows.values()), same, max(self._own.values()), self._dtype)


def compare_rows(
    found: Sequence[float], own: Sequence[float], worst: float, dtype: mx.Dtype
) -> LogitDifference:
    """Compare what rows of logits differ from float32, by a method (`found`) and by the library (`own`).
    `worst`: of all rows by the library. The statistic that is nearest to its limit, or farthest beyond it."""
    usual, root = np.maximum(own, LEAST[dtype]), math.sqrt(len(own))
    factor = max(1 + SPREAD / root, math.exp(CHANCE * float(np.log(usual).std()) / root))
    most = min(max(WORST_FACTOR * worst, LEAST_WORST[dtype]), MOST_WORST[dtype])
    comparisons = (
        LogitDifference(float(np.median(found)), factor * float(np.median(usual))),
        LogitDifference(float(np.max(found)), max(most, OWN_FACTOR * worst)),
    )
    return max(comparisons, key=lambda comparison: comparison.ratio)


def measure_rows(logits: CheckLogits, expected: CheckLogits) -> dict[tuple[int, int], float]:
    """The root mean square of the differences of each row of logits, in standard deviations of `expected`."""
    found, wanted = _stack(logits, expected)
    differences = np.sqrt(np.square(found - wanted).mean(axis=1)) / (wanted.std(axis=1) + 1e-9)
    return dict(zip(logits, differences.tolist(), strict=True))


def compare_logits(logits: CheckLogits, expected: CheckLogits) -> float:
    """The largest difference of two sets of logits, in standard deviations of `expected`."""
    found, wanted = _stack(logits, expected)
    return float((np.abs(found - wanted).max(axis=1) / (wanted.std(axis=1) + 1e-9)).max())


def _stack(logits: CheckLogits, expected: CheckLogits) -> tuple[np.ndarray, np.ndarray]:
    found = np.array(mx.stack(list(logits.values())).astype(mx.float32))
    return found, np.array(mx.stack([expected[key] for key in logits]).astype(mx.float32))


@contextmanager
def read_in_float32(model: nn.Module) -> Iterator[None]:
    """Within the block, modules read each half-precision parameter as float32.

    Nothing is stored: a parameter is converted at each use and freed afterwards. A layer with a large
    parameter is evaluated before the next begins, so memory is bounded by the largest one. Packed weights
    stay packed; their scales are converted.
    """
    changed: list[tuple[Any, Any]] = [(module, type(module)) for module in list_modules(model)]
    for module, kind in changed:
        module.__class__ = _derive_class(kind)
    try:
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


@functools.cache
def _derive_class(kind: Any) -> Any:
    """A class of the same name and module, since libraries tell modules apart by them."""

    def get(self: Any, key: str, default: Any = None) -> Any:
        return widen(dict.get(self, key, default))

    def __getitem__(self: Any, key: str) -> Any:
        return widen(dict.__getitem__(self, key))

    members: dict[str, Any] = {"__module__": kind.__module__, "get": get, "__getitem__": __getitem__}
    for name in ("__call__", "as_linear"):
        if hasattr(kind, name):
            members[name] = _make_waiting(getattr(kind, name))
    return type(kind.__name__, (kind,), members)


def _make_waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which evaluates its result if the module has a large parameter of its own."""

    def call_and_wait(self: Any, *given: Any, **more: Any) -> Any:
        result = call(self, *given, **more)
        if any(isinstance(value, mx.array) and value.nbytes >= LARGE for value in self.values()):
            mx.eval(result)
            forget_view(self)
        return result

    return call_and_wait


def widen(value: Any) -> Any:
    """A half-precision array in float32; any other value unchanged."""
    is_short = isinstance(value, mx.array) and value.dtype in (mx.float16, mx.bfloat16)
    return value.astype(mx.float32) if is_short else value
