"""The prefix cache's memory gives way to rows: B16, B18. Whoever could run is not made to wait for what may
be forgotten, and no more is forgotten than that takes."""

from __future__ import annotations

from mlxrun.scheduler.memory_budget import Footprint, MemoryBudget, RequestLimits
from mlxrun.scheduler.prefix_cache_interface import NoPrefixCache
from mlxrun.scheduler.scheduler import Scheduler
from mlxrun.scheduler.step_plan import SampledToken, StepPlan, StepResult
from tests.helpers.engine_fakes import make_request, small

LIMIT = 1000
MEMORY = MemoryBudget(limit=LIMIT, footprint=Footprint(per_token=1, step=1))


class Held(NoPrefixCache):
    """A cache of so many bytes, of which `pinned` cannot go."""

    nbytes = 0

    def __init__(self, nbytes: int, pinned: int = 0) -> None:
        self.nbytes = nbytes
        self.pinned = pinned

    def shrink(self, max_bytes: int) -> None:
        self.nbytes = max(min(self.nbytes, max_bytes), self.pinned)


def made(cache: Held) -> Scheduler:
    return Scheduler(small(max_running=8), RequestLimits(10_000, MEMORY), prefix_cache=cache)


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult({rid: SampledToken(7) for rid in plan.decode}))
    return plan


def running(scheduler: Scheduler) -> list[str]:
    return [entry.id for entry in scheduler.requests if entry.running]


def used(scheduler: Scheduler) -> int:
    return MEMORY.compute_needed_bytes(
        [entry.projected_length for entry in scheduler.requests if entry.running], 0
    )


def test_the_cache_gives_way_before_anybody_waits() -> None:
    """Two requests that fit beside each other run at once, though the cache held all of the memory."""
    cache = Held(LIMIT)
    scheduler = made(cache)
    for rid in ("a", "b"):
        scheduler.add(make_request(rid, 200, 50))
    step(scheduler)
    assert running(scheduler) == ["a", "b"]
    assert 0 < cache.nbytes <= LIMIT - used(scheduler)


def test_no_more_is_forgotten_than_is_needed() -> None:
    """Where there is room for both nothing goes."""
    cache = Held(100)
    scheduler = made(cache)
    for rid in ("a", "b"):
        scheduler.add(make_request(rid, 200, 50))
    step(scheduler)
    assert running(scheduler) == ["a", "b"] and cache.nbytes == 100


def test_the_cache_gives_way_before_a_row_does() -> None:
    """Rows that grow take from the cache first: nobody is preempted, the sum is never too large."""
    cache = Held(400)
    scheduler = made(cache)
    for rid in ("a", "b"):
        scheduler.add(make_request(rid, 100, 200))
    seen = []
    while scheduler.busy:
        before, both = used(scheduler), len(scheduler.requests) == 2
        assert not step(scheduler).clear_pool, "nobody has to go"
        seen.append(cache.nbytes)
        assert before + cache.nbytes <= LIMIT
        assert not both or len(scheduler.requests) < 2 or running(scheduler) == ["a", "b"]
    assert seen == sorted(seen, reverse=True) and seen[0] > seen[-1] >= LIMIT - 3 * 300


def test_what_running_requests_use_is_not_promised_twice() -> None:
    """Bytes that cannot go count. The second waits until the first has ended, then it runs."""
    cache = Held(750, pinned=750)
    scheduler = made(cache)
    for rid in ("a", "b"):
        scheduler.add(make_request(rid, 100, 5))
    step(scheduler)
    assert running(scheduler) == ["a"]
    for _ in range(30):
        step(scheduler)
        assert len(running(scheduler)) <= 1
    assert not scheduler.requests
