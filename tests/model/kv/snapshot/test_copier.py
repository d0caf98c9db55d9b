"""What a copy for the prefix cache may and may not do to a request."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mlxrun.core.request import HitKind
from mlxrun.core.step_plan import CacheHit, SnapshotKind, SnapshotRequest
from mlxrun.model.kv.snapshot.copier import DueSnapshots, SnapshotCopier


class NamedCodec:
    """Payloads say what was copied; the row called broken cannot be."""

    def copy_delta(self, view: Any, start: int, stop: int) -> Any:
        if view == "broken":
            raise RuntimeError("no copy")
        return "delta", view, start, stop

    def copy_state(self, view: Any, length: int) -> Any:
        return "state", view, length

    def restore(self, hit: CacheHit, capacity: int, new_cache: list[Any]) -> list[Any]:
        if hit.state == "broken":
            raise ValueError("wrong shape")
        return [hit.length, capacity]

    def list_arrays(self, payload: Any) -> list[Any]:
        return [payload]


def ask(name: str, stop: int, kind: SnapshotKind = SnapshotKind.DELTA, start: int = 0) -> SnapshotRequest:
    return SnapshotRequest(name, kind, start, stop, entry=None)


@pytest.fixture
def copier() -> SnapshotCopier:
    codec: Any = NamedCodec()
    return SnapshotCopier(codec)


def find_view(name: str) -> Any:
    return None if name == "gone" else (16, name)


def test_deltas_need_their_tokens_and_states_exactly_so_many(copier: SnapshotCopier) -> None:
    state = SnapshotKind.STATE
    received = [ask("a", 8), ask("a", 17), ask("a", 16, state), ask("a", 8, state), ask("gone", 8)]
    found = copier.copy_rows(received, find_view)
    assert [result.request for result in found] == received
    assert [result.payload for result in found] == [
        ("delta", "a", 0, 8),
        None,
        ("state", "a", 16),
        None,
        None,
    ]
    assert copier.list_arrays(found) == [("delta", "a", 0, 8), ("state", "a", 16)]


def test_a_copy_that_fails_is_left_out(copier: SnapshotCopier, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = copier.copy_rows([ask("broken", 8), ask("a", 8)], find_view)
    assert [result.payload for result in found] == [None, ("delta", "a", 0, 8)]
    assert "a copy for the prefix cache failed" in caplog.text


def test_a_hit_that_cannot_be_restored_is_none(copier: SnapshotCopier) -> None:
    assert copier.restore(CacheHit(8, HitKind.EXACT), 24, []) == [8, 24]
    assert copier.restore(CacheHit(8, HitKind.EXACT, state="broken"), 24, []) is None


def test_due_snapshots_come_in_order_and_once() -> None:
    received = [ask("a", 16), ask("a", 8), ask("b", 8), ask("a", 24, SnapshotKind.STATE)]
    due = DueSnapshots(received)
    assert due.forward_ends == {("a", 24)}, "only a state has to be copied at exactly its position"
    assert due.pop_ready("a", 7) == []
    assert due.pop_ready("a", 20) == [received[1], received[0]]
    assert due.pop_ready("a", 24) == [received[3]] and due.pop_ready("a", 99) == []
