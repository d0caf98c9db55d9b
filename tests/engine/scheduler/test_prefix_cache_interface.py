"""What the scheduler asks of the prefix cache, in which order, whatever happens to a request."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mlxrun.core.memory_budget import RequestLimits
from mlxrun.core.request import Request
from mlxrun.core.step_plan import CacheHit, PromptLogprobs, SnapshotRequest, SnapshotResult
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache, PrefixCacheInterface
from mlxrun.engine.scheduler.scheduler import Scheduler
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


class Recorder(PrefixCacheInterface):
    """Checks the order of the calls for each request, and has no entries."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.rows: set[str] = set()
        self.prefilled: dict[str, int] = {}
        self.calls = 0

    def track(self, request: Request) -> None:
        assert request.id not in self.known
        self.known.add(request.id)
        self.calls += 1

    def should_wait_for_prefix(self, request_id: str) -> bool:
        assert request_id in self.known - self.rows
        return False

    def lookup(self, request_id: str, output: Sequence[int], max_tokens: int) -> CacheHit | None:
        assert request_id in self.known - self.rows
        self.rows.add(request_id)
        self.prefilled[request_id] = 0
        return None

    def plan_snapshots(self, request_id: str, start: int, stop: int, target: int) -> list[SnapshotRequest]:
        assert request_id in self.rows and start == self.prefilled[request_id] < stop <= target
        self.prefilled[request_id] = stop
        return []

    def plan_final_snapshots(
        self, request_id: str, output: Sequence[int], kv_length: int
    ) -> list[SnapshotRequest]:
        assert request_id in self.known
        self.rows.discard(request_id)
        return []

    def forget(self, request_id: str) -> None:
        self.known.remove(request_id)
        assert request_id not in self.rows


@pytest.mark.parametrize("seed", range(8))
def test_each_request_is_tracked_looked_up_and_forgotten(seed: int) -> None:
    """Also if it is aborted while it waits, runs or is preempted."""
    rng, cache = random.Random(seed), Recorder()
    scheduler = Scheduler(
        make_settings(max_running=3), RequestLimits(1000), prefix_cache=cache, clock=Clock()
    )
    made = make_engine()
    engine = Engine(made.model_info, scheduler, FakeRunner(), made._settings)
    answers = Answers()
    requests = [make_request(f"r{i}", rng.randrange(1, 30), rng.randrange(1, 9)) for i in range(12)]
    aborted = set()
    for request in requests:
        engine.add(request)
        for _ in range(rng.randrange(3)):
            answers.record(engine.step())
        victim = rng.choice(requests).id
        if rng.random() < 0.3:
            engine.abort(victim)
            aborted.add(victim)
        for state in scheduler.requests:
            if state.running and rng.random() < 0.1:
                scheduler.preempt(state)  # type: ignore[arg-type]
    finish_all(engine, answers)
    assert cache.calls == len(requests) and not cache.known and not cache.rows
    for request in requests:
        if request.id not in aborted:
            assert answers.get_answer(request.id) == compute_answer(request)


CALLS: Mapping[str, tuple[Any, Any]] = {
    "track": ((make_request("a"),), None),
    "should_wait_for_prefix": (("a",), False),
    "count_cached": ((make_request("a"),), 0),
    "lookup": (("a", (), 5), None),
    "find_prompt_logprobs": (("a", 1), ()),
    "record_prompt_logprobs": ((PromptLogprobs("a", 1, ()),), None),
    "plan_snapshots": (("a", 0, 4, 9), []),
    "plan_final_snapshots": (("a", (), 4), []),
    "forget": (("a",), None),
    "shrink": ((0,), None),
    "store_snapshot": ((SnapshotResult(SnapshotRequest("a", "state", 0, 4, None), None),), None),  # type: ignore[arg-type]
    "invalidate_hit": (("a",), None),
    "clear": ((), None),
    "pin_prefix": ((make_request("a"), 3, "agent"), None),
    "unpin_prefix": (("5f",), False),
    "release_pinned_memory": ((0,), None),
    "read_counters": ((), {}),
    "shutdown": ((), None),
}


def test_a_cache_without_entries_answers_nothing() -> None:
    """Each method is here, so a new one has to say what no cache means."""
    names = {name for name in vars(PrefixCacheInterface) if not name.startswith("_")}
    properties = {"stops_at_cache_positions", "survives_restart", "nbytes", "pinned_prefixes"}
    assert names - properties == CALLS.keys()
    cache = NoPrefixCache()
    assert (cache.stops_at_cache_positions, cache.survives_restart, cache.nbytes) == (False, False, 0)
    assert cache.pinned_prefixes == ()
    for name, (given, expected) in CALLS.items():
        assert getattr(cache, name)(*given) == expected
