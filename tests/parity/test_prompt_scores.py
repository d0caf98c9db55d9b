"""Logprobs of prompts are those of the library's plain forward over the whole prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.model.run import prompt_logprobs
from mlxrun.model.run.hidden_hook import HiddenStateHook
from mlxrun.model.run.prompt_logprobs import PromptLogprobReader, RowLogprobs
from tests.helpers import engine_driver, oracle, text_models, vision_models
from tests.helpers.engine_driver import VARIANTS, TimedRequest
from tests.helpers.model_fixtures import Zoo, mark_sweep

pytestmark = pytest.mark.usefixtures("probed_once")

TOLERANCE = 1e-4
TEXT = mark_sweep(text_models.TEXT, text_models.CORE)
VISION = mark_sweep(vision_models.VISION, vision_models.CORE)
PROMPTS = [tuple(ids) for ids in text_models.prompts(77, [1, 2, 16, 17, 37, 70])]


def make_scored(
    name: str, ids: Sequence[int], count: int = 1, logprobs_from: int = 1, **params: Any
) -> Request:
    params = {"max_tokens": 0, "prompt_logprobs": count} | params
    return replace(engine_driver.make_text_request(name, ids, **params), logprobs_from=logprobs_from)


def measure_error(event: TokenEvent, request: Request, expected: np.ndarray) -> float:
    """The largest difference of a logprob, the likeliest tokens' included; infinite if one is missing, too
    many, or None where it should not be."""
    ids, count = request.prompt, request.params.prompt_logprobs
    inside = {at for start, stop in request.image_spans for at in range(start, stop)}
    positions = range(request.logprobs_from, len(ids))
    if event.finish is not FinishReason.LENGTH or len(event.prompt_logprobs) != len(positions):
        return float("inf")
    worst = 0.0
    for at, score in zip(positions, event.prompt_logprobs, strict=True):
        if (score is None) != (at in inside):
            return float("inf")
        if score is None:
            continue
        row = expected[at - 1]
        best = np.sort(row)[::-1][:count]
        found = [score.logprob, *(value for _, value in score.top), *(row[token] for token, _ in score.top)]
        wanted = [row[ids[at]], *best, *best]
        worst = max(worst, float(np.max(np.abs(np.array(found) - wanted))))
        least, most = (1 + np.sum(row > row[ids[at]] + slack) for slack in (TOLERANCE, -TOLERANCE))
        if not least <= score.rank <= most:
            return float("inf")
    return worst


_cold: dict[tuple[Path, tuple[int, ...]], np.ndarray] = {}


def score_cold(zoo: Zoo, family: str, ids: Sequence[int]) -> np.ndarray:
    """The ORACLE's scores, computed once a session."""
    key = (zoo.text(family), tuple(ids))
    if key not in _cold:
        _cold[key] = oracle.text_scores(*key)
    return _cold[key]


@pytest.mark.parametrize("family", TEXT)
def test_every_family_scores_prompts_in_chunks(zoo: Zoo, family: str) -> None:
    """All of them beside each other and beside rows that decode."""
    engine = engine_driver.make_real_engine(zoo.text(family), backend="none")
    requests = [make_scored(f"p{i}", ids, i % 4) for i, ids in enumerate(PROMPTS)]
    answered = make_scored("answered", PROMPTS[4], 2, max_tokens=24, logprobs=0)
    plain = engine_driver.make_text_request("plain", PROMPTS[3])
    events = engine_driver.run_requests(engine, [plain, answered, *requests])
    for request in (*requests, answered):
        expected = score_cold(zoo, family, request.prompt)
        assert measure_error(events[request.id], request, expected) < TOLERANCE, request.id
    engine_driver.check_answer(events["plain"], zoo.answer(family, PROMPTS[3]))
    engine_driver.check_answer(events["answered"], zoo.answer(family, PROMPTS[4]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["gemma3_text", pytest.param("qwen3_next", marks=pytest.mark.sweep)])
def test_every_way_to_compute_gives_the_same(zoo: Zoo, family: str, variant: str) -> None:
    engine = engine_driver.make_real_engine(zoo.text(family), backend="none", **VARIANTS[variant])
    requests = [make_scored(f"p{i}", ids, 1, max_tokens=i % 2) for i, ids in enumerate(PROMPTS)]
    events = engine_driver.run_requests(engine, requests)
    for request in requests:
        expected = score_cold(zoo, family, request.prompt)
        assert measure_error(events[request.id], request, expected) < TOLERANCE, request.id


@pytest.mark.parametrize("start", [2, 17, 18, 69, 200])
def test_only_wanted_tokens_are_scored(zoo: Zoo, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no logits are computed for the others."""
    monkeypatch.setattr(prompt_logprobs, "MIN_SLICE_BYTES", 1)
    monkeypatch.setattr(prompt_logprobs, "WEIGHTS_SHARE", 1 << 30)  # slices of 8 tokens
    rows: list[int] = []
    compute = HiddenStateHook.compute_logits
    monkeypatch.setattr(
        HiddenStateHook, "compute_logits", lambda *a: (rows.append(a[1].shape[1]), compute(*a))[1]
    )
    engine = engine_driver.make_real_engine(zoo.text("llama"), backend="none")
    engine.add(make_scored("first", PROMPTS[1]))  # the hook is tried with it
    while engine.busy:
        engine.step()
    rows.clear()
    request = make_scored("a", PROMPTS[5], 3, start)
    event = engine_driver.run_requests(engine, [request])["a"]
    assert measure_error(event, request, score_cold(zoo, "llama", request.prompt)) < TOLERANCE
    assert max(rows, default=0) <= 8
    # And the last token of each scored chunk, which is never computed.
    assert sum(rows) <= max(0, 70 - start) + 5


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_model_without_hidden_states_is_scored_too(
    zoo: Zoo, family: str, reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "MIN_SLICE_BYTES", 1)
    monkeypatch.setattr(prompt_logprobs, "WEIGHTS_SHARE", 1 << 30)
    monkeypatch.setattr(prompt_logprobs, "find_hidden_hook", lambda adapter: None)
    engine = engine_driver.make_real_engine(zoo.text(family), backend="none", reproducible=reproducible)
    requests = [make_scored(f"p{i}", ids, 2, 1 + i, max_tokens=i % 2) for i, ids in enumerate(PROMPTS)]
    events = engine_driver.run_requests(engine, requests)
    for request in requests:
        expected = score_cold(zoo, family, request.prompt)
        assert measure_error(events[request.id], request, expected) < TOLERANCE, request.id


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_preempted_prompts_are_scored_once(zoo: Zoo, family: str) -> None:
    engine, rng = engine_driver.make_real_engine(zoo.text(family), prefill_budget=16), random.Random(3)
    requests = [make_scored(f"p{i}", ids, i % 3, max_tokens=i % 2) for i, ids in enumerate(PROMPTS)]

    def preempt(step: int) -> None:
        for state in engine.scheduler.requests:
            if state.running and rng.random() < 0.2 and step < 40:
                engine.scheduler.preempt(state)

    events = engine_driver.run_requests(engine, [TimedRequest(r, i) for i, r in enumerate(requests)], preempt)
    for request in requests:
        expected = score_cold(zoo, family, request.prompt)
        assert measure_error(events[request.id], request, expected) < TOLERANCE, request.id


@pytest.mark.parametrize("family", VISION)
def test_text_beside_images_is_scored(zoo: Zoo, family: str) -> None:
    folder = zoo.vision(family)
    engine = engine_driver.make_real_engine(folder)
    images = vision_models.images(5, 2)
    prompt = vision_models.prompt(
        family, "what do you see in ", None, " and in this one ", None, " tell me all"
    )
    made = engine_driver.make_vision_request(engine, "a", prompt, images, max_tokens=0, prompt_logprobs=2)
    ids, expected = oracle.vision_scores(folder, prompt, images)
    assert list(made.prompt) == ids and made.image_spans
    for name in ("cold", "cached"):
        request = replace(made, id=name)
        event = engine_driver.run_requests(engine, [request])[name]
        assert measure_error(event, request, expected) < TOLERANCE


@pytest.mark.parametrize("family", vision_models.CORE)
def test_a_preempted_answer_about_an_image_goes_on(zoo: Zoo, family: str) -> None:
    """The chunk in which its prompt ends has tokens of the answer too. The model is called for both, and the
    logits of the prompt's part were missing: the request failed."""
    engine = engine_driver.make_real_engine(zoo.vision(family), backend="none", chunk=512)
    image = vision_models.images(3, 1, size=(32, 32))[0]
    prompt = vision_models.prompt(family, "what is ", None, " and tell me more about it, please")
    request = engine_driver.make_vision_request(engine, "a", prompt, [image], max_tokens=9, prompt_logprobs=1)
    plain = engine_driver.run_requests(engine, [request])["a"]
    again = replace(request, id="b")
    event = engine_driver.run_requests(engine, [again], engine_driver.preempt_every(engine, 5))["b"]
    assert engine.scheduler.num_preemptions > 0 and engine.generation.errors == 0
    assert event.tokens == plain.tokens and len(event.prompt_logprobs) == len(plain.prompt_logprobs)
    engine_driver.check_answer(event, zoo.see(family, prompt, [image], 9))


# -- mutation twins ---------------------------------------------------------------------------------------


def test_an_off_by_one_is_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    start = RowLogprobs.start

    def start_late(request: Request) -> RowLogprobs | None:
        scoring = start(request)
        return scoring and replace(scoring, prompt=(*scoring.prompt[1:], 0))

    monkeypatch.setattr(RowLogprobs, "start", start_late)
    engine = engine_driver.make_real_engine(zoo.text("llama"), backend="none")
    request = make_scored("a", PROMPTS[5])
    event = engine_driver.run_requests(engine, [request])["a"]
    assert measure_error(event, request, score_cold(zoo, "llama", request.prompt)) > 0.01


def test_a_wrong_target_is_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PromptLogprobReader.reduce_logits

    def reduce(self: PromptLogprobReader, logits: Any, tokens: Any, parts: Any) -> Any:
        return replace(original(self, logits[::-1], tokens, parts), tokens=tokens)

    monkeypatch.setattr(PromptLogprobReader, "reduce_logits", reduce)
    engine = engine_driver.make_real_engine(zoo.text("llama"), backend="none")
    request = make_scored("a", PROMPTS[5])
    event = engine_driver.run_requests(engine, [request])["a"]
    assert measure_error(event, request, score_cold(zoo, "llama", request.prompt)) > 0.01


def test_the_token_that_ends_an_answer_has_its_logprob(zoo: Zoo) -> None:
    """Though it is no part of the answer."""
    answer = zoo.answer("llama", PROMPTS[4], 1)
    params = {"max_tokens": 4, "stop_ids": frozenset(answer.tokens[:1]), "logprobs": 1}
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    event = engine_driver.run_requests(engine, [engine_driver.make_text_request("a", PROMPTS[4], **params)])[
        "a"
    ]
    assert (event.tokens, event.finish, event.stop_id) == ((), FinishReason.STOP, answer.tokens[0])
    assert event.stop_logprob is not None
    assert abs(event.stop_logprob.logprob - answer.logprobs[0][answer.tokens[0]]) < TOLERANCE
