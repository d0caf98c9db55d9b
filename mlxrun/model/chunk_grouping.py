"""Which prompt chunks share a forward: first chunks of plain text, of equal or nearly equal length.

A shared forward starts from empty caches, so it is exact without padding for every family. Rows that are
padded on the right stay exact where attention is the only state (causal: no token sees what comes after
it); recurrent layers would take the padding in, so there only equal lengths share. Consecutive chunks of one
request may be merged: the grid of chunks only matters for the prefix cache and for reproducible results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlxrun.scheduler.step_plan import PrefillChunk

MAX_WASTE = 1.25  # a shared forward may compute this many times its useful tokens


@dataclass(frozen=True, slots=True)
class PrefillSharing:
    """`max_rows`: most chunks in a forward. `max_padded`: longest chunk to pad to; 0: equal lengths only.
    `merge_chunks`: consecutive chunks of a request share a forward (faster on GPUs, with fused attention).
    """

    max_rows: int = 1
    max_padded: int = 0
    merge_chunks: bool = False


def group_chunks(
    chunks: Sequence[PrefillChunk],
    shareable: Collection[str],
    sharing: PrefillSharing,
    forward_ends: Collection[tuple[str, int]] = (),
) -> list[list[PrefillChunk]]:
    """The chunks of each forward, in an order that keeps each request's chunks in sequence.

    `shareable`: requests without images whose chunk does not sample. `forward_ends`: (request, position)
    where a forward has to end because a snapshot of the state is due.
    """
    if sharing.merge_chunks:
        chunks = _merge_chunks(chunks, forward_ends)
    first = [c for c in chunks if c.start == 0 and c.request_id in shareable]
    later = [[c] for c in chunks if c.start > 0 or c.request_id not in shareable]
    forwards: list[list[PrefillChunk]] = []
    for chunk in sorted(first, key=lambda c: -c.stop):
        if not (forwards and _fits(forwards[-1], chunk, sharing)):
            forwards.append([])
        forwards[-1].append(chunk)
    return forwards + later


def _merge_chunks(
    chunks: Sequence[PrefillChunk], forward_ends: Collection[tuple[str, int]]
) -> list[PrefillChunk]:
    merged: list[PrefillChunk] = []
    for chunk in chunks:
        last = merged[-1] if merged else None
        start = (chunk.request_id, chunk.start)
        if last is not None and (last.request_id, last.stop) == start and start not in forward_ends:
            merged[-1] = PrefillChunk(chunk.request_id, last.start, chunk.stop)
        else:
            merged.append(chunk)
    return merged


def _fits(forward: Sequence[PrefillChunk], chunk: PrefillChunk, sharing: PrefillSharing) -> bool:
    longest = forward[0].stop
    if len(forward) >= sharing.max_rows:
        return False
    if chunk.stop == longest:
        return True
    useful = sum(c.stop for c in forward) + chunk.stop
    return longest <= sharing.max_padded and longest * (len(forward) + 1) <= MAX_WASTE * useful
