"""The order in which entries are evicted."""

from __future__ import annotations

from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.cache_tier import EvictionOrder
from mlxrun.engine.prefix_cache.entry import CacheEntry
from tests.helpers.cache_fakes import Row, list_stops, make_cache, make_request, serve
from tests.helpers.cache_files import make_entry

LONG = list(range(100, 130))


def add_entries(*last_used: int) -> tuple[EvictionOrder, list[CacheEntry]]:
    """An order that holds one entry for each tick."""
    order, entries = EvictionOrder(CacheEntry.must_stay), []
    for number, tick in enumerate(last_used):
        entry, _ = make_entry(number)
        entry.last_used = tick
        entries.append(entry)
        order.add(entry)
    return order, entries


def test_entries_come_out_by_their_last_use() -> None:
    order, entries = add_entries(3, 1, 2)
    assert [order.pop() for _ in range(4)] == [entries[1], entries[2], entries[0], None]


def test_an_entry_that_was_used_since_it_was_added_waits_longer() -> None:
    order, (old, new) = add_entries(1, 2)
    old.last_used = 5
    assert [order.pop(), order.pop()] == [new, old]


def test_pinned_entries_stay_until_they_are_added_again() -> None:
    order, (pinned, other) = add_entries(1, 2)
    pinned.pins = 1
    assert [order.pop(), order.pop()] == [other, None]
    pinned.pins = 0
    order.add(pinned)
    assert order.pop() is pinned


def test_a_discarded_entry_never_comes_out() -> None:
    order, (gone, other) = add_entries(1, 2)
    order.discard(gone)
    assert [order.pop(), order.pop()] == [other, None]


def test_at_one_tick_states_go_before_the_deltas_they_depend_on() -> None:
    order = EvictionOrder(CacheEntry.must_stay)
    delta, state = make_entry(1)[0], make_entry(2, kind=SnapshotKind.STATE)[0]
    order.add(delta)
    order.add(state)
    assert [order.pop(), order.pop()] == [state, delta]


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
        assert list_stops(cache, SnapshotKind.DELTA) == [8, 16, 24][: most // 8]


def test_boundaries_outlast_answers() -> None:
    """A state at a prompt's end goes after one at a newer answer's end."""
    cache = make_cache(states=True, every=1000)
    serve(cache, "a", LONG)
    serve(cache, "b", [7, *LONG], [1, 2, 3])
    cache.shrink(cache.nbytes - 1)
    assert 33 not in list_stops(cache, SnapshotKind.STATE)
    assert list_stops(cache, SnapshotKind.STATE) == [29, 30]


def test_the_order_does_not_grow() -> None:
    cache = make_cache()
    for n in range(500):
        serve(cache, str(n), LONG, [n % 5])
    assert len(cache._store._memory_order) < 200
