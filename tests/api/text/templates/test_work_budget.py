"""What a budget counts, and when it is used up."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from jinja2.utils import Namespace

from mlxrun.api.text.templates import work_budget
from mlxrun.api.text.templates.work_budget import (
    BASE_BYTES,
    TemplateLimitError,
    WorkBudget,
    apply_limits,
    get_budget,
)


def test_steps_and_bytes_are_counted() -> None:
    budget = WorkBudget(share=0.001)
    for _ in range(BASE_BYTES // 1000 // 32):
        budget.tick()
    with pytest.raises(TemplateLimitError):
        for _ in range(10):
            budget.tick()
    WorkBudget().spend(BASE_BYTES // 2)
    with pytest.raises(TemplateLimitError):
        WorkBudget().spend(BASE_BYTES)
    WorkBudget(characters=10**6).spend(BASE_BYTES)


@pytest.mark.parametrize(
    "value", ["text", 12, [1, 2], {"a": [1, (2, 3)]}, {1: 2}.items(), range(3), Namespace(a="b"), None]
)
def test_values_are_measured_as_they_are_printed(value: Any) -> None:
    budget = WorkBudget()
    assert budget.measure(value) >= len(str(value)) or isinstance(value, range)
    assert budget.measure([value, value]) > 2 * (budget.measure(value) - 32)


def test_measuring_ends_where_the_budget_does() -> None:
    """The value would have 2^200 items."""
    value: Any = [1]
    for _ in range(200):
        value = [value, value]
    assert WorkBudget(share=0.01).measure(value) > BASE_BYTES // 100
    cycle: list[Any] = []
    cycle.append(cycle)
    assert WorkBudget(share=0.01).measure(cycle) > BASE_BYTES // 100


def test_the_clock_is_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(work_budget.time, "thread_time", lambda: read.append(1) or 0.0)
    budget = WorkBudget()
    for _ in range(10_000):
        budget.tick()
    assert 5 < len(read) < 100


def test_each_thread_has_its_own_budget() -> None:
    found: list[WorkBudget] = []
    with apply_limits():
        own = get_budget()
        assert get_budget() is own
        thread = threading.Thread(target=lambda: found.append(get_budget()))
        thread.start()
        thread.join()
        with apply_limits():
            assert get_budget() is not own
        assert get_budget() is own
    assert found[0] is not own and get_budget() is not own
