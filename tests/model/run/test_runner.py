"""The runner carries out hand-written step plans; whole requests are in tests/parity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core.request import HitKind, Request, SamplingParams
from mlxrun.core.step_plan import (
    Admission,
    CacheHit,
    PrefillChunk,
    SnapshotKind,
    SnapshotRequest,
    StepPlan,
    StepResult,
)
from mlxrun.model.run import prefill
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.runner import ModelRunner
from tests.helpers import text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.runner_driver import list_tokens, make_runner, plan_start, run_plans

PROMPTS = text_models.prompts(0, (5, 12, 40))
METHODS = {
    "tokens read before the launch": ComputeMethods(),
    "launched first": ComputeMethods(launch_first=True),
    "grouped": ComputeMethods("grouped"),
    "row by row": ComputeMethods("row_by_row"),
}


def make_request(name: str, index: int) -> Request:
    return Request(name, tuple(PROMPTS[index]), SamplingParams(max_tokens=24, logprobs=0))


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_a_request_is_prefilled_by_chunks_and_decoded(zoo: Zoo, methods: ComputeMethods) -> None:
    runner = make_runner(zoo.text("llama"), methods)
    plans = [*plan_start(make_request("a", 2), chunk=16), *[StepPlan(decode=("a",))] * 8]
    results = run_plans(runner, plans)
    zoo.answer("llama", PROMPTS[2]).check(list_tokens(results, "a"))
    assert len(list_tokens(results, "a")) == 9


def test_a_step_holds_a_rows_newest_caches_only(zoo: Zoo) -> None:
    """Not those between two chunks, which would be in memory until the step is collected."""
    runner = make_runner(zoo.text("llama"), ComputeMethods())
    (plan,) = plan_start(make_request("a", 2))
    chunks = (PrefillChunk("a", 0, 16), PrefillChunk("a", 16, 32))
    runner.execute(replace(plan, prefill=chunks))
    assert len(runner._launched.prefilled) == 2 * 3, "keys and values of three layers"


def test_tokens_lag_one_step_behind(zoo: Zoo) -> None:
    """Decode-ahead: what a step returns was sampled by the step before."""
    runner = make_runner(zoo.text("llama"), ComputeMethods())
    results = run_plans(runner, [*plan_start(make_request("a", 0)), StepPlan(decode=("a",))])
    assert [len(result.tokens) for result in results] == [0, 1, 1]


def test_first_tokens_are_known_as_such(zoo: Zoo) -> None:
    runner = make_runner(zoo.text("llama"), ComputeMethods())
    runner.execute(plan_start(make_request("a", 0))[0])
    assert runner.awaits_first_tokens
    runner.execute(replace(plan_start(make_request("b", 1))[0], decode=("a",)))
    assert not runner.awaits_first_tokens, "one of the two rows has sampled before"


def test_a_preempted_row_goes_on_from_its_tokens(zoo: Zoo) -> None:
    runner = make_runner(zoo.text("llama"), ComputeMethods())
    request = make_request("a", 1)
    first = run_plans(runner, [*plan_start(request), *[StepPlan(decode=("a",))] * 3])
    output = list_tokens(first, "a")
    again = plan_start(request, output=output)
    second = run_plans(runner, [replace(again[0], free=("a",)), *again[1:], *[StepPlan(decode=("a",))] * 3])
    zoo.answer("llama", PROMPTS[1]).check([*output, *list_tokens(second, "a")])
    assert len(output) == 4 and len(list_tokens(second, "a")) == 4


def test_a_token_under_way_is_not_given_to_a_new_request_of_the_same_id(zoo: Zoo) -> None:
    runner = make_runner(zoo.text("llama"), ComputeMethods())
    runner.execute(plan_start(make_request("a", 0))[0])
    plan = replace(plan_start(make_request("a", 1))[0], free=("a",))
    assert runner.execute(plan).tokens == {}
    zoo.answer("llama", PROMPTS[1]).check(list_tokens([runner.collect()], "a"))


def test_a_request_that_cannot_start_harms_no_other(zoo: Zoo) -> None:
    """Images for a text model fail that request in its first step."""
    runner = make_runner(zoo.text("llama"), ComputeMethods())
    bad = replace(make_request("bad", 0), media=object())
    good = plan_start(make_request("good", 1))[0]
    results = run_plans(
        runner,
        [
            replace(
                good,
                admit=(Admission(bad), *good.admit),
                prefill=(PrefillChunk("bad", 0, 5), *good.prefill),
            ),
            StepPlan(decode=("good",)),
        ],
    )
    assert "takes no images" in str(results[0].errors["bad"])
    zoo.answer("llama", PROMPTS[1]).check(list_tokens(results, "good"))


def continue_from(runner: ModelRunner, payload: Any) -> list[StepResult]:
    """Restore 32 tokens of the longest prompt from a payload, and go on from there as request b."""
    hit = CacheHit(32, HitKind.PREFIX, ((0, 32, payload),))
    admission = Admission(make_request("b", 2), hit=hit)
    start = StepPlan(admit=(admission,), prefill=(PrefillChunk("b", 32, 40),))
    return run_plans(runner, [start, *[StepPlan(decode=("b",))] * 4])


def test_snapshots_arrive_with_the_next_step_and_restore_the_row(zoo: Zoo) -> None:
    runner = make_runner(zoo.text("llama"), ComputeMethods())
    received = SnapshotRequest("a", SnapshotKind.DELTA, 0, 32, entry="mine")
    start = plan_start(make_request("a", 2), chunk=32)
    runner.execute(replace(start[0], snapshots=(received,)))
    assert runner.has_pending_snapshots
    (found,) = runner.execute(start[1]).snapshots
    assert found.request is received and found.payload is not None
    zoo.answer("llama", PROMPTS[2]).check(list_tokens(continue_from(runner, found.payload), "b"))


def test_a_hit_that_cannot_be_restored_is_computed(zoo: Zoo) -> None:
    runner = make_runner(zoo.text("llama"), ComputeMethods())
    hit = CacheHit(32, HitKind.PREFIX, ((0, 32, "no payload"),))
    admission = Admission(make_request("a", 2), hit=hit)
    plans = [
        StepPlan(admit=(admission,), prefill=(PrefillChunk("a", 32, 40),)),
        *[StepPlan(decode=("a",))] * 4,
    ]
    results = run_plans(runner, plans)
    assert results[0].invalid_hits == ("a",)
    zoo.answer("llama", PROMPTS[2]).check(list_tokens(results, "a"))


def test_a_hit_that_cannot_be_restored_is_computed_without_splitting_images(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "RECOMPUTE_CHUNK", 16)
    runner, lengths = make_runner(zoo.text("llama"), ComputeMethods()), list[int]()
    call = runner._caller.prefill

    def watch(ids: mx.array, *rest: Any) -> mx.array:
        lengths.append(ids.shape[1])
        return call(ids, *rest)

    monkeypatch.setattr(runner._caller, "prefill", watch)
    hit = CacheHit(32, HitKind.PREFIX, ((0, 32, "no payload"),))
    admission = Admission(replace(make_request("a", 2), image_spans=((10, 30),)), hit=hit)
    runner.execute(StepPlan(admit=(admission,), prefill=(PrefillChunk("a", 32, 40),)))
    assert lengths == [10, 20, 2, 8]


def test_the_tests_see_a_snapshot_of_another_prompt(zoo: Zoo) -> None:
    """The mutation twin of restoring a row."""
    runner = make_runner(zoo.text("llama"), ComputeMethods())
    other = Request("other", tuple(reversed(PROMPTS[2])), SamplingParams(max_tokens=24))
    received = SnapshotRequest("other", SnapshotKind.DELTA, 0, 32, entry="mine")
    start = plan_start(other, chunk=32)
    runner.execute(replace(start[0], snapshots=(received,)))
    (found,) = runner.execute(start[1]).snapshots
    with pytest.raises(AssertionError):
        zoo.answer("llama", PROMPTS[2]).check(list_tokens(continue_from(runner, found.payload), "b"))
