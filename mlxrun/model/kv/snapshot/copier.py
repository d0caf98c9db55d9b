"""Copies rows for the prefix cache: rows that prefill, decode or end.

A copy that fails is logged and left out, since no request may suffer for the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlxrun.core.step_plan import CacheHit, SnapshotKind, SnapshotRequest, SnapshotResult
from mlxrun.model.kv.ragged.layer_caches import RowView
from mlxrun.model.kv.snapshot.snapshots import Payload, SnapshotCodec

log = logging.getLogger(__name__)

RowPosition = tuple[str, int]  # request, tokens


class SnapshotCopier:
    """Copies rows and restores them. Exceptions are logged, never raised."""

    def __init__(self, codec: SnapshotCodec) -> None:
        self._codec = codec

    def copy_rows(
        self, requests: Sequence[SnapshotRequest], find_view: Callable[[str], tuple[int, RowView] | None]
    ) -> list[SnapshotResult]:
        """A lazy copy for each request; its payload is None if the row does not hold what is requested.
        `find_view`: the number of tokens in a row's caches and their content, None if the row never
        started."""
        views = {rid: find_view(rid) for rid in {request.request_id for request in requests}}
        return [
            SnapshotResult(request, self._copy(request, views[request.request_id])) for request in requests
        ]

    def _copy(self, request: SnapshotRequest, row: tuple[int, RowView] | None) -> Payload | None:
        if row is None:
            return None
        length, view = row
        try:
            if request.kind is SnapshotKind.DELTA and length >= request.stop:
                return self._codec.copy_delta(view, request.start, request.stop)
            if request.kind is SnapshotKind.STATE and length == request.stop:
                return self._codec.copy_state(view, length)
        except Exception:  # see the module's docstring
            log.warning("a copy for the prefix cache failed", exc_info=True)
        return None

    def restore(self, hit: CacheHit, capacity: int, new_cache: list[Any]) -> list[Any] | None:
        """Caches that hold a hit's tokens. None if they cannot be restored; they must be computed then."""
        try:
            return self._codec.restore(hit, capacity, new_cache)
        except Exception as error:  # see the module's docstring
            log.warning("a prefix cannot be restored and is computed: %s: %s", type(error).__name__, error)
            return None

    def list_arrays(self, snapshots: Iterable[SnapshotResult]) -> list[mx.array]:
        """The arrays that must be evaluated."""
        payloads = [s.payload for s in snapshots if s.payload is not None]
        return [a for payload in payloads for a in self._codec.list_arrays(payload)]


class DueSnapshots:
    """The snapshots that a step takes of its prefilling rows."""

    def __init__(self, requests: Sequence[SnapshotRequest]) -> None:
        self._due: dict[RowPosition, list[SnapshotRequest]] = {}
        for request in requests:
            self._due.setdefault((request.request_id, request.stop), []).append(request)

    @property
    def forward_ends(self) -> set[RowPosition]:
        """Where a forward must end, because a state can be copied only at exactly its position."""
        return {p for p, due in self._due.items() if any(r.kind is SnapshotKind.STATE for r in due)}

    def pop_ready(self, request_id: str, cached: int) -> list[SnapshotRequest]:
        """The requests that a row of `cached` tokens fulfils, by position."""
        ready = sorted(p for p in self._due if p[0] == request_id and p[1] <= cached)
        return [request for position in ready for request in self._due.pop(position)]
