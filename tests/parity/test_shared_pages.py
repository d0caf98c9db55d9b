"""Rows whose prompts begin alike hold what they share once, and still give the ORACLE's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlxrun.core.request import Request
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler import token_budget
from mlxrun.model.kv.paged.page_table import PageTable
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.run import runner
from mlxrun.model.run.compute_methods import ComputeMethods
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo

SHARED, OTHER = (tuple(ids) for ids in text_models.prompts(61, [45, 45]))
COUNT = 14
PAGE = 8  # of use_small_groups
# Two groups that share a beginning, one prompt twice, one that ends with a page, and one that is short.
PROMPTS = [
    *(SHARED + OTHER[i : i + 3 + i] for i in range(4)),
    OTHER[:33] + SHARED[:5],
    OTHER[:33] + SHARED[7:20],
    SHARED + OTHER[1:5],
    SHARED[: 4 * PAGE],
    SHARED[: 4 * PAGE + 1],
    SHARED[:3],
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_driver.use_small_groups(monkeypatch)


def make_engine(zoo: Zoo, family: str = "llama", **options: Any) -> Engine:
    return engine_driver.make_real_engine(zoo.text(family), ComputeMethods("paged"), max_running=8, **options)


def list_asks(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[TimedRequest]:
    asks = [
        engine_driver.make_text_request(str(i), ids, max_tokens=COUNT - i % 3)
        for i, ids in enumerate(prompts)
    ]
    return [TimedRequest(ask, 2 * i) for i, ask in enumerate(asks)]


def get_table(engine: Engine) -> PageTable:
    tables = engine_driver.get_runner(engine)._decoder.batch._tables
    return tables[None]


# deepseek_v3: latent attention; gemma2: a soft cap.
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3", "gemma2"])
@pytest.mark.parametrize("preempted", [0, 3])
def test_answers_are_those_of_each_request_alone(zoo: Zoo, family: str, preempted: int) -> None:
    engine = make_engine(zoo, family)
    each = engine_driver.preempt_every(engine, preempted)
    events = engine_driver.run_requests(engine, list_asks(), each)
    for i, ids in enumerate(PROMPTS):
        engine_driver.check_answer(events[str(i)], zoo.answer(family, ids, COUNT - i % 3))
    assert engine.generation.errors == 0, "rows of a step that fails are computed again"


def test_what_rows_share_is_held_once(zoo: Zoo) -> None:
    most = 0

    def each(step: int) -> None:
        nonlocal most
        table = get_table(engine)
        if len(table._rows) == 6:
            most = max(most, table.used)

    prompts = [(*SHARED, i) for i in range(6)]
    engine = make_engine(zoo)
    engine_driver.run_requests(engine, [TimedRequest(ask.request) for ask in list_asks(prompts)], each)
    shared, own = len(SHARED) // PAGE, 3
    assert 0 < most <= 1 + shared + 6 * own < 6 * (shared + 1)
    assert get_table(engine).used == 1 + len(get_table(engine)._holders) == 1


def count_most_running(zoo: Zoo) -> tuple[int, int]:
    """Rows that decode together of eight with a common beginning, in memory for some four whole ones; and the
    steps in which rows were preempted."""
    prompts = [(*SHARED, i) for i in range(8)]
    engine = make_engine(zoo)
    budget = engine.scheduler.token_budget
    memory = replace(budget._memory, footprint=replace(budget._memory.footprint, step=PAGE))
    budget._memory = replace(memory, limit=memory.compute_needed_bytes([64] * 4, 16))
    most = preempted = 0

    def each(step: int) -> None:
        nonlocal most, preempted
        most = max(most, sum(state.joined for state in engine.scheduler.requests))
        preempted += engine.scheduler.has_rows_to_free and len(engine.scheduler.requests) == len(prompts)

    asks = [TimedRequest(engine_driver.make_text_request(str(i), p)) for i, p in enumerate(prompts)]
    events = engine_driver.run_requests(engine, asks, each)
    for i, ids in enumerate(prompts):
        engine_driver.check_answer(events[str(i)], zoo.answer("llama", ids))
    assert budget.shared_tokens == 0
    return most, preempted


def test_memory_counts_what_rows_share_once(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """So more rows run. The twin counts every row whole."""
    most, preempted = count_most_running(zoo)
    assert most == 8 and not preempted
    monkeypatch.setattr(PagedDecodeBatch, "shared_tokens", 0)
    assert count_most_running(zoo)[0] < 6


def test_few_rows_at_a_time_have_a_copy_of_a_long_prefix(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for a step have none."""
    monkeypatch.setattr(token_budget, "HELD_TOKENS", 2 * len(SHARED))
    engine = make_engine(zoo)
    engine_driver.run_requests(engine, [engine_driver.make_text_request("first", SHARED)])
    held: list[int] = []

    def each(step: int) -> None:
        rows = engine_driver.get_runner(engine)._rows.values()
        held.append(sum(bool(row.cache) for row in rows))

    prompts = [(*SHARED, *OTHER[i : i + 4]) for i in range(8)]
    asks = [TimedRequest(ask.request) for ask in list_asks(prompts)]
    events = engine_driver.run_requests(engine, asks, each)
    assert max(held) == 3
    for i, ids in enumerate(prompts):
        assert events[str(i)].num_cached_tokens > len(SHARED) // 2
        engine_driver.check_answer(events[str(i)], zoo.answer("llama", ids, COUNT - i % 3))


def test_without_a_prefix_cache_nothing_is_shared(zoo: Zoo) -> None:
    methods = ComputeMethods("paged", snapshots=False)
    engine = engine_driver.make_real_engine(zoo.text("llama"), methods, backend="none")
    request = engine_driver.make_text_request("a", SHARED)
    engine.add(request)
    for _ in range(4):
        engine.step()
    assert get_table(engine)._rows and not get_table(engine)._holders


def test_pages_of_other_prompts_are_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: a name that does not cover all tokens before it."""

    def name_by_place(request: Request, adapter: int, grid: int) -> tuple[bytes, ...]:
        return tuple(bytes([i]) for i in range((len(request.prompt) - 1) // PAGE))

    monkeypatch.setattr(runner, "compute_page_keys", name_by_place)
    events = engine_driver.run_requests(make_engine(zoo), list_asks())
    with pytest.raises(AssertionError):
        for i, ids in enumerate(PROMPTS):
            engine_driver.check_answer(events[str(i)], zoo.answer("llama", ids, COUNT - i % 3))


def test_pages_that_are_freed_too_early_are_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: the first row that leaves takes the shared pages with it."""
    remove = PageTable.remove_row

    def remove_all(self: PageTable, rid: str) -> None:
        self._holders.clear()
        remove(self, rid)

    monkeypatch.setattr(PageTable, "remove_row", remove_all)
    with pytest.raises(AssertionError):
        events = engine_driver.run_requests(make_engine(zoo), list_asks())
        for i, ids in enumerate(PROMPTS):
            engine_driver.check_answer(events[str(i)], zoo.answer("llama", ids, COUNT - i % 3))
