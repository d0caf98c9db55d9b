"""The prefix cache shrinks before a request waits or a row is preempted, by no more than necessary; and the
budget of prompt tokens beside decoding rows."""

from __future__ import annotations

import pytest

from mlxrun.core.memory_budget import Footprint, MemoryBudget, RequestLimits
from mlxrun.core.step_plan import PrefillChunk, SampledToken, StepCosts, StepPlan, StepResult
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.scheduler.token_budget import TokenBudget
from tests.helpers.engine_fakes import make_request, make_settings

LIMIT = 1000
MEMORY = MemoryBudget(limit=LIMIT, footprint=Footprint(per_token=1, step=1))


class SizedCache(NoPrefixCache):
    """A prefix cache of this many bytes, of which `pinned` cannot be evicted."""

    nbytes = 0

    def __init__(self, nbytes: int, pinned: int = 0) -> None:
        self.nbytes = nbytes
        self.pinned = pinned

    def shrink(self, max_bytes: int) -> None:
        self.nbytes = max(min(self.nbytes, max_bytes), self.pinned)

    def release_pinned_memory(self, max_bytes: int) -> None:
        self.pinned = 0
        self.shrink(max_bytes)


def make_scheduler(cache: SizedCache) -> Scheduler:
    return Scheduler(make_settings(max_running=8), RequestLimits(10_000, MEMORY), prefix_cache=cache)


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult({rid: (SampledToken(7),) for rid in plan.decode}))
    return plan


def running(scheduler: Scheduler) -> list[str]:
    return [entry.id for entry in scheduler.requests if entry.running]


def used(scheduler: Scheduler) -> int:
    return MEMORY.compute_needed_bytes(
        [entry.projected_length for entry in scheduler.requests if entry.running], 0
    )


def test_the_prefix_cache_shrinks_before_a_request_waits() -> None:
    """Two requests that fit beside each other run at once, although the cache filled the memory."""
    cache = SizedCache(LIMIT)
    scheduler = make_scheduler(cache)
    for rid in ("a", "b"):
        scheduler.add(make_request(rid, 200, 50))
    step(scheduler)
    assert running(scheduler) == ["a", "b"]
    assert 0 < cache.nbytes <= LIMIT - used(scheduler)


def test_nothing_is_evicted_if_both_requests_fit() -> None:
    """The cache keeps its size if it fits beside both rows."""
    cache = SizedCache(100)
    scheduler = make_scheduler(cache)
    for rid in ("a", "b"):
        scheduler.add(make_request(rid, 200, 50))
    step(scheduler)
    assert running(scheduler) == ["a", "b"] and cache.nbytes == 100


def test_the_prefix_cache_shrinks_before_a_row_is_preempted() -> None:
    """Growing rows take memory from the cache first: no row is preempted, the sum stays within the limit."""
    cache = SizedCache(400)
    scheduler = make_scheduler(cache)
    for rid in ("a", "b"):
        scheduler.add(make_request(rid, 100, 200))
    seen = []
    while scheduler.busy:
        before, both = used(scheduler), len(scheduler.requests) == 2
        assert not step(scheduler).clear_pool, "no row has to be preempted"
        seen.append(cache.nbytes)
        assert before + cache.nbytes <= LIMIT
        assert not both or len(scheduler.requests) < 2 or running(scheduler) == ["a", "b"]
    assert seen == sorted(seen, reverse=True) and seen[0] > seen[-1] >= LIMIT - 3 * 300


def test_pinned_bytes_count_as_used() -> None:
    """The second request waits until the first has ended and its entries can be evicted."""
    cache = SizedCache(750, pinned=750)
    scheduler = make_scheduler(cache)
    for rid in ("a", "b"):
        scheduler.add(make_request(rid, 100, 5))
    step(scheduler)
    assert running(scheduler) == ["a"]
    for _ in range(30):
        step(scheduler)
        assert len(running(scheduler)) <= 1
    assert not scheduler.requests


def test_chunks_of_deep_prompts_shrink_beside_decoding_rows() -> None:
    """The delay of decoding rows does not grow with the depth of a prompt; a lone prompt keeps its budget."""
    plain, deep = (
        TokenBudget(settings, 512, 512, MemoryBudget(), NoPrefixCache(), costs)
        for settings, costs in (
            (make_settings(chunk=512, prefill_budget=512), StepCosts()),
            (
                make_settings(chunk=512, prefill_budget=4096, prefill_budget_busy=256),
                StepCosts(deep_prompt=1024),
            ),
        )
    )
    depths = (0, 1024, 2048, 16384, 10**6)
    budgets = [deep.compute_prefill_budget([], 16, 1, depth) for depth in depths]
    assert budgets == [256, 256, 128, 16, 4]
    assert deep.compute_prefill_budget([], 0, 1, 16384) == 4096
    assert plain.compute_prefill_budget([], 0, 1, 16384) == 512


def test_a_shortened_chunk_has_one_of_few_lengths() -> None:
    few, any_length = StepCosts(few_lengths=True), StepCosts()
    assert [few.limit_chunk(5000, budget) for budget in (4096, 1500, 1024, 700, 64)] == [
        4096,
        1024,
        1024,
        512,
        64,
    ]
    assert few.limit_chunk(600, 700) == any_length.limit_chunk(5000, 700) == 700


def test_a_scored_prompt_with_one_token_of_output_samples_in_its_last_chunk() -> None:
    costs = StepCosts(max_sampling_chunk=4)
    for max_tokens, scored, most in ((1, 1, 512), (1, None, 4), (2, 1, 4)):
        request = make_request("a", max_tokens=max_tokens, prompt_logprobs=scored)
        assert costs.get_max_sampling_chunk(request, hit=True, lone=False) == most
        assert costs.get_max_sampling_chunk(request, hit=False, lone=True) == 4
        assert costs.get_max_sampling_chunk(request, hit=False, lone=False) == 0


def test_a_draft_needs_a_recurrent_state_for_each_token() -> None:
    memory = MemoryBudget(limit=LIMIT, footprint=Footprint(fixed=100))
    scheduler = Scheduler(make_settings(max_running=8), RequestLimits(10_000, memory))
    scheduler.add(make_request("a", 20, 50))
    step(scheduler)
    (state,) = scheduler.requests
    for count, fits in ((8, True), (9, False)):  # beside the row, which counts twice
        state.draft = (1,) * count
        assert scheduler.token_budget.fits_next_step([state]) is fits


def test_what_decoding_rows_share_counts_once() -> None:
    """As long as the others run: a row that has left shares nothing, which is known a step later."""
    budget = TokenBudget(make_settings(), 16, 16, MEMORY, NoPrefixCache(), StepCosts())
    assert not budget.fits_memory([], 0, decoding=[300, 300, 300])  # the longest row counts twice
    budget.shared_tokens = 500
    assert budget.fits_memory([], 0, decoding=[300, 300, 300])
    assert budget.fits_memory([], 0, decoding=[300, 300, 300, 300])
    assert not budget.fits_memory([300, 300, 300], 0), "rows that do not decode yet have copies"
    assert budget.fits_memory([], 0, decoding=[500])
    assert not budget.fits_memory([], 0, decoding=[501])


@pytest.mark.parametrize("ends", ["abort", "preemption"])
def test_a_row_that_leaves_takes_along_what_it_shared(ends: str) -> None:
    """Else the others would count too little until the runner says what they share."""
    scheduler = Scheduler(make_settings(max_running=8), RequestLimits(10_000, MEMORY))
    for rid in "ab":
        scheduler.add(make_request(rid, 20, 50))
    while not all(state.joined for state in scheduler.requests):
        step(scheduler)
    budget, (last, leaving) = scheduler.token_budget, scheduler.requests
    budget.shared_tokens, length = 50, leaving.projected_length
    if ends == "abort":
        scheduler.abort("b")
    else:
        scheduler.preempt(leaving)
    assert 20 < length < 50 and budget.shared_tokens == 50 - length
    scheduler.abort("a")
    assert budget.shared_tokens == 50 - length - last.projected_length > 0
    budget.record_leaving(last)
    assert budget.shared_tokens == 0


def test_slow_steps_do_not_shrink_chunks_below_what_a_launch_takes() -> None:
    """After a step that took a second: where forwards are bound by their launches, 512 tokens still."""
    for costs, limit in ((StepCosts(), 64), (StepCosts(min_chunk=512), 512)):
        settings = make_settings(chunk=4096, prefill_budget=4096, step_ms=100)
        scheduler = Scheduler(settings, RequestLimits(10_000, MemoryBudget()), costs=costs)
        plan = StepPlan(prefill=(PrefillChunk("a", 0, 512),))
        scheduler.token_budget.pace.record_step(plan, plan, 1.0)
        assert scheduler.token_budget.compute_prefill_budget([], 0, 1) == limit


def test_only_a_prompt_by_itself_has_shorter_steps() -> None:
    """Not one of two that wait, nor one beside a row that decodes."""
    settings = make_settings(chunk=64, prefill_budget=4096, prefill_budget_busy=4096, step_ms=100)
    costs = StepCosts(lone_share=0.25)
    budget = Scheduler(settings, RequestLimits(10_000, MemoryBudget()), costs=costs).token_budget
    plan = StepPlan(prefill=(PrefillChunk("a", 0, 512),))
    budget.pace.record_step(plan, plan, 0.1)
    found = [budget.compute_prefill_budget([], *counts) for counts in ((0, 1), (0, 2), (1, 1))]
    assert found == [128, 512, 512]


def test_pinned_prefixes_give_way_to_a_request_that_runs_alone() -> None:
    """It could never run otherwise. Beside another row it waits, and they stay."""
    cache = SizedCache(500, pinned=500)
    scheduler = make_scheduler(cache)
    scheduler.add(make_request("a", 60, 40))
    scheduler.add(make_request("b", 300, 100))
    step(scheduler)
    assert running(scheduler) == ["a"] and cache.pinned == 500
    while "a" in running(scheduler):
        step(scheduler)
    step(scheduler)
    assert running(scheduler) == ["b"] and cache.pinned == 0
