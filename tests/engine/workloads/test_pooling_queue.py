"""Which texts share a batch, in which order, and that each request ends once."""

from __future__ import annotations

import pytest

from mlxrun.core.errors import InternalError, OutOfMemory, Overloaded, PromptTooLong, RequestError
from mlxrun.core.memory_budget import Footprint, MemoryBudget
from mlxrun.core.request import FinishReason, Request, SamplingParams
from mlxrun.core.step_plan import PoolingBatch
from mlxrun.engine.workloads.pooling import PoolingQueue


def make(name: str, size: int, background: bool = False) -> Request:
    params = SamplingParams(max_tokens=0)
    return Request(name, tuple(range(size)), params, pooled=True, background=background)


def fill(
    *sizes: int, max_rows: int = 256, max_padding: int | None = None, background: bool = False
) -> PoolingQueue:
    """A queue with a request for each size, named by its place."""
    queue = PoolingQueue(1000, 100, max_rows, max_padding)
    for at, size in enumerate(sizes):
        queue.add(make(str(at), size, background))
    return queue


def choose(queue: PoolingQueue, tokens: int = 100, background: bool = True) -> PoolingBatch:
    batch = queue.choose(tokens, background)
    assert batch is not None
    return batch


def list_names(batch: PoolingBatch) -> list[str]:
    return [request.id for request in batch.requests]


def run_all(queue: PoolingQueue, tokens: int = 100) -> list[list[str]]:
    """The batches, each finished before the next."""
    found = []
    while queue.is_busy:
        batch = choose(queue, tokens)
        found.append(list_names(batch))
        queue.finish(batch, [b"v"] * len(batch.requests))
    return found


def test_texts_of_similar_length_share_a_batch() -> None:
    assert run_all(fill(50, 3, 48, 2, 49, 4), 150) == [["2", "4", "0"], ["3", "1", "5"]]


def test_a_batch_is_at_most_half_padding_and_within_the_budget() -> None:
    assert run_all(fill(10, 100), 1000) == [["0", "1"]]
    assert run_all(fill(10, 10, 100, 10), 1000) == [["0", "1", "3"], ["2"]]
    assert run_all(fill(10, 100, 100), 150) == [["0"], ["1"], ["2"]]
    assert run_all(fill(30, 30, 30, 30), 100) == [["0", "1", "2"], ["3"]]
    assert run_all(fill(5, 5, 5), 10) == [["0", "1"], ["2"]]


def test_a_text_adds_little_padding_where_padding_costs() -> None:
    assert run_all(fill(50, 55, 60, 70), 1000) == [["0", "1", "2", "3"]]
    assert run_all(fill(50, 55, 60, 70, max_padding=10), 1000) == [["0", "1", "2"], ["3"]]
    assert run_all(fill(70, 60, 55, 50, max_padding=10), 1000) == [["1", "0"], ["3", "2"]]
    assert run_all(fill(20, 10, 22, 19, max_padding=9), 1000) == [["3", "0", "2"], ["1"]]


def test_the_oldest_request_is_always_next() -> None:
    queue = fill(500, *[5] * 9)
    assert list_names(choose(queue)) == ["0"]


def test_a_text_longer_than_the_budget_has_a_batch_of_its_own() -> None:
    assert run_all(fill(500), 64) == [["0"]]


def test_one_row_at_a_time() -> None:
    assert run_all(fill(5, 5, max_rows=1)) == [["0"], ["1"]]


def test_background_requests_wait_for_clients() -> None:
    queue = PoolingQueue(1000, 100)
    queue.add(make("job", 5, background=True))
    assert not queue.has_foreground
    assert queue.choose(100, background=False) is None
    job = choose(queue)
    queue.add(make("live", 5))
    assert queue.has_foreground
    live = choose(queue)
    assert list_names(live) == ["live"]
    queue.finish(live, [b"v"])
    assert choose(queue) is job


def test_events_have_the_vectors() -> None:
    queue = fill(2, 3)
    batch = choose(queue)
    assert choose(queue) is batch, "it is under way until it is finished"
    first, second = queue.finish(batch, [b"a", b"b"])
    assert (first.request_id, first.vector, first.finish) == ("0", b"a", FinishReason.STOP)
    assert (second.request_id, second.vector, second.num_computed_tokens) == ("1", b"b", 3)
    assert queue.count() == {"running": 0, "waiting": 0, "finished": 2}


def test_aborted_requests_get_one_event() -> None:
    queue = fill(2, 2, 500)
    batch = choose(queue)
    for name in ("0", "2"):
        event = queue.abort(name)
        assert event is not None and event.finish is FinishReason.ABORT
        assert queue.abort(name) is None
    assert [event.request_id for event in queue.finish(batch, [b"a", b"b"])] == ["1"]
    assert queue.abort("1") is None and not queue.is_busy


def test_a_batch_of_aborted_requests_is_dropped() -> None:
    queue = fill(2)
    choose(queue)
    queue.abort("0")
    assert queue.choose(100, True) is None and not queue.is_busy
    queue.add(make("0", 3))
    assert list_names(choose(queue)) == ["0"]


def test_of_a_batch_that_failed_only_the_culprit_fails() -> None:
    queue = fill(2, 2, 2)
    assert queue.fail(choose(queue), ValueError("bad")) == []
    ended = []
    while queue.is_busy:
        batch = choose(queue)
        (name,) = list_names(batch)
        bad = name == "1"
        ended += queue.fail(batch, ValueError("bad")) if bad else queue.finish(batch, [b"v"])
    assert [event.finish for event in ended] == [FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]
    assert isinstance(ended[1].error, InternalError)


def test_batches_fit_in_memory() -> None:
    """Together, or one by one, or once there is memory; a background batch gives its memory back."""
    budget = MemoryBudget(limit=1000, weights=100, transient=3, footprint=Footprint(per_token=10, step=1))
    queue = PoolingQueue(1000, 100, memory=budget, slice_tokens=20)
    with pytest.raises(OutOfMemory, match=r"weights 0.0 MB \+ 85 tokens 0.0 MB > limit"):
        queue.add(make("long", 85))
    queue.add(make("job", 30, background=True))
    assert list_names(choose(queue)) == ["job"] and queue.held_bytes == 30 * 10 + 20 * 3
    for name in "ab":
        queue.add(make(name, 10))
    assert queue.choose(100, False, lambda nbytes: nbytes <= 100) is queue._batches[True]
    assert (queue.held_bytes, queue.wanted_bytes) == (360, 130)
    alone = queue.choose(100, False, lambda nbytes: nbytes <= 130)
    assert alone is not None and list_names(alone) == ["a"]
    assert (queue.held_bytes, queue.wanted_bytes) == (490, 0)
    queue.finish(alone, [b"v"])
    queue.add(make("c", 10))
    together = queue.choose(100, False, lambda nbytes: nbytes <= 260)
    assert together is not None and list_names(together) == ["b", "c"]


def test_what_cannot_run_is_refused() -> None:
    queue = PoolingQueue(10, 2)
    with pytest.raises(PromptTooLong, match="11 tokens; the model takes 10"):
        queue.add(make("long", 11))
    with pytest.raises(RequestError, match="empty"):
        queue.add(make("none", 0))
    queue.add(make("a", 3))
    assert queue.has("a") and not queue.has("b")
    queue.add(make("b", 3))
    with pytest.raises(Overloaded):
        queue.add(make("c", 3))
    queue.add(make("job", 3, background=True))


def test_a_lone_text_fits_where_nothing_else_is() -> None:
    """Several do not, and none fits beside a batch under way."""
    queue = PoolingQueue(1000, 100, memory=MemoryBudget(limit=1000, footprint=Footprint(per_token=1, step=1)))
    for name in ("0", "1"):
        queue.add(make(name, 10, background=True))
    queue.add(make("live", 20))
    batch = queue.choose(100, True, lambda nbytes: False, alone=True)
    assert batch is not None and list_names(batch) == ["live"]
    queue.finish(batch, [b"v"])
    batch = queue.choose(100, True, lambda nbytes: False, alone=True)
    assert batch is not None and list_names(batch) == ["0"]
    queue.add(make("next", 5))
    assert queue.choose(100, False, lambda nbytes: False, alone=True) is batch


def test_a_background_batch_goes_first_where_a_prompt_waits_for_its_memory() -> None:
    queue = fill(10, background=True)
    job = choose(queue)
    queue.add(make("live", 5))
    assert queue.choose(100, False, blocked=True) is job
    queue.abort("0")
    live = queue.choose(100, False, blocked=True)
    assert live is not None and list_names(live) == ["live"], "nobody waits for the other any more"


def test_a_text_that_waits_for_memory_and_is_aborted_wants_none() -> None:
    budget = MemoryBudget(limit=1000, footprint=Footprint(per_token=10, step=1))
    queue = PoolingQueue(1000, 100, memory=budget)
    queue.add(make("a", 5))
    assert queue.choose(100, False, lambda nbytes: False) is None and queue.wanted_bytes == 50
    queue.abort("a")
    assert queue.wanted_bytes == 0 and not queue.is_busy
