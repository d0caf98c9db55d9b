"""Pools of pages, and numbers of a step: computed from those of the last one, or made anew, they are what was
asked for."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from mlxrun.model.kv.paged import paged_cache
from mlxrun.model.kv.paged.paged_cache import FEWEST, PagePool, StepNumbers
from mlxrun.model.kv.ragged.row_group import RowKeysValues


def _read(array: mx.array) -> list[int]:
    assert array.dtype == mx.int32
    numbers: list[int] = array.tolist()
    return numbers


def test_any_sequence_of_steps_gives_the_numbers_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "MOST_STEPS", 5)
    rng, numbers = random.Random(0), StepNumbers()
    values, rows, dummies = [3, 9], 2, 0
    for _ in range(2000):
        kind = rng.randrange(12)
        if kind == 0:  # rows join or leave
            rows, dummies = rng.randrange(1, 7), rng.randrange(3)
            values = rng.choices(range(100), k=rows)
        elif kind == 1:  # a row begins a page, or gives drafts back
            values[rng.randrange(rows)] = rng.randrange(100)
        elif kind == 2:  # nothing was sampled
            pass
        else:
            values = [n + 1 for n in values]
        received = [*values, *[0] * dummies]
        found = _read(numbers.follow(received, rows))
        assert found == received + [0] * (FEWEST - len(received))


def test_steps_of_growing_rows_take_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, made = StepNumbers(), []
    make = mx.array
    monkeypatch.setattr(paged_cache.mx, "array", lambda *a, **k: made.append(a) or make(*a, **k))
    for step in range(20):
        numbers.follow([5 + step, 700 + step, 0], 2)
    assert len(made) == 2  # the first numbers, and what a step adds
    numbers.follow([25, 512, 0], 2)
    assert len(made) == 3


def test_numbers_that_nobody_asks_for_make_no_endless_graph() -> None:
    numbers, depth = StepNumbers(), 0
    last = numbers.follow([1], 1)
    for step in range(2, 2000):
        new = numbers.follow([step], 1)
        depth = 0 if numbers._steps == 0 else depth + 1
        assert depth <= paged_cache.MOST_STEPS
        last = new
    assert _read(last)[0] == 1999


def write_row(tokens: int) -> tuple[float, bool]:
    """The memory that writing a row into a pool takes meanwhile, in units of its keys, and whether the pool
    has the row then."""
    keys, values = (mx.random.normal((1, 8, tokens, 64), key=mx.random.key(seed)) for seed in (1, 2))
    pool, row = PagePool(), RowKeysValues(keys, values, tokens)
    pool.resize(16, row)
    own = mx.arange(tokens) * 3 % pool.num_slots  # in no order
    slots = mx.concatenate([own, own + pool.num_slots])
    mx.eval(pool.arrays, keys, values, slots)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pool.write_rows([row], slots)
    mx.eval(pool.arrays)
    taken, found = (mx.get_peak_memory() - before) / keys.nbytes, pool.read_row(own)
    return taken, bool(mx.array_equal(found.keys, keys) and mx.array_equal(found.values, values))


def test_a_long_row_is_written_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: keys and values together, as those of short rows, whose copy is small."""
    taken, written = write_row(4096)
    assert written and taken < 0.5
    assert write_row(100)[1]
    monkeypatch.setattr(paged_cache, "MOST_TOGETHER", 1 << 30)
    taken, written = write_row(4096)
    assert written and taken > 1.9
