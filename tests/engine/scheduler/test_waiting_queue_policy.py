"""The order in which requests are served: policies, aging, and no overtaking."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxrun.config.settings import SchedulerSettings
from mlxrun.core.memory_budget import Footprint, MemoryBudget
from mlxrun.engine.scheduler.request_state import RequestState
from mlxrun.engine.scheduler.waiting_queue import FairPolicy
from tests.helpers.engine_fakes import (
    Clock,
    FakeRunner,
    list_chunks,
    make_engine,
    make_request,
    make_settings,
    serve_requests,
)

POLICIES = ("fcfs", "priority", "shortest", "fair")


CROWD = (
    make_request("a", 30, 2, priority=1, fairness_key="x"),
    make_request("b", 10, 2, priority=0, fairness_key="x"),
    make_request("c", 20, 2, priority=1, fairness_key="y"),
    make_request("d", 5, 2, priority=0, fairness_key="y"),
)


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", "abcd"), ("priority", "bdac"), ("shortest", "dbca"), ("fair", "acdb")]
)
def test_policies_order_waiting_requests(policy: str, order: str) -> None:
    """Who is admitted when there is one row. `fair`: 29 tokens of x, 19 and 4 of y, then x again."""
    runner, _ = serve_requests(*CROWD, settings=make_settings(policy=policy, max_running=1))
    assert "".join(runner.admissions) == order


@pytest.mark.parametrize(
    ("policy", "first"), [("fcfs", "b"), ("priority", "b"), ("shortest", "b"), ("fair", "b")]
)
def test_policies_order_prompts_that_run(policy: str, first: str) -> None:
    """Also between chunks: a short, urgent request of another key comes after a long one has started."""
    runner = FakeRunner()
    engine = make_engine(runner, make_settings(policy=policy))
    engine.add(make_request("a", 60, 2, priority=1, fairness_key="x"))
    engine.add(make_request("c", 60, 2, priority=1, fairness_key="y"))
    engine.step()
    engine.add(make_request("b", 5, 2, priority=0, fairness_key="z"))
    engine.step()
    engine.step()
    assert [rid for plan in runner.plans[1:] for rid, *_ in list_chunks(plan)][0] == (
        "c" if policy == "fair" else first
    )
    assert first in [rid for plan in runner.plans[1:] for rid, *_ in list_chunks(plan)]


def test_fair_gives_no_credit_for_idle_time() -> None:
    """A late key starts level with the key that got the fewest tokens, not at zero."""
    policy = FairPolicy()
    x, y, z = (RequestState(make_request(key, fairness_key=key), i, 0.0, 100) for i, key in enumerate("xyz"))
    assert policy.sort([x, y]) == [x, y]
    policy.record_served(x, 100)
    policy.record_served(y, 90)
    assert policy.sort([z, y, x]) == [y, z, x]
    policy.record_served(z, 5)
    assert policy.sort([x, y, z]) == [y, z, x]
    assert policy.sort([x, z]) == [z, x]  # y is idle ...
    policy.record_served(z, 50)
    assert policy.sort([x, y, z]) == [x, y, z]  # ... and starts at x's count


def crowded(settings: SchedulerSettings, memory: MemoryBudget | None = None, every: int = 1) -> int | None:
    """Steps until a long, unimportant request ends while every few steps one comes; None: not in 300."""
    clock = Clock()
    runner = FakeRunner(memory=memory)
    engine = make_engine(runner, replace(settings, max_queue=1000), memory=memory, clock=clock)
    engine.add(make_request("new", 3, 20))
    engine.add(make_request("old", 50, 4, priority=9, fairness_key="crowd"))
    for step in range(300):
        clock.now += 1
        if step % every == 0:
            engine.add(make_request(f"n{step}", 3, 20, priority=0, fairness_key=f"k{step}"))
        if any(e.request_id == "old" and e.finish for e in engine.step()):
            assert runner.broken == []
            return step
    assert runner.broken == []
    return None


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves(policy: str) -> None:
    """With ten times more work than rows, all requests become overdue and are served by arrival."""
    steps = crowded(make_settings(policy=policy, aging=10.0, max_running=2))
    assert steps is not None and steps < 80


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_where_memory_is_short(policy: str) -> None:
    """An overdue prompt is not preempted when rows grow, or it would begin again for ever."""
    memory = MemoryBudget(limit=160, transient=1, footprint=Footprint(per_token=1, step=1))
    settings = make_settings(
        policy=policy, aging=10.0, max_running=6, prefill_budget=4, prefill_budget_busy=4
    )
    steps = crowded(settings, memory, every=5)
    assert steps is not None and steps < 150


@pytest.mark.parametrize(("policy", "starves"), [("fcfs", False), ("priority", True), ("shortest", True)])
def test_without_aging_the_last_one_waits_for_ever(policy: str, starves: bool) -> None:
    """Without aging, the tests above would fail."""
    assert (crowded(make_settings(policy=policy, aging=0.0, max_running=2)) is None) == starves


def test_waiting_requests_keep_their_order() -> None:
    """A request that does not fit is not overtaken by smaller ones behind it."""
    memory = MemoryBudget(limit=120, footprint=Footprint(per_token=1, step=1))
    runner, answers = serve_requests(
        make_request("a", 30, 4), make_request("big", 50, 4), make_request("b", 3, 4), memory=memory
    )
    assert runner.admissions == ["a", "big", "b"]
    assert ["big" in plan.decode for plan in runner.plans].index(True) > 4
