"""Copies for the prefix cache, out of rows that prefill, decode or end. A copy that fails is none: no request
may suffer from what is only kept for others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlxrun.model.ragged.layer_caches import RowView
from mlxrun.model.snapshot.snapshots import SnapshotCodec
from mlxrun.scheduler.step_plan import CacheHit, SnapshotKind, SnapshotRequest, SnapshotResult

log = logging.getLogger(__name__)

RowPosition = tuple[str, int]  # request, tokens


class SnapshotCopier:
    """`snapshots`: None where nothing is kept."""

    def __init__(self, snapshots: SnapshotCodec | None) -> None:
        self._snapshots = snapshots

    def copy_row(self, save: SnapshotRequest, length: int, view: RowView) -> SnapshotResult:
        """What is asked for of a row of `length` tokens, lazy; no payload if the row does not hold it."""
        snapshots = self._snapshots
        try:
            assert snapshots is not None
            if save.kind is SnapshotKind.DELTA and length >= save.stop:
                return SnapshotResult(save, snapshots.copy_delta(view, save.start, save.stop))
            if save.kind is SnapshotKind.STATE and length == save.stop:
                return SnapshotResult(save, snapshots.copy_state(view, length))
        except Exception:  # the border: see above
            log.warning("a copy for the prefix cache failed", exc_info=True)
        return SnapshotResult(save, None)

    def restore(self, hit: CacheHit, room: int, new_cache: list[Any]) -> list[Any] | None:
        """Caches that hold what a hit gives, or None: it has to be computed."""
        try:
            assert self._snapshots is not None
            return self._snapshots.restore(hit, room, new_cache)
        except Exception as error:  # the border
            log.warning("a prefix cannot be restored and is computed: %s: %s", type(error).__name__, error)
            return None

    def list_arrays(self, saved: Iterable[SnapshotResult]) -> list[mx.array]:
        """What has to be evaluated."""
        snapshots = self._snapshots
        made = [s.payload for s in saved if s.payload is not None]
        return [] if snapshots is None else [a for payload in made for a in snapshots.list_arrays(payload)]


class DueSnapshots:
    """The copies that a step wants of rows that prefill in it."""

    def __init__(self, saves: Sequence[SnapshotRequest]) -> None:
        self._at: dict[RowPosition, list[SnapshotRequest]] = {}
        for save in saves:
            self._at.setdefault((save.request_id, save.stop), []).append(save)

    @property
    def forward_ends(self) -> set[RowPosition]:
        """Where a forward has to end, because a state is that of one moment."""
        return {
            place for place, saves in self._at.items() if any(s.kind is SnapshotKind.STATE for s in saves)
        }

    def pop_ready(self, request_id: str, filled: int) -> list[SnapshotRequest]:
        """What can be copied now of a row with so many tokens, first things first."""
        places = sorted(p for p in self._at if p[0] == request_id and p[1] <= filled)
        return [save for place in places for save in self._at.pop(place)]
