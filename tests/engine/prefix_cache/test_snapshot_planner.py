"""What is stored of a prompt and its answer, where, and which states make others obsolete."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.core.request import HitKind
from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache
from tests.helpers.cache_fakes import (
    FakeTier,
    Row,
    check_integrity,
    list_entries,
    list_stops,
    make_cache,
    make_request,
    serve,
)

LONG = list(range(100, 130))


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
        hit = serve(cache, f"t{turn}", prompt, [1, 2], cache_positions=(11,))
        found.append(hit.length if hit is not None else 0)
        prompt += [1, 2, 200 + turn, 5]
    return found


def test_a_conversation_keeps_its_first_and_its_last_states() -> None:
    """The system prompt's end for others, and its end to go on from: not a state for each turn."""
    cache = make_cache(states=True, every=1000)
    assert turns(cache, 10) == [0, *range(31, 67, 4)]
    assert list_stops(cache, SnapshotKind.STATE) == [11, 63, 65, 67]
    held = cache.nbytes
    turns(other := make_cache(states=True, every=1000), 3)
    assert len(list_stops(other, SnapshotKind.STATE)) == 4 and held < 1.3 * (other.nbytes + 7 * 4)
    check_integrity(cache)


def test_a_state_from_which_others_went_on_stays() -> None:
    """Two conversations branch off at 35: that state is there for a third, whatever came after."""
    cache = make_cache(states=True, every=1000)
    turns(cache, 2)
    for fork in (90, 91):
        hit = serve(cache, f"f{fork}", [*LONG, 1, 2, 200, 5, 1, fork, 7], [3, 4])
        assert hit is not None and hit.length == 35
    turns(cache, 8)
    assert 35 in list_stops(cache, SnapshotKind.STATE)
    hit = serve(cache, "third", [*LONG, 1, 2, 200, 5, 1, 95, 7], [3, 4])
    assert hit is not None and hit.length == 35


def test_states_stay_until_the_new_one_is_safe() -> None:
    """A kill finds the older ones: with files, a state goes once the newer one is a file."""
    cache = make_cache(states=True, every=1000)
    turns(cache, 3)
    before = list_stops(cache, SnapshotKind.STATE)
    cache._store.is_durable = lambda record: False  # type: ignore[method-assign]
    turns(cache, 4)
    assert set(before) < set(list_stops(cache, SnapshotKind.STATE))


def test_only_the_newest_checkpoint_of_a_prompt_stays() -> None:
    """Every 24 tokens less the chunk that a kill may find half written."""
    cache = make_cache(states=True, every=24)
    row = Row(cache, make_request("a", range(70)))
    row.begin()
    seen = []
    while row.prefill():
        seen.append(list_stops(cache, SnapshotKind.STATE))
    assert seen[1:4] == [[16], [16], [32]] and seen[-1] == [69]


@pytest.mark.parametrize("states", [False, True])
def test_of_intervals_only_a_short_prompt_has_no_file_and_a_long_one_loses_little(states: bool) -> None:
    """The files are what a killed job finds: at most an interval and a chunk less than was computed."""
    options: dict[str, Any] = {"tier": FakeTier(), "states": states, "every": 24, "intervals_only": True}
    cache = make_cache(**options)
    serve(cache, "short", range(50, 64), [1, 2], cache_positions=(11,))
    assert not options["tier"].files and len(list_entries(cache)) > 0
    serve(cache, "long", range(100, 170), [1, 2], cache_positions=(113,))
    hit = Row(make_cache(**options), make_request("again", range(100, 170))).begin()
    assert hit is not None and 70 - 24 - 8 <= hit.length < 69


def test_of_intervals_only_a_state_that_is_not_written_puts_off_no_checkpoint() -> None:
    options: dict[str, Any] = {"tier": FakeTier(), "states": True, "every": 64, "intervals_only": True}
    row = Row(make_cache(**options), make_request("a", range(120), cache_positions=(55,)))
    row.begin()
    while row.filled < 104:
        row.prefill()
    hit = Row(make_cache(**options), make_request("again", range(120))).begin()
    assert hit is not None and row.filled - hit.length <= 64 + 8


@pytest.mark.parametrize("states", [False, True])
def test_of_intervals_only_turns_that_grow_are_written_too(states: bool) -> None:
    """Each turn begins in memory where the last one ended, and is shorter than an interval."""
    options: dict[str, Any] = {"tier": FakeTier(), "states": states, "every": 24, "intervals_only": True}
    cache, prompt = make_cache(**options), list(LONG[:6])
    for turn in range(12):
        serve(cache, f"t{turn}", prompt, [1, 2])
        prompt += [1, 2, 200 + turn, 5]
        hit = Row(make_cache(**options), make_request("again", prompt)).begin()
        assert len(prompt) - 4 - (hit.length if hit is not None else 0) <= 24 + 8


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
    assert list_stops(cache, SnapshotKind.STATE) == [16, 69]


def test_states_at_boundaries_are_stored() -> None:
    cache = make_cache(states=True, every=16)
    assert cache.stops_at_cache_positions and not make_cache().stops_at_cache_positions
    serve(cache, "a", range(70), cache_positions=(11, 50))
    assert {11, 50, 69} <= set(list_stops(cache, SnapshotKind.STATE))
    assert all(r.at_cache_position for r in list_entries(cache, SnapshotKind.STATE) if r.stop in (11, 50, 69))


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
