"""Decides which prompt chunks share a forward: first chunks of plain text, of equal or nearly equal length.

A shared forward starts from empty caches, so it is exact without padding for every family. Rows that are
padded on the right stay exact if attention is the only state, since no token sees what comes after it.
Recurrent layers would take the padding in, so there only equal lengths share. Consecutive chunks of one
request may be merged: their grid matters only for the prefix cache and for reproducible results.

Tails are the rests of prompts after a hit, in rows that want logprobs and never decode. Tails of rows with
equally long caches share a forward too, for which the caches are stacked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mlxrun.core.step_plan import PrefillChunk

MAX_WASTE = 1.25  # a shared forward may compute this many times its useful tokens
MAX_TAIL = 256  # tokens: chunks of a tail are merged up to this, although it crosses the grid
NO_LIMIT = 1 << 40
FEW_TOKENS = 64  # forwards of fewer tokens cost about the same: their time goes into reading the weights


@dataclass(frozen=True, slots=True)
class PrefillSharing:
    """Which chunks may share a forward.

    `max_rows`: most chunks in a forward. `max_padded`: longest chunk to pad to; 0: equal lengths only.
    `merge_chunks`: consecutive chunks of a request share a forward, which is faster with fused attention for
    every shape. `tails`: tails share forwards. `max_shared`: longest chunk that shares one.
    """

    max_rows: int = 1
    max_padded: int = 0
    merge_chunks: bool = False
    tails: bool = False
    max_shared: int = NO_LIMIT


def group_chunks(
    chunks: Sequence[PrefillChunk],
    shareable: Collection[str],
    sharing: PrefillSharing,
    forward_ends: Collection[tuple[str, int]] = (),
    ends: Mapping[str, int] | None = None,
) -> list[list[PrefillChunk]]:
    """The chunks of each forward, with each request's chunks in sequence.

    `shareable`: requests without images whose chunk does not sample. `forward_ends`: (request, position)
    where a forward must end because a snapshot of the state is due. `ends`: where the prefill of rows ends
    that never decode.
    """
    ends = ends or {}
    limits = dict.fromkeys(ends, MAX_TAIL) if sharing.tails and not sharing.merge_chunks else {}
    if limits or sharing.merge_chunks:
        chunks = _merge_chunks(chunks, forward_ends, limits, 0 if limits else NO_LIMIT)
    first = [c for c in chunks if c.start == 0 and c.request_id in shareable]
    later = [c for c in chunks if c.start > 0 or c.request_id not in shareable]
    may_share = {c for c in later if sharing.tails and c.request_id in shareable}
    tails = {c for c in may_share if c.stop == ends.get(c.request_id)}
    shared = _share_forwards(sorted(first, key=lambda c: -c.stop), sharing)
    shared_tails = _share_forwards(sorted(tails, key=lambda c: (c.start, -c.stop, c.request_id)), sharing)
    return shared + [[c] for c in later if c not in tails] + shared_tails


def _merge_chunks(
    chunks: Sequence[PrefillChunk],
    forward_ends: Collection[tuple[str, int]],
    limits: Mapping[str, int],
    default: int,
) -> list[PrefillChunk]:
    """Merge consecutive chunks up to a limit of tokens: that of their request, or the default."""
    merged: list[PrefillChunk] = []
    for chunk in chunks:
        last = merged[-1] if merged else None
        start = (chunk.request_id, chunk.start)
        follows = last is not None and (last.request_id, last.stop) == start and start not in forward_ends
        if last and follows and chunk.stop - last.start <= limits.get(chunk.request_id, default):
            merged[-1] = PrefillChunk(chunk.request_id, last.start, chunk.stop)
        else:
            merged.append(chunk)
    return merged


def _share_forwards(chunks: Sequence[PrefillChunk], sharing: PrefillSharing) -> list[list[PrefillChunk]]:
    """The chunks of each forward; those that begin alike are given one after the other, the longest first."""
    forwards: list[list[PrefillChunk]] = []
    for chunk in chunks:
        if not (forwards and _fits(forwards[-1], chunk, sharing)):
            forwards.append([])
        forwards[-1].append(chunk)
    return forwards


def _fits(forward: Sequence[PrefillChunk], chunk: PrefillChunk, sharing: PrefillSharing) -> bool:
    """Whether a chunk may join these; it is not longer if it begins where they do."""
    start, longest = forward[0].start, forward[0].stop - forward[0].start
    if chunk.start != start or len(forward) >= sharing.max_rows or longest > sharing.max_shared:
        return False
    if chunk.stop == forward[0].stop:
        return True
    useful, computed = sum(c.stop - start for c in (*forward, chunk)), longest * (len(forward) + 1)
    is_cheap = computed <= MAX_WASTE * useful or (start > 0 and computed <= FEW_TOKENS)
    return longest <= sharing.max_padded and is_cheap
