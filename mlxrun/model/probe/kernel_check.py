"""Compares the attention kernel with the library's attention, for each shape that a model calls it with.

The probe's prompts are shorter than a page, and nobody has seen the kernel on every GPU. So rows of random
numbers that end on both sides of a page are attended to by both; a row must give the same bits alone; and the
kernel must not be the slower one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.hooks.score_rule import ScoreRule, attend_arrays
from mlxrun.model.kv.paged.attention_kernel import PagedRows, attend_pages
from mlxrun.model.kv.paged.kernel_source import PAGE
from mlxrun.model.kv.paged.paged_cache import Attend
from mlxrun.model.probe.attention_check import FACTOR, SPREAD, get_least, measure_rms
from mlxrun.model.probe.float32_reads import widen

LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 68, 0)  # tokens of the rows; 0: a dummy row
ALONE = 4  # the row that is computed by itself too
TIMED_ROWS, TIMED_TOKENS, TIMED_CALLS = 16, 4 * PAGE, 8
SLOWER = 1.5  # times the library's time that the kernel may take


class KernelError(RuntimeError):
    """The kernel computes something else than the library, or takes longer."""


class KernelCheck:
    """`attend_pages`, which is compared when it is called with a new shape. KernelError if it differs."""

    def __init__(self, attend: Attend = attend_pages, timed: bool = True) -> None:
        self._attend = attend
        self._timed = timed
        self._compared: set[tuple[Any, ...]] = set()

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, rows: PagedRows, rule: ScoreRule
    ) -> mx.array:
        shape = (*queries.shape[1:], *keys.shape[1:], *values.shape[1:])
        form = (rule.window, rule.cap, rule.sinks is None, rule.positions is None)
        key = (*shape, queries.dtype, keys.dtype, *form)
        if key not in self._compared:
            self._compared.add(key)
            self._compare(_RandomRows((queries, keys, values), rule, LENGTHS))
        return self._attend(queries, keys, values, rows, rule)

    def _compare(self, given: _RandomRows) -> None:
        found = self._attend(*given.arrays, given.rows, given.rule)
        exact = given.attend_by_library(wide=True)
        rounding = measure_rms(given.attend_by_library(), exact, slice(None))
        difference = measure_rms(found[:-1], exact, slice(None))
        limit = max(FACTOR * rounding, get_least(given.arrays[0].dtype) or 0.0)
        if not difference <= limit:
            raise KernelError(f"attention differs by {difference:.1e} from the library's (limit {limit:.1e})")
        alone = given.select(ALONE)
        only = self._attend(*alone.arrays, alone.rows, alone.rule)
        if not mx.array_equal(only[0], found[ALONE]).item():
            raise KernelError("attention of a row depends on the rows beside it")
        if self._timed:
            self._compare_times(given)

    def _compare_times(self, given: _RandomRows) -> None:
        many = _RandomRows(given.arrays, given.rule, (TIMED_TOKENS,) * TIMED_ROWS)
        queries, keys, values = many.arrays
        plain_keys, plain_values = (
            mx.contiguous(a.reshape(-1, TIMED_TOKENS, *a.shape[1:])[:TIMED_ROWS].swapaxes(1, 2))
            for a in (keys[PAGE:], values[PAGE:])
        )
        mx.eval(plain_keys, plain_values)
        mask = (mx.arange(TIMED_TOKENS)[None] >= mx.zeros((TIMED_ROWS, 1), dtype=mx.int32))[:, None, None]
        library = _measure(lambda: attend_arrays(queries, plain_keys, plain_values, mask, many.rule))
        own = _measure(lambda: self._attend(*many.arrays, many.rows, many.rule))
        if own > SLOWER * library:
            raise KernelError(f"attention takes {own * 1e6:.0f} us, the library's {library * 1e6:.0f} us")


class _RandomRows:
    """Random rows of these lengths, with the shapes and types of the given queries, keys and values."""

    def __init__(
        self, like: tuple[mx.array, mx.array, mx.array], rule: ScoreRule, lengths: tuple[int, ...]
    ) -> None:
        random = np.random.default_rng(5)
        counts = [-(-n // PAGE) for n in lengths]
        pages = random.permutation(sum(counts)) + 1  # in no order, as in a pool that has been used
        self._tables = np.zeros((len(lengths), max(counts)), dtype=np.int32)
        for row, count in enumerate(counts):
            self._tables[row, :count], pages = pages[:count], pages[count:]
        self._lengths = lengths
        sizes = (len(lengths), *[(sum(counts) + 1) * PAGE] * 2)
        made = [_make_random(n, array, seed) for seed, (n, array) in enumerate(zip(sizes, like, strict=True))]
        spread = SPREAD / (abs(rule.scale) * like[0].shape[-1] ** 0.5)
        self.arrays = ((made[0] * spread).astype(like[0].dtype), made[1], made[2])
        if rule.positions is not None:
            rule = replace(rule, positions=_make_random(len(lengths), rule.positions, 3))
        self.rule = rule
        self.rows = _make_rows(self._tables, lengths)
        mx.eval(self.arrays, rule.positions)

    def attend_by_library(self, wide: bool = False) -> mx.array:
        """Attention of each row that has tokens by the library, over its own keys in order. `wide`: in
        float32."""
        queries, keys, values = (widen(array) for array in self.arrays) if wide else self.arrays
        outputs = []
        for row, tokens in enumerate(self._lengths):
            if tokens:
                first = 0 if self.rule.window is None else max(tokens - self.rule.window, 0)
                at = np.arange(first, tokens)
                places = mx.array(self._tables[row, at // PAGE] * PAGE + at % PAGE)
                own_keys, own_values = (a[places].swapaxes(0, 1)[None] for a in (keys, values))
                rule = replace(self.rule, window=None)
                if rule.positions is not None:
                    rule = replace(rule, positions=rule.positions[row : row + 1])
                if wide:
                    rule = replace(rule, positions=widen(rule.positions), sinks=widen(rule.sinks))
                outputs.append(attend_arrays(queries[row : row + 1], own_keys, own_values, None, rule))
        return mx.concatenate(outputs)

    def select(self, index: int) -> _RandomRows:
        """One of the rows."""
        alone = object.__new__(_RandomRows)
        alone._lengths, alone._tables = self._lengths[index : index + 1], self._tables[index : index + 1]
        alone.arrays = (self.arrays[0][index : index + 1], self.arrays[1], self.arrays[2])
        alone.rule = self.rule
        if self.rule.positions is not None:
            alone.rule = replace(self.rule, positions=self.rule.positions[index : index + 1])
        alone.rows = _make_rows(alone._tables, alone._lengths)
        return alone


def _make_random(size: int, like: mx.array, seed: int) -> mx.array:
    return mx.random.normal((size, *like.shape[1:]), key=mx.random.key(seed)).astype(like.dtype)


def _make_rows(tables: np.ndarray[Any, np.dtype[np.int32]], lengths: tuple[int, ...]) -> PagedRows:
    return PagedRows(mx.array(tables), mx.array(lengths, dtype=mx.int32))


def _measure(compute: Callable[[], mx.array]) -> float:
    """Seconds of a call, the least of three times."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        mx.eval([compute() for _ in range(TIMED_CALLS)])
        times.append(time.perf_counter() - start)
    return min(times[1:]) / TIMED_CALLS
