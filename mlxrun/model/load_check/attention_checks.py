"""Compares attention with that of the library in float32, on random arrays.

In logits that are all alike, or amid the rounding of half precision, a fault of some percent in attention
disappears. So the engine's attention over plain arrays, and the attention kernel of pages, are compared by
themselves. That is done at each new shape, on arrays whose logits spread.

The load check's prompts are shorter than a page, and the kernel is not tested on every GPU. So its rows end
on both sides of a page, a row must give the same bits alone, and the kernel must not be slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.hooks import engine_attention
from mlxrun.model.hooks.logit_rule import LogitRule, attend_arrays
from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged.attention_kernel import PagedRows, attend_pages
from mlxrun.model.kv.paged.paged_cache import Attend
from mlxrun.model.load_check.rounding import widen
from mlxrun.model.machine.device import may_shorten_float32, warm_device

SPREAD = 2.0  # the standard deviation of logits
# Root mean square of differences, in units of that of the result: so many times that of the library in the
# same precision, and at least so much.
FACTOR = 2.0
LEAST = {mx.float32: 1e-5, mx.float16: 5e-4, mx.bfloat16: 4e-3}
SHORTENED = 2e-3  # of float32, where the GPU multiplies it with the mantissa of float16
LONG = ((1, 5000), (40, 300))  # queries and keys of two more calls for each form of heads: other code
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 68, 0)  # tokens of the kernel's rows; 0: a dummy row
ALONE = 4  # the row that is computed by itself too
TIMED_ROWS, TIMED_TOKENS, TIMED_CALLS = 16, 4 * PAGE, 8
SLOWER = 1.5  # times the library's time that the kernel may take
KernelArguments = tuple[mx.array, mx.array, mx.array | None, PagedRows, LogitRule]


def find_limit(dtype: mx.Dtype, limits: Mapping[mx.Dtype, float]) -> float | None:
    """The limit of this dtype; None for other dtypes."""
    return SHORTENED if dtype == mx.float32 and may_shorten_float32() else limits.get(dtype)


def measure_rms(found: mx.array, exact: mx.array, seen: Any = slice(None)) -> float:
    """The root mean square of differences over the rows that `seen` selects, in units of that of `exact`."""
    wanted = np.array(exact.astype(mx.float32))[seen]
    difference = np.array(found.astype(mx.float32))[seen] - wanted
    return float(np.sqrt(np.square(difference).mean() / (np.square(wanted).mean() + 1e-30)))


def _compare_attention(found: mx.array, own: mx.array, exact: mx.array, seen: Any = slice(None)) -> str:
    """Why attention is not the library's; empty if it is. `own`, `exact`: by the library, in the same
    precision and in float32."""
    difference, rounding = (measure_rms(array, exact, seen) for array in (found, own))
    limit = max(FACTOR * rounding, find_limit(own.dtype, LEAST) or 0.0)
    if difference <= limit:
        return ""
    return f"attention differs by {difference:.1e} from the library's (limit {limit:.1e})"


def _make_random(size: int, like: mx.array, seed: int) -> mx.array:
    return mx.random.normal((size, *like.shape[1:]), key=mx.random.key(seed)).astype(like.dtype)


# -- attention over plain arrays ----------------------------------------------------------------------


class AttentionError(RuntimeError):
    """The engine's attention differs from the library's."""


class AttentionCheck:
    """Called with the arguments of each call of `engine_attention.attend_plain`. AttentionError if the
    results differ for such shapes."""

    def __init__(self) -> None:
        self._compared: dict[tuple[Any, ...], str] = {}  # the problem by kind of call, empty: none

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, **kwargs: Any
    ) -> None:
        if find_limit(queries.dtype, LEAST) is None:
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
    found = engine_attention.attend_plain(queries, keys, values, scale, mask, **extra)
    own = library(*arrays, scale=scale, mask=mask, **extra)
    wide = {name: widen(value) for name, value in extra.items()}
    exact = library(*map(widen, arrays), scale=scale, mask=widen(mask), **wide)
    problem = _compare_attention(found, own, exact, _find_seen(exact, mask))
    return f"the engine's {problem}" if problem else ""


def _find_seen(exact: mx.array, mask: Any) -> Any:
    """Which queries attend to anything: what the others get is of no use, and may be NaN."""
    if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
        return np.ones(exact.shape[:-1], dtype=np.bool_)
    return np.broadcast_to(np.array(mask.any(axis=-1)), exact.shape[:-1])


# -- attention over pages -----------------------------------------------------------------------------


class KernelError(RuntimeError):
    """The kernel differs from the library, or is slower."""


class KernelCheck:
    """`attend_pages`, with a comparison at each new shape. KernelError if the results differ."""

    def __init__(self, attend: Attend = attend_pages, timed: bool = True) -> None:
        self._attend = attend
        self._timed = timed
        self._compared: set[tuple[Any, ...]] = set()

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array | None, rows: PagedRows, rule: LogitRule
    ) -> mx.array:
        joined, like = values is None, (queries, keys, keys if values is None else values)
        shape = (*queries.shape[1:], *keys.shape[1:], *like[2].shape[1:])
        form = (rule.window, rule.cap, rule.sinks is None, rule.positions is None, joined)
        key = (*shape, queries.dtype, keys.dtype, *form)
        if key not in self._compared:
            self._compared.add(key)
            self._compare(RandomRows(like, rule, LENGTHS, joined))
        return self._attend(queries, keys, values, rows, rule)

    def _compare(self, given: RandomRows) -> None:
        found = self._attend(*given.list_arguments())
        exact = given.attend_by_library(wide=True)
        problem = _compare_attention(found[:-1], given.attend_by_library(), exact)
        if problem:
            raise KernelError(problem)
        only = self._attend(*given.select(ALONE))
        if not mx.array_equal(only[0], found[ALONE]).item():
            raise KernelError("attention of a row depends on the rows beside it")
        if self._timed:
            self._compare_times(given)

    def _compare_times(self, given: RandomRows) -> None:
        many = RandomRows(given.arrays, given.rule, (TIMED_TOKENS,) * TIMED_ROWS, given.joined)
        arguments = many.list_arguments()
        warm_device()
        library = measure_seconds(many.arrange_for_library())
        own = measure_seconds(lambda: self._attend(*arguments))
        if own > SLOWER * library:
            raise KernelError(f"attention takes {own * 1e6:.0f} us, the library's {library * 1e6:.0f} us")


class RandomRows:
    """Random rows of these lengths, with the shapes and types of the given queries, keys and values.
    `joined`: the kernel gets keys and values as one array."""

    def __init__(
        self,
        like: tuple[mx.array, mx.array, mx.array],
        rule: LogitRule,
        lengths: tuple[int, ...],
        joined: bool = False,
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
        self.joined = joined
        self._pages = (mx.concatenate(made[1:]), None) if joined else (made[1], made[2])
        mx.eval(self.arrays, self._pages, rule.positions)

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

    def arrange_for_library(self) -> Callable[[], mx.array]:
        """Attention of all rows by the library in one call. They have equal lengths, of whole pages; its keys
        are those of the pages in order of the pool."""
        queries, keys, values = self.arrays
        count, tokens = len(self._lengths), self._lengths[0]
        plain_keys, plain_values = (
            mx.contiguous(a.reshape(-1, tokens, *a.shape[1:])[:count].swapaxes(1, 2))
            for a in (keys[PAGE:], values[PAGE:])
        )
        mx.eval(plain_keys, plain_values)
        mask = (mx.arange(tokens)[None] >= mx.zeros((count, 1), dtype=mx.int32))[:, None, None]
        return lambda: attend_arrays(queries, plain_keys, plain_values, mask, self.rule)

    def list_arguments(self) -> KernelArguments:
        """The arguments of the kernel."""
        return self.arrays[0], *self._pages, self.rows, self.rule

    def select(self, index: int) -> KernelArguments:
        """The arguments of the kernel for one of the rows."""
        one, rule = slice(index, index + 1), self.rule
        if rule.positions is not None:
            rule = replace(rule, positions=rule.positions[one])
        rows = _make_rows(self._tables[one], self._lengths[one])
        return self.arrays[0][one], *self._pages, rows, rule


def _make_rows(tables: np.ndarray[Any, np.dtype[np.int32]], lengths: tuple[int, ...]) -> PagedRows:
    return PagedRows(mx.array(tables), mx.array(lengths, dtype=mx.int32))


def measure_seconds(compute: Callable[[], mx.array]) -> float:
    """Seconds of a call, the least of three times."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        mx.eval([compute() for _ in range(TIMED_CALLS)])
        times.append(time.perf_counter() - start)
    return min(times[1:]) / TIMED_CALLS
