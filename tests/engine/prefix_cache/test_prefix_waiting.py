"""Requests wait for a prefix that another one is about to compute, and for nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxrun.core.request import SamplingParams
from tests.helpers.cache_fakes import (
    Row,
    make_cache,
    make_request,
)

LONG = list(range(100, 130))


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
        a = Row(cache, make_request("a", [*system, 1, 2], cache_positions=(100,)), 512)
        Row(cache, make_request("b", [*system, 3, 4], cache_positions=(100,)), 512)
        Row(cache, make_request("c", [*system, 1, 2], cache_positions=(100,)), 512)
        Row(cache, make_request("d", [9, *system, 1, 2], cache_positions=(101,)), 512)
        a.begin()
        assert [cache.should_wait_for_prefix(x) for x in "bcd"] == [True, True, False]
        while a.prefill():
            pass
        assert [cache.should_wait_for_prefix(x) for x in "bcd"] == [False] * 3
        hit = cache.lookup("b", (), 101)
        assert hit is not None and hit.length == 100


EXAMPLES = list(range(200))


def test_what_prompts_have_in_common_before_they_part_is_computed_once() -> None:
    """The same examples before each question, inside of a chunk: nobody says where they end."""
    cache = make_cache(chunk=512)
    first = Row(cache, make_request("a", [*EXAMPLES, *range(300, 340)]), 512)
    second = Row(cache, make_request("b", [*EXAMPLES, *range(400, 440)]), 512)
    Row(cache, make_request("c", [*EXAMPLES[:60], *range(500, 600)]), 512)
    first.begin()
    assert cache.should_wait_for_prefix("b") and not cache.should_wait_for_prefix("c")
    first.prefill()
    assert not cache.should_wait_for_prefix("b")
    hit = second.begin()
    assert hit is not None and hit.length == len(EXAMPLES)


@pytest.mark.parametrize("options", [{"states": True}, {"grid_only": True}])
def test_no_request_waits_where_a_hit_cannot_end(options: dict[str, Any]) -> None:
    cache = make_cache(chunk=512, **options)
    Row(cache, make_request("a", [*EXAMPLES, 1]), 512).begin()
    Row(cache, make_request("b", [*EXAMPLES, 2, 3]), 512)
    assert not cache.should_wait_for_prefix("b")


def test_no_request_waits_for_an_answer() -> None:
    """The end of a prompt that nobody waited for is stored with the answer, which may be long."""
    cache = make_cache(chunk=512)
    first = Row(cache, make_request("a", [*EXAMPLES, 1]), 512)
    first.begin()
    first.prefill()
    Row(cache, make_request("b", [*EXAMPLES, 2, 3]), 512)
    assert not cache.should_wait_for_prefix("b")


def test_a_cache_that_keeps_nothing_makes_a_request_wait_once() -> None:
    cache = make_cache(chunk=512, memory=1)
    rows = [Row(cache, make_request(str(n), [*EXAMPLES, n, n]), 512) for n in range(4)]
    rows[0].begin()
    assert all(cache.should_wait_for_prefix(row.request.id) for row in rows[1:])
    rows[0].prefill()
    rows[1].begin()
    assert not any(cache.should_wait_for_prefix(row.request.id) for row in rows[2:])


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


@pytest.mark.parametrize(("priority", "waits"), [(4, False), (5, True), (6, True)])
def test_an_urgent_request_waits_for_no_less_urgent_one(priority: int, waits: bool) -> None:
    """Its owner may get no steps while others come that are more urgent than it."""
    cache = make_cache()
    Row(cache, make_request("owner", [*LONG, 1], priority=5)).begin()
    Row(cache, make_request("waiting", [*LONG, 2], priority=priority))
    assert cache.should_wait_for_prefix("waiting") is waits


@pytest.mark.parametrize("background", [False, True])
def test_a_live_request_waits_for_none_in_the_background(background: bool) -> None:
    """That one gets what other requests leave of a step, which may be nothing for long."""
    cache = make_cache()
    Row(cache, make_request("owner", [*LONG, 1], background=True)).begin()
    Row(cache, make_request("waiting", [*LONG, 2], background=background))
    assert cache.should_wait_for_prefix("waiting") == background


def test_a_scored_request_does_not_wait_for_what_has_no_logprobs() -> None:
    cache = make_cache()
    Row(cache, make_request("owner", [*LONG, 1])).begin()
    for start, waits in ((1, False), (8, False), (9, True)):
        scored = make_request(f"from {start}", [*LONG, 2], logprobs_from=start)
        Row(cache, replace(scored, params=SamplingParams(0, prompt_logprobs=0)))
        assert cache.should_wait_for_prefix(f"from {start}") == waits


@pytest.mark.parametrize("media", [None, {"pixel_values": 1}])
def test_images_whose_tokens_are_not_known_share_nothing(media: object) -> None:
    """Equal token ids may stand for different images; without images they are the same content."""
    cache = make_cache()
    first = Row(cache, replace(make_request("a", LONG), media=media))
    first.begin()
    while first.prefill():
        pass
    first.end()
    hit = Row(cache, replace(make_request("b", LONG), media=media)).begin()
    assert (hit is None) == (media is not None)
