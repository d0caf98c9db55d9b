"""Which prompt chunks share a forward, and how: first chunks of plain text, equal in length or nearly so.

A shared forward starts from empty caches, so it is exact without padding for every family. Rows that are
padded on the right stay exact where attention is the only state (causal: no token sees what comes after
it); recurrent layers would take the padding in, so there only equal lengths share. Chunks of one request
that follow each other may go as one: the grid is for the prefix cache and for reproducible cuts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlxrun.scheduler.step_plan import PrefillChunk

MAX_WASTE = 1.25  # a shared forward may compute this many times its useful tokens


@dataclass(frozen=True, slots=True)
class PrefillSharing:
    """`rows`: most chunks in a forward. `padded`: longest chunk to pad to; 0: equal lengths only. `joined`:
    consecutive chunks of a request go as one (faster on GPUs; without fused attention, small ones are).
    """

    max_rows: int = 1
    max_padded: int = 0
    merge_chunks: bool = False


def group_chunks(
    chunks: Sequence[PrefillChunk],
    plain: Collection[str],
    sharing: PrefillSharing,
    breaks: Collection[tuple[str, int]] = (),
) -> list[list[PrefillChunk]]:
    """Chunks as forwards, in an order that keeps each request's chunks in sequence.

    `plain`: requests without images whose chunk does not sample. `breaks`: (request, position) where a
    forward has to end, as the state after it is wanted.
    """
    if sharing.merge_chunks:
        chunks = _merge_chunks(chunks, breaks)
    first = [c for c in chunks if c.start == 0 and c.request_id in plain]
    later = [[c] for c in chunks if c.start > 0 or c.request_id not in plain]
    forwards: list[list[PrefillChunk]] = []
    for chunk in sorted(first, key=lambda c: -c.stop):
        if not (forwards and _fits(forwards[-1], chunk, sharing)):
            forwards.append([])
        forwards[-1].append(chunk)
    return forwards + later


def _merge_chunks(chunks: Sequence[PrefillChunk], breaks: Collection[tuple[str, int]]) -> list[PrefillChunk]:
    joined: list[PrefillChunk] = []
    for chunk in chunks:
        last = joined[-1] if joined else None
        follows = last and last.request_id == chunk.request_id and last.stop == chunk.start
        if last and follows and (last.request_id, last.stop) not in breaks:
            joined[-1] = PrefillChunk(chunk.request_id, last.start, chunk.stop)
        else:
            joined.append(chunk)
    return joined


def _fits(forward: Sequence[PrefillChunk], chunk: PrefillChunk, sharing: PrefillSharing) -> bool:
    longest = forward[0].stop
    if len(forward) >= sharing.max_rows:
        return False
    if chunk.stop == longest:
        return True
    useful = sum(c.stop for c in forward) + chunk.stop
    return longest <= sharing.max_padded and longest * (len(forward) + 1) <= MAX_WASTE * useful
