"""Short prompts overtake a long one, and background requests stay behind all others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxrun.core.errors import Overloaded
from mlxrun.core.memory_budget import Footprint, MemoryBudget
from mlxrun.core.request import FinishReason, Request
from mlxrun.core.step_plan import StepPlan
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler.waiting_queue import LONG_TOKENS
from tests.helpers.engine_fakes import FakeRunner, finish_all, make_engine, make_request, make_settings

POLICIES = ("fcfs", "priority", "shortest", "fair")
CHUNK = 8


def busy(policy: str, **fields: Any) -> tuple[FakeRunner, Engine]:
    """Four rows decode, and a prompt of 400 tokens has started."""
    runner = FakeRunner()
    settings = make_settings(policy=policy, chunk=CHUNK, prefill_budget=24, max_running=12, **fields)
    engine = make_engine(runner, settings, context=600)
    for i in range(4):
        engine.add(make_request(f"d{i}", 3, 90))
    for _ in range(3):
        engine.step()
    engine.add(make_request("long", 400, 2))
    engine.step()
    return runner, engine


def prefilled(plan: StepPlan, rid: str | None = None) -> int:
    return sum(c.stop - c.start for c in plan.prefill if rid in (None, c.request_id))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("when", range(4))
def test_a_short_prompt_waits_for_two_chunks_at_most(policy: str, when: int) -> None:
    """With every policy, and whenever it comes."""
    runner, engine = busy(policy)
    for _ in range(when):
        engine.step()
    engine.add(make_request("short", 7, 2))
    before = len(runner.plans)
    for _ in range(4):
        engine.step()
    after = runner.plans[before:]
    done = next(i for i, plan in enumerate(after) if prefilled(plan, "short"))
    assert prefilled(after[done], "short") == 6
    assert sum(prefilled(plan) for plan in after[: done + 1]) <= 2 * CHUNK
    assert all(len(plan.decode) >= 4 for plan in after)
    assert runner.broken == []


def start_long(left: int) -> tuple[FakeRunner, Engine]:
    """A prompt with so many tokens left, all of which one chunk has room for."""
    runner = FakeRunner()
    engine = make_engine(runner, make_settings(chunk=4096, prefill_budget=4096, max_running=4), context=20000)
    engine.add(make_request("long", 4096 + left + 1, 2))
    engine.step()
    return runner, engine


@pytest.mark.parametrize(("left", "overtakes"), [(LONG_TOKENS + 1, True), (LONG_TOKENS, False)])
def test_what_is_left_of_a_long_prompt_is_overtaken(left: int, overtakes: bool) -> None:
    """On CUDA a chunk has thousands of tokens, and a short prompt would wait for all of them."""
    runner, engine = start_long(left)
    engine.add(make_request("short", 41, 2))
    engine.step()
    found = [chunk.request_id for chunk in runner.plans[1].prefill]
    assert found == (["short"] if overtakes else ["long", "short"])


def test_a_first_token_does_not_wait_for_a_chunk_of_a_long_prompt() -> None:
    """A step's tokens come at its end. The long prompt goes on in the next step that launches something."""
    runner, engine = start_long(8000)
    engine.add(make_request("short", 41, 3))
    for _ in range(5):
        engine.step()
    steps = [(plan.decode, prefilled(plan, "long"), prefilled(plan, "short")) for plan in runner.plans[1:]]
    assert steps[:2] == [((), 0, 40), (("short",), 0, 0)]
    assert next(long for _, long, _ in steps[2:] if long) > 0
    assert sum(bool(long) for _, long, _ in steps[2:]) >= 2 and runner.broken == []


def test_rows_that_have_tokens_do_not_hold_prompts() -> None:
    runner, engine = busy("fcfs")
    engine.add(make_request("short", 7, 3))
    for _ in range(6):
        engine.step()
    joins = next(i for i, plan in enumerate(runner.plans) if "short" in plan.decode)
    assert prefilled(runner.plans[joins], "long") == CHUNK


def test_the_head_of_the_queue_keeps_every_other_step() -> None:
    """With a new short prompt in every step, the long one still gets half of the steps."""
    runner, engine = busy("fcfs")
    before = len(runner.plans)
    for i in range(40):
        engine.add(make_request(f"s{i}", 7, 1))
        engine.step()
    steps = runner.plans[before:]
    long = [prefilled(plan, "long") for plan in steps]
    assert long[::2] == [0] * 20 and long[1::2] == [CHUNK] * 20 or long[1::2] == [0] * 20
    assert sum(long) == 20 * CHUNK


def test_short_prompts_are_served_in_the_order_in_which_they_came() -> None:
    """Those that come in each step do not pass one that came before, though they are shorter."""
    runner, engine = busy("fcfs", aging=0)
    engine.add(make_request("other", 31, 2))
    before = len(runner.plans)
    for i in range(16):
        engine.add(make_request(f"s{i}", 7, 1))
        engine.step()
    steps = runner.plans[before:]
    done = max(i for i, plan in enumerate(steps) if prefilled(plan, "other"))
    assert sum(prefilled(plan, "other") for plan in steps) == 30 and done < 9
    assert not any(prefilled(plan, "s1") for plan in steps[: done - 1])


def test_a_prompt_that_is_nearly_as_long_overtakes_nobody() -> None:
    """fcfs stays first come, first served among prompts of similar length."""
    runner, engine = busy("fcfs")
    engine.add(make_request("other", 300, 2))
    for _ in range(10):
        engine.step()
    assert all(prefilled(plan, "other") == 0 for plan in runner.plans)


def test_a_less_urgent_prompt_overtakes_nobody() -> None:
    runner, engine = busy("priority")
    engine.add(make_request("short", 7, 2, priority=1))
    for _ in range(10):
        engine.step()
    assert all(prefilled(plan, "short") == 0 for plan in runner.plans)


def background(rid: str, size: int, max_tokens: int, **fields: Any) -> Request:
    return replace(make_request(rid, size, max_tokens, **fields), background=True)


def test_background_prompts_get_spare_capacity() -> None:
    """A step computes no background prompt while another prompt could use its tokens."""
    runner = FakeRunner()
    engine = make_engine(runner, make_settings(max_running=8))
    engine.add(background("b", 60, 4))
    engine.step()
    engine.add(make_request("a", 40, 4))
    before = len(runner.plans)
    answers = finish_all(engine)
    order = [c.request_id for plan in runner.plans[before:] for c in plan.prefill]
    assert order.index("a") == 0 and "b" not in order[: len([r for r in order if r == "a"])]
    assert {answers.finish(rid) for rid in "ab"} == {FinishReason.LENGTH}


def test_background_rows_are_preempted_for_a_row() -> None:
    """If a batch has all rows, a live request gets one at once, and the batch continues later."""
    runner = FakeRunner()
    engine = make_engine(runner, make_settings(max_running=4))
    for i in range(6):
        engine.add(background(f"b{i}", 5, 30))
    for _ in range(4):
        engine.step()
    assert len(runner.admissions) == 4
    engine.add(make_request("a", 5, 3))
    engine.step()
    assert "a" in runner.admissions and "b3" in runner.plans[-1].free
    answers = finish_all(engine)
    assert all(answers.finish(f"b{i}") is FinishReason.LENGTH for i in range(6))
    assert runner.broken == []


def test_background_rows_are_preempted_for_memory() -> None:
    memory = MemoryBudget(limit=120, transient=1, footprint=Footprint(per_token=1, step=1))
    runner = FakeRunner(memory=memory)
    engine = make_engine(runner, make_settings(max_running=8), memory=memory)
    engine.add(background("b", 40, 8))
    for _ in range(6):
        engine.step()
    engine.add(make_request("a", 40, 4))
    engine.step()
    assert runner.plans[-1].free == ("b",) and runner.admissions[-1] == "a"
    finish_all(engine)
    assert runner.broken == []


def test_background_requests_get_half_of_the_rows_beside_others() -> None:
    """They slow down each step, so beside live rows they get at most half of all rows."""
    runner = FakeRunner()
    engine = make_engine(runner, make_settings(max_running=8))
    engine.add(make_request("a", 3, 60))
    for i in range(8):
        engine.add(background(f"b{i}", 3, 20))
    for _ in range(20):
        engine.step()
    assert max(len(plan.decode) for plan in runner.plans) == 5


def test_live_and_background_requests_are_counted_apart() -> None:
    """A batch does not fill the queue of live requests, and they do not fill that of the batch."""
    engine = make_engine(FakeRunner(), make_settings(max_queue=2))
    for rid in "xy":
        engine.add(background(rid, 5, 2))
    engine.add(make_request("a", 5, 2))
    with pytest.raises(Overloaded):
        engine.add(background("z", 5, 2))
    engine.add(make_request("b", 5, 2))
    with pytest.raises(Overloaded):
        engine.add(make_request("c", 5, 2))


def test_aging_moves_no_background_request_forward() -> None:
    runner = FakeRunner()
    engine = make_engine(runner, make_settings(max_running=1, aging=0.001))
    engine.add(make_request("a", 30, 2))
    engine.add(background("b", 5, 2))
    engine.add(make_request("c", 30, 2))
    finish_all(engine)
    assert "".join(runner.admissions) == "acb"
