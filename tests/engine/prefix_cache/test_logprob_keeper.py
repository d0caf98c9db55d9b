"""Logprobs beside the entries of the prefix cache, and which requests wait for those that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlxrun.core.request import Request, SamplingParams, TokenLogprob
from mlxrun.core.step_plan import PromptLogprobs
from tests.helpers.cache_fakes import (
    FakeTier,
    Row,
    check_integrity,
    list_entries,
    make_cache,
    make_request,
    serve,
)

LONG = list(range(100, 160))


def make_scored(rid: str, prompt: Sequence[int], count: int = 1, **more: Any) -> Request:
    return replace(make_request(rid, prompt, **more), params=SamplingParams(0, prompt_logprobs=count))


def test_a_request_waits_once_if_the_cache_keeps_nothing() -> None:
    """Otherwise requests that share more than the cache can hold would run one at a time."""
    cache = make_cache(chunk=64, memory=1)
    rows = [Row(cache, make_scored(str(n), [*LONG, n]), 64) for n in range(4)]
    rows[0].begin()
    assert all(cache.should_wait_for_prefix(row.request.id) for row in rows[1:])
    rows[0].prefill()
    assert all(cache.should_wait_for_prefix(row.request.id) for row in rows[1:]), "it still runs"
    rows[0].end()
    assert rows[1].begin() is None
    assert not any(cache.should_wait_for_prefix(row.request.id) for row in rows[2:])


def test_a_request_waits_again_if_the_cache_has_more_by_then() -> None:
    """The choices of the second question share the examples with those of the first one, and more."""
    cache = make_cache(chunk=128)
    question = [*LONG, *range(30)]
    first = Row(cache, make_scored("first", [*LONG, 99, 98]), 128)
    second, third = (
        Row(cache, make_scored(name, [*question, n, n]), 128) for n, name in enumerate(("b", "c"))
    )
    first.begin()
    assert cache.should_wait_for_prefix("b") and cache.should_wait_for_prefix("c")
    while first.prefill():
        pass
    first.end()
    assert not cache.should_wait_for_prefix("b")
    second.begin()
    assert cache.should_wait_for_prefix("c")
    while second.prefill():
        pass
    second.end()
    hit = third.begin()
    assert hit is not None and hit.length == len(question)


def test_a_request_waits_for_the_logprobs_of_what_is_already_stored() -> None:
    """With a tier, a prompt is stored a step before its logprobs are read. Also those that come then wait."""
    cache = make_cache(chunk=128, tier=FakeTier())
    first, second, late = (Row(cache, make_scored(name, [*LONG, at]), 128) for at, name in enumerate("abc"))
    first.begin()
    assert cache.should_wait_for_prefix("b")
    while first.prefill():
        pass
    assert list_entries(cache), "the prompt is stored"
    assert cache.should_wait_for_prefix("b") and cache.should_wait_for_prefix("c")
    logprobs = tuple(TokenLogprob(-1.0, ((5, -0.5),), 1) for _ in range(len(LONG)))
    cache.record_prompt_logprobs(PromptLogprobs("a", 1, logprobs))
    first.end()
    for row in (second, late):
        assert not cache.should_wait_for_prefix(row.request.id)
        assert len(cache.find_prompt_logprobs(row.request.id, 1)) == len(LONG) - 1


@pytest.mark.parametrize("background", [False, True])
def test_a_live_request_waits_for_none_in_the_background(background: bool) -> None:
    cache = make_cache(chunk=128)
    Row(cache, make_scored("owner", [*LONG, 1], background=True), 128).begin()
    Row(cache, make_scored("waiting", [*LONG, 2], background=background), 128)
    assert cache.should_wait_for_prefix("waiting") == background


@pytest.mark.parametrize(("start", "waits"), [(1, False), (16, False), (17, True), (50, True)])
def test_a_request_that_wants_more_than_the_cache_has_waits_only_for_what_is_not_scored(
    start: int, waits: bool
) -> None:
    cache = make_cache(chunk=128)
    Row(cache, make_scored("owner", [*LONG, 1]), 128).begin()
    for count in (1, 3):
        Row(cache, make_scored(str(count), [*LONG, 2], count, logprobs_from=start), 128)
    assert cache.should_wait_for_prefix("1")
    assert cache.should_wait_for_prefix("3") == waits


def test_a_refused_file_with_new_scores_leaves_the_old_one_in_use() -> None:
    files = FakeTier()
    cache = make_cache(tier=files, memory=10)
    serve(cache, "plain", range(1, 10))
    (entry,) = list_entries(cache)
    assert entry.in_tier and len(files.files) == 1
    files.full = True
    row = Row(cache, make_scored("scored", range(1, 10)))
    row.begin()
    row.prefill()
    logprobs = tuple(TokenLogprob(-1.0, ((5, -0.5),)) for _ in range(8))
    cache.record_prompt_logprobs(PromptLogprobs("scored", 1, logprobs))
    row.end()
    assert entry.logprobs is not None
    check_integrity(cache, 10)
    cache.shrink(0)
    check_integrity(cache, 0)
    assert list_entries(cache) == [entry] and cache._store.load(entry) is not None
