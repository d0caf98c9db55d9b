"""Pools of pages, and numbers of a step: computed from those of the last one, or made anew, they are what was
asked for."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged import paged_cache
from mlxrun.model.kv.paged.paged_cache import FEWEST, PagePool, StepNumbers, TokenSlots
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
    own = np.arange(tokens, dtype=np.int32) * 3 % pool.num_slots  # in no order
    slots = TokenSlots.find(own, pool.num_slots)
    mx.eval(pool.arrays, keys, values, slots.array)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pool.write_rows([row], slots)
    mx.eval(pool.arrays)
    taken, found = (mx.get_peak_memory() - before) / keys.nbytes, pool.read_row(mx.array(own))
    return taken, bool(mx.array_equal(found.keys, keys) and mx.array_equal(found.values, values))


def test_a_long_row_is_written_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: keys and values together, as those of short rows, whose copy is small."""
    taken, written = write_row(4096)
    assert written and taken < 0.5
    assert write_row(100)[1]
    monkeypatch.setattr(paged_cache, "MOST_TOGETHER", 1 << 30)
    taken, written = write_row(4096)
    assert written and taken > 1.9


def list_slots(*runs: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.concatenate([np.arange(slot, slot + count, dtype=np.int32) for slot, count in runs])


NOBODY = (0, 1)  # the slot of a token that nobody reads
RUNS = {
    "one": ([(PAGE, 40)], [(0, PAGE, 40)]),
    "two": ([(3 * PAGE, 20), (PAGE + 5, 25)], [(0, 3 * PAGE, 20), (20, PAGE + 5, 25)]),
    "between tokens that nobody reads": (
        [NOBODY, (2 * PAGE, 20), NOBODY, NOBODY, (2 * PAGE + 20, 20), NOBODY],
        [(1, 2 * PAGE, 20), (23, 2 * PAGE + 20, 20)],
    ),
    "many": ([(PAGE + 20 * i, 5) for i in range(8)], []),
    "none": ([NOBODY] * 3, []),
}


def find_run_problem(name: str, joined: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether slices and a scatter write the same."""
    own = list_slots(*RUNS[name][0])
    keys, values = (
        mx.random.normal((1, 2, len(own), 4 * width), key=mx.random.key(width)) for width in (1, 2)
    )
    row = RowKeysValues(keys, keys + 1 if joined else values, len(own))
    pools = []
    for least in (10, 1 << 20):
        monkeypatch.setattr(paged_cache, "RUN_TOKENS", least)
        pools.append(PagePool())
        pools[-1].resize(8, row)
        pools[-1].write_rows([row], TokenSlots.find(own, pools[-1].num_slots))
    found, expected = (
        [a.reshape(-1, 8 * PAGE, *a.shape[1:])[:, PAGE:] for a in pool.arrays] for pool in pools
    )
    same = all(mx.array_equal(*pair).item() for pair in zip(found, expected, strict=True))
    return "" if same and len(found) == 2 - joined else "differs"


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("name", RUNS)
def test_tokens_in_slots_that_follow_each_other_are_copied_as_slices(
    name: str, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_run_problem(name, joined, monkeypatch) == ""
    monkeypatch.setattr(paged_cache, "RUN_TOKENS", 10)
    assert list(TokenSlots.find(list_slots(*RUNS[name][0]), 1000).runs) == RUNS[name][1]


@pytest.mark.parametrize("shift", [(1, 0), (0, 1)])
def test_a_run_that_is_shifted_is_found(shift: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    find = TokenSlots.find

    def mistake(own: Any, num_slots: int) -> TokenSlots:
        slots = find(own, num_slots)
        runs = [(at + shift[0], slot + shift[1], count - shift[0]) for at, slot, count in slots.runs]
        return replace(slots, runs=runs)

    monkeypatch.setattr(TokenSlots, "find", mistake)
    assert find_run_problem("two", True, monkeypatch) == "differs"
