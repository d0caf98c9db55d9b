"""The scheduler under any order of adds, aborts, failures and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxrun.core.errors import Overloaded, PromptTooLong
from mlxrun.core.memory_budget import Footprint, MemoryBudget
from mlxrun.core.request import FinishReason, Request
from mlxrun.core.step_plan import StepPlan
from mlxrun.engine.engine import Engine
from tests.helpers.engine_fakes import (
    Answers,
    Clock,
    FakeRunner,
    compute_answer,
    finish_all,
    make_engine,
    make_request,
    make_settings,
)
from tests.helpers.examples import count_examples

pytestmark = pytest.mark.thorough

SIZES = st.integers(1, 40)


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid settings, with memory that is short or unlimited."""
    chunk = draw(st.sampled_from([1, 4, 7, 100]))
    budget = draw(st.integers(chunk, 3 * chunk))
    whole = draw(st.booleans())
    scheduler = make_settings(
        policy=draw(st.sampled_from(["fcfs", "priority", "shortest", "fair"])),
        aging=draw(st.sampled_from([0.0, 5.0])),
        chunk=chunk,
        prefill_budget=budget,
        prefill_budget_busy=draw(st.integers(chunk if whole else 1, budget)),
        max_running=draw(st.integers(1, 5)),
        max_queue=draw(st.integers(1, 6)),
    )
    memory = None
    if draw(st.booleans()):
        windows = ((8, 2),) if draw(st.booleans()) else ()
        footprint = Footprint(per_token=2, fixed=draw(st.integers(0, 20)), windows=windows, step=4)
        transient = draw(st.integers(0, 3))
        memory = MemoryBudget(draw(st.integers(150, 900)), 50, transient, footprint)
    return {"settings": scheduler, "memory": memory, "whole": whole}


@st.composite
def requests(draw: st.DrawFn, rid: str) -> Request:
    size = draw(SIZES)
    spans = []
    at = draw(st.integers(0, 10))
    for _ in range(draw(st.integers(0, 3))):
        end = min(at + draw(st.integers(1, 15)), size)
        if at < end:
            spans.append((at, end))
        at = end + draw(st.integers(0, 4))
    request = make_request(
        rid,
        size,
        draw(st.integers(1, 12)),
        stop_ids=draw(st.sets(st.integers(0, 49), max_size=3)),
        image_spans=tuple(spans),
        priority=draw(st.integers(-1, 1)),
        fairness_key=draw(st.sampled_from("xyz")),
    )
    return replace(request, background=draw(st.booleans()))


class Run:
    """An engine, what was sent to it, and what came back."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.clock = Clock()
        self.runner = FakeRunner(memory=setup["memory"])
        self.engine: Engine = make_engine(self.runner, clock=self.clock, max_errors=10**6, **setup)
        self.answers = Answers()
        self.sent: dict[str, Request] = {}
        self.refused: list[str] = []
        self.runner.before = self._every_row_decodes
        self.budgets: list[int] = []  # of each plan

    def _every_row_decodes(self, plan: StepPlan) -> None:
        """Whatever prefills, the plan decodes each row that is prefilled and has tokens left."""
        entries = {e.id: e for e in self.engine.scheduler.requests}
        self.budgets.append(self._budget(len(plan.decode), len(entries) - len(plan.decode)))
        for rid, row in self.runner.rows.items():
            if rid not in entries or rid in plan.free or row.filled < entries[rid].prefill_target:
                continue
            end = min(entries[rid].max_length, len(row.request.prompt) + row.request.params.max_tokens)
            if row.length < end and rid not in plan.decode:
                self.runner.broken.append(f"{rid} is left out of {plan}")

    def _budget(self, decoding: int, waiting: int) -> int:
        """The maximum of prompt tokens in a step."""
        limits = self.engine.scheduler.settings
        if decoding == 0:
            return limits.prefill_budget
        return min(limits.prefill_budget, limits.prefill_budget_busy * max(waiting, decoding) // decoding)

    def apply(self, call: tuple[Any, ...]) -> None:
        match call:
            case ("add", request):
                try:
                    self.engine.add(request)
                except (Overloaded, PromptTooLong) as error:
                    self.refused.append(f"{request.id}: {error}")
                else:
                    self.sent[request.id] = request
            case ("abort", rid):
                self.engine.abort(rid)
            case ("poison", rid, position):
                self.runner.poison = {**self.runner.poison, rid: position}
            case ("refuse", rid):
                self.runner.refuse = {**self.runner.refuse, rid: ValueError("no image")}
            case ("fail",):
                self.runner.fail_steps = [*self.runner.fail_steps, len(self.runner.plans) + 1]
            case ("wait", seconds):
                self.clock.now += seconds
            case ("step",):
                if self.engine.busy:
                    self.answers.record(self.engine.step())


class SchedulerMachine(RuleBasedStateMachine):
    """All calls of a scheduler, in any order, over a runner that checks each plan."""

    @initialize(setup=setups(), late=st.booleans())
    def start(self, setup: dict[str, Any], late: bool) -> None:
        self.setup = setup
        self.calls: list[tuple[Any, ...]] = []
        self.run_ = Run(setup)
        self.run_.runner.late = self.late = late
        self.count = 0
        self.aborted: set[str] = set()
        self.checked = 0

    def _do(self, *call: Any) -> None:
        self.calls.append(call)
        self.run_.apply(call)

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self._do("add", data.draw(requests(f"r{self.count}")))
        self.count += 1

    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        rid = f"r{index % (self.count + 1)}"
        if any(e.id == rid for e in self.run_.engine.scheduler.requests):
            self.aborted.add(rid)
        self._do("abort", rid)

    @rule(ahead=st.integers(0, 3), position=st.integers(1, 50))
    def poison(self, ahead: int, position: int) -> None:
        """A later or a running request cannot be computed from some position on."""
        self._do("poison", f"r{self.count - ahead}", position)

    @rule()
    def refuse(self) -> None:
        self._do("refuse", f"r{self.count}")

    @rule()
    def fail(self) -> None:
        self._do("fail")

    @rule(seconds=st.integers(0, 6))
    def wait(self, seconds: int) -> None:
        self._do("wait", seconds)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._do("step")

    @precondition(lambda self: hasattr(self, "run_"))
    @invariant()
    def plans_keep_the_rules(self) -> None:
        run = self.run_
        assert run.runner.broken == []
        for plan, budget in list(zip(run.runner.plans, run.budgets, strict=True))[self.checked :]:
            self._check(plan, budget)
        self.checked = len(run.runner.plans)
        entries = run.engine.scheduler.requests
        assert sum(e.running for e in entries) <= self.setup["settings"].max_running
        assert {e.id for e in entries}.isdisjoint(r for r in run.sent if run.answers.finish(r))
        assert all(e.num_in_flight >= 0 and len(e.output) < e.request.params.max_tokens for e in entries)

    def _check(self, plan: StepPlan, budget: int) -> None:
        limits = self.setup["settings"]
        sizes = [c.stop - c.start for c in plan.prefill]
        assert sum(sizes) <= budget or (len(sizes) == 1 and self._is_image(plan))
        for chunk in plan.prefill:
            spans = self.run_.sent[chunk.request_id].image_spans
            over = (chunk.start // limits.chunk + 1) * limits.chunk < chunk.stop
            assert not over or any(s == chunk.start and e == chunk.stop for s, e in spans)
            if self.setup["whole"] and chunk.stop % limits.chunk:
                known = len(self.run_.sent[chunk.request_id].prompt)
                at_image = any(chunk.stop in span for span in spans)
                assert at_image or chunk.stop >= known - 1

    def _is_image(self, plan: StepPlan) -> bool:
        (chunk,) = plan.prefill
        return (chunk.start, chunk.stop) in self.run_.sent[chunk.request_id].image_spans

    def teardown(self) -> None:
        if not hasattr(self, "run_"):
            return
        run = self.run_
        finish_all(run.engine, run.answers)
        self.plans_keep_the_rules()
        assert run.runner.rows == {}
        for rid, request in run.sent.items():
            self._check_end(rid, request)
        again = Run(self.setup)
        again.runner.late = self.late
        for call in self.calls:
            again.apply(call)
        finish_all(again.engine, again.answers)
        assert again.runner.plans == run.runner.plans
        assert again.answers.events.keys() == run.answers.events.keys()
        assert again.refused == run.refused

    def _check_end(self, rid: str, request: Request) -> None:
        run = self.run_
        tokens, finish = run.answers.get_answer(rid)
        scheduler = run.engine.scheduler
        limit = scheduler.limits.compute_max_length(request, scheduler.token_budget.min_chunk)
        right, reason = compute_answer(request, limit)
        assert tokens == right[: len(tokens)]
        assert max(e.num_computed_tokens for e in run.answers.events[rid]) <= len(request.prompt)
        if finish is FinishReason.ABORT:
            assert rid in self.aborted
        elif finish is FinishReason.ERROR:
            assert rid in run.runner.poison or rid in run.runner.refuse or run.runner.fail_steps
        else:
            assert (tokens, finish) == (right, reason)


SchedulerMachine.TestCase.settings = settings(
    max_examples=count_examples(500),
    stateful_step_count=40,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestScheduler = SchedulerMachine.TestCase
