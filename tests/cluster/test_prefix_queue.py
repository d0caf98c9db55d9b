"""Which lines a worker gets next."""

from __future__ import annotations

import pytest

from mlxrun.cluster import prefix_queue
from mlxrun.cluster.prefix_queue import PrefixQueue

SYSTEM = 1 << 32


def fill(*items: tuple[int, str]) -> PrefixQueue[str]:
    queue: PrefixQueue[str] = PrefixQueue()
    for prefix, item in items:
        queue.add(prefix, item)
    return queue


def test_a_worker_gets_its_own_groups_before_others() -> None:
    queue = fill((1, "a"), (2, "b"), (1, "c"), (2, "d"))
    assert queue.take(0, 1, idle=False) == ["a"]
    assert queue.take(1, 1, idle=False) == ["b"]
    assert queue.take(0, 9, idle=False) == ["c"]
    assert queue.take(0, 9, idle=False) == [] and len(queue) == 1  # it is the other one's
    assert queue.take(0, 9, idle=True) == ["d"] and len(queue) == 0


def test_free_groups_of_the_same_system_prompt_come_first() -> None:
    queue = fill((SYSTEM, "a"), (2 * SYSTEM, "b"), (SYSTEM + 1, "c"), (SYSTEM + 2, "d"))
    assert queue.take(0, 1, idle=False) == ["a"]
    assert queue.take(0, 1, idle=False) == ["c"]
    assert queue.take(1, 1, idle=False) == ["b"]
    assert queue.take(1, 1, idle=False) == ["d"]


def test_items_come_back_to_the_front_and_without_their_dead_owner() -> None:
    queue = fill((1, "a"), (1, "b"), (2, "c"))
    assert queue.take(0, 2, idle=False) == ["a", "b"]
    queue.add(1, "x")
    assert queue.take(1, 1, idle=False) == ["c"] and queue.take(1, 1, idle=False) == []
    queue.add(1, "b", first=True)
    queue.remove_worker(0)
    assert queue.take(1, 9, idle=False) == ["b", "x"]


def test_owners_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_queue, "REMEMBERED", 10)
    queue: PrefixQueue[int] = PrefixQueue()
    for prefix in range(1000):
        queue.add(prefix, prefix)
        assert queue.take(0, 1, idle=False) == [prefix]
    assert len(queue._owners) <= 11
    queue.add(0, 7)
    assert queue.take(1, 1, idle=False) == [7]
