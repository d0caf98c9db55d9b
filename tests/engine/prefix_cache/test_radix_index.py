"""How prompts meet the prefix cache (radix_index.py, PrefixCache.lookup), and what a lookup costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxrun.core.request import HitKind
from mlxrun.engine.prefix_cache import entry as cache_entry
from mlxrun.engine.prefix_cache import radix_index
from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache
from tests.helpers.cache_fakes import Row, check_integrity, make_cache, make_request, serve

DOG, CAT = b"d" * 32, b"c" * 32
LONG = list(range(100, 130))


def test_nothing_is_known_at_first() -> None:
    cache = make_cache()
    assert serve(cache, "a", LONG) is None
    assert cache.counters.miss == 1


def test_a_prompt_sent_again_leaves_one_token() -> None:
    """Also after the entry of its answer has replaced that of the prompt."""
    cache = make_cache()
    serve(cache, "a", LONG, [1, 2, 3])
    hit = serve(cache, "b", LONG)
    assert hit is not None and (hit.length, hit.kind) == (29, HitKind.EXACT)


def test_prompt_and_answer_sent_again() -> None:
    cache = make_cache()
    serve(cache, "a", LONG, [1, 2, 3])
    hit = serve(cache, "b", [*LONG, 1, 2, 3])
    assert hit is not None and (hit.length, hit.kind) == (32, HitKind.EXACT)


def test_a_prompt_that_goes_on() -> None:
    cache = make_cache()
    serve(cache, "a", LONG, [1, 2, 3])
    hit = serve(cache, "b", [*LONG, 1, 2, 50, 51, 52])
    assert hit is not None and (hit.length, hit.kind) == (32, HitKind.PREFIX)


def test_a_beginning_of_a_longer_prompt() -> None:
    cache = make_cache(chunk=64)
    serve(cache, "a", LONG, chunk=64)
    hit = serve(cache, "b", LONG[:20], chunk=64)
    assert hit is not None and (hit.length, hit.kind) == (19, HitKind.SUPERSEQUENCE)


@pytest.mark.parametrize("chunk", [4, 8, 64])
def test_a_prompt_that_branches_off_inside_an_entry(chunk: int) -> None:
    cache = make_cache(chunk=chunk)
    serve(cache, "a", LONG, chunk=chunk)
    hit = serve(cache, "b", [*LONG[:25], 1, 2, 3, 4, 5], chunk=chunk)
    assert hit is not None and (hit.length, hit.kind) == (25, HitKind.LCP)
    check_integrity(cache)


def test_the_best_of_many_branches() -> None:
    cache = make_cache(chunk=64)
    for n in range(1, 30):
        serve(cache, f"a{n}", [*LONG[:n], 7, 8, 9], chunk=64)
    for n in range(3, 29):
        hit = Row(cache, make_request(f"b{n}", [*LONG[:n], 5, 5]), 64).begin()
        assert hit is not None and hit.length == n
    check_integrity(cache)


def test_states_are_exact_positions() -> None:
    """A beginning of another prompt finds no state, unless one was stored right there."""
    cache = make_cache(states=True, every=1000)
    serve(cache, "a", LONG)
    assert serve(cache, "b", LONG[:20]) is None
    hit = serve(cache, "c", LONG)
    assert hit is not None and (hit.length, hit.kind) == (29, HitKind.EXACT)
    assert hit.state is not None and hit.deltas[-1][1] == 29
    assert serve(cache, "d", [*LONG[:19], 1, 2, 3]) is not None  # "b" left a state at 19


@pytest.mark.parametrize("deltas", [True, False])
def test_states_at_boundaries_serve_others(deltas: bool) -> None:
    """Off the grid, with and without layers that keep all keys."""
    cache = make_cache(states=True, deltas=deltas, every=1000)
    serve(cache, "a", LONG, cache_positions=(21,))
    hit = serve(cache, "b", [*LONG[:21], 1, 2, 3, 4], cache_positions=(21,))
    assert hit is not None and (hit.length, hit.kind) == (21, HitKind.PREFIX)
    assert bool(hit.deltas) == deltas
    check_integrity(cache)


@pytest.mark.parametrize("deltas", [True, False])
def test_every_turn_of_a_chat_is_found(deltas: bool) -> None:
    cache = make_cache(states=True, deltas=deltas, every=1000)
    prompt, before = list(LONG), 0
    for turn in range(6):
        hit = serve(cache, f"t{turn}", prompt, [1, 2, 3])
        if turn:
            assert hit is not None and hit.length >= before
        before = len(prompt) - 1
        prompt += [1, 2, 3, *range(turn * 10 + 200, turn * 10 + 207)]


def test_without_the_keys_a_state_is_a_miss() -> None:
    cache = make_cache(states=True, every=1000)
    serve(cache, "a", LONG)
    first = next(r for r in cache._index.entries.values() if r.start == 0)
    cache._store.remove(first)
    assert not cache._index.entries, "what rests on it went with it"
    assert serve(cache, "b", LONG) is None


def test_images() -> None:
    """The same tokens with another image match up to the image."""
    cache = make_cache()
    prompt, spans = [1, 2, 3, *[9] * 10, 4, 5, 6], ((3, 13),)
    serve(cache, "a", prompt, image_spans=spans, image_digests=(DOG,))
    same = serve(cache, "b", prompt, image_spans=spans, image_digests=(DOG,))
    assert same is not None and (same.length, same.kind) == (15, HitKind.EXACT)
    other = serve(cache, "c", prompt, image_spans=spans, image_digests=(CAT,))
    assert other is not None and (other.length, other.kind) == (3, HitKind.LCP)


def test_a_hit_never_ends_inside_an_image() -> None:
    """If only a part of the image's chunk is known, the hit ends before the image."""
    cache = make_cache(chunk=8)
    prompt, spans = [1, 2, 3, *[9] * 10, 4, 5, 6], ((3, 13),)
    serve(cache, "a", prompt, image_spans=spans, image_digests=(DOG,))
    last = max(cache._index.entries.values(), key=lambda r: r.stop)
    cache._store.remove(last)
    hit = serve(cache, "b", prompt, image_spans=spans, image_digests=(DOG,))
    assert hit is not None and hit.length == 3


def test_images_without_digests_are_never_matched() -> None:
    cache = make_cache()
    row_request = make_request("c", [1, 9, 9, 2, 3, 4], image_spans=((1, 3),))
    for _ in range(2):
        cache.track(row_request)
        assert cache.lookup("c", (), 5) is None
        assert cache.plan_snapshots("c", 0, 5, 5) == []
        assert cache.plan_final_snapshots("c", (), 5) == []
        assert not cache.should_wait_for_prefix("c")
        cache.forget("c")


def test_on_the_grid_only() -> None:
    """engine.reproducible: every hit and every entry ends on the grid."""
    for states in (False, True):
        cache = make_cache(states=states, grid_only=True, every=16)
        assert not cache.stops_at_cache_positions
        serve(cache, "a", LONG, [1, 2, 3, 4], cache_positions=(11,))
        assert all(r.stop % 8 == 0 for r in cache._index.entries.values())
        hit = serve(cache, "b", LONG)
        assert hit is not None and hit.length in (16, 24)
        short = serve(cache, "c", [*LONG[:13], 1, 1])
        assert short is None or short.length % 8 == 0


# -- cost --------------------------------------------------------------------------------------------


def count_costs(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> tuple[int, int]:
    """(hashes made, edges compared) of an action."""
    counts = [0, 0]

    def wrap(module: Any, name: str, at: int) -> None:
        real = getattr(module, name)

        def spy(*args: Any) -> Any:
            counts[at] += 1
            return real(*args)

        monkeypatch.setattr(module, name, spy)

    with monkeypatch.context():
        wrap(cache_entry, "compute_digest", 0)
        wrap(radix_index, "count_common_ids", 1)
        act()
    monkeypatch.undo()
    return counts[0], counts[1]


def fill_cache(cache: PrefixCache, records: int, shared: list[int]) -> None:
    for n in range(records):
        serve(cache, f"s{n}", [*shared, n + 1000, n * 7, n], chunk=512)


def test_the_cost_of_a_lookup_does_not_grow_with_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 entries that share 300 tokens within a chunk, and the chunks of other prompts."""
    shared = [n % 50 for n in range(300)]
    prompt = [*shared, *range(2000, 2000 + 16_000)]
    costs = []
    for records in (50, 5000):
        cache = make_cache(chunk=512, memory=10**9, every=10**6)
        fill_cache(cache, records, shared)
        for n in range(records // 16):
            serve(cache, f"o{n}", [n + 60, *range(1600)], chunk=512)
        serve(cache, "a", prompt, chunk=512)
        row = Row(cache, make_request("b", [*prompt[:-50], *range(60)]), 512)
        costs.append(count_costs(monkeypatch, row.begin))
        assert row.hit is not None and row.hit.length == len(prompt) - 50
    assert costs[0] == costs[1]
    assert costs[1][0] <= 16_300 // 512 + 2
    assert costs[1][1] <= 16


def test_a_branching_chunk_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [n % 50 for n in range(300)]
    cache = make_cache(chunk=512, memory=10**9)
    fill_cache(cache, 3000, shared)
    row = Row(cache, make_request("b", [*shared, 1, 2, 3]), 512)
    _, compared = count_costs(monkeypatch, row.begin)
    assert row.hit is not None and row.hit.length == 300
    assert compared <= 6
