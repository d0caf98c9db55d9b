"""What fits in memory: the arithmetic, and which requests wait, shrink a step or are preempted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mlxrun.core.errors import OutOfMemory
from mlxrun.core.memory_budget import Footprint, MemoryBudget, RequestLimits
from mlxrun.core.request import FinishReason
from mlxrun.engine.scheduler import token_budget
from mlxrun.engine.scheduler.request_state import RequestState
from tests.helpers.engine_fakes import (
    Answers,
    FakeRunner,
    compute_answer,
    finish_all,
    list_chunks,
    make_engine,
    make_request,
    make_settings,
    serve_requests,
)

POLICIES = ("fcfs", "priority", "shortest", "fair")


def test_footprint_rounds_up_and_windows_stop_growing() -> None:
    """The arithmetic of admission."""
    footprint = Footprint(per_token=3, fixed=100, windows=((8, 5), (20, 1)), step=4)
    assert [footprint.compute_row_bytes(n) for n in (0, 1, 4, 5, 9, 100)] == [100, 136, 136, 172, 188, 460]


def test_memory_counts_the_longest_row_twice() -> None:
    """Joining the batch, or moving to another group, copies a row."""
    budget = MemoryBudget(limit=100, weights=10, transient=2, footprint=Footprint(per_token=1, step=1))
    assert budget.compute_needed_bytes([5, 20, 7], 4) == 10 + 32 + 20 + 8
    assert budget.fits([5, 20, 7], 4) and budget.fits([5, 20, 7], 19) and not budget.fits([5, 20, 7], 20)
    assert MemoryBudget().fits([10**12], 10**12)


def test_quantized_rows_count_as_such_once_they_decode() -> None:
    """A prompt is computed in full precision, and is in both forms when its row joins the others."""
    footprint = Footprint(per_token=8, step=1, packed_per_token=2, packed_from=4)
    budget = MemoryBudget(limit=1000, weights=10, footprint=footprint)
    assert budget.compute_needed_bytes([20], 0) == 10 + 160 + 40
    assert budget.compute_needed_bytes([], 0, [20, 4, 6]) == 10 + (40 + 32 + 12) + 160
    assert budget.compute_needed_bytes([], 0, [5]) == 10 + 40 + 40, "this step quantizes it"
    assert budget.find_max_length(1, 500, 16) == 99
    assert "99 tokens 990 B" in budget.explain_shortage(99, 16)


def test_more_requests_run_at_once_where_rows_are_quantized() -> None:
    counts = []
    for packed in (None, 1):
        footprint = Footprint(per_token=4, step=1, packed_per_token=packed)
        requests = [make_request(str(i), 10, 30) for i in range(6)]
        runner = FakeRunner()
        engine = make_engine(runner, memory=MemoryBudget(limit=350, footprint=footprint))
        for request in requests:
            engine.add(request)
        answers = finish_all(engine)
        assert [answers.get_answer(r.id) for r in requests] == [compute_answer(r) for r in requests]
        counts.append(max(len(plan.decode) for plan in runner.plans))
    assert counts[1] > counts[0] > 0


def serve_crowd(limit: int, start: int) -> FakeRunner:
    """Serve prompts that are computed together, in memory that holds few of them unquantized."""
    footprint = Footprint(per_token=4, step=1, packed_per_token=1, packed_from=start)
    memory = MemoryBudget(limit=limit, footprint=footprint)
    settings = make_settings(chunk=64, prefill_budget=64, prefill_budget_busy=64)
    runner = FakeRunner(memory=memory)
    engine = make_engine(runner, settings, memory=memory)
    for index in range(8):
        engine.add(make_request(str(index), 20, 3))
    finish_all(engine)
    return runner


@pytest.mark.parametrize("start", [0, 18])
def test_rows_count_in_full_until_a_step_has_quantized_them(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several may join the decode batch at once, beside prompts. The twin counts them as quantized as soon as
    their prompts are computed."""
    limits = range(250, 420, 10)
    assert [serve_crowd(limit, start).broken for limit in limits] == [[]] * len(limits)

    def list_early(states: Sequence[RequestState]) -> tuple[list[int], list[int]]:
        whole = [s.projected_length for s in states if not s.decoding]
        return whole, [s.projected_length for s in states if s.decoding]

    monkeypatch.setattr(token_budget, "list_lengths", list_early)
    assert any(serve_crowd(limit, start).broken for limit in limits)


@pytest.mark.parametrize("chunk", [0, 4, 30])
def test_the_maximum_length_is_the_last_one_that_fits(chunk: int) -> None:
    """The binary search agrees with trying each length."""
    for limit in range(40, 300, 7):
        budget = MemoryBudget(limit, 10, 2, Footprint(per_token=1, fixed=3, windows=((6, 2),), step=4))
        fitting = [n for n in range(2, 60) if budget.fits([n], min(n, chunk))]
        if 2 in fitting:
            assert budget.find_max_length(2, 59, chunk) == max(fitting)


def test_a_limit_is_refused_where_the_shortest_request_is() -> None:
    """A text for its vector is not copied, and needs less."""
    budget = MemoryBudget(0, 10, 2, Footprint(per_token=1, fixed=3, step=4), images=4)
    assert budget.find_start_problem() is budget.find_start_problem(pools=True) is None
    found = set()
    for limit in range(1, 40):
        limited = replace(budget, limit=limit)
        refused = None
        try:
            RequestLimits(100, limited).compute_max_length(make_request("a", 1), 16)
        except OutOfMemory as error:
            refused = str(error).removeprefix("the prompt can never fit in memory: ")
        assert limited.find_start_problem() == refused
        found.add((refused is None, limited.find_start_problem(pools=True) is None))
    assert found == {(False, False), (False, True), (True, True)}
    problem = replace(budget, limit=18).find_start_problem(pools=True)
    assert problem == "weights 6 B + media.memory_bytes 4 B + 1 token 9 B > limit 18 B"
    problem = replace(budget, limit=18, images=0, features=3).find_start_problem(pools=True)
    assert problem == "weights 7 B + cache.image_bytes 3 B + 1 token 9 B > limit 18 B"


def test_max_tokens_does_not_count_against_memory() -> None:
    """An answer that may become long is admitted beside others; if it does, somebody waits."""
    memory = MemoryBudget(limit=572, footprint=Footprint(per_token=1, step=1))
    requests = [make_request("a", 5, 180), make_request("b", 5, 280)]
    runner, answers = serve_requests(*requests, memory=memory)
    assert [a.request.id for a in runner.plans[0].admit] == ["a", "b"]
    assert [answers.get_answer(r.id) for r in requests] == [compute_answer(r) for r in requests]


def test_admission_reserves_memory_for_an_answer() -> None:
    """Otherwise rows would be preempted as soon as they have started."""
    memory = MemoryBudget(limit=85, footprint=Footprint(per_token=1, step=1))
    runner, answers = serve_requests(make_request("a", 10, 30), make_request("b", 10, 30), memory=memory)
    assert runner.admissions == ["a", "b"]
    assert not any(plan.clear_pool for plan in runner.plans)
    assert answers.finish("b") is FinishReason.LENGTH


@pytest.mark.parametrize("seed", range(60))
def test_memory_never_exceeds_the_limit(seed: int) -> None:
    """A fake allocator that counts what is in the rows, over crowds that do not fit together."""
    draw = random.Random(seed)
    footprint = Footprint(
        draw.randint(1, 3), draw.choice([0, 9]), draw.choice([(), ((12, 2),)]), draw.choice([1, 4])
    )
    budget = draw.choice([4, 12, 80])
    settings = make_settings(
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
    runner, answers = serve_requests(*requests, settings=settings, memory=memory)
    assert [answers.get_answer(r.id) for r in requests] == [compute_answer(r) for r in requests]
    assert runner.peak > memory.limit // 2


def test_a_shortage_of_memory_shrinks_the_budget_first() -> None:
    """First the budget of the step shrinks, then requests wait, then rows are preempted."""
    footprint = Footprint(per_token=1, step=1)
    settings = make_settings(chunk=256, prefill_budget=512, prefill_budget_busy=512)
    sizes = {}
    for limit in (0, 1200, 950, 700):
        memory = MemoryBudget(limit, 0, 1, footprint)
        runner = FakeRunner(memory=memory if limit else None)
        engine = make_engine(runner, settings, memory=memory)
        engine.add(make_request("a", 300, 1))
        answers = finish_all(engine)
        assert answers.get_answer("a") == compute_answer(make_request("a", 300, 1))
        assert runner.broken == []
        sizes[limit] = [
            sum(stop - start for _, start, stop in list_chunks(p)) for p in runner.plans if p.prefill
        ]
    assert sizes == {0: [299], 1200: [299], 950: [256, 43], 700: [64, 64, 64, 64, 43]}


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_rows_continue_with_the_same_tokens(policy: str) -> None:
    """Preempted requests get the same tokens, and memory stays within the limit."""
    memory = MemoryBudget(
        limit=260, weights=20, transient=1, footprint=Footprint(per_token=1, fixed=2, step=4)
    )
    requests = [
        make_request(rid, 10 + i, 60, priority=i % 2, fairness_key=rid) for i, rid in enumerate("abcd")
    ]
    runner, answers = serve_requests(*requests, memory=memory, settings=make_settings(policy=policy))
    assert all(answers.get_answer(r.id) == compute_answer(r) for r in requests)
    assert len(runner.admissions) > 4
    assert 220 < runner.peak <= 260


def test_the_least_urgent_youngest_row_is_preempted() -> None:
    """The pool of free buffers is released in the same step."""
    memory = MemoryBudget(limit=125, footprint=Footprint(per_token=1, step=1))
    runner, _ = serve_requests(
        make_request("a", 10, 40, priority=1),
        make_request("b", 10, 40, priority=0),
        make_request("c", 10, 40, priority=1),
        memory=memory,
        settings=make_settings(prefill_budget=40),
    )
    preempting = [plan for plan in runner.plans if plan.clear_pool]
    assert [plan.free for plan in preempting[:2]] == [("c",), ("a",)]
    assert not any(plan.clear_pool for plan in runner.plans[:3])
    assert {"a", "b", "c"} == set(runner.admissions)


def test_a_token_in_flight_counts_although_its_row_is_preempted() -> None:
    """It was computed on all that the row held, so nothing of it is computed again. One that comes
    back in the same step draws it again, and a new request with that id has nothing to do with it."""
    engine = make_engine(FakeRunner())
    scheduler, answers = engine.scheduler, Answers()
    long, other = make_request("a", 10, 30), make_request("b", 9, 30)
    engine.add(long)
    while len(answers.tokens("a")) < 3:
        answers.record(engine.step())
    (entry,) = scheduler.requests
    assert (entry.kv_length, entry.num_tokens, entry.num_in_flight) == (13, 13, 1)
    scheduler.preempt(entry)
    scheduler.admit = lambda order: ()  # type: ignore[method-assign]
    answers.record(engine.step())
    assert len(answers.tokens("a")) == 4 and entry.num_in_flight == 0 and not entry.running
    del scheduler.admit  # type: ignore[method-assign]
    while len(answers.tokens("a")) < 6:
        answers.record(engine.step())
    scheduler.preempt(entry)  # admitted in the same step
    answers.record(engine.step())
    assert len(answers.tokens("a")) == 6
    scheduler.abort("a")
    engine.add(replace(other, id="a"))
    scheduler.admit = lambda order: ()  # type: ignore[method-assign]
    assert engine.step() == []
    del scheduler.admit  # type: ignore[method-assign]
    again = finish_all(engine)
    assert again.tokens("a") == compute_answer(other)[0]
    assert answers.tokens("a") == compute_answer(long)[0][:6]


def test_a_lone_row_may_fill_the_memory() -> None:
    """A lone request ends when the memory is full, and is never preempted for its own growth."""
    memory = MemoryBudget(limit=200, weights=20, transient=1, footprint=Footprint(per_token=1, step=1))
    request = make_request("a", 10, 500)
    runner, answers = serve_requests(request, memory=memory)
    assert answers.get_answer("a") == (
        compute_answer(request)[0][:78],
        FinishReason.LENGTH,
    )  # 2 * 88 + 4 = 180
    assert runner.admissions == ["a"]


def test_a_row_in_two_models_takes_what_it_takes_in_each() -> None:
    one = Footprint(per_token=3, fixed=100, windows=((8, 5),), step=4)
    other = Footprint(per_token=2, fixed=10, windows=((20, 1),), step=4)
    both = one.add(other)
    for tokens in (1, 8, 30):
        assert both.compute_row_bytes(tokens) == one.compute_row_bytes(tokens) + other.compute_row_bytes(
            tokens
        )
    packed = Footprint(per_token=8, step=1, packed_per_token=2).add(Footprint(per_token=4, step=1))
    assert packed.sum_row_bytes([10], decoding=True) == 10 * (2 + 4)


def test_the_most_rows_are_those_that_admission_takes() -> None:
    """The last row joins the others: it and the longest are copied then."""
    memory = MemoryBudget(limit=200, weights=20, transient=1, footprint=Footprint(per_token=1, step=1))
    assert memory.compute_rows_bytes(1, 10, 4) == 20 + 2 * 10 + 4
    assert memory.compute_rows_bytes(3, 10, 4) == 20 + 3 * 10 + 10 + 4
    assert memory.compute_rows_bytes(1, 2, 4) == 20 + 2 * 2 + 2
    rows = memory.find_max_rows(10, 32, 4)
    assert memory.compute_rows_bytes(rows, 10, 4) <= 200 < memory.compute_rows_bytes(rows + 1, 10, 4)
    assert memory.find_max_rows(10, 3, 4) == 3 and memory.find_max_rows(100, 3, 4) == 0
    assert MemoryBudget().find_max_rows(10, 7, 4) == 7
