"""Prompt scoring in the scheduler: each logprob is sent once, in order, whatever happens to the row."""

from __future__ import annotations

import random

import pytest

from mlxrun.core.errors import PromptTooLong
from mlxrun.core.request import FinishReason, Request, TokenLogprob
from mlxrun.core.step_plan import PromptLogprobs, StepPlan, StepResult
from mlxrun.engine.scheduler.prefix_cache_interface import PrefixCacheInterface
from mlxrun.engine.scheduler.request_state import RequestLogprobs
from tests.helpers.engine_fakes import (
    Answers,
    FakeRunner,
    compute_answer,
    compute_score,
    finish_all,
    make_engine,
    make_request,
    make_settings,
    serve_requests,
)


def list_wanted(request: Request) -> tuple[TokenLogprob | None, ...]:
    count = request.params.prompt_logprobs
    assert count is not None
    inside = {at for start, stop in request.image_spans for at in range(start, stop)}
    positions = range(request.logprobs_from, len(request.prompt))
    return tuple(None if at in inside else compute_score(request.prompt, at, count) for at in positions)


def list_sent(answers: Answers, rid: str) -> tuple[TokenLogprob | None, ...]:
    return tuple(score for event in answers.events[rid] for score in event.prompt_logprobs)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 13, 40])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_all_logprobs_come_once_and_in_order(size: int, max_tokens: int) -> None:
    request = make_request("a", size, max_tokens, prompt_logprobs=2)
    _, answers = serve_requests(request)
    assert list_sent(answers, "a") == list_wanted(request)
    assert answers.get_answer("a") == compute_answer(request)
    assert answers.events["a"][-1].num_computed_tokens == size


def test_a_request_without_output_computes_neither_its_last_token_nor_a_decode_step() -> None:
    runner, answers = serve_requests(make_request("a", 10, 0, prompt_logprobs=0))
    assert [chunk.stop for plan in runner.plans for chunk in plan.prefill][-1] == 9
    assert not any(plan.decode for plan in runner.plans)
    assert answers.finish("a") is FinishReason.LENGTH


def test_without_logprobs_it_ends_when_its_prompt_is_computed() -> None:
    runner, answers = serve_requests(make_request("a", 30, 0), make_request("b", 3, 5))
    assert answers.get_answer("a") == ((), FinishReason.LENGTH)
    assert sum(c.stop - c.start for p in runner.plans for c in p.prefill if c.request_id == "a") == 29


def test_only_wanted_tokens_are_sent_and_images_have_none() -> None:
    spans = ((3, 7), (7, 9), (16, 18))
    for start in (1, 4, 8, 12, 16, 17, 18, 99):
        request = make_request("a", 18, 0, prompt_logprobs=1, image_spans=spans, logprobs_from=start)
        _, answers = serve_requests(request)
        assert list_sent(answers, "a") == list_wanted(request)


@pytest.mark.parametrize("seed", range(12))
def test_preempted_and_failed_rows_neither_lose_nor_repeat_logprobs(seed: int) -> None:
    rng = random.Random(seed)
    runner = FakeRunner(fail_steps=rng.sample(range(4, 40), 2))
    engine, answers = make_engine(runner, make_settings(max_running=3)), Answers()
    requests = [
        make_request(
            f"r{i}", rng.randrange(1, 40), rng.randrange(0, 3), prompt_logprobs=i % 3, logprobs_from=1 + i
        )
        for i in range(8)
    ]
    for request in requests:
        engine.add(request)
    while engine.busy:
        answers.record(engine.step())
        for state in engine.scheduler.requests:
            if state.running and rng.random() < 0.1:
                engine.scheduler.preempt(state)
    assert runner.broken == []
    for request in requests:
        sent, wanted = list_sent(answers, request.id), list_wanted(request)
        if answers.finish(request.id) is FinishReason.ERROR:  # it was alone in a step that failed
            assert sent == wanted[: len(sent)]
            continue
        assert sent == wanted
        assert answers.get_answer(request.id) == compute_answer(request)


def test_logprobs_of_an_ended_request_are_not_those_of_the_next_one_with_its_id() -> None:
    engine, answers = make_engine(), Answers()
    engine.add(make_request("a", 9, 0, prompt_logprobs=0))
    engine.step()
    engine.abort("a")
    again = Request("a", tuple(range(500, 509)), make_request("a", 9, 0, prompt_logprobs=0).params)
    engine.step()  # the final event of the first one
    engine.add(again)
    finish_all(engine, answers)
    assert list_sent(answers, "a") == list_wanted(again)


def test_a_scheduler_that_takes_stray_logprobs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: without `launched`, logprobs of another request would be taken."""
    scores = RequestLogprobs(make_request("a", 9, 0, prompt_logprobs=0))
    stray = [TokenLogprob(-1.0), TokenLogprob(-2.0)]
    assert not scores.owns(1) and scores.next_position == 1
    assert scores.add(1, stray) and scores.next_position == 3
    assert scores.take_unsent() == tuple(stray) and scores.take_unsent() == ()


def test_a_hit_leaves_the_token_before_the_first_wanted_one() -> None:
    scores = RequestLogprobs(make_request("a", 20, 0, prompt_logprobs=0, logprobs_from=8))
    assert (scores.limit_hit(19), scores.limit_hit(5)) == (7, 5)
    scores.add(8, [TokenLogprob(-1.0)] * 12)
    assert scores.complete and scores.limit_hit(19) == 19


def test_an_aborted_request_brings_what_was_known() -> None:
    engine = make_engine()
    engine.add(make_request("a", 30, 0, prompt_logprobs=0))
    engine.step()
    plan = StepPlan()
    engine.scheduler.update(plan, StepResult())
    state = engine.scheduler.requests[0]
    state.prompt_logprobs.add(1, [TokenLogprob(-1.0)])
    event = engine.scheduler.abort("a")
    assert event is not None and event.prompt_logprobs == (TokenLogprob(-1.0),)


def test_a_prompt_may_fill_the_context_if_there_is_no_output() -> None:
    engine = make_engine(context=10)
    engine.add(make_request("full", 10, 0, prompt_logprobs=0))
    for size, max_tokens in ((11, 0), (10, 1)):
        with pytest.raises(PromptTooLong):
            engine.add(make_request("long", size, max_tokens, prompt_logprobs=0))
    assert len(list_sent(finish_all(engine), "full")) == 9


def test_only_logprobs_of_the_request_itself_reach_the_prefix_cache() -> None:
    """Those of an ended request are still computed when the next one with its id waits."""
    recorded: list[tuple[str, TokenLogprob]] = []

    class Recorder(PrefixCacheInterface):
        def record_prompt_logprobs(self, scores: PromptLogprobs) -> None:
            recorded.extend((scores.request_id, score) for score in scores.logprobs)

    engine, answers = make_engine(settings=make_settings(max_running=1)), Answers()
    engine.scheduler.prefix_cache = Recorder()
    engine.add(make_request("a", 9, 0, prompt_logprobs=0))
    engine.step()
    engine.abort("a")
    engine.add(make_request("other", 20, 2))
    again = Request("a", tuple(range(500, 509)), make_request("a", 9, 0, prompt_logprobs=0).params)
    engine.add(again)
    engine.step()
    answers.events.clear()
    finish_all(engine, answers)
    assert list_sent(answers, "a") == list_wanted(again)
    assert {score.logprob for _, score in recorded} == {s.logprob for s in list_wanted(again) if s}
