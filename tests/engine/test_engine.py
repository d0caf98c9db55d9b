"""The engine over a scripted runner: what happens to requests when the model fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlxrun.config.settings import SchedulerSettings
from mlxrun.core.errors import EngineDead, MediaError, MlxrunError, RequestError
from mlxrun.core.request import FinishReason
from mlxrun.core.step_plan import StepPlan
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler import scheduler
from tests.helpers.engine_fakes import (
    Answers,
    FakeRunner,
    compute_answer,
    finish_all,
    make_engine,
    make_request,
    make_settings,
)

CROWD = [make_request(rid, 3 + 4 * i, 6 + i) for i, rid in enumerate("abcde")]


def error_of(answers: Answers, rid: str) -> MlxrunError:
    error = answers.error(rid)
    assert isinstance(error, MlxrunError)
    return error


def test_a_request_that_cannot_start_fails_alone() -> None:
    """One of three requests has a broken image: it gets the error, and the others are not affected."""
    refused = MediaError("not an image")
    runner = FakeRunner(refuse={"b": refused})
    engine = make_engine(runner)
    for request in CROWD[:3]:
        engine.add(request)
    answers = finish_all(engine)
    assert answers.get_answer("a") == compute_answer(CROWD[0])
    assert answers.get_answer("c") == compute_answer(CROWD[2])
    assert answers.error("b") is refused
    assert runner.resets == 0
    assert runner.broken == []


@pytest.mark.parametrize("error", [TypeError("bad media"), ValueError("odd")])
def test_what_the_runner_raises_becomes_a_request_error(error: Exception) -> None:
    """The error keeps its cause. It has status 500, as the client is not at fault."""
    engine = make_engine(FakeRunner(refuse={"a": error}))
    engine.add(make_request("a"))
    shown = error_of(finish_all(engine), "a")
    assert isinstance(shown, RequestError)
    assert (shown.http_status, shown.code, shown.__cause__) == (500, "model_error", error)
    assert str(error) in str(shown)
    assert RequestError.http_status == 400


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("culprit", range(5))
@pytest.mark.parametrize("position", [1, 4, 18, 22])
def test_one_poisoned_request_fails_alone(culprit: int, position: int, late: bool) -> None:
    """Wherever it breaks (prompt, first token, a later one), also if the device reports it a step late."""
    bad = CROWD[culprit]
    runner = FakeRunner(poison={bad.id: position}, late=late)
    engine = make_engine(runner, make_settings(max_running=5))
    for request in CROWD:
        engine.add(request)
    answers = finish_all(engine)
    assert runner.broken == []
    for request in CROWD:
        tokens, finish = answers.get_answer(request.id)
        right = compute_answer(request)
        if request is not bad:
            assert (tokens, finish) == right
            continue
        reached = len(bad.prompt) + bad.params.max_tokens > position
        assert finish is (FinishReason.ERROR if reached else FinishReason.LENGTH)
        assert tokens == right[0][: len(tokens)]
        if reached:
            assert "a cannot be computed".replace("a", bad.id, 1) in str(error_of(answers, bad.id))


@pytest.mark.parametrize("step", range(1, 16))
def test_a_step_that_fails_once_costs_no_request(step: int) -> None:
    """At every step of a busy engine: all are rebuilt from their tokens, the answers are right."""
    runner = FakeRunner(fail_steps=[step])
    engine = make_engine(runner, make_settings(max_running=3, policy="shortest"))
    for request in CROWD:
        engine.add(request)
    answers = finish_all(engine)
    assert runner.broken == []
    assert runner.resets == 1
    assert [answers.get_answer(r.id) for r in CROWD] == [compute_answer(r) for r in CROWD]


def test_a_late_error_does_not_fail_the_remaining_request() -> None:
    """The failing request was aborted or preempted while its token was in flight."""
    for position in range(2, 12):
        runner = FakeRunner(poison={"b": position}, late=True)
        engine = make_engine(runner)
        answers = Answers()
        for request in CROWD[:2]:
            engine.add(request)
        while runner.trouble is None:
            answers.record(engine.step())
        engine.abort("b")
        finish_all(engine, answers)
        assert runner.resets == 1
        assert answers.get_answer("a") == compute_answer(CROWD[0])
        assert answers.finish("b") is FinishReason.ABORT


def test_two_culprits_in_a_row_do_not_stop_the_engine() -> None:
    """A suspect runs when nothing of the one before is in flight, so one failure is conclusive."""
    runner = FakeRunner(poison={"b": 1, "c": 1})
    engine = make_engine(runner, max_errors=3)
    for request in CROWD[:3]:
        engine.add(request)
    answers = finish_all(engine)
    assert answers.get_answer("a") == compute_answer(CROWD[0])
    assert [answers.finish(rid) for rid in "bc"] == [FinishReason.ERROR] * 2
    assert runner.resets == 3


def test_rows_that_fail_only_together_run_in_smaller_numbers() -> None:
    """As where a device runs out of memory although the budget says that all of them fit."""

    def refuse_three(plan: StepPlan) -> None:
        if len(plan.decode) > 2:
            raise RuntimeError("out of memory")

    runner = FakeRunner(before=refuse_three)
    engine = make_engine(runner, make_settings(max_running=8))
    requests = [make_request(rid, max_tokens=20) for rid in "abcdefgh"]
    for request in requests:
        engine.add(request)
    answers = finish_all(engine)
    assert [answers.get_answer(each.id) for each in requests] == [compute_answer(each) for each in requests]
    assert runner.resets == 2  # with 8 and with 4 rows, and not again


def test_a_failure_leaves_no_step_behind() -> None:
    """The rows are lost already, so no step is needed to free them."""
    engine = make_engine(FakeRunner(poison={"a": 1}))
    engine.add(make_request("a"))
    assert [event.finish for event in engine.step()] == [FinishReason.ERROR]
    assert not engine.busy


def test_requests_that_come_during_a_quarantine_wait_for_its_end() -> None:
    """A suspect runs alone, so that a failure identifies it."""
    runner = FakeRunner(fail_steps=[4])
    engine = make_engine(runner)
    answers = Answers()
    for request in CROWD[:2]:
        engine.add(request)
    for _ in range(4):
        answers.record(engine.step())
    engine.add(CROWD[2])
    finish_all(engine, answers)
    assert runner.admissions == ["a", "b", "a", "b", "a", "b", "c"]
    assert runner.broken == []
    assert [answers.get_answer(r.id) for r in CROWD[:3]] == [compute_answer(r) for r in CROWD[:3]]


@pytest.mark.parametrize("abort", "abc")
@pytest.mark.parametrize("after", range(8))
def test_suspects_can_be_aborted(abort: str, after: int) -> None:
    """At any point of a quarantine; the others go on."""
    runner = FakeRunner(fail_steps=[3])
    engine = make_engine(runner)
    answers = Answers()
    for request in CROWD[:3]:
        engine.add(request)
    for _ in range(3 + after):
        answers.record(engine.step())
    engine.abort(abort)
    finish_all(engine, answers)
    assert runner.broken == []
    for request in CROWD[:3]:
        aborted = answers.finish(request.id) is FinishReason.ABORT
        assert aborted == (request.id == abort)
        assert aborted or answers.get_answer(request.id) == compute_answer(request)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_broken_device_stops_the_engine(
    limit: int, count: int, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """K failed steps without a token between them, with K log lines; requests may come meanwhile."""
    runner = FakeRunner(dead=True, late=late)
    engine = make_engine(runner, max_errors=limit)
    answers = Answers()
    sent = 0
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(EngineDead, match="in a row: the device is gone") as dead,
    ):
        for _ in range(50):
            while len(engine.scheduler.requests) < count:
                sent += 1
                engine.add(make_request(f"r{sent}"))
            answers.record(engine.step())
    assert isinstance(dead.value.__cause__, RuntimeError)
    assert len(caplog.records) == limit
    assert runner.resets == limit
    assert len(runner.plans) <= 4 * limit
    assert all(answers.get_answer(rid) in [((), FinishReason.ERROR), ((), None)] for rid in answers.events)


def test_culprits_of_any_number_leave_others_their_answers() -> None:
    """Each choice of a prompt that cannot be computed fails by itself, beside a request that can be."""
    culprits = [make_request(f"bad{at}", 5, 8) for at in range(8)]
    runner = FakeRunner(poison={each.id: 3 for each in culprits})
    engine = make_engine(runner, make_settings(max_running=16), max_errors=5)
    for request in (CROWD[0], *culprits):
        engine.add(request)
    answers = finish_all(engine)
    assert answers.get_answer(CROWD[0].id) == compute_answer(CROWD[0])
    assert {answers.finish(each.id) for each in culprits} == {FinishReason.ERROR}
    assert 0 < runner.trials < len(culprits)


def test_culprits_one_after_the_other_do_not_stop_an_idle_engine(caplog: pytest.LogCaptureFixture) -> None:
    """The third one makes the engine compute without a request, which shows that it can."""
    names = [f"bad{at}" for at in range(7)]
    runner = FakeRunner(poison=dict.fromkeys(names, 3))
    engine, answers = make_engine(runner, max_errors=3), Answers()
    for name in names:
        engine.add(make_request(name, 5, 8))
        finish_all(engine, answers)
    assert [answers.finish(name) for name in names] == [FinishReason.ERROR] * 7
    assert runner.trials == 2
    assert caplog.text.count("3 steps failed in a row by their requests") == 2


def test_failures_far_apart_do_not_add_up() -> None:
    """A token that came out between them shows that the engine works."""
    runner = FakeRunner(fail_steps=range(5, 200, 12))
    engine = make_engine(runner, max_errors=3)
    request = make_request("a", 5, 60)
    engine.add(request)
    engine.add(make_request("b", 5, 60))
    answers = finish_all(engine)
    assert runner.resets > 6 and runner.trials == 0
    assert answers.get_answer("a") == compute_answer(request)


def test_progress_counts_the_prompt_once() -> None:
    """What is computed again after a failure or a preemption is no more prompt than before."""
    runner = FakeRunner(fail_steps=[6])
    engine = make_engine(runner)
    for request in CROWD[:2]:
        engine.add(request)
    answers = finish_all(engine)
    for request in CROWD[:2]:
        assert max(e.num_computed_tokens for e in answers.events[request.id]) == len(request.prompt)
        assert answers.events[request.id][-1].num_computed_tokens == len(request.prompt)


def test_an_idle_engine_has_nothing_to_do() -> None:
    """No step is left over after the last event, whatever ended the request."""
    for runner in (FakeRunner(), FakeRunner(refuse={"a": ValueError()}), FakeRunner(poison={"a": 1})):
        engine = make_engine(runner)
        assert not engine.busy
        engine.add(make_request("a"))
        assert engine.busy
        finish_all(engine, steps=10)
        assert engine.scheduler.requests == ()
        assert runner.rows == {}


def test_close_closes_the_runner() -> None:
    runner = FakeRunner()
    make_engine(runner).close()
    assert runner.closed


class TimedDevice:
    """`FakeRunner.before` and `time.monotonic` of a device that computes `pace` prompt tokens a second. The
    time of a step passes while the next one waits for it; if it is not `is_lazy`, in the step itself."""

    def __init__(self, pace: float, monkeypatch: pytest.MonkeyPatch, is_lazy: bool = True) -> None:
        self.pace = pace
        self.is_lazy = is_lazy
        self.now = 0.0
        self.launched = 0
        monkeypatch.setattr("mlxrun.engine.workloads.generation.time.monotonic", lambda: self.now)

    def __call__(self, plan: StepPlan) -> None:
        tokens = self.count(plan)
        self.now += (self.launched if self.is_lazy else tokens) / self.pace
        self.launched = tokens

    def count(self, plan: StepPlan) -> float:
        return sum(chunk.stop - chunk.start for chunk in plan.prefill)


def list_sizes(runner: FakeRunner) -> list[int]:
    """Prompt tokens of each step that had some."""
    totals = (sum(chunk.stop - chunk.start for chunk in plan.prefill) for plan in runner.plans)
    return [total for total in totals if total]


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize(("pace", "size"), [(100_000, 4096), (3000, 512), (1000, 128), (10, 64)])
def test_steps_take_as_long_as_they_may(
    pace: int, size: int, is_lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 ms: after the first chunk, a step has as many tokens as the device computes in that time."""
    runner = FakeRunner(before=TimedDevice(pace, monkeypatch, is_lazy))
    settings = SchedulerSettings(step_ms=200, chunk=512, prefill_budget=4096)
    engine = make_engine(runner, settings, context=20_000)
    engine.add(make_request("long", 15_000, 2))
    finish_all(engine, steps=400)
    sizes = list_sizes(runner)
    assert sizes[:2] == [512, 512]  # the pace is known once a step has waited for another
    assert set(sizes[6:-1]) <= {size} and min(sizes[:-1]) >= min(size, 512)


def test_a_short_prompt_passes_a_long_one_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives waits for the steps that are launched, and its prompt is in the next one."""
    device = TimedDevice(1000, monkeypatch)
    runner = FakeRunner(before=device)
    engine = make_engine(runner, SchedulerSettings(step_ms=200, chunk=512), context=20_000)
    engine.add(make_request("long", 15_000, 2))
    for _ in range(10):
        engine.step()
    came = device.now
    engine.add(make_request("short", 20, 2))
    while not any(event.tokens for event in engine.step()):
        pass
    assert device.now - came <= 2 * 0.2


def test_waiting_for_work_is_not_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted prompt leaves a step behind; the hours until the next request are not its time."""
    device = TimedDevice(100_000, monkeypatch)
    runner = FakeRunner(before=device)
    engine = make_engine(runner, SchedulerSettings(step_ms=200, chunk=512), context=20_000)
    engine.add(make_request("gone", 15_000, 2))
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    finish_all(engine)
    device.now += 3600
    runner.plans.clear()
    engine.add(make_request("next", 15_000, 2))
    finish_all(engine)
    assert list_sizes(runner)[0] > 512


def make_document(parts: int, **settings: Any) -> tuple[Engine, FakeRunner]:
    """An engine with a decoding row, and a request whose images take so many steps."""
    runner = FakeRunner(image_parts={"document": parts})
    engine = make_engine(runner, SchedulerSettings(**{"step_ms": 100, "chunk": 64} | settings))
    engine.add(make_request("row", 5, 200))
    for _ in range(4):
        engine.step()
    spans = tuple((at, at + 8) for at in range(4, 384, 10))
    engine.add(replace(make_request("document", 400, 2), image_spans=spans, media="pixels"))
    return engine, runner


@pytest.mark.parametrize("step_ms", [0, 100])
def test_a_prompt_waits_for_its_images_and_nobody_else_does(step_ms: int) -> None:
    engine, runner = make_document(20, step_ms=step_ms)
    finish_all(engine)
    assert runner.broken == [] and runner.image_parts["document"] == 0
    encoding = [plan for plan in runner.plans if plan.encode]
    assert len(encoding) == 20 and not any(plan.prefill for plan in encoding)
    assert all(plan.decode == ("row",) for plan in encoding)
    assert {plan.encode_seconds for plan in encoding} == {0.025 if step_ms else None}


def list_steps_of_short(engine: Engine, runner: FakeRunner) -> list[StepPlan]:
    """The plans from the arrival of a short prompt to the launch of its first token."""
    runner.plans.clear()
    engine.add(make_request("short", 6, 1))
    while not any("short" in plan.decode for plan in runner.plans):
        engine.step()
    return runner.plans[:]


def test_no_step_to_a_first_token_encodes_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short prompt waits only for the step that runs as it comes. The second half is the twin: without that
    rule it waits for images with its first token too."""
    for put_off, expected in ((scheduler.MAX_PUT_OFF, [False, False]), (0, [False, True])):
        monkeypatch.setattr(scheduler, "MAX_PUT_OFF", put_off)
        engine, runner = make_document(20)
        for _ in range(3):
            engine.step()
        assert [bool(plan.encode) for plan in list_steps_of_short(engine, runner)] == expected
        finish_all(engine)
        assert runner.broken == []


def test_a_stream_of_short_prompts_does_not_keep_images_back() -> None:
    engine, runner = make_document(6)
    for number in range(200):
        if not runner.image_parts["document"]:
            break
        engine.add(make_request(f"short {number}", 6, 1))
        engine.step()
    turns = [number for number, plan in enumerate(runner.plans) if plan.encode]
    # Where short prompts overtake, every second step is theirs alone.
    assert len(turns) == 6 and max(np.diff(turns)) <= 2 * (scheduler.MAX_PUT_OFF + 1)
    finish_all(engine)
    assert runner.broken == []


def test_a_document_that_is_aborted_begins_again() -> None:
    engine, runner = make_document(6)
    for _ in range(3):
        engine.step()
    engine.abort("document")
    engine.step()
    runner.image_parts["document"] = 4
    spans = ((4, 8),)
    engine.add(replace(make_request("document", 40, 2), image_spans=spans, media="pixels"))
    answers = finish_all(engine)
    assert answers.get_answer("document")[1] is FinishReason.LENGTH
    assert runner.broken == [] and runner.image_parts["document"] == 0
