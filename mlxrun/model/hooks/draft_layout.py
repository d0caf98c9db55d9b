"""How a recurrent layer computes a forward with drafts: its calls, and where the states of rows are
afterwards.

A row of the batch with k drafted tokens has k + 1 consecutive rows of the forward. For each of them, a
recurrent layer needs the state after the one before. In *passes*, call p computes the p-th token of each row.
In *blocks*, one call computes all tokens of the rows with drafts, like those of a prompt. Another call
computes the rows without drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx

DraftRecurrence = Literal["blocks", "passes", "wide_passes"]  # each costs more than the one before


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Chosen rows of an array."""

    rows: tuple[int, ...]
    _indices: list[mx.array] = field(default_factory=list)

    def take(self, array: mx.array, *, copied: bool = False) -> mx.array:
        """These rows of an array. `copied`: never as a view, which would keep the whole array in memory."""
        first, count = self.rows[0], len(self.rows)
        if self.rows == tuple(range(first, first + count)):
            if count == array.shape[0]:
                return array
            if not copied:
                return array[first : first + count]
        if not self._indices:
            self._indices.append(mx.array(self.rows, dtype=mx.int32))
        return array[self._indices[0]]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a recurrent layer.

    `sources`: the rows of the forward that it computes; each row of the call has `tokens` consecutive ones.
    `begin`: the rows of the batch whose states the call's rows start with. With `previous`, they start where
    these rows of the call before ended. `owners`: the rows of the batch whose state the call may leave;
    `kept`: their places in the call; `ends`: how many of their tokens are computed then.
    """

    tokens: int
    sources: RowChoice
    begin: RowChoice
    previous: RowChoice | None
    owners: tuple[int, ...]
    kept: RowChoice
    ends: int

    @property
    def firsts(self) -> tuple[int, ...]:
        """For each row of the call, the row of the forward with its first token."""
        return self.sources.rows[:: self.tokens]

    def take(self, array: mx.array) -> mx.array:
        """The part of an array that the call computes: [rows of the forward, 1, ...] -> [rows, tokens, ...].
        Of an array without the second axis, it takes the first of each row."""
        if self.tokens == 1:
            return self.sources.take(array)
        if array.ndim < 2 or array.shape[1] != 1:
            return RowChoice(self.firsts).take(array)
        part = self.sources.take(array)
        return part.reshape(-1, self.tokens, *part.shape[2:])

    def flatten(self, part: mx.array) -> mx.array:
        """An array [rows, tokens, ...] of the call with one row for each token. ValueError for another
        shape."""
        if self.tokens == 1:
            return part
        if part.shape[:2] != (len(self.firsts), self.tokens):
            raise ValueError(f"a recurrent layer gives an array {part.shape} for {self.tokens} tokens a row")
        return part.reshape(-1, 1, *part.shape[2:])


@dataclass(frozen=True, slots=True)
class ChosenStates:
    """Where the states of some rows are: call number `call` left them at `places` of its `owners`. `repeat`:
    a call for fewer tokens that must compute them first, None if they are there."""

    call: int
    places: RowChoice
    repeat: LayerCall | None = None


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """The calls of a recurrent layer in one forward.

    `counts`: tokens of each row of the batch; `total`: rows of the forward, of which the last may be dummies;
    `width`: rows of the states with which the first call begins; `results`: for each row of the forward, its
    place in the results of all calls.
    """

    counts: tuple[int, ...]
    total: int
    width: int
    calls: list[LayerCall]
    results: RowChoice

    def choose_states(self, kept: Sequence[int]) -> tuple[list[ChosenStates], RowChoice]:
        """Where the state of each row after its first `kept` tokens is: the parts, and each row's place in
        all parts."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row, count in enumerate(kept):
            found = [i for i, call in enumerate(self.calls) if row in call.owners and call.ends >= count]
            groups.setdefault((found[0], count), []).append(row)
        parts = []
        for (index, count), rows in groups.items():
            call = self.calls[index]
            places = RowChoice(tuple(call.owners.index(row) for row in rows))
            repeat = None if count == call.ends else _lay_out_block(rows, count, self.counts)
            parts.append(ChosenStates(index, places, repeat))
        order = [row for rows in groups.values() for row in rows]
        return parts, RowChoice(tuple(order.index(row) for row in range(len(kept))))


def lay_out_drafts(
    recurrence: DraftRecurrence, counts: Sequence[int], total: int, width: int = 0
) -> DraftLayout:
    """The layout for rows with `counts` tokens, of which at least one has a draft. `width`: rows of each of
    the `wide_passes`, at least one for each row."""
    width = max(width if recurrence == "wide_passes" else 0, len(counts))
    if recurrence == "blocks":
        plain = [row for row, count in enumerate(counts) if count == 1]
        drafting = [row for row, count in enumerate(counts) if count > 1]
        calls = [_lay_out_block(plain, 1, counts)] if plain else []
        calls.append(_lay_out_block(drafting, max(counts), counts))
    else:
        calls = _lay_out_passes(counts, total, width if recurrence == "wide_passes" else 0)
    places: dict[int, int] = {}  # by row of the forward
    firsts, computed = _find_firsts(counts), 0
    for call in calls:
        for owner, at in zip(call.owners, call.kept.rows, strict=True):
            begin = call.ends - call.tokens
            for token in range(begin, min(call.ends, counts[owner])):
                places[firsts[owner] + token] = computed + at * call.tokens + token - begin
        computed += len(call.sources.rows)
    results = RowChoice(tuple(places.get(row, 0) for row in range(total)))
    return DraftLayout(tuple(counts), total, width, calls, results)


def _find_firsts(counts: Sequence[int]) -> list[int]:
    """The first row of the forward of each row of the batch."""
    return list(itertools.accumulate(counts, initial=0))


def _lay_out_block(rows: Sequence[int], tokens: int, counts: Sequence[int]) -> LayerCall:
    """A call for the first tokens of these rows. One that has fewer repeats its last."""
    firsts = _find_firsts(counts)
    sources = [firsts[row] + min(token, counts[row] - 1) for row in rows for token in range(tokens)]
    begin, places = RowChoice(tuple(rows)), RowChoice(tuple(range(len(rows))))
    return LayerCall(tokens, RowChoice(tuple(sources)), begin, None, tuple(rows), places, tokens)


def _lay_out_passes(counts: Sequence[int], total: int, width: int) -> list[LayerCall]:
    """`width`: rows of every call; 0: as many as have a token."""
    calls: list[LayerCall] = []
    firsts, before = _find_firsts(counts), [*range(len(counts))]
    for index in range(max(counts)):
        owners = [row for row, count in enumerate(counts) if count > index]
        members = [*range(len(counts))] if width else owners
        # A row that has no more tokens, or a dummy, computes some token again, and its state is dropped.
        sources = [firsts[row] + min(index, counts[row] - 1) for row in members]
        dummies = max(width - len(members), 0)
        begin = range(len(members) + dummies)
        previous = begin if width else [before.index(row) for row in members]
        rows = RowChoice((*sources, *[total - 1] * dummies)), RowChoice(tuple(begin))
        kept = RowChoice(tuple(members.index(row) for row in owners))
        last = RowChoice(tuple(previous)) if index else None
        calls.append(LayerCall(1, *rows, last, tuple(owners), kept, index + 1))
        before = members
    return calls
