"""Attention to pages: shapes and forms, random rows of them, and what must come out in float64.

Rows have 0 tokens to three pages, in pages of no order; whatever no row may read is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxrun.model.hooks.logit_rule import LogitRule
from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged.attention_kernel import PagedRows, attend_pages

LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 68, 3 * PAGE, 0, 17)
ROUNDING = {mx.float32: 2.0**-23, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Case:
    """`turn_dim`: of rotary parts, in the latent form; 0 in others. `window` 0: all tokens. `cap` 0: none.
    `joined`: keys and values are one array."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    turn_dim: int = 0
    window: int = 0
    sinks: bool = False
    cap: float = 0.0
    joined: bool = False

    def __str__(self) -> str:
        dims = f"{self.key_dim}/{self.value_dim}" + f"+{self.turn_dim}" * bool(self.turn_dim)
        forms = f" window {self.window}" * bool(self.window) + " sinks" * self.sinks + " joined" * self.joined
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return f"{self.heads}:{self.kv_heads} {dims} {dtype}{forms}" + f" cap {self.cap}" * bool(self.cap)


@dataclass(frozen=True)
class Attention:
    """The arguments of `attend_pages`, and the slots that each row attends to."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    rows: PagedRows
    rule: LogitRule
    seen: list[list[int]]
    joined: bool

    def compute(self) -> mx.array:
        pages = (mx.concatenate([self.keys, self.values]), None) if self.joined else (self.keys, self.values)
        return attend_pages(self.queries, *pages, self.rows, self.rule)

    def select(self, row: int) -> Attention:
        """One row, alone."""
        own = slice(row, row + 1)
        positions = None if self.rule.positions is None else self.rule.positions[own]
        rows = PagedRows(self.rows.tables[own], self.rows.lengths[own])
        rule = replace(self.rule, positions=positions)
        return replace(self, queries=self.queries[own], rows=rows, rule=rule, seen=self.seen[own])


def make_attention(case: Case, lengths: tuple[int, ...] = LENGTHS) -> Attention:
    random = np.random.default_rng(5)

    def make(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape, np.float32)).astype(case.dtype)

    tables, seen, total = _place_rows(case, lengths, random)
    slots = [slot for row in seen for slot in row]
    keys, values = (
        np.full((total, case.kv_heads, width), np.nan, np.float32)
        for width in (case.key_dim, case.turn_dim or case.value_dim)
    )
    for array in (keys, values):
        array[slots] = random.standard_normal((len(slots), *array.shape[1:]), np.float32)
    turned = make(len(lengths), case.heads, 1, case.turn_dim) * 0.1 if case.turn_dim else None
    sinks = make(case.heads) if case.sinks else None
    return Attention(
        make(len(lengths), case.heads, 1, case.key_dim),
        mx.array(keys).astype(case.dtype),
        mx.array(values).astype(case.dtype),
        PagedRows(mx.array(tables), mx.array(lengths, dtype=mx.int32)),
        LogitRule(case.key_dim**-0.5, case.window or None, sinks, case.cap, turned),
        seen,
        case.joined,
    )


def _place_rows(
    case: Case, lengths: tuple[int, ...], random: np.random.Generator
) -> tuple[NDArray[np.int32], list[list[int]], int]:
    """The tables, the slots that each row attends to, and the number of all slots. Page 0 is no row's."""
    lows = [max(length - case.window, 0) if case.window else 0 for length in lengths]
    spans = [range(low // PAGE, -(-length // PAGE)) for low, length in zip(lows, lengths, strict=True)]
    count, columns = sum(map(len, spans)), max(map(len, spans))
    columns = 1 << (columns - 1).bit_length()
    free = [int(page) for page in random.permutation(count) + 1]
    tables, seen = np.zeros((len(lengths), columns), np.int32), []
    for row, (low, length, span) in enumerate(zip(lows, lengths, spans, strict=True)):
        pages = {page: free.pop() for page in span}
        for page, place in pages.items():
            tables[row, page % columns] = place
        seen.append([pages[token // PAGE] * PAGE + token % PAGE for token in range(low, length)])
    return tables, seen, (count + 1) * PAGE


def to_float64(array: mx.array) -> NDArray[np.float64]:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def attend_in_float64(given: Attention) -> NDArray[np.float64]:
    """By definition: [rows, heads, D]."""
    queries, rule = to_float64(given.queries)[:, :, 0], given.rule
    keys, values = to_float64(given.keys), to_float64(given.values)
    latent = rule.positions is not None
    width = (keys if latent else values).shape[2]
    result = np.zeros((*queries.shape[:2], width))
    sinks = np.full(queries.shape[1], -np.inf) if rule.sinks is None else to_float64(rule.sinks)
    for row, slots in enumerate(given.seen):
        for head, query in enumerate(queries[row] if slots else ()):
            own = head * keys.shape[1] // queries.shape[1]
            logits = keys[slots, own] @ query * rule.scale
            if rule.positions is not None:
                logits += values[slots, 0] @ to_float64(rule.positions)[row, head, 0]
            if rule.cap:
                logits = rule.cap * np.tanh(logits / rule.cap)
            top = max(logits.max(), sinks[head])
            weights = np.exp(logits - top)
            summed = weights @ (keys if latent else values)[slots, own]
            result[row, head] = summed / (weights.sum() + np.exp(sinks[head] - top))
    return result


def find_problem(case: Case, given: Attention, found: mx.array) -> str | None:
    """How `found` differs from attention in float64 by more than the result's rounding."""
    expected, got = attend_in_float64(given), to_float64(found)[:, :, 0]
    error = np.abs(got - expected).max()
    if not error <= 2 * ROUNDING[case.dtype] * np.abs(expected).max() + 2e-6:  # NaN is a problem
        return f"differs by {error:.2g}"
    return None
