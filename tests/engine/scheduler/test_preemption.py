"""Which background rows are preempted for another request: as few as necessary, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mlxrun.core.memory_budget import Footprint, MemoryBudget, RequestLimits
from mlxrun.core.request import Request
from mlxrun.core.step_plan import CacheHit, SampledToken, StepResult
from mlxrun.engine.scheduler import preemption as module
from mlxrun.engine.scheduler.preemption import Preempt, Preemption, choose_victims, rank_urgency
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache
from mlxrun.engine.scheduler.request_state import RequestState
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.scheduler.token_budget import DECODE_RESERVE
from tests.helpers.engine_fakes import Clock, FakeRunner, finish_all, make_engine, make_request, make_settings
from tests.helpers.examples import count_examples


def background(rid: str, size: int, max_tokens: int = 30, **fields: Any) -> Request:
    return replace(make_request(rid, size, max_tokens, **fields), background=True)


def step(scheduler: Scheduler) -> list[str]:
    """Run a step in which each decoding row gets a token. Returns the requests whose rows were freed."""
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult({rid: (SampledToken(1),) for rid in plan.decode}))
    return list(plan.free)


@dataclass(frozen=True)
class Case:
    """Running rows, in the background or not, and a late request that is not in the background."""

    running: tuple[Request, ...]
    late: Request
    memory: MemoryBudget
    rows: int
    steps: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size, answer = st.sampled_from([2, 4, 12, 40]), st.sampled_from([2, 8, 30])
    running = []
    for number in range(draw(st.integers(1, 6))):
        made = make_request(f"r{number}", draw(size), draw(answer), priority=draw(st.integers(0, 2)))
        running.append(replace(made, background=draw(st.integers(0, 3)) > 0))
    whole = sum(len(r.prompt) + r.params.max_tokens for r in running)
    memory = MemoryBudget(max(whole + draw(st.integers(-20, 100)), 160), 0, 0, Footprint(per_token=1, step=1))
    late = make_request("late", draw(st.integers(2, 70)), draw(answer))
    return Case(tuple(running), late, memory, draw(st.integers(2, 8)), draw(st.integers(1, 4)))


def check(case: Case) -> None:
    """Check which background rows the late request preempted."""
    plain = make_settings(max_running=case.rows, prefill_budget=400, prefill_budget_busy=400)
    scheduler = Scheduler(plain, RequestLimits(300, case.memory), clock=Clock())
    for request in case.running:
        scheduler.add(request)
    for _ in range(case.steps):
        step(scheduler)
    scheduler.add(case.late)
    before = [e for e in scheduler.requests if e.running]
    waits = [e for e in scheduler.requests if not e.running and not e.request.background and e.id != "late"]
    if waits or not _fits(case, before):  # others are before it, or rows are given up for those that run
        return
    late = scheduler.requests[-1]
    assert late.id == "late"
    lengths = {e.id: e.projected_length for e in before}
    wanted = late.projected_length + min(late.remaining_output, DECODE_RESERVE)
    freed = set(scheduler.schedule().free)
    victims = [e for e in before if e.id in freed]

    def enters(rows: Sequence[RequestState]) -> bool:
        sizes = [lengths[e.id] for e in rows] + [wanted]
        return not rows or (len(rows) < case.rows and case.memory.fits(sizes, 0))

    assert all(e.request.background for e in victims)
    live = [e for e in before if not e.request.background]
    assert late.running == enters(live)
    assert not victims or late.running, "rows were preempted in vain"
    for victim in victims:
        rest = [e for e in before if e not in victims or e is victim]
        assert not enters(rest), f"{victim.id} need not have been preempted"
    if victims:
        first = min(rank_urgency(e, False) for e in victims)
        rest = [e for e in before if not e.request.background or rank_urgency(e, False) <= first]
        assert not enters(rest), "less urgent rows would have been enough"


def _fits(case: Case, rows: Sequence[RequestState]) -> bool:
    return len(rows) < 2 or case.memory.fits([e.projected_length for e in rows], 0)


@settings(max_examples=count_examples(300), derandomize=True, deadline=None, phases=[Phase.generate])
@given(case=cases())
def holds(case: Case) -> None:
    check(case)


def test_as_few_rows_as_necessary_are_preempted_and_none_in_vain() -> None:
    """For any rows, memory and urgency."""
    holds()


def _all(rows: Sequence[RequestState], fits: Callable[[Sequence[RequestState]], bool]) -> list[RequestState]:
    return list(rows)[::-1]


def _most_urgent(
    rows: Sequence[RequestState], fits: Callable[[Sequence[RequestState]], bool]
) -> list[RequestState]:
    return choose_victims(list(rows)[::-1], fits)


def _unpruned(
    rows: Sequence[RequestState], fits: Callable[[Sequence[RequestState]], bool]
) -> list[RequestState]:
    count = next(n for n in range(len(rows) + 1) if n == len(rows) or fits(rows[: len(rows) - n]))
    return list(rows)[len(rows) - count :]


@pytest.mark.parametrize("wrong", [_all, _most_urgent, _unpruned])
def test_the_property_sees_a_wrong_choice(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The property fails with a wrong choice of victims."""
    monkeypatch.setattr(module, "choose_victims", wrong)
    with pytest.raises(AssertionError):
        holds()


def test_the_property_sees_rows_preempted_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property fails if rows are preempted before it is known whether that helps."""

    def ask(self: Preemption, entry: RequestState, running: list[RequestState], preempt: Preempt) -> bool:
        for row in [e for e in self._sort_by_urgency(running)[::-1] if e.request.background]:
            if not self._can_run(entry, running):
                running.remove(row)
                preempt(row)
        return self._can_run(entry, running)

    monkeypatch.setattr(Preemption, "preempt_background", ask)
    with pytest.raises(AssertionError):
        holds()


def test_a_batch_continues_beside_a_request_that_does_not_fit() -> None:
    """A live row fills the memory: a request that waits for it does not preempt the batch's rows."""
    memory = MemoryBudget(limit=200, footprint=Footprint(per_token=1, step=1))
    runner = FakeRunner(memory=memory)
    engine = make_engine(runner, make_settings(max_running=8), memory=memory, context=300)
    engine.add(make_request("live", 60, 10))
    engine.add(background("b", 10, 10))
    for _ in range(8):
        engine.step()
    engine.add(make_request("large", 80, 4))
    engine.step()
    assert runner.plans[-1].free == () and "large" not in runner.admissions
    finish_all(engine)
    assert runner.broken == [] and runner.admissions == ["live", "b", "large"]


class Pinning(NoPrefixCache):
    """A prefix cache whose entries are pinned by running rows, and cannot be evicted before these end."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.pinned: set[str] = set()

    @property
    def nbytes(self) -> int:
        return self.each * len(self.pinned)

    def lookup(self, request_id: str, output: Sequence[int], max_tokens: int) -> CacheHit | None:
        self.pinned.add(request_id)
        return None

    def plan_final_snapshots(self, request_id: str, output: Sequence[int], kv_length: int) -> list[Any]:
        self.pinned.discard(request_id)
        return []


def test_entries_pinned_by_preempted_rows_can_be_evicted() -> None:
    """Bytes that are pinned by a background row do not make a live request wait."""
    memory = MemoryBudget(limit=200, footprint=Footprint(per_token=1, step=1))
    scheduler = Scheduler(
        make_settings(), RequestLimits(300, memory), prefix_cache=Pinning(25), clock=Clock()
    )
    for number in range(3):
        scheduler.add(background(f"b{number}", 5, 3))
    step(scheduler)
    assert sum(e.running for e in scheduler.requests) == 3
    scheduler.add(make_request("a", 60, 4))
    freed = step(scheduler)
    assert [e.id for e in scheduler.requests if e.running] == ["b0", "b1", "a"] and freed == ["b2"]
    assert scheduler.num_preemptions == 1


def test_the_most_urgent_row_stays_though_it_does_not_fit() -> None:
    """Else nothing would run, and nothing get smaller."""
    scheduler = Scheduler(make_settings(), RequestLimits(300), clock=Clock())
    for name in "abc":
        scheduler.add(make_request(name, 5, 3))
    step(scheduler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.token_budget, "fits_next_step", lambda rows: False)
        freed = step(scheduler)
    assert freed == ["c", "b"] and scheduler.num_preemptions == 2
