"""Pinned prefixes: eviction leaves them alone, and in all else they are entries like others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlxrun.core.errors import RequestError
from mlxrun.core.request import SamplingParams
from mlxrun.core.step_plan import PinnedPrefix
from mlxrun.engine.prefix_cache.entry import CacheEntry
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

SYSTEM = list(range(100, 121))  # 21 tokens: two chunks, and a part of the third
KINDS = pytest.mark.parametrize(("deltas", "states"), [(True, False), (True, True), (False, True)])
TIERS = pytest.mark.parametrize("make_tier", [lambda: None, FakeTier], ids=["memory", "disk"])


def warm(cache: PrefixCache, prompt: Sequence[int] = SYSTEM, name: str = "agent") -> PinnedPrefix | None:
    """Compute a prefix and pin it, as the server does. One token of a question follows it."""
    request = replace(make_request("warm", [*prompt, 1]), params=SamplingParams(max_tokens=0))
    Row(cache, request).serve()
    return cache.pin_prefix(request, len(prompt), name)


def flood(cache: PrefixCache, count: int = 30) -> None:
    """Serve many other prompts, more than the cache has room for."""
    for n in range(count):
        serve(cache, f"flood {n}", [n, *range(200, 230)], [n, 1])
        check_integrity(cache)


def count_hit(cache: PrefixCache, question: int) -> int:
    """The tokens that another question behind the pinned prefix finds; Row compares their content."""
    hit = serve(cache, f"ask {question}", [*SYSTEM, question, 3, 4])
    return hit.length if hit else 0


@KINDS
@TIERS
def test_eviction_leaves_a_pinned_prefix_alone(make_tier: Any, deltas: bool, states: bool) -> None:
    cache = make_cache(deltas=deltas, states=states, memory=90, disk=120, tier=make_tier())
    pinned = warm(cache)
    assert pinned is not None and pinned.tokens == len(SYSTEM)
    for question in (50, 51):
        flood(cache)
        assert count_hit(cache, question) == len(SYSTEM)
    assert cache.pinned_prefixes == (pinned,)
    assert cache.counters.pinned_bytes == pinned.nbytes > 0


@KINDS
@TIERS
def test_without_the_mark_it_is_evicted(
    monkeypatch: pytest.MonkeyPatch, make_tier: Any, deltas: bool, states: bool
) -> None:
    """The twin: eviction that does not know of pinned prefixes."""
    for method in ("must_stay", "must_stay_in_memory"):
        monkeypatch.setattr(CacheEntry, method, lambda entry: entry.pins > 0)
    with pytest.raises(AssertionError):
        test_eviction_leaves_a_pinned_prefix_alone(make_tier, deltas, states)


@KINDS
@TIERS
def test_an_unpinned_prefix_is_an_ordinary_one(make_tier: Any, deltas: bool, states: bool) -> None:
    cache = make_cache(deltas=deltas, states=states, memory=90, disk=120, tier=make_tier())
    pinned = warm(cache)
    assert pinned is not None
    flood(cache)
    assert cache.unpin_prefix(pinned.id) and not cache.unpin_prefix(pinned.id)
    assert count_hit(cache, 50) == len(SYSTEM), "unpinning deletes nothing"
    flood(cache)
    assert count_hit(cache, 51) == 0
    assert cache.pinned_prefixes == () and cache.counters.pinned_bytes == 0


@KINDS
def test_clearing_unpins(deltas: bool, states: bool) -> None:
    cache = make_cache(deltas=deltas, states=states)
    warm(cache)
    cache.clear()
    assert cache.nbytes == 0 and cache.pinned_prefixes == () and count_hit(cache, 50) == 0


def test_a_hit_that_ends_inside_a_longer_entry_stays_pinned() -> None:
    """The next question replaces the last, partial entry by one that contains it."""
    cache = make_cache(memory=90)
    warm(cache)
    serve(cache, "a", [*SYSTEM, 50, 51, 52, 53])
    flood(cache)
    assert count_hit(cache, 60) == len(SYSTEM)


def test_two_prefixes_share_what_is_equal() -> None:
    """Their sum counts shared entries once, and unpinning one leaves what the other needs."""
    cache = make_cache(memory=200)
    first, second = warm(cache), warm(cache, [*SYSTEM[:16], *range(150, 160)], "other")
    assert first is not None and second is not None
    assert cache.counters.pinned_bytes == first.nbytes + second.nbytes - 16
    assert cache.unpin_prefix(second.id)
    flood(cache)
    assert count_hit(cache, 50) == len(SYSTEM)
    assert cache.counters.pinned_bytes == first.nbytes


def test_pinning_again_changes_the_name_only() -> None:
    cache = make_cache()
    first, again = warm(cache), warm(cache, name="renamed")
    assert first is not None and again is not None
    assert (again.id, again.tokens, again.nbytes) == (first.id, first.tokens, first.nbytes)
    assert cache.pinned_prefixes == (again,) and again.name == "renamed"


def test_no_more_is_pinned_than_the_share_of_memory() -> None:
    cache = make_cache(memory=80)
    assert warm(cache) is not None
    with pytest.raises(
        RequestError, match="the prefix of 26 tokens takes 26 B; .*at most 40 B.*pinned_share"
    ):
        warm(cache, range(300, 326))
    assert len(cache.pinned_prefixes) == 1
    flood(cache)
    assert count_hit(cache, 50) == len(SYSTEM)


def test_what_the_cache_does_not_have_cannot_be_pinned() -> None:
    cache = make_cache()
    assert cache.pin_prefix(make_request("a", SYSTEM), 20, "agent") is None


def test_with_a_tier_pinned_entries_may_leave_memory() -> None:
    """Rows get all memory; the prefix comes back from the tier. Without a tier it stays in memory."""
    on_disk, in_memory = make_cache(tier=FakeTier()), make_cache()
    for cache in (on_disk, in_memory):
        warm(cache)
        cache.shrink(0)
    assert (on_disk.nbytes, in_memory.nbytes) == (0, len(SYSTEM))
    assert count_hit(on_disk, 50) == count_hit(in_memory, 50) == len(SYSTEM)


def test_pinned_entries_stay_in_memory_while_the_tier_refuses_them() -> None:
    tier = FakeTier()
    tier.full = True
    cache = make_cache(tier=tier)
    warm(cache)
    cache.shrink(0)
    assert cache.nbytes == len(SYSTEM) and count_hit(cache, 50) == len(SYSTEM)


def test_memory_is_released_where_nothing_else_helps(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(memory=1000)
    warm(cache)
    flood(cache, 3)
    cache.release_pinned_memory(len(SYSTEM))
    assert cache.nbytes == len(SYSTEM) and cache.pinned_prefixes, "other entries were enough"
    cache.release_pinned_memory(len(SYSTEM) - 1)
    assert cache.nbytes < len(SYSTEM) and not cache.pinned_prefixes
    assert "all prefixes were unpinned" in caplog.text


def test_a_prefix_with_an_unusable_entry_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Its payload is bad: a miss, and not a wrong answer."""
    codec = FakeCodec()
    cache = make_cache(codec=codec)
    warm(cache)
    middle = next(entry for entry in cache._index.entries.values() if entry.stop == 16)
    codec.broken.add(middle.payload)
    assert count_hit(cache, 50) == 8
    assert cache.pinned_prefixes == () and "(agent) was lost" in caplog.text
    check_integrity(cache)


@pytest.mark.parametrize("prompt", [SYSTEM, SYSTEM[:16], SYSTEM[:5]])
def test_on_the_grid_only(prompt: list[int]) -> None:
    """Reproducible engines take hits on the grid only, so no more is pinned."""
    cache = make_cache(grid_only=True)
    pinned = warm(cache, prompt)
    assert (pinned.tokens if pinned else 0) == len(prompt) // 8 * 8
