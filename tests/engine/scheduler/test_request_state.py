"""The counters of a request: what is left to prefill, where chunks end, what a preemption resets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.core.request import HitKind, Request, SamplingParams
from mlxrun.core.step_plan import CacheHit
from mlxrun.engine.scheduler.request_state import RequestState


def make_state(size: int, *, max_tokens: int = 8, max_length: int = 1000, **fields: Any) -> RequestState:
    request = Request("a", tuple(range(size)), SamplingParams(max_tokens=max_tokens), **fields)
    return RequestState(request, 0, 0.0, max_length)


@pytest.mark.parametrize(
    ("size", "spans", "target"),
    [(1, (), 1), (9, (), 8), (9, ((2, 5),), 8), (9, ((4, 9),), 9), (9, ((8, 9),), 9), (9, ((7, 8),), 8)],
)
def test_prefill_stops_before_the_last_token(size: int, spans: Any, target: int) -> None:
    """It is the first decode step, unless it is all there is or part of an image."""
    assert make_state(size, image_spans=spans).prefill_target == target


@given(
    st.integers(2, 60),
    st.integers(1, 9),
    st.integers(1, 20),
    st.lists(st.integers(1, 58), max_size=4, unique=True),
    st.lists(st.integers(1, 59), max_size=3),
)
def test_chunks_cover_the_prompt_and_never_end_inside_an_image(
    size: int, chunk: int, budget: int, bounds: list[int], stops: list[int]
) -> None:
    """Each ends on the grid, at a snapshot, at the budget, or beside an image, and none is empty."""
    edges = sorted(bound for bound in bounds if bound < size)
    spans = tuple(zip(edges[::2], edges[1::2], strict=False))
    state = make_state(size, image_spans=spans)
    stops = [stop for stop in stops if not any(a < stop < b for a, b in spans)]
    state.cache_positions = tuple(sorted(stops))
    while state.remaining_prefill:
        start = state.num_computed_tokens
        stop = state.find_chunk_end(chunk, budget)
        assert start < stop <= state.prefill_target
        assert not any(a < stop < b for a, b in spans)
        inside = [span for span in spans if span[0] == start and span[1] - start > min(chunk, budget)]
        assert inside or stop - start <= min(chunk, budget)
        assert inside or not any(start < position < stop for position in stops)
        state.record_prefill(stop)
    assert state.decoding and state.num_computed_tokens == state.prefill_target


def test_tokens_in_flight_count_towards_the_limit() -> None:
    state = make_state(4, max_tokens=3)
    state.start_running(None)
    state.record_prefill(3)
    for _ in range(3):
        assert not state.exhausted
        state.record_decode()
    assert state.exhausted and state.projected_length == 7
    state.output += [1, 2]
    state.num_in_flight -= 2
    assert (state.remaining_output, state.exhausted) == (1, True)


def test_the_length_limits_the_output_too() -> None:
    assert make_state(4, max_tokens=50, max_length=9).remaining_output == 5
    assert make_state(4, max_tokens=50, max_length=9, prior_output=(1, 2)).remaining_output == 3


def test_a_preempted_request_keeps_its_answer_and_what_it_reported() -> None:
    """Only the row is gone. The first hit is the one that is reported."""
    state = make_state(10)
    state.start_running(CacheHit(6, HitKind.PREFIX))
    assert (state.num_computed_tokens, state.num_cached_tokens, state.remaining_prefill) == (6, 6, 3)
    state.record_prefill(9)
    state.output.append(5)
    state.running = True
    state.reset()
    assert (state.running, state.decoding, state.num_computed_tokens, state.output) == (False, False, 0, [5])
    assert state.remaining_prefill == 10
    state.start_running(CacheHit(10, HitKind.EXACT))
    assert state.decoding and (state.hit_kind, state.num_cached_tokens) == (HitKind.PREFIX, 6)
    assert state.make_event(11).num_computed_tokens == 10, "tokens of the answer are no prefill"


@pytest.mark.parametrize(("left", "samples"), [(1, False), (2, True), (4, True), (5, False)])
def test_few_tokens_are_computed_in_the_forward_that_samples(left: int, samples: bool) -> None:
    for state, hit in ((make_state(20), CacheHit(20 - left, HitKind.PREFIX)), (make_state(left), None)):
        state.start_running(hit, max_sampling_chunk=4)
        assert state.last_chunk_samples is samples
        one_is_left = not samples and state.num_tokens > 1
        assert state.prefill_target == state.num_tokens - one_is_left


def test_a_request_waits_for_images_behind_its_hit() -> None:
    state = make_state(20, image_spans=((2, 4), (9, 12)), media="pixels")
    for length, ready in ((0, 0), (4, 0), (11, 0), (12, None)):
        state.start_running(CacheHit(length, HitKind.PREFIX) if length else None)
        assert state.num_ready == ready
    state = make_state(20, image_spans=((2, 4),))
    state.start_running(None)
    assert state.num_ready is None, "there is nothing to encode"
