"""Budgets of memory and disk, entries that cannot be used, and what a restart finds on disk."""

from __future__ import annotations

import pytest

from mlxrun.core.step_plan import SerializedPayload, SnapshotKind
from mlxrun.engine.prefix_cache.entry import CacheEntry
from tests.helpers.cache_fakes import (
    STATE_BYTES,
    FakeCodec,
    FakeTier,
    Row,
    check_integrity,
    list_entries,
    make_cache,
    make_request,
    serve,
)

LONG = list(range(100, 130))


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("memory", [1, 10, 40, 100])
def test_the_budget_holds_on_every_path(memory: int, states: bool) -> None:
    for files in (None, FakeTier()):
        cache = make_cache(states=states, memory=memory, tier=files)
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
        serve(cache, str(n), [n % 3, *LONG], [n, n], cache_positions=(5, 13))
    assert cache.nbytes > 0
    cache.shrink(0)
    assert cache.nbytes == 0 and cache.counters.entries == 0
    assert not cache._index._trees and not cache._tracked and not cache._waiting._owners


def test_a_full_cache_takes_new_prompts() -> None:
    """Old cache_positions do not keep new prompts out."""
    cache = make_cache(states=True, memory=4 * (30 + 2 * STATE_BYTES), every=1000)
    for n in range(20):
        serve(cache, str(n), [n, *LONG], cache_positions=(9,))
        hit = serve(cache, f"again{n}", [n, *LONG], cache_positions=(9,))
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
    files = FakeTier()
    cache = make_cache(tier=files)
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


@pytest.mark.parametrize(("deltas", "states"), [(True, False), (True, True), (False, True)])
def test_a_restart_finds_it_again(deltas: bool, states: bool) -> None:
    files = FakeTier()
    cache = make_cache(tier=files, deltas=deltas, states=states)
    serve(cache, "a", LONG, [1, 2], cache_positions=(11,))
    cache.shutdown()
    assert files.closed
    again = make_cache(tier=files, deltas=deltas, states=states)
    check_integrity(again)
    hit = serve(again, "b", [*LONG, 1, 5, 6], cache_positions=(11,))
    assert hit is not None and hit.length == 31
    assert again.read_counters()["memory_bytes"] == again.nbytes > 0
    check_integrity(again)


def test_checkpoints_are_on_disk_before_the_prompt_is_done() -> None:
    """A crash in the middle loses what came after the last checkpoint."""
    files = FakeTier()
    row = Row(make_cache(tier=files, every=24), make_request("a", range(70)))
    row.begin()
    written = []
    while row.prefill():
        written.append(max((r.stop for r, _ in files.files.values()), default=0))
    assert written == [0, 16, 16, 32, 32, 48, 48, 64, 69]
    hit = serve(make_cache(tier=files), "b", range(70))
    assert hit is not None and hit.length == 69


def test_memory_is_only_in_front_of_the_disk() -> None:
    files, codec = FakeTier(), FakeCodec()
    cache = make_cache(tier=files, codec=codec, memory=20)
    serve(cache, "a", LONG)
    cache.shrink(0)
    assert cache.nbytes == 0 and list_entries(cache)
    for _ in range(2):
        hit = serve(cache, "b", LONG)
        assert hit is not None and hit.length == 29
        check_integrity(cache, 20)
    assert files.nbytes == 29


def test_the_disk_has_a_budget() -> None:
    files = FakeTier()
    cache = make_cache(tier=files, disk=40)
    for n in range(5):
        serve(cache, str(n), [n, *LONG])
        assert files.nbytes <= 40
        check_integrity(cache)
    assert cache.counters.evicted_disk > 0 and cache.read_counters()["disk_bytes"] == files.nbytes
    reopened = make_cache(tier=files, disk=20)
    assert files.nbytes <= 20
    check_integrity(reopened)
    hit = serve(reopened, "z", [4, *LONG])
    assert hit is not None and hit.length == 16


@pytest.mark.parametrize("harm", ["gone", "garbage"])
def test_bad_files_shorten_the_hit(harm: str) -> None:
    files = FakeTier()
    serve(make_cache(tier=files), "a", LONG)
    key = next(k for k, (r, _) in files.files.items() if r.stop == 16)
    cache = make_cache(tier=files)
    if harm == "gone":
        del files.files[key]
    else:
        files.files[key] = (files.files[key][0], SerializedPayload({}, {}))
    hit = Row(cache, make_request("b", LONG)).begin()
    assert hit is not None and hit.length == 8
    assert cache.counters.refused == (harm == "garbage"), "files count what they cannot read"
    check_integrity(cache)


def test_files_that_cannot_be_reached_or_lie_are_deleted() -> None:
    files = FakeTier()
    serve(make_cache(tier=files, states=True), "a", LONG)
    by_stop = {(r.kind, r.stop): r for r, _ in files.files.values()}
    del files.files[by_stop[SnapshotKind.DELTA, 16].key]
    by_stop[SnapshotKind.DELTA, 8].parent = b"x" * 16
    cache = make_cache(tier=files, states=True)
    assert not list_entries(cache) and not files.files and cache.counters.refused == 1


def test_a_full_disk_is_only_memory() -> None:
    files = FakeTier()
    files.full = True
    cache = make_cache(tier=files, memory=50)
    for n in range(5):
        serve(cache, str(n), [n, *LONG])
        check_integrity(cache, 50)
    assert not files.files and serve(cache, "again", [4, *LONG]) is not None


def test_shorter_entries_leave_the_disk_once_the_longer_one_is_there() -> None:
    files = FakeTier()
    cache = make_cache(tier=files, every=1000)
    serve(cache, "a", range(13))
    assert files.nbytes == 12
    row = Row(cache, make_request("b", range(70)))
    row.begin()
    row.prefill()
    assert files.nbytes == 16, "not at a checkpoint, but the part's file was the only one"
    check_integrity(cache)


class SlowDiskTier(FakeTier):
    """Accepts entries, and writes none of them before `written` is set."""

    written = False

    def is_stored(self, entry: CacheEntry) -> bool:
        return self.written and super().is_stored(entry)


def test_a_shorter_entry_stays_on_disk_until_the_longer_one_is_there() -> None:
    """A disk that takes no more loses nothing that it has."""

    files = SlowDiskTier()
    cache = make_cache(tier=files)
    serve(cache, "a", range(13))
    kept = set(files.files)
    assert kept
    serve(cache, "b", range(15))
    assert kept < set(files.files), "the longer entry is being written, the shorter one is still there"
    files.written = True
    serve(cache, "c", [9, 9, 9, 9, 9])
    assert not kept <= set(files.files)


def test_clearing_deletes_the_files_that_wait_for_longer_ones() -> None:
    """Else a restart would find them."""
    files = SlowDiskTier()
    cache = make_cache(tier=files)
    for _ in range(2):
        serve(cache, "a", range(13))
        serve(cache, "b", range(15))
        assert len(files.files) > len(list_entries(cache)), "the shorter entry's file waits"
        cache.clear()
        assert not files.files and not list_entries(cache) and cache.read_counters()["disk_bytes"] == 0


@pytest.mark.parametrize("written", [False, True])
def test_shutting_down_deletes_the_files_that_waited(written: bool) -> None:
    """If the longer ones are there by then."""
    files = SlowDiskTier()
    cache = make_cache(tier=files)
    serve(cache, "a", range(13))
    kept = set(files.files)
    serve(cache, "b", range(15))
    files.written = written
    cache.shutdown()
    assert (kept <= set(files.files)) is not written
