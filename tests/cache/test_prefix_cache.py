"""What the prefix cache stores and for how long, and that no hit ever has wrong content."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.cache import content_keys, tracked_request
from mlxrun.cache.entry import CacheEntry
from mlxrun.cache.entry_store import EntryStore
from mlxrun.cache.prefix_cache import PrefixCache
from mlxrun.scheduler.payload import SerializedPayload
from mlxrun.scheduler.request import HitKind
from mlxrun.scheduler.step_plan import SnapshotKind
from tests.helpers.cache_fakes import (
    STATE_BYTES,
    FakeCodec,
    FakeDiskTier,
    Row,
    check_integrity,
    make_cache,
    make_request,
    serve,
)

LONG = list(range(100, 130))


def list_entries(cache: PrefixCache, part: SnapshotKind | None = None) -> list[CacheEntry]:
    return [r for r in cache._index.entries.values() if part in (None, r.kind)]


def stops(cache: PrefixCache, part: SnapshotKind) -> list[int]:
    return sorted(r.stop for r in list_entries(cache, part))


# -- what is stored ----------------------------------------------------------------------------------


def test_an_interrupted_prompt_keeps_its_work() -> None:
    cache = make_cache()
    row = Row(cache, make_request("a", LONG))
    row.begin()
    for _ in range(3):
        row.prefill()
    row.end()
    hit = serve(cache, "b", LONG)
    assert hit is not None and hit.length == 24


def test_a_prompt_that_is_always_interrupted_gets_done() -> None:
    """With states: each try goes on where the last one was given up, off the grid too."""
    for deltas in (True, False):
        cache, found = make_cache(states=True, deltas=deltas), []
        for n in range(7):
            row = Row(cache, make_request(str(n), LONG))
            hit = row.begin()
            found.append(hit.length if hit else 0)
            row.prefill(5)
            row.end()
        assert found == [0, 5, 8, 13, 16, 21, 24]


def test_growing_turns_hold_the_last_one() -> None:
    cache = make_cache()
    prompt = list(LONG)
    for turn in range(10):
        hit = serve(cache, f"t{turn}", prompt, [1, 2, 3, 4])
        assert turn == 0 or (hit is not None and hit.kind is HitKind.PREFIX)
        held = len(prompt) + 3
        assert cache.nbytes == held, "one copy of each token, no more"
        prompt += [1, 2, 3, 4, 200 + turn, 5]
    check_integrity(cache)


def test_branches_share_what_they_have_in_common() -> None:
    cache = make_cache()
    serve(cache, "a", [*LONG[:16], 1, 2])
    serve(cache, "b", [*LONG[:16], 3, 4])
    assert cache.nbytes == 16 + 1 + 1


def turns(cache: PrefixCache, count: int) -> list[int]:
    """A conversation; the tokens that each turn found."""
    prompt, found = list(LONG), []
    for turn in range(count):
        hit = serve(cache, f"t{turn}", prompt, [1, 2], boundaries=(11,))
        found.append(hit.length if hit is not None else 0)
        prompt += [1, 2, 200 + turn, 5]
    return found


def test_a_conversation_keeps_its_first_and_its_last_states() -> None:
    """The system prompt's end for others, and its end to go on from: not a state for each turn."""
    cache = make_cache(states=True, every=1000)
    assert turns(cache, 10) == [0, *range(31, 67, 4)]
    assert stops(cache, SnapshotKind.STATE) == [11, 63, 65, 67]
    held = cache.nbytes
    turns(other := make_cache(states=True, every=1000), 3)
    assert len(stops(other, SnapshotKind.STATE)) == 4 and held < 1.3 * (other.nbytes + 7 * 4)
    check_integrity(cache)


def test_a_state_from_which_others_went_on_stays() -> None:
    """Two conversations branch off at 35: that state is there for a third, whatever came after."""
    cache = make_cache(states=True, every=1000)
    turns(cache, 2)
    for fork in (90, 91):
        hit = serve(cache, f"f{fork}", [*LONG, 1, 2, 200, 5, 1, fork, 7], [3, 4])
        assert hit is not None and hit.length == 35
    turns(cache, 8)
    assert 35 in stops(cache, SnapshotKind.STATE)
    hit = serve(cache, "third", [*LONG, 1, 2, 200, 5, 1, 95, 7], [3, 4])
    assert hit is not None and hit.length == 35


def test_states_stay_until_the_new_one_is_safe() -> None:
    """A kill finds the older ones: with files, a state goes once the newer one is a file."""
    cache = make_cache(states=True, every=1000)
    turns(cache, 3)
    before = stops(cache, SnapshotKind.STATE)
    cache._store.is_durable = lambda record: False  # type: ignore[method-assign]
    turns(cache, 4)
    assert set(before) < set(stops(cache, SnapshotKind.STATE))


def test_only_the_newest_checkpoint_of_a_prompt_stays() -> None:
    """Every 24 tokens less the chunk that a kill may find half written."""
    cache = make_cache(states=True, every=24)
    row = Row(cache, make_request("a", range(70)))
    row.begin()
    seen = []
    while row.prefill():
        seen.append(stops(cache, SnapshotKind.STATE))
    assert seen[1:4] == [[16], [16], [32]] and seen[-1] == [69]


def test_a_checkpoint_that_another_uses_stays() -> None:
    cache = make_cache(states=True)
    row = Row(cache, make_request("a", range(70)))
    row.begin()
    for _ in range(2):
        row.prefill()
    other = Row(cache, make_request("b", [*range(18), 5, 5]))
    hit = other.begin()
    assert hit is not None and hit.length == 16
    other.preempt()
    while row.prefill():
        pass
    assert stops(cache, SnapshotKind.STATE) == [16, 69]


def test_states_at_boundaries_are_stored() -> None:
    cache = make_cache(states=True, every=16)
    assert cache.needs_boundary_stops and not make_cache().needs_boundary_stops
    serve(cache, "a", range(70), boundaries=(11, 50))
    assert {11, 50, 69} <= set(stops(cache, SnapshotKind.STATE))
    assert all(r.boundary for r in list_entries(cache, SnapshotKind.STATE) if r.stop in (11, 50, 69))


def test_nothing_is_saved_twice() -> None:
    for states in (False, True):
        cache = make_cache(states=states)
        serve(cache, "a", LONG, [1])
        row = Row(cache, make_request("b", LONG))
        row.begin()
        assert cache.plan_snapshots("b", row.filled, row.filled, 29) == []
        assert cache.plan_final_snapshots("b", (), row.filled) == []


def test_a_preempted_row_goes_on() -> None:
    for states in (False, True):
        cache = make_cache(states=states)
        row = Row(cache, make_request("a", LONG))
        row.begin()
        while row.prefill():
            pass
        row.decode([1, 2, 3, 4])
        row.preempt()
        hit = row.begin()
        assert hit is not None and (hit.length, hit.kind) == (33, HitKind.EXACT)
        row.end()


def test_tokens_that_are_not_known_yet_are_not_stored() -> None:
    """Decode-ahead: the row may hold a token more than anybody knows."""
    for states in (False, True):
        cache = make_cache(states=states)
        row = Row(cache, make_request("a", LONG))
        row.begin()
        saves = cache.plan_final_snapshots("a", [1], 32)
        assert [s.stop for s in saves] == ([] if states else [8, 16, 24, 31])


# -- budgets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("memory", [1, 10, 40, 100])
def test_the_budget_holds_on_every_path(memory: int, states: bool) -> None:
    for files in (None, FakeDiskTier()):
        cache = make_cache(states=states, memory=memory, disk_tier=files)
        for n in range(30):
            row = Row(cache, make_request(str(n), [n % 7, *LONG]))
            row.begin()
            while row.prefill():
                check_integrity(cache, memory)
            row.decode([n % 3, 2])
            row.end()
            check_integrity(cache, memory)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("deltas", [False, True])
def test_all_memory_can_be_freed(deltas: bool, states: bool) -> None:
    if not deltas and not states:
        return
    cache = make_cache(deltas=deltas, states=states)
    for n in range(10):
        serve(cache, str(n), [n % 3, *LONG], [n, n], boundaries=(5, 13))
    assert cache.nbytes > 0
    cache.shrink(0)
    assert cache.nbytes == 0 and cache.counters.records == 0
    assert not cache._index._trees and not cache._tracked and not cache._planned


def test_the_least_recently_used_goes_first() -> None:
    cache = make_cache(memory=90)
    for rid in range(3):
        serve(cache, str(rid), [rid, *LONG[:29]])
    assert serve(cache, "again", [0, *LONG[:29]]) is not None
    serve(cache, "new", [9, *LONG[:29]])
    lengths = {n: Row(cache, make_request(f"l{n}", [n, *LONG[:29]])).begin() for n in (0, 1, 2, 9)}
    assert all(lengths[n] is not None and lengths[n].length == 29 for n in (0, 2, 9))  # type: ignore[union-attr]
    one = lengths[1]
    assert one is None or one.length < 29


def test_suffix_before_prefix() -> None:
    cache = make_cache()
    serve(cache, "a", LONG)
    for most in (24, 20, 16, 8, 0):
        cache.shrink(most)
        assert stops(cache, SnapshotKind.DELTA) == [8, 16, 24][: most // 8]


def test_boundaries_outlast_answers() -> None:
    """A state at a prompt's end goes after one at a newer answer's end."""
    cache = make_cache(states=True, every=1000)
    serve(cache, "a", LONG)
    serve(cache, "b", [7, *LONG], [1, 2, 3])
    cache.shrink(cache.nbytes - 1)
    assert 33 not in stops(cache, SnapshotKind.STATE)
    assert stops(cache, SnapshotKind.STATE) == [29, 30]


def test_a_full_cache_takes_new_prompts() -> None:
    """Old boundaries do not keep new prompts out."""
    cache = make_cache(states=True, memory=4 * (30 + 2 * STATE_BYTES), every=1000)
    for n in range(20):
        serve(cache, str(n), [n, *LONG], boundaries=(9,))
        hit = serve(cache, f"again{n}", [n, *LONG], boundaries=(9,))
        assert hit is not None and hit.length == 30


def test_a_hit_is_pinned_until_its_row_is_freed() -> None:
    cache = make_cache()
    serve(cache, "a", LONG)
    row = Row(cache, make_request("b", LONG))
    row.begin()
    cache.shrink(0)
    assert cache.nbytes == 29
    row.end()
    cache.shrink(0)
    assert cache.nbytes == 0


def test_evicted_while_waiting() -> None:
    cache = make_cache()
    serve(cache, "a", LONG)
    row = Row(cache, make_request("b", LONG))
    assert not cache.should_wait_for_prefix("b")
    cache.shrink(0)
    assert row.serve() is None


def test_the_order_does_not_grow() -> None:
    cache = make_cache()
    for n in range(500):
        serve(cache, str(n), LONG, [n % 5])
    assert len(cache._store._memory_order) < 200


# -- what cannot be used -----------------------------------------------------------------------------


@pytest.mark.parametrize("states", [False, True])
def test_unusable_payloads_are_dropped(states: bool) -> None:
    codec = FakeCodec()
    cache = make_cache(codec=codec, states=states)
    serve(cache, "a", LONG)
    middle = next(r for r in list_entries(cache, SnapshotKind.DELTA) if r.stop == 16)
    codec.broken.add(middle.payload)
    hit = Row(cache, make_request("b", LONG)).begin()
    assert cache.counters.refused >= 1
    assert (hit.length if hit else 0) == (0 if states else 8)
    assert middle.key not in cache._index.entries
    check_integrity(cache)


def test_what_could_not_be_restored_is_dropped() -> None:
    files = FakeDiskTier()
    cache = make_cache(disk_tier=files)
    serve(cache, "a", LONG)
    row = Row(cache, make_request("b", LONG))
    assert row.begin() is not None
    cache.invalidate_hit("b")
    assert cache.counters.refused == 4 and not list_entries(cache) and not files.files and cache.nbytes == 0
    row.state.num_computed_tokens, row.state.decoding = 0, False
    while row.prefill():
        pass
    row.end()
    assert serve(cache, "c", LONG) is not None
    check_integrity(cache)


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


# -- disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("deltas", "states"), [(True, False), (True, True), (False, True)])
def test_a_restart_finds_it_again(deltas: bool, states: bool) -> None:
    files = FakeDiskTier()
    cache = make_cache(disk_tier=files, deltas=deltas, states=states)
    serve(cache, "a", LONG, [1, 2], boundaries=(11,))
    cache.shutdown()
    assert files.closed
    again = make_cache(disk_tier=files, deltas=deltas, states=states)
    check_integrity(again)
    hit = serve(again, "b", [*LONG, 1, 5, 6], boundaries=(11,))
    assert hit is not None and hit.length == 31
    assert again.counters.memory_bytes == again.nbytes > 0
    check_integrity(again)


def test_checkpoints_are_on_disk_before_the_prompt_is_done() -> None:
    """A crash in the middle loses what came after the last checkpoint."""
    files = FakeDiskTier()
    row = Row(make_cache(disk_tier=files, every=24), make_request("a", range(70)))
    row.begin()
    written = []
    while row.prefill():
        written.append(max((r.stop for r, _ in files.files.values()), default=0))
    assert written == [0, 16, 16, 32, 32, 48, 48, 64, 69]
    hit = serve(make_cache(disk_tier=files), "b", range(70))
    assert hit is not None and hit.length == 69


def test_memory_is_only_in_front_of_the_disk() -> None:
    files, codec = FakeDiskTier(), FakeCodec()
    cache = make_cache(disk_tier=files, codec=codec, memory=20)
    serve(cache, "a", LONG)
    cache.shrink(0)
    assert cache.nbytes == 0 and list_entries(cache)
    for _ in range(2):
        hit = serve(cache, "b", LONG)
        assert hit is not None and hit.length == 29
        check_integrity(cache, 20)
    assert files.nbytes == 29


def test_the_disk_has_a_budget() -> None:
    files = FakeDiskTier()
    cache = make_cache(disk_tier=files, disk=40)
    for n in range(5):
        serve(cache, str(n), [n, *LONG])
        assert files.nbytes <= 40
        check_integrity(cache)
    assert cache.counters.evicted_disk > 0 and cache.counters.disk_bytes == files.nbytes
    reopened = make_cache(disk_tier=files, disk=20)
    assert files.nbytes <= 20
    check_integrity(reopened)
    hit = serve(reopened, "z", [4, *LONG])
    assert hit is not None and hit.length == 16


@pytest.mark.parametrize("harm", ["gone", "garbage"])
def test_bad_files_shorten_the_hit(harm: str) -> None:
    files = FakeDiskTier()
    serve(make_cache(disk_tier=files), "a", LONG)
    key = next(k for k, (r, _) in files.files.items() if r.stop == 16)
    cache = make_cache(disk_tier=files)
    if harm == "gone":
        del files.files[key]
    else:
        files.files[key] = (files.files[key][0], SerializedPayload({}, {}))
    hit = Row(cache, make_request("b", LONG)).begin()
    assert hit is not None and hit.length == 8
    assert cache.counters.refused == (harm == "garbage"), "files count what they cannot read"
    check_integrity(cache)


def test_files_that_cannot_be_reached_or_lie_are_deleted() -> None:
    files = FakeDiskTier()
    serve(make_cache(disk_tier=files, states=True), "a", LONG)
    by_stop = {(r.kind, r.stop): r for r, _ in files.files.values()}
    del files.files[by_stop[SnapshotKind.DELTA, 16].key]
    by_stop[SnapshotKind.DELTA, 8].parent = b"x" * 16
    cache = make_cache(disk_tier=files, states=True)
    assert not list_entries(cache) and not files.files and cache.counters.refused == 1


def test_a_full_disk_is_only_memory() -> None:
    files = FakeDiskTier()
    files.full = True
    cache = make_cache(disk_tier=files, memory=50)
    for n in range(5):
        serve(cache, str(n), [n, *LONG])
        check_integrity(cache, 50)
    assert not files.files and serve(cache, "again", [4, *LONG]) is not None


def test_shorter_entries_leave_the_disk_once_the_longer_one_is_there() -> None:
    files = FakeDiskTier()
    cache = make_cache(disk_tier=files, every=1000)
    serve(cache, "a", range(13))
    assert files.nbytes == 12
    row = Row(cache, make_request("b", range(70)))
    row.begin()
    row.prefill()
    assert files.nbytes == 16, "not at a checkpoint, but the part's file was the only one"
    check_integrity(cache)


# -- waiting for a prefix ----------------------------------------------------------------------------


def test_a_shared_prefix_is_computed_once() -> None:
    cache = make_cache()
    first, second = Row(cache, make_request("a", [*LONG, 1, 2])), Row(cache, make_request("b", [*LONG, 3, 4]))
    assert not cache.should_wait_for_prefix("b"), "nobody runs"
    first.begin()
    assert cache.should_wait_for_prefix("b")
    for stop in (8, 16, 24):
        assert cache.should_wait_for_prefix("b"), f"{stop} is still to come"
        first.prefill()
    assert not cache.should_wait_for_prefix("b"), "from 30 on they differ, and the next grid point is beyond"
    hit = second.begin()
    assert hit is not None and hit.length == 24


def test_a_short_shared_prefix_is_computed_once() -> None:
    """A boundary before the first grid point, and two equal prompts."""
    for states in (False, True):
        cache = make_cache(chunk=512, states=states)
        system = list(range(100))
        a = Row(cache, make_request("a", [*system, 1, 2], boundaries=(100,)), 512)
        Row(cache, make_request("b", [*system, 3, 4], boundaries=(100,)), 512)
        Row(cache, make_request("c", [*system, 1, 2], boundaries=(100,)), 512)
        Row(cache, make_request("d", [9, *system, 1, 2], boundaries=(101,)), 512)
        a.begin()
        assert [cache.should_wait_for_prefix(x) for x in "bcd"] == [True, True, False]
        while a.prefill():
            pass
        assert [cache.should_wait_for_prefix(x) for x in "bcd"] == [False] * 3
        hit = cache.lookup("b", (), 101)
        assert hit is not None and hit.length == 100


def test_no_request_waits_for_a_few_tokens() -> None:
    cache = make_cache(chunk=512)
    Row(cache, make_request("a", LONG), 512).begin()
    Row(cache, make_request("b", LONG), 512)
    assert not cache.should_wait_for_prefix("b")


@pytest.mark.parametrize("how", ["preempt", "end"])
def test_no_request_waits_for_one_that_has_gone(how: str) -> None:
    cache = make_cache()
    first = Row(cache, make_request("a", LONG))
    Row(cache, make_request("b", LONG))
    first.begin()
    assert cache.should_wait_for_prefix("b")
    getattr(first, how)()
    assert not cache.should_wait_for_prefix("b")


def test_no_request_waits_for_what_is_not_stored() -> None:
    """The budget holds nothing: once it was computed, waiting has no use."""
    cache = make_cache(memory=1)
    first = Row(cache, make_request("a", LONG))
    Row(cache, make_request("b", [*LONG[:8], 1, 2]))
    first.begin()
    assert cache.should_wait_for_prefix("b")
    first.prefill()
    assert not cache.should_wait_for_prefix("b")


def test_waiting_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked at every step, answered from memory until the cache changes."""
    cache = make_cache()
    Row(cache, make_request("a", LONG)).begin()
    Row(cache, make_request("b", [*LONG, 1, 2]))
    searched = []
    real = cache._index.match
    monkeypatch.setattr(cache._index, "match", lambda *a: searched.append(1) or real(*a))
    assert all(cache.should_wait_for_prefix("b") for _ in range(100))
    assert len(searched) == 1


# -- anything, in any order --------------------------------------------------------------------------


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
    boundaries = tuple(sorted(p for p in ends if p < len(prompt)))
    return make_request(
        str(number), prompt, image_spans=tuple(spans), image_digests=digests, boundaries=boundaries
    )


class Machine:
    """A cache under random use; every hit is compared with what it should hold (Row.check)."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.deltas, self.states = draw.choice([(True, False), (True, True), (False, True)])
        self.chunk = draw.choice([3, 4, 8])
        self.memory = draw.choice([1, 12, 30, 60, 200, 10**6])
        self.files = draw.choice([None, FakeDiskTier()])
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
            disk_tier=self.files,
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
        counters = self.cache.counters
        assert counters.disk_bytes == (self.files.nbytes if self.files else 0)
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
        assert self.cache.nbytes == 0 and self.cache.counters.records == 0 and not self.cache._planned
        if self.files is None:
            assert not self.cache._index._trees


def drive(seed: int) -> int:
    """A run of it; how many hits there were."""
    machine = Machine(seed)
    for _ in range(120):
        machine.step()
    machine.finish()
    return machine.hits


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_whatever_happens_a_hit_is_right(seed: int) -> None:
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
    return content_keys.array("q", tokens)  # type: ignore[attr-defined]


def test_the_tests_see_images_that_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(make_cache(4))
    monkeypatch.setattr(tracked_request, "build_content_ids", forget_images)
    with pytest.raises(AssertionError, match="wrong content"):
        quick(make_cache(4))


def test_the_tests_see_keys_that_forget_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    real = content_keys.compute_digest
    monkeypatch.setattr(content_keys, "compute_digest", lambda *parts: real(parts[-1]))
    with pytest.raises(AssertionError, match="wrong content"):
        quick(make_cache(4))


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
    monkeypatch.setattr(EntryStore, "enforce_budgets", lambda self: self._update_counters())
    with pytest.raises(AssertionError):
        for seed in range(50):
            drive(seed)


def test_a_shorter_entry_stays_on_disk_until_the_longer_one_is_there() -> None:
    """A disk that takes no more loses nothing that it has."""

    class Slow(FakeDiskTier):
        """Accepts entries, and writes none of them before `written` is set."""

        written = False

        def is_stored(self, entry: CacheEntry) -> bool:
            return self.written and super().is_stored(entry)

    files = Slow()
    cache = make_cache(disk_tier=files)
    serve(cache, "a", range(13))
    kept = set(files.files)
    assert kept
    serve(cache, "b", range(15))
    assert kept < set(files.files), "the longer entry is being written, the shorter one is still there"
    files.written = True
    serve(cache, "c", [9, 9, 9, 9, 9])
    assert not kept <= set(files.files)
