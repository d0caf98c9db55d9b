"""Requests and their events: pure data, and how unread events become one."""

from __future__ import annotations

import dataclasses

import pytest

from mlxrun.core.errors import EngineDead
from mlxrun.core.request import FinishReason, HitKind, Request, SamplingParams, TokenEvent, TokenLogprob
from mlxrun.core.transcription import Transcript
from tests.helpers.engine_fakes import merge_events


@pytest.mark.parametrize(
    ("cache_positions", "points"),
    [((), (40,)), ((10, 30), (10, 30, 40)), ((10, 45), (10, 45)), ((40,), (40,))],
)
def test_questions_part_behind_the_last_image(
    cache_positions: tuple[int, ...], points: tuple[int, ...]
) -> None:
    request = Request("a", tuple(range(50)), SamplingParams(max_tokens=1), image_spans=((12, 15), (35, 40)))
    request = dataclasses.replace(request, cache_positions=cache_positions)
    assert request.all_cache_positions == points
    assert dataclasses.replace(request, image_spans=()).all_cache_positions == cache_positions
    assert dataclasses.replace(request, image_spans=((35, 50),)).all_cache_positions == cache_positions


def test_events_merge_into_one() -> None:
    """Tokens concatenate, and the other fields take the latest value."""
    score = TokenLogprob(-1.0)
    first = TokenEvent("a", (1, 2), num_computed_tokens=8, num_cached_tokens=4, prompt_logprobs=(score,))
    later = TokenEvent("a", (3,), num_computed_tokens=6, finish=FinishReason.STOP, prompt_logprobs=(None,))
    assert merge_events(first, later) == TokenEvent(
        "a",
        (1, 2, 3),
        num_computed_tokens=8,
        num_cached_tokens=4,
        finish=FinishReason.STOP,
        prompt_logprobs=(score, None),
    )


def test_progress_never_goes_back() -> None:
    """The larger count of each, the first kind of hit that is known, and the end of the later event."""
    first = TokenEvent("a", (1,), num_computed_tokens=8, num_cached_tokens=4, hit_kind=HitKind.LCP)
    error = EngineDead("x")
    last = TokenEvent("a", (2,), num_computed_tokens=2, finish=FinishReason.ERROR, error=error)
    merged = first.merge_progress(last)
    assert merged == TokenEvent(
        "a",
        num_computed_tokens=8,
        num_cached_tokens=4,
        hit_kind=HitKind.LCP,
        finish=FinishReason.ERROR,
        error=error,
    )
    stopped = first.merge_progress(TokenEvent("a", finish=FinishReason.STOP, stop_id=7))
    assert (stopped.stop_id, stopped.finish) == (7, FinishReason.STOP)


def test_every_field_of_an_event_survives_a_merge() -> None:
    """A new field has to be thought about: each value of the later event is in the merged one."""
    values = {
        "num_computed_tokens": 3,
        "num_cached_tokens": 2,
        "hit_kind": HitKind.EXACT,
        "finish": FinishReason.STOP,
        "error": EngineDead("x"),
        "stop_id": 5,
        "stop_logprob": TokenLogprob(-0.5),
        "vector": b"\0\0\0\0",
        "transcript": Transcript("a", "en"),
        "num_left_out": 4,
        "queue_seconds": 0.5,
    }
    names = set(TokenEvent._fields)
    assert names - {"request_id", "tokens", "logprobs", "prompt_logprobs"} == values.keys()
    for name, value in values.items():
        merged = TokenEvent("a").merge_progress(TokenEvent("a", **{name: value}))  # type: ignore[arg-type]
        assert getattr(merged, name) == value


def test_requests_cannot_be_changed() -> None:
    """They are shared by threads and by the choices of a prompt."""
    request = Request("a", (1, 2), SamplingParams())
    for each, name in ((request, "prompt"), (request.params, "seed"), (TokenEvent("a"), "tokens")):
        with pytest.raises(AttributeError):
            setattr(each, name, ())
