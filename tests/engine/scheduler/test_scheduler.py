"""The scheduler over a scripted runner: what a step contains, what is refused, how a request ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxrun.core.errors import Overloaded, PromptTooLong, RequestError
from mlxrun.core.memory_budget import Footprint, MemoryBudget, RequestLimits
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.core.step_plan import SampledToken, StepPlan, StepResult
from mlxrun.engine.scheduler.scheduler import Scheduler
from tests.helpers.engine_fakes import (
    Answers,
    Clock,
    FakeRunner,
    compute_answer,
    compute_token,
    finish_all,
    list_chunks,
    make_engine,
    make_request,
    make_settings,
    serve_requests,
)

POLICIES = ("fcfs", "priority", "shortest", "fair")


def all_chunks(runner: FakeRunner, rid: str = "a") -> list[list[tuple[int, int]]]:
    """Chunks of one request, step by step."""
    steps = [[(c.start, c.stop) for c in plan.prefill if c.request_id == rid] for plan in runner.plans]
    return [step for step in steps if step]


# -- a request's life ------------------------------------------------------------------------------------


def test_one_request_step_by_step() -> None:
    """Chunks, then one token per step; tokens are known one step after their launch."""
    runner = FakeRunner()
    engine = make_engine(runner)
    request = make_request("a", size=10, max_tokens=3)
    engine.add(request)
    tokens, _ = compute_answer(request)
    news = [[(e.tokens, e.num_computed_tokens, e.finish) for e in engine.step()] for _ in range(6)]
    assert news == [
        [((), 9, None)],
        [],
        [(tokens[:1], 10, None)],
        [(tokens[1:2], 10, None)],
        [(tokens[2:], 10, FinishReason.LENGTH)],
        [],
    ]
    assert list_chunks(runner.plans[0]) == [("a", 0, 4), ("a", 4, 8), ("a", 8, 9)]
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
    """Prompts of one token and prompts that end in an image have no token for a decode step."""
    requests = [make_request(rid, size, max_tokens, image_spans=spans) for rid in "ab"]
    runner, answers = serve_requests(*requests)
    for request in requests:
        assert answers.get_answer(request.id) == compute_answer(request)
    last = all_chunks(runner)[-1][-1][1]
    assert last == (size if size == 1 or (spans and spans[-1][1] == size) else size - 1)


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_stop_id_ends_the_answer_and_is_not_part_of_it(size: int, at: int) -> None:
    """Requests stop at their own stop ids; the token that was launched after it is dropped."""
    plain = make_request("a", size, 8)
    prompt = plain.prompt
    stop = next(
        p
        for p in range(size + at, size + 9)
        if compute_token(prompt, p) not in compute_answer(plain)[0][: p - size]
    )
    request = replace(plain, params=replace(plain.params, stop_ids=frozenset([compute_token(prompt, stop)])))
    _, answers = serve_requests(request, make_request("b", 5, 20))
    assert answers.get_answer("a") == compute_answer(request)
    ended = stop < size + 8
    assert answers.finish("a") is (FinishReason.STOP if ended else FinishReason.LENGTH)
    stop_id = compute_token(prompt, stop) if ended else None
    assert [event.stop_id for event in answers.events["a"]][-1] == stop_id
    assert all(event.stop_id is None for event in answers.events["a"][:-1] + answers.events["b"])


def test_the_context_ends_an_answer() -> None:
    """Prompt and answer together hold at most the context."""
    request = make_request("a", 10, 100)
    _, answers = serve_requests(request, context=16)
    assert answers.get_answer("a") == (compute_answer(request)[0][:6], FinishReason.LENGTH)


def test_events_carry_logprobs_where_asked() -> None:
    _, answers = serve_requests(make_request("a", 5, 3, logprobs=0), make_request("b", 5, 3))
    assert [lp.logprob for e in answers.events["a"] for lp in e.logprobs] == [-5.0, -6.0, -7.0]
    assert not any(e.logprobs for e in answers.events["b"])


# -- chunks and budgets ----------------------------------------------------------------------------------


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
    settings = make_settings(prefill_budget=budget, prefill_budget_busy=budget)
    runner, answers = serve_requests(
        make_request("a", 20, 1, image_spans=spans), settings=settings, whole=whole
    )
    assert all_chunks(runner) == expected
    assert answers.finish("a") is FinishReason.LENGTH


def test_the_grid_is_the_same_whatever_else_runs() -> None:
    """With aligned chunks a prompt is split in the same way, alone or beside others."""
    request = make_request("a", 37, 1, image_spans=((6, 11),))
    alone, _ = serve_requests(request, whole=True)
    others = [make_request(f"b{i}", 3 + 5 * i, 9) for i in range(6)]
    for policy in POLICIES:
        together, _ = serve_requests(
            *others[:3], request, *others[3:], settings=make_settings(policy=policy), whole=True
        )
        assert sum(all_chunks(together), []) == sum(all_chunks(alone), [])


def test_decode_never_waits_for_prefill_and_prefill_never_stops() -> None:
    """In every step of a long prompt beside decoding rows, both get their share."""
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
    assert all(0 < sum(stop - start for _, start, stop in list_chunks(plan)) <= 8 for plan in busy)


@pytest.mark.parametrize(
    ("decoding", "waiting", "most"), [(0, 1, 24), (1, 1, 8), (5, 3, 8), (3, 5, 12), (2, 5, 20), (1, 9, 24)]
)
def test_the_budget_follows_the_numbers_of_decoding_rows_and_waiting_prompts(
    decoding: int, waiting: int, most: int
) -> None:
    """Beside rows that decode `prefill_budget_busy`, and more in proportion if more prompts wait; never
    more than `prefill_budget`."""
    runner = FakeRunner()
    engine = make_engine(runner, make_settings(max_running=12, prefill_budget=24))
    for i in range(decoding):
        engine.add(make_request(f"d{i}", 3, 50))
    for _ in range(2 if decoding else 0):
        engine.step()
    for i in range(waiting):
        engine.add(make_request(f"w{i}", 50, 2))
    engine.step()
    assert len(runner.plans[-1].decode) == decoding
    assert sum(stop - start for _, start, stop in list_chunks(runner.plans[-1])) == most


# -- what is refused -------------------------------------------------------------------------------------


def test_a_full_queue_is_overloaded() -> None:
    """The request after `max_queue` waiting ones is refused, and taken once there is room."""
    engine = make_engine(settings=make_settings(max_running=1, max_queue=2))
    engine.add(make_request("r", 3, 8))
    engine.step()
    engine.add(make_request("a"))
    engine.add(make_request("b"))
    with pytest.raises(Overloaded, match=r"the queue is full \(2 waiting"):
        engine.add(make_request("c"))
    assert Overloaded.http_status == 429
    answers = Answers()
    while answers.finish("r") is None:
        answers.record(engine.step())
    answers.record(engine.step())  # a has the row now
    engine.add(make_request("c"))
    finish_all(engine, answers)
    assert all(answers.get_answer(rid) == compute_answer(make_request(rid)) for rid in "abc")


@pytest.mark.parametrize("size", [16, 17, 500])
def test_a_prompt_longer_than_the_context_is_refused_with_numbers(size: int) -> None:
    """At least one token must be left for the answer."""
    engine = make_engine(context=16)
    with pytest.raises(PromptTooLong, match=f"{size} tokens.*16") as caught:
        engine.add(make_request("a", size))
    assert (caught.value.http_status, caught.value.code) == (400, "context_length_exceeded")
    engine.add(make_request("a", 15))
    assert finish_all(engine).tokens("a") == compute_answer(make_request("a", 15))[0][:1]


def test_what_could_never_fit_is_refused_with_the_sum() -> None:
    """A request is refused only if it does not fit alone, and the error shows the sum."""
    memory = MemoryBudget(3_000_000, 1_000_000, 0, Footprint(per_token=10_000, step=1))
    engine = make_engine(memory=memory)
    with pytest.raises(PromptTooLong) as caught:
        engine.add(make_request("a", 100))
    assert (caught.value.http_status, caught.value.code) == (400, "context_length_exceeded")
    assert "weights 1.0 MB + 101 tokens 2.0 MB" in str(caught.value)
    assert "> limit 3.0 MB" in str(caught.value)
    engine.add(make_request("a", 99))
    assert finish_all(engine).get_answer("a") == (
        compute_answer(make_request("a", 99))[0][:1],
        FinishReason.LENGTH,
    )


def test_an_image_that_cannot_be_computed_in_memory_is_refused() -> None:
    """An image is computed in one chunk, so all of its transients must fit."""
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
        (make_request("a", 5, -1), "max_tokens"),
        (make_request("twin", 5), "'twin' is already running"),
    ],
)
def test_requests_that_cannot_run_are_refused(request_: Request, match: str) -> None:
    """They leave nothing behind."""
    engine = make_engine()
    engine.add(make_request("twin"))
    with pytest.raises(RequestError, match=match):
        engine.add(request_)
    assert finish_all(engine).get_answer("twin") == compute_answer(make_request("twin"))
    engine.add(make_request("twin"))  # the id is free again
    assert finish_all(engine).get_answer("twin") == compute_answer(make_request("twin"))


# -- aborts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("after", range(9))
def test_abort_frees_the_row_in_the_next_step(after: int, size: int) -> None:
    """At any point: no further chunk, no further token, one final event, and the plan frees the row."""
    runner = FakeRunner()
    engine = make_engine(runner)
    other = make_request("b", 12, 9)
    engine.add(make_request("a", size, 4))
    engine.add(other)
    answers = Answers()
    for _ in range(after):
        answers.record(engine.step())
    ended, had = answers.finish("a"), answers.tokens("a")
    before = len(runner.plans)
    engine.abort("a")
    engine.abort("a")
    finish_all(engine, answers)
    assert runner.broken == []
    assert answers.get_answer("a") == (had, ended or FinishReason.ABORT)
    assert answers.get_answer("b") == compute_answer(other)
    later = runner.plans[before:]
    assert not any("a" in plan.decode or any(rid == "a" for rid, *_ in list_chunks(plan)) for plan in later)
    freed = [plan.free.count("a") for plan in runner.plans]
    assert sum(freed) == (0 if after == 0 else 1)
    if after and ended is None:
        assert later[0].free == ("a",)


def test_abort_of_an_unknown_request_does_nothing() -> None:
    """It may have ended already."""
    engine = make_engine()
    engine.abort("nobody")
    assert not engine.busy


def test_an_id_can_be_used_again_at_once() -> None:
    """A token in flight for the aborted request is not given to the new one."""
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
        answers.record(first[1:])
        assert finish_all(engine, answers).get_answer("a") == compute_answer(fresh)
        assert runner.broken == []


# -- cost ------------------------------------------------------------------------------------------------


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
        scheduler.update(plan, StepResult({rid: (SampledToken(1),) for rid in plan.decode}))


def test_a_long_answer_costs_the_same_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 tokens take four times the calls of 1,000, and nobody copies the answer so far."""
    monkeypatch.setattr(Counted, "read", 0)
    cost = {}
    for length in (1000, 4000):
        scheduler = Scheduler(make_settings(), RequestLimits(10_000), clock=Clock())
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
        settings = make_settings(
            policy=policy, max_running=count, max_queue=2 * count, prefill_budget=10 * count
        )
        scheduler = Scheduler(settings, RequestLimits(10_000), clock=clock)
        for number in range(2 * count):
            scheduler.add(make_request(f"r{number}", 10, 50, fairness_key=str(number)))
        scheduler.update(plan := scheduler.schedule(), StepResult())
        assert len(plan.admit) == count
        clock.now += 100 * late
        cost[count] = calls(scheduler.schedule)
    assert cost[200] < 4.5 * cost[50]


def test_events_say_how_long_a_request_waited() -> None:
    """Until it first ran: a preemption changes nothing."""
    clock = Clock()
    scheduler = Scheduler(make_settings(max_running=1), RequestLimits(1000), clock=clock)
    scheduler.add(make_request("a", 10, 2))
    scheduler.add(make_request("b", 10, 2))
    waited: dict[str, set[float]] = {"a": set(), "b": set()}
    for _ in range(20):
        clock.now += 1
        plan = scheduler.schedule()
        result = StepResult({rid: (SampledToken(1),) for rid in plan.decode})
        for event in scheduler.update(plan, result):
            waited[event.request_id].add(event.queue_seconds)
    assert waited["a"] == {1.0} and len(waited["b"]) == 1 and min(waited["b"]) > 2
    first, later = TokenEvent("a", queue_seconds=3.0), TokenEvent("a")
    assert first.merge_progress(later).queue_seconds == 3.0


def test_an_error_of_an_ended_request_is_not_that_of_the_next_one_with_its_id() -> None:
    """A grammar may fail in a token that was under way when its row was freed."""
    scheduler = Scheduler(make_settings(), RequestLimits(1000))
    scheduler.add(make_request("a"))
    late = StepResult(errors={"a": RequestError("planted")})
    assert scheduler.update(StepPlan(), late) == [] and len(scheduler.requests) == 1
    plan = scheduler.schedule()
    (event,) = scheduler.update(plan, late)
    assert event.finish is FinishReason.ERROR
