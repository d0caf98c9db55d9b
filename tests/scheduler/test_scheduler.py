"""The scheduler's rules one by one, over a scripted runner: what a step has, who is next, what is refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxrun.config.settings import SchedulerSettings
from mlxrun.engine.engine import Engine
from mlxrun.errors import ConfigError, Overloaded, PromptTooLong, RequestError
from mlxrun.scheduler.memory_budget import Footprint, MemoryBudget, RequestLimits
from mlxrun.scheduler.policy import build_policy
from mlxrun.scheduler.request import FinishReason, Request, TokenEvent
from mlxrun.scheduler.request_state import RequestState
from mlxrun.scheduler.scheduler import Scheduler
from mlxrun.scheduler.step_plan import SampledToken, StepPlan, StepResult
from tests.helpers.engine_fakes import (
    Answers,
    Clock,
    FakeRunner,
    answer,
    finish_all,
    make_engine,
    make_request,
    merge_events,
    small,
    token_at,
)

POLICIES = ("fcfs", "priority", "shortest", "fair")


def chunks(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.request_id, c.start, c.stop) for c in plan.prefill]


def all_chunks(runner: FakeRunner, rid: str = "a") -> list[list[tuple[int, int]]]:
    """Chunks of one request, step by step."""
    steps = [[(c.start, c.stop) for c in plan.prefill if c.request_id == rid] for plan in runner.plans]
    return [step for step in steps if step]


def run(*requests: Request, **options: Any) -> tuple[FakeRunner, Answers]:
    """Answer these requests, all sent before the first step."""
    runner = FakeRunner(memory=options.get("memory"))
    engine = make_engine(runner, **options)
    for request in requests:
        engine.add(request)
    answers = finish_all(engine)
    assert runner.broken == []
    assert runner.rows == {}
    return runner, answers


def ends(answers: Answers, engine: Engine, steps: int) -> list[str]:
    """Step; ids in the order in which they ended."""
    order: list[str] = []
    for _ in range(steps):
        events = engine.step()
        answers.take(events)
        order += [e.request_id for e in events if e.finish]
    return order


# -- a request's life -----------------------------------------------------------------------------------


def test_one_request_step_by_step() -> None:
    """Chunks, then one token a step; tokens are known one step after they were launched."""
    runner = FakeRunner()
    engine = make_engine(runner)
    request = make_request("a", size=10, max_tokens=3)
    engine.add(request)
    tokens, _ = answer(request)
    news = [[(e.tokens, e.num_computed_tokens, e.finish) for e in engine.step()] for _ in range(6)]
    assert news == [
        [((), 9, None)],
        [],
        [(tokens[:1], 10, None)],
        [(tokens[1:2], 10, None)],
        [(tokens[2:], 10, FinishReason.LENGTH)],
        [],
    ]
    assert chunks(runner.plans[0]) == [("a", 0, 4), ("a", 4, 8), ("a", 8, 9)]
    assert [plan.decode for plan in runner.plans] == [(), ("a",), ("a",), ("a",), (), ()]
    assert [plan.free for plan in runner.plans] == [(), (), (), (), (), ("a",)]
    assert not engine.busy


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize(
    ("size", "spans"),
    [
        (1, ()),
        (1, ((0, 1),)),
        (2, ()),
        (4, ()),
        (5, ((2, 5),)),  # ends in an image
        (9, ((0, 9),)),  # nothing but an image
        (13, ((1, 3), (3, 7), (12, 13))),
    ],
)
def test_any_prompt_gets_its_answer(size: int, spans: Any, max_tokens: int) -> None:
    """Prompts of one token and prompts that end in an image have no token to hand to decode."""
    requests = [make_request(rid, size, max_tokens, image_spans=spans) for rid in "ab"]
    runner, answers = run(*requests)
    for request in requests:
        assert answers.got(request.id) == answer(request)
    last = all_chunks(runner)[-1][-1][1]
    assert last == (size if size == 1 or (spans and spans[-1][1] == size) else size - 1)


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_stop_id_ends_the_answer_and_is_no_part_of_it(size: int, at: int) -> None:
    """Requests stop at their own stop ids; the token that was launched after it is dropped."""
    plain = make_request("a", size, 8)
    prompt = plain.prompt
    stop = next(
        p for p in range(size + at, size + 9) if token_at(prompt, p) not in answer(plain)[0][: p - size]
    )
    request = replace(plain, params=replace(plain.params, stop_ids=frozenset([token_at(prompt, stop)])))
    _, answers = run(request, make_request("b", 5, 20))
    assert answers.got("a") == answer(request)
    assert answers.finish("a") is (FinishReason.STOP if stop < size + 8 else FinishReason.LENGTH)


def test_the_context_ends_an_answer() -> None:
    """Prompt and answer together hold at most the context."""
    request = make_request("a", 10, 100)
    _, answers = run(request, context=16)
    assert answers.got("a") == (answer(request)[0][:6], FinishReason.LENGTH)


def test_events_carry_logprobs_where_asked() -> None:
    _, answers = run(make_request("a", 5, 3, logprobs=0), make_request("b", 5, 3))
    assert [lp.logprob for e in answers.events["a"] for lp in e.logprobs] == [-5.0, -6.0, -7.0]
    assert not any(e.logprobs for e in answers.events["b"])


def test_events_merge_into_one() -> None:
    """The collector's slot holds the sum of the news."""
    first = TokenEvent("a", (1, 2), num_computed_tokens=8, num_cached_tokens=4)
    merged = merge_events(first, TokenEvent("a", (3,), num_computed_tokens=6, finish=FinishReason.STOP))
    assert merged == TokenEvent(
        "a", (1, 2, 3), num_computed_tokens=8, num_cached_tokens=4, finish=FinishReason.STOP
    )


# -- chunks and budgets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "budget", "whole", "expected"),
    [
        ((), 12, True, [[(0, 4), (4, 8), (8, 12)], [(12, 16), (16, 19)]]),
        (
            (),
            2,
            False,
            [
                [(0, 2)],
                [(2, 4)],
                [(4, 6)],
                [(6, 8)],
                [(8, 10)],
                [(10, 12)],
                [(12, 14)],
                [(14, 16)],
                [(16, 18)],
                [(18, 19)],
            ],
        ),
        ((), 6, True, [[(0, 4)], [(4, 8)], [(8, 12)], [(12, 16)], [(16, 19)]]),
        # An image over the grid moves the boundary to its start; one at the start of a chunk, to its end.
        (((3, 6),), 12, True, [[(0, 3), (3, 6), (6, 8), (8, 12)], [(12, 16), (16, 19)]]),
        (((4, 8),), 12, True, [[(0, 4), (4, 8), (8, 12)], [(12, 16), (16, 19)]]),
        (((3, 6), (6, 9)), 12, True, [[(0, 3), (3, 6), (6, 9), (9, 12)], [(12, 16), (16, 19)]]),
        # One that is larger than the budget goes in one piece and alone.
        (((2, 18),), 12, True, [[(0, 2)], [(2, 18)], [(18, 19)]]),
        (((2, 18),), 5, False, [[(0, 2)], [(2, 18)], [(18, 19)]]),
        # A budget below the chunk ends inside an image: the chunk ends before it.
        (
            ((5, 8),),
            3,
            False,
            [
                [(0, 3)],
                [(3, 4)],
                [(4, 5)],
                [(5, 8)],
                [(8, 11)],
                [(11, 12)],
                [(12, 15)],
                [(15, 16)],
                [(16, 19)],
            ],
        ),
    ],
)
def test_chunks_lie_on_the_grid(spans: Any, budget: int, whole: bool, expected: Any) -> None:
    """Boundaries at multiples of the chunk counted from 0, never inside an image."""
    settings = small(prefill_budget=budget, prefill_budget_busy=budget)
    runner, answers = run(make_request("a", 20, 1, image_spans=spans), settings=settings, whole=whole)
    assert all_chunks(runner) == expected
    assert answers.finish("a") is FinishReason.LENGTH


def test_the_grid_is_the_same_whatever_else_runs() -> None:
    """With whole chunks a prompt is cut at the same places alone and in company."""
    request = make_request("a", 37, 1, image_spans=((6, 11),))
    alone, _ = run(request, whole=True)
    others = [make_request(f"b{i}", 3 + 5 * i, 9) for i in range(6)]
    for policy in POLICIES:
        together, _ = run(*others[:3], request, *others[3:], settings=small(policy=policy), whole=True)
        assert sum(all_chunks(together), []) == sum(all_chunks(alone), [])


def test_decode_never_waits_for_prefill_and_prefill_never_stops() -> None:
    """Both sides of the bound, on every step of a long prompt among rows that decode."""
    runner = FakeRunner()
    engine = make_engine(runner)
    for rid in "ab":
        engine.add(make_request(rid, 3, 60))
    for _ in range(3):
        engine.step()
    engine.add(make_request("long", 200, 2))
    first = len(runner.plans)
    finish_all(engine)
    busy = [plan for plan in runner.plans[first:] if plan.prefill]
    assert len(busy) == 25  # 199 tokens, 8 a step
    assert all(plan.decode == ("a", "b") for plan in busy)
    assert all(0 < sum(stop - start for _, start, stop in chunks(plan)) <= 8 for plan in busy)


@pytest.mark.parametrize(
    ("decoding", "waiting", "most"), [(0, 1, 24), (1, 1, 8), (5, 3, 8), (3, 5, 12), (2, 5, 20), (1, 9, 24)]
)
def test_the_budget_follows_who_decodes_and_who_waits(decoding: int, waiting: int, most: int) -> None:
    """Beside rows that decode `prefill_budget_busy`, and more in proportion if more prompts wait; never
    more than `prefill_budget`."""
    runner = FakeRunner()
    engine = make_engine(runner, small(max_running=12, prefill_budget=24))
    for i in range(decoding):
        engine.add(make_request(f"d{i}", 3, 50))
    for _ in range(2 if decoding else 0):
        engine.step()
    for i in range(waiting):
        engine.add(make_request(f"w{i}", 50, 2))
    engine.step()
    assert len(runner.plans[-1].decode) == decoding
    assert sum(stop - start for _, start, stop in chunks(runner.plans[-1])) == most


# -- who is next ----------------------------------------------------------------------------------------

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
    runner, _ = run(*CROWD, settings=small(policy=policy, max_running=1))
    assert "".join(runner.admissions) == order


@pytest.mark.parametrize(
    ("policy", "first"), [("fcfs", "a"), ("priority", "b"), ("shortest", "b"), ("fair", "b")]
)
def test_policies_order_prompts_that_run(policy: str, first: str) -> None:
    """Also between chunks. A short, urgent request of another key comes when a long one has begun."""
    runner = FakeRunner()
    engine = make_engine(runner, small(policy=policy))
    engine.add(make_request("a", 60, 2, priority=1, fairness_key="x"))
    engine.add(make_request("c", 60, 2, priority=1, fairness_key="y"))
    engine.step()
    engine.add(make_request("b", 5, 2, priority=0, fairness_key="z"))
    engine.step()
    engine.step()
    assert [rid for plan in runner.plans[1:] for rid, *_ in chunks(plan)][0] == (
        "c" if policy == "fair" else first
    )
    assert first in [rid for plan in runner.plans[1:] for rid, *_ in chunks(plan)]


def test_fair_gives_no_credit_for_idle_time() -> None:
    """A key that comes late starts level with the one that got least, not at nothing."""
    policy = build_policy("fair")
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


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'fcsf' is not one of fcfs, priority, shortest, fair"):
        build_policy("fcsf")


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
    """Ten times more work than there are rows for; all become overdue, and go by arrival."""
    steps = crowded(small(policy=policy, aging=10.0, max_running=2))
    assert steps is not None and steps < 80


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_where_memory_is_short(policy: str) -> None:
    """An overdue prompt is not preempted when rows grow, or it would begin again for ever."""
    memory = MemoryBudget(limit=160, transient=1, footprint=Footprint(per_token=1, step=1))
    settings = small(policy=policy, aging=10.0, max_running=6, prefill_budget=4, prefill_budget_busy=4)
    steps = crowded(settings, memory, every=5)
    assert steps is not None and steps < 150


@pytest.mark.parametrize(("policy", "starves"), [("fcfs", False), ("priority", True), ("shortest", True)])
def test_without_aging_the_last_one_waits_for_ever(policy: str, starves: bool) -> None:
    """What the tests above would miss if aging did nothing."""
    assert (crowded(small(policy=policy, aging=0.0, max_running=2)) is None) == starves


def test_waiting_requests_keep_their_order_in_line() -> None:
    """One that does not fit is not overtaken by smaller ones behind it."""
    memory = MemoryBudget(limit=120, footprint=Footprint(per_token=1, step=1))
    runner, answers = run(
        make_request("a", 30, 4), make_request("big", 50, 4), make_request("b", 3, 4), memory=memory
    )
    assert runner.admissions == ["a", "big", "b"]
    assert ["big" in plan.decode for plan in runner.plans].index(True) > 4


# -- what is refused ------------------------------------------------------------------------------------


def test_a_full_queue_is_overloaded() -> None:
    """The request after `max_queue` waiting ones is refused, and taken once there is room."""
    engine = make_engine(settings=small(max_running=1, max_queue=2))
    engine.add(make_request("r", 3, 8))
    engine.step()
    engine.add(make_request("a"))
    engine.add(make_request("b"))
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        engine.add(make_request("c"))
    assert Overloaded.http_status == 429
    answers = Answers()
    while answers.finish("r") is None:
        answers.take(engine.step())
    answers.take(engine.step())  # a has the row now
    engine.add(make_request("c"))
    finish_all(engine, answers)
    assert all(answers.got(rid) == answer(make_request(rid)) for rid in "abc")


@pytest.mark.parametrize("size", [16, 17, 500])
def test_a_prompt_longer_than_the_context_is_refused_with_numbers(size: int) -> None:
    """At least one token must be left for the answer."""
    engine = make_engine(context=16)
    with pytest.raises(PromptTooLong, match=f"{size} tokens.*16") as caught:
        engine.add(make_request("a", size))
    assert (caught.value.http_status, caught.value.code) == (400, "context_length_exceeded")
    engine.add(make_request("a", 15))
    assert finish_all(engine).tokens("a") == answer(make_request("a", 15))[0][:1]


def test_what_could_never_fit_is_refused_with_the_sum() -> None:
    """Only what does not fit alone is refused, and the error shows why."""
    memory = MemoryBudget(3_000_000, 1_000_000, 0, Footprint(per_token=10_000, step=1))
    engine = make_engine(memory=memory)
    with pytest.raises(PromptTooLong) as caught:
        engine.add(make_request("a", 100))
    assert caught.value.code == "out_of_memory"
    assert "weights 1.0 MB + 101 tokens 2.0 MB" in str(caught.value)
    assert "> limit 3.0 MB" in str(caught.value)
    engine.add(make_request("a", 99))
    assert finish_all(engine).got("a") == (answer(make_request("a", 99))[0][:1], FinishReason.LENGTH)


def test_an_image_that_cannot_be_computed_in_memory_is_refused() -> None:
    """An image goes in one piece, so all of its transients must fit."""
    memory = MemoryBudget(limit=200, transient=2, footprint=Footprint(per_token=1, step=1))
    engine = make_engine(FakeRunner(memory=memory), memory=memory)
    engine.add(make_request("text", 60))
    with pytest.raises(PromptTooLong, match="can never fit in memory"):
        engine.add(make_request("image", 60, image_spans=((5, 50),)))
    assert finish_all(engine).finish("text") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (make_request("a", 0), "empty"),
        (make_request("a", 5, 0), "max_tokens"),
        (make_request("twin", 5), "'twin' is already running"),
    ],
)
def test_requests_that_cannot_run_are_refused(request_: Request, match: str) -> None:
    """And leave nothing behind."""
    engine = make_engine()
    engine.add(make_request("twin"))
    with pytest.raises(RequestError, match=match):
        engine.add(request_)
    assert finish_all(engine).got("twin") == answer(make_request("twin"))
    engine.add(make_request("twin"))  # the id is free again
    assert finish_all(engine).got("twin") == answer(make_request("twin"))


# -- memory ---------------------------------------------------------------------------------------------


def test_footprint_rounds_up_and_windows_stop_growing() -> None:
    """The arithmetic that admission stands on."""
    footprint = Footprint(per_token=3, fixed=100, windows=((8, 5), (20, 1)), step=4)
    assert [footprint.compute_row_bytes(n) for n in (0, 1, 4, 5, 9, 100)] == [100, 136, 136, 172, 188, 460]


def test_memory_counts_the_longest_row_twice() -> None:
    """Joining the batch, or moving to another group, copies a row."""
    budget = MemoryBudget(limit=100, weights=10, transient=2, footprint=Footprint(per_token=1, step=1))
    assert budget.compute_needed_bytes([5, 20, 7], 4) == 10 + 32 + 20 + 8
    assert budget.fits([5, 20, 7], 4) and budget.fits([5, 20, 7], 19) and not budget.fits([5, 20, 7], 20)
    assert MemoryBudget().fits([10**12], 10**12)


@pytest.mark.parametrize("piece", [0, 4, 30])
def test_longest_is_the_last_length_that_fits(piece: int) -> None:
    """Found by halving; checked against trying each."""
    for limit in range(40, 300, 7):
        budget = MemoryBudget(limit, 10, 2, Footprint(per_token=1, fixed=3, windows=((6, 2),), step=4))
        fitting = [n for n in range(2, 60) if budget.fits([n], min(n, piece))]
        if 2 in fitting:
            assert budget.find_max_length(2, 59, piece) == max(fitting)


def test_max_tokens_does_not_count_against_memory() -> None:
    """An answer that may become long is admitted beside others; if it does, somebody waits."""
    memory = MemoryBudget(limit=572, footprint=Footprint(per_token=1, step=1))
    requests = [make_request("a", 5, 180), make_request("b", 5, 280)]
    runner, answers = run(*requests, memory=memory)
    assert [a.request.id for a in runner.plans[0].admit] == ["a", "b"]
    assert [answers.got(r.id) for r in requests] == [answer(r) for r in requests]


def test_a_row_is_admitted_with_room_for_an_answer() -> None:
    """So that rows are not preempted as soon as they have begun."""
    memory = MemoryBudget(limit=85, footprint=Footprint(per_token=1, step=1))
    runner, answers = run(make_request("a", 10, 30), make_request("b", 10, 30), memory=memory)
    assert runner.admissions == ["a", "b"]
    assert not any(plan.clear_pool for plan in runner.plans)
    assert answers.finish("b") is FinishReason.LENGTH


@pytest.mark.parametrize("seed", range(60))
def test_the_sum_is_never_over_the_limit(seed: int) -> None:
    """A fake allocator that counts what is in the rows, over crowds that do not fit together."""
    draw = random.Random(seed)
    footprint = Footprint(
        draw.randint(1, 3), draw.choice([0, 9]), draw.choice([(), ((12, 2),)]), draw.choice([1, 4])
    )
    budget = draw.choice([4, 12, 80])
    settings = small(
        policy=draw.choice(POLICIES),
        chunk=draw.choice([4, 80]),
        prefill_budget=max(budget, 80),
        prefill_budget_busy=budget,
        max_running=6,
    )
    requests = []
    for rid in "abcdefgh":
        size = draw.randint(1, 60)
        image = draw.randint(0, size - 1)
        spans = draw.choice([(), ((image, min(size, image + 25)),)])
        tokens = draw.choice([5, 40])
        requests.append(
            make_request(rid, size, tokens, image_spans=spans, priority=draw.randint(0, 1), fairness_key=rid)
        )
    transient = draw.choice([0, 1, 4])
    least = 20 + 2 * footprint.compute_row_bytes(100) + transient * 64
    memory = MemoryBudget(draw.randint(least, 2 * least), 20, transient, footprint)
    runner, answers = run(*requests, settings=settings, memory=memory)
    assert [answers.got(r.id) for r in requests] == [answer(r) for r in requests]
    assert runner.peak > memory.limit // 2


def test_where_memory_is_short_the_budget_shrinks_first() -> None:
    """Order of what gives way: the budget of the step, then those who wait, then rows."""
    footprint = Footprint(per_token=1, step=1)
    settings = small(chunk=256, prefill_budget=512, prefill_budget_busy=512)
    sizes = {}
    for limit in (0, 1200, 950, 700):
        memory = MemoryBudget(limit, 0, 1, footprint)
        runner = FakeRunner(memory=memory if limit else None)
        engine = make_engine(runner, settings, memory=memory)
        engine.add(make_request("a", 300, 1))
        answers = finish_all(engine)
        assert answers.got("a") == answer(make_request("a", 300, 1))
        assert runner.broken == []
        sizes[limit] = [sum(stop - start for _, start, stop in chunks(p)) for p in runner.plans if p.prefill]
    assert sizes == {0: [299], 1200: [299], 950: [256, 43], 700: [64, 64, 64, 64, 43]}


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_outgrow_the_memory_wait_and_go_on_with_the_same_tokens(policy: str) -> None:
    """Load costs time, never quality; the sum never passes the limit."""
    memory = MemoryBudget(
        limit=260, weights=20, transient=1, footprint=Footprint(per_token=1, fixed=2, step=4)
    )
    requests = [
        make_request(rid, 10 + i, 60, priority=i % 2, fairness_key=rid) for i, rid in enumerate("abcd")
    ]
    runner, answers = run(*requests, memory=memory, settings=small(policy=policy))
    assert all(answers.got(r.id) == answer(r) for r in requests)
    assert len(runner.admissions) > 4
    assert 220 < runner.peak <= 260


def test_the_least_urgent_youngest_row_gives_way() -> None:
    """And the pool of free buffers is given back in the same step."""
    memory = MemoryBudget(limit=125, footprint=Footprint(per_token=1, step=1))
    runner, _ = run(
        make_request("a", 10, 40, priority=1),
        make_request("b", 10, 40, priority=0),
        make_request("c", 10, 40, priority=1),
        memory=memory,
        settings=small(prefill_budget=40),
    )
    preempting = [plan for plan in runner.plans if plan.clear_pool]
    assert [plan.free for plan in preempting[:2]] == [("c",), ("a",)]
    assert not any(plan.clear_pool for plan in runner.plans[:3])
    assert {"a", "b", "c"} == set(runner.admissions)


def test_a_token_under_way_counts_though_its_row_gives_way() -> None:
    """It was computed on all that the row held, so nothing of it is computed again. One that comes
    back in the same step draws it again, and a new request with that id has nothing to do with it."""
    engine = make_engine(FakeRunner())
    scheduler, answers = engine.scheduler, Answers()
    long, other = make_request("a", 10, 30), make_request("b", 9, 30)
    engine.add(long)
    while len(answers.tokens("a")) < 3:
        answers.take(engine.step())
    (entry,) = scheduler.requests
    assert (entry.kv_length, entry.num_tokens, entry.num_in_flight) == (13, 13, 1)
    scheduler._preempt(entry)
    scheduler._admit = lambda order: ()  # type: ignore[method-assign]
    answers.take(engine.step())
    assert len(answers.tokens("a")) == 4 and entry.num_in_flight == 0 and not entry.running
    del scheduler._admit  # type: ignore[method-assign]
    while len(answers.tokens("a")) < 6:
        answers.take(engine.step())
    scheduler._preempt(entry)  # admitted in the same step
    answers.take(engine.step())
    assert len(answers.tokens("a")) == 6
    scheduler.abort("a")
    engine.add(replace(other, id="a"))
    scheduler._admit = lambda order: ()  # type: ignore[method-assign]
    assert engine.step() == []
    del scheduler._admit  # type: ignore[method-assign]
    again = finish_all(engine)
    assert again.tokens("a") == answer(other)[0]
    assert answers.tokens("a") == answer(long)[0][:6]


def test_a_lone_row_may_fill_the_memory() -> None:
    """What fits alone ends, cut where the memory ends; it is never preempted for itself."""
    memory = MemoryBudget(limit=200, weights=20, transient=1, footprint=Footprint(per_token=1, step=1))
    request = make_request("a", 10, 500)
    runner, answers = run(request, memory=memory)
    assert answers.got("a") == (answer(request)[0][:78], FinishReason.LENGTH)  # 2 * 88 + 4 = 180
    assert runner.admissions == ["a"]


# -- aborts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("after", range(9))
def test_abort_frees_the_row_in_the_next_step(after: int, size: int) -> None:
    """At any point: no further chunk, no further token, one final event, and the row is named."""
    runner = FakeRunner()
    engine = make_engine(runner)
    other = make_request("b", 12, 9)
    engine.add(make_request("a", size, 4))
    engine.add(other)
    answers = Answers()
    for _ in range(after):
        answers.take(engine.step())
    ended, had = answers.finish("a"), answers.tokens("a")
    before = len(runner.plans)
    engine.abort("a")
    engine.abort("a")
    finish_all(engine, answers)
    assert runner.broken == []
    assert answers.got("a") == (had, ended or FinishReason.ABORT)
    assert answers.got("b") == answer(other)
    later = runner.plans[before:]
    assert not any("a" in plan.decode or any(rid == "a" for rid, *_ in chunks(plan)) for plan in later)
    freed = [plan.free.count("a") for plan in runner.plans]
    assert sum(freed) == (0 if after == 0 else 1)
    if after and ended is None:
        assert later[0].free == ("a",)


def test_abort_of_an_unknown_request_does_nothing() -> None:
    """It may have left the table already."""
    engine = make_engine()
    engine.abort("nobody")
    assert not engine.busy


def test_an_id_can_be_used_again_at_once() -> None:
    """The token that was under way for the aborted request is not taken for the new one's."""
    for after in range(1, 8):
        runner = FakeRunner()
        engine = make_engine(runner)
        engine.add(make_request("a", 6, 9))
        for _ in range(after):
            engine.step()
        engine.abort("a")
        fresh = Request("a", (1, 2, 3), make_request(max_tokens=3).params)
        engine.add(fresh)
        first, answers = engine.step(), Answers()
        assert first[0].finish is FinishReason.ABORT
        answers.take(first[1:])
        assert finish_all(engine, answers).got("a") == answer(fresh)
        assert runner.broken == []


# -- cost -----------------------------------------------------------------------------------------------


class Counted(list[int]):
    """A list that counts how many of its items are read by copying or iterating."""

    read = 0

    def __iter__(self) -> Any:
        Counted.read += len(self)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        Counted.read += 1
        return super().__getitem__(index)


def calls(work: Callable[[], None]) -> int:
    """Calls of functions, Python's and C's, while `work` runs."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def decode_all(scheduler: Scheduler) -> None:
    while scheduler.busy:
        plan = scheduler.schedule()
        scheduler.update(plan, StepResult({rid: SampledToken(1) for rid in plan.decode}))


def test_a_long_answer_costs_the_same_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 tokens take four times the calls of 1,000, and nobody copies the answer so far."""
    monkeypatch.setattr(Counted, "read", 0)
    cost = {}
    for length in (1000, 4000):
        scheduler = Scheduler(small(), RequestLimits(10_000), clock=Clock())
        scheduler.add(make_request("a", 10, length))
        scheduler.requests[0].output = output = Counted()
        cost[length] = calls(lambda s=scheduler: decode_all(s))
        assert len(output) == length
    assert 3.9 * cost[1000] < cost[4000] < 4.1 * cost[1000]
    assert Counted.read == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("late", [False, True])
def test_a_step_costs_the_same_for_each_request(policy: str, late: bool) -> None:
    """Four times the rows and the queue, overdue or not: four times the calls (a step sorts in C)."""
    cost = {}
    for count in (50, 200):
        clock = Clock()
        settings = small(policy=policy, max_running=count, max_queue=2 * count, prefill_budget=10 * count)
        scheduler = Scheduler(settings, RequestLimits(10_000), clock=clock)
        for number in range(2 * count):
            scheduler.add(make_request(f"r{number}", 10, 50, fairness_key=str(number)))
        scheduler.update(plan := scheduler.schedule(), StepResult())
        assert len(plan.admit) == count
        clock.now += 100 * late
        cost[count] = calls(scheduler.schedule)
    assert cost[200] < 4.5 * cost[50]
