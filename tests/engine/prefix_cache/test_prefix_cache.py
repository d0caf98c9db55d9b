"""No hit ever has wrong content, whatever happens in whatever order; a failure of the cache is a miss."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.engine.prefix_cache import entry as cache_entry
from mlxrun.engine.prefix_cache import prefix_waiting, tracked_request
from mlxrun.engine.prefix_cache.entry_store import EntryStore
from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache
from tests.helpers.cache_fakes import (
    FakeCodec,
    FakeTier,
    Row,
    check_integrity,
    make_cache,
    make_request,
    serve,
)
from tests.helpers.examples import count_examples

LONG = list(range(100, 130))


class Failing(FakeCodec):
    def is_usable(self, payload: Any, tokens: int) -> bool:
        raise RuntimeError("boom")

    def nbytes(self, payload: Any) -> int:
        raise RuntimeError("boom")


def test_a_failure_of_the_cache_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(codec=Failing())
    with caplog.at_level(logging.ERROR):
        for n in range(3):
            assert serve(cache, str(n), LONG, [1]) is None
    assert len(caplog.records) == 1 and cache.counters.miss == 3


def test_stray_calls_do_nothing() -> None:
    cache = make_cache()
    cache.invalidate_hit("x")
    cache.forget("x")
    assert cache.lookup("x", (), 5) is None and not cache.should_wait_for_prefix("x")
    assert cache.plan_snapshots("x", 0, 5, 5) == [] == cache.plan_final_snapshots("x", (), 5)


def some_request(draw: random.Random, number: int) -> Any:
    """Prompts over two tokens, so that they share much; images that look alike."""
    prompt = [int(draw.random() < 0.2) for _ in range(draw.randint(1, 30))]
    spans: list[tuple[int, int]] = []
    at = draw.choice([0, 2, 2, 5, 9])
    for _ in range(draw.randint(0, 2)):
        end = at + draw.choice([1, 3, 9])
        if end <= len(prompt):
            prompt[at:end] = [7] * (end - at)
            spans.append((at, end))
        at = end + draw.randint(0, 3)
    digests = tuple(draw.choice([b"dog", b"cat"]) for _ in spans)
    inside = {p for start, stop in spans for p in range(start + 1, stop)}
    ends = {draw.randint(1, 29) for _ in range(draw.randint(0, 2))} - inside
    cache_positions = tuple(sorted(p for p in ends if p < len(prompt)))
    return make_request(
        str(number), prompt, image_spans=tuple(spans), image_digests=digests, cache_positions=cache_positions
    )


class Machine:
    """A cache under random use; every hit is compared with what it should hold (Row.check)."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.deltas, self.states = draw.choice([(True, False), (True, True), (False, True)])
        self.chunk = draw.choice([3, 4, 8])
        self.memory = draw.choice([1, 12, 30, 60, 200, 10**6])
        self.files = draw.choice([None, FakeTier()])
        self.grid_only = draw.random() < 0.2
        self.disk = draw.choice([10, 40, 100, 10**6])
        self.rows: dict[str, Row] = {}
        self.count = self.hits = 0
        self.start()

    def start(self) -> None:
        self.codec = FakeCodec()
        self.cache = make_cache(
            self.chunk,
            deltas=self.deltas,
            states=self.states,
            memory=self.memory,
            tier=self.files,
            disk=self.disk,
            codec=self.codec,
            grid_only=self.grid_only,
            every=16,
        )

    def pick(self, rows: Sequence[Row]) -> Row | None:
        return self.draw.choice(rows) if rows else None

    def step(self) -> None:
        act = self.draw.choice(
            ["open", "open", "begin", "begin", "run", "run", "run", "leave", "end", "other"]
        )
        running = [r for r in self.rows.values() if r.state.running]
        waiting = [r for r in self.rows.values() if not r.state.running]
        if act == "open":
            self.count += 1
            self.rows[str(self.count)] = Row(self.cache, some_request(self.draw, self.count), self.chunk)
        elif act == "begin" and (row := self.pick(waiting)):
            self.hits += row.begin() is not None
        elif act == "run" and (row := self.pick(running)):
            if not row.prefill(self.draw.randint(1, 9)):
                row.decode([self.draw.randint(0, 1) for _ in range(self.draw.randint(0, 3))])
        elif act == "leave" and (row := self.pick(running)):
            row.preempt()
        elif act == "end" and (row := self.pick(list(self.rows.values()))):
            del self.rows[row.request.id]
            row.end()
        elif act == "other" and self.draw.random() < 0.5:
            self.other(running)
        self.check()

    def other(self, running: list[Row]) -> None:
        act = self.draw.choice(["shrink", "break", "discard", "restart", "full"])
        held = [r for r in self.cache._index.entries.values() if r.payload is not None]
        if act == "shrink":
            self.cache.shrink(self.draw.randint(0, 40))
        elif act == "break" and held:
            self.codec.broken.add(self.draw.choice(held).payload)
        elif act == "discard" and (row := self.pick(running)) and row.hit and row.filled == row.hit.length:
            self.cache.invalidate_hit(row.request.id)
            row.state.num_computed_tokens = row.filled = 0
            row.state.decoding = False
            row.hit = None
        elif act == "full" and self.files is not None:
            self.files.full = not self.files.full
        elif act == "restart":
            self.rows.clear()
            self.cache.shutdown()
            self.start()

    def check(self) -> None:
        check_integrity(self.cache, self.memory)
        assert not self.cache._failed
        if self.files is not None:
            pinned = sum(r.stop for r in self.cache._index.entries.values() if r.pins)
            assert self.files.nbytes <= self.disk + pinned
        assert self.cache.read_counters()["disk_bytes"] == (self.files.nbytes if self.files else 0)
        for row in self.rows.values():
            if not row.state.running and self.cache.should_wait_for_prefix(row.request.id):
                prefilling = [r for r in self.rows.values() if r.state.running and not r.state.decoding]
                assert prefilling, "held by nobody"

    def finish(self) -> None:
        for row in self.rows.values():
            while row.state.running and row.prefill():
                self.check()
            row.end()
        self.cache.shrink(0)
        assert self.cache.nbytes == 0 and self.cache.counters.entries == 0 and not self.cache._waiting._owners
        if self.files is None:
            assert not self.cache._index._trees


def drive(seed: int) -> int:
    """A run of it; how many hits there were."""
    machine = Machine(seed)
    for _ in range(120):
        machine.step()
    machine.finish()
    return machine.hits


@settings(max_examples=count_examples(200))
@given(st.integers(0, 2**32))
def test_whatever_happens_a_hit_is_right(seed: int) -> None:
    drive(seed)


def test_a_hit_is_right_where_requests_wait_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_waiting, "MIN_CACHE_POSITION", 3)
    for seed in range(40):
        drive(seed)


def test_the_property_has_something_to_look_at() -> None:
    assert sum(drive(seed) for seed in range(20)) > 60


def quick(cache: PrefixCache) -> None:
    """Serve image prompts that differ only in what the image shows, and prompts that branch off early."""
    prompt, spans = [1, 2, *[7] * 6, 3, 4, 5, 6], ((2, 8),)
    for what in (b"dog", b"cat", b"dog"):
        serve(cache, repr(what), prompt, image_spans=spans, image_digests=(what,), chunk=4)
    for n in range(4):
        serve(cache, str(n), [n, *LONG], chunk=4)


def forget_images(tokens: Sequence[int], spans: Sequence[tuple[int, int]], digests: Sequence[bytes]) -> Any:
    return cache_entry.array("q", tokens)  # type: ignore[attr-defined]


def test_the_tests_see_images_that_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(make_cache(4))
    monkeypatch.setattr(tracked_request, "build_content_ids", forget_images)
    with pytest.raises(AssertionError, match="wrong content"):
        quick(make_cache(4))


def test_the_property_sees_keys_that_forget_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cache_entry.compute_digest
    monkeypatch.setattr(cache_entry, "compute_digest", lambda *parts: real(parts[-1]))
    with pytest.raises(AssertionError):
        for seed in range(200):
            drive(seed)


def test_the_property_sees_images_that_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_request, "build_content_ids", forget_images)
    with pytest.raises(AssertionError, match="wrong content"):
        for seed in range(200):
            drive(seed)


def test_the_property_sees_hits_inside_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_request.TrackedRequest, "round_down", lambda self, length: length)
    with pytest.raises(AssertionError):
        for seed in range(200):
            drive(seed)


def test_the_property_sees_a_budget_that_is_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryStore, "enforce_budgets", lambda self: None)
    with pytest.raises(AssertionError):
        for seed in range(50):
            drive(seed)
