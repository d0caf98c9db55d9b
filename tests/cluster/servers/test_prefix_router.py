"""Requests go where their prefix is, unless that worker has much more to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlxrun.cluster.servers import prefix_router
from mlxrun.cluster.servers.prefix_router import BLOCK, MOST_PREFIXES, SPILL, PrefixRouter, hash_prefixes
from mlxrun.jobs.lines.lookahead import iterate_texts

SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers in one word, and in German."}


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return {"messages": [SYSTEM, *turns]}


def test_a_conversation_begins_with_its_earlier_turns() -> None:
    first, later = hash_prefixes(chat("hello")), hash_prefixes(chat("hello", "hi", "how are you?"))
    assert later[: len(first)] == first and len(later) == len(first) + 2
    other = hash_prefixes(chat("goodbye"))
    assert other[0] == first[0] and other[1] != first[1]  # the system prompt is the same


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * 5 * BLOCK},
        {"input": "x" * 5 * BLOCK, "instructions": "short"},
        {"system": "x" * 5 * BLOCK, "messages": []},
        {"prompt": list(range(5 * BLOCK))},
    ],
)
def test_long_texts_have_prefixes_of_blocks(body: dict[str, Any]) -> None:
    found = hash_prefixes(body)
    assert len(found) == len(set(found)) >= 5


def test_what_has_no_prefix() -> None:
    for body in ({}, {"prompt": "short"}, {"messages": None}, {"messages": 3}, {"input": {"a": 1}}):
        assert hash_prefixes(body) == []
    assert hash_prefixes({"model": "a", "prompt": "x" * 99}) != hash_prefixes(
        {"model": "b", "prompt": "x" * 99}
    )


@pytest.mark.parametrize("part", ["x" * 999, [1], 1])
def test_huge_prompts_are_read_in_part(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that routing does not hold up other requests: 100 MB would take a second."""
    read = []

    def iterate(value: Any) -> Iterator[str]:
        for text in iterate_texts(value):
            read.append(text)
            yield text

    monkeypatch.setattr(prefix_router, "iterate_texts", iterate)
    assert len(hash_prefixes({"prompt": [[part] * 20_000]})) <= MOST_PREFIXES
    assert len(hash_prefixes({"prompt": [part] * 20_000})) <= MOST_PREFIXES
    assert len(read) < 10_000


def test_the_owner_of_the_longest_prefix_is_chosen() -> None:
    router, idle = PrefixRouter(), {0: 0.0, 1: 0.0, 2: 0.0}
    router.record([b"system"], 0)
    router.record([b"system", b"talk"], 2)
    assert router.choose([b"system", b"talk", b"more"], idle) == 2
    assert router.choose([b"system", b"other"], idle | {0: 0.1}) == 2  # of its two owners the idle one
    assert router.choose([b"system", b"talk"], {0: 0.0, 1: 0.0}) == 0  # its longest owner is not there
    router.remove_worker(2)
    assert router.choose([b"system", b"talk"], idle) == 0


def test_idle_workers_take_turns_with_new_prefixes() -> None:
    router, seen = PrefixRouter(), []
    for number in range(6):
        seen.append(router.choose([bytes(number)], {0: 0.0, 1: 0.0, 2: 0.0}))
        router.record([bytes(number)], seen[-1])
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    router.remove_worker(1)
    assert router.choose([b"new"], {0: 0.0, 1: 0.0}) == 0  # its successor is not flooded


def test_a_prefix_that_all_share_spreads() -> None:
    """Where one worker is much busier than another one, that one computes the prefix too."""
    router, loads = PrefixRouter(), {0: 0.0, 1: 0.0}
    for _ in range(40):
        chosen = router.choose([b"shared"], loads)
        router.record([b"shared"], chosen)
        loads[chosen] += 1 / 32
    assert abs(loads[0] - loads[1]) <= SPILL


def test_a_limited_number_of_prefixes_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "REMEMBERED", 10)
    router = PrefixRouter()
    for number in range(100):
        router.record([b"%d" % number], 1)
    loads = {0: 0.0, 1: 0.1}
    assert router.choose([b"99"], loads) == 1 and router.choose([b"1"], loads) == 0
