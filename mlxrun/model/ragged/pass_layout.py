"""Which rows of a forward with drafts a recurrent layer computes in which pass.

A row of the batch with k drafted tokens has k + 1 rows of the forward, one after the other. A recurrent layer
needs the state after one of them for the next, so pass p computes the p-th token of each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Rows of an array, which may be a range of it."""

    rows: tuple[int, ...]
    _indices: list[mx.array] = field(default_factory=list)

    def take(self, array: mx.array, *, copied: bool = False) -> mx.array:
        """These rows. `copied`: never as a view, which would keep the whole array in memory."""
        first, count = self.rows[0], len(self.rows)
        if self.rows == tuple(range(first, first + count)) and not copied:
            return array if count == array.shape[0] else array[first : first + count]
        if not self._indices:
            self._indices.append(mx.array(self.rows, dtype=mx.int32))
        return array[self._indices[0]]


@dataclass(frozen=True, slots=True)
class LayerPass:
    """`sources`: the rows of the forward that the pass computes. `previous`: where each of them was in the
    pass before; None in the first. `owners`: the rows of the batch that have a token in this pass, in order,
    and `kept`: where they are in it."""

    sources: RowChoice
    previous: RowChoice | None
    owners: tuple[int, ...]
    kept: RowChoice


class PassLayout:
    """`counts`: tokens of each row of the batch. `total`: rows of the forward, of which the last may be
    dummies. `width`: rows of every pass, so that all round as a step does; 0: as many as have a token."""

    def __init__(self, counts: Sequence[int], total: int, width: int = 0) -> None:
        self.counts, self.total = tuple(counts), total
        self.passes: list[LayerPass] = []
        firsts = list(itertools.accumulate(counts, initial=0))[:-1]
        results: dict[int, int] = {}  # by row of the forward: its place in the results of all passes
        computed, before = 0, [*range(len(counts))]
        for index in range(max(counts)):
            owners = [row for row, count in enumerate(counts) if count > index]
            members = [*range(len(counts))] if width else owners
            # A row that has no more tokens, or a dummy, computes some token again, and its state is dropped.
            dummies = max(width - len(members), 0)
            sources = [firsts[row] + min(index, counts[row] - 1) for row in members]
            places = [members.index(row) for row in owners]
            previous = range(width) if width else [before.index(row) for row in members]
            self.passes.append(
                LayerPass(
                    RowChoice((*sources, *[total - 1] * dummies)),
                    RowChoice(tuple(previous)) if index else None,
                    tuple(owners),
                    RowChoice(tuple(places)),
                )
            )
            results |= {firsts[row] + index: computed + at for row, at in zip(owners, places, strict=True)}
            computed, before = computed + len(members) + dummies, members
        self.results = RowChoice(tuple(results.get(row, 0) for row in range(total)))

    def choose_states(self, kept: Sequence[int]) -> tuple[list[int], RowChoice]:
        """Where each row's state after its first `kept` tokens is: the passes that have one, and for each row
        its place in the states that these passes keep, one pass after the other."""
        passes = sorted({count - 1 for count in kept})
        sizes = [len(self.passes[index].owners) for index in passes]
        firsts = dict(zip(passes, itertools.accumulate(sizes, initial=0), strict=False))
        places = [firsts[n - 1] + self.passes[n - 1].owners.index(row) for row, n in enumerate(kept)]
        return passes, RowChoice(tuple(places))
