"""Logprobs of prompt tokens beside the entries of the prefix cache.

A token's logits give the logprob and rank of the next token, and the likeliest one. So an entry of tokens
[first, stop) has logprobs of tokens first + 1 to stop. Token `stop` is not in the entry: its logprobs depend
on the prompt that follows. NaN stands for an unknown value.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mlxrun.core.request import TokenLogprob

NAN = math.nan
MAX_FOLLOWING = 256  # tokens after an entry whose logprobs are kept
# As TokenLogprob._make, at a third of the time: long prompts have many.
_make_logprob = partial(tuple.__new__, TokenLogprob)


@dataclass(frozen=True, slots=True, eq=False)
class EntryLogprobs:
    """Item i of the arrays is about token `first` + 1 + i. The last item of `logprobs` is always NaN, as its
    token is not in the entry. `following`: logprob and rank of each token that was found there, by its id.
    `ranks` are known where the logprobs are."""

    first: int
    logprobs: array[float]
    ranks: array[int]
    best_ids: array[int]
    best_logprobs: array[float]
    following: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    complete: bool = field(init=False)  # all is known of its own tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "complete", not any(map(math.isnan, self.logprobs[:-1])))

    def merge(self, other: EntryLogprobs) -> EntryLogprobs:
        """These logprobs, with unknown ones taken from `other`, which is about the same tokens. Returns this
        object if `other` knows no more."""
        following = {**other.following, **self.following}
        if not self._lacks(other):
            is_known = len(following) in (len(self.following), MAX_FOLLOWING + 1)
            return self if is_known else replace(self, following=following)
        logprobs, ranks = _fill_unknown(self.logprobs, self.ranks, other.logprobs, other.ranks)
        best_logprobs, best_ids = _fill_unknown(
            self.best_logprobs, self.best_ids, other.best_logprobs, other.best_ids
        )
        return EntryLogprobs(self.first, logprobs, ranks, best_ids, best_logprobs, following)

    def _lacks(self, other: EntryLogprobs) -> bool:
        if self.complete and not math.isnan(self.best_logprobs[-1]):
            return False
        pairs = zip(self.logprobs + self.best_logprobs, other.logprobs + other.best_logprobs, strict=True)
        return any(math.isnan(own) and not math.isnan(others) for own, others in pairs)

    def encode(self) -> bytes:
        """Return 32-bit numbers as bytes. The first two are `first` and the number of items."""
        values = array("f", [logprob for logprob, _ in self.following.values()])
        ranks = array("i", [rank for _, rank in self.following.values()])
        head = array("i", [self.first, len(self.best_ids)])
        own = (head, self.best_ids, self.logprobs, self.ranks, self.best_logprobs)
        return b"".join(part.tobytes() for part in (*own, array("i", self.following), values, ranks))

    @classmethod
    def decode(cls, data: bytes) -> EntryLogprobs:
        """The inverse of `encode`. ValueError if the bytes are not logprobs."""
        if len(data) < 8 or len(data) % 4:
            raise ValueError("the head of the logprobs is missing")
        first, count = array("i", data[:8])
        rest, odd = divmod(len(data) // 4 - 2 - 4 * count, 3)
        if first < 0 or count < 1 or rest < 0 or odd:
            raise ValueError(f"{len(data)} bytes are not the logprobs of {count} tokens")
        ends = [8]
        for items in (count, count, count, count, rest, rest, rest):
            ends.append(ends[-1] + 4 * items)
        parts = [data[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]
        best_ids, ranks, ids, followed = (array("i", part) for part in parts[::2])
        logprobs, best_logprobs, values = (array("f", part) for part in parts[1::2])
        following = dict(zip(ids, zip(values, followed, strict=True), strict=True))
        return cls(first, logprobs, ranks, best_ids, best_logprobs, following)


class LogprobBook:
    """The known logprobs of one prompt, by position."""

    def __init__(self, prompt: Sequence[int], image_spans: Sequence[tuple[int, int]]) -> None:
        self._prompt = prompt
        self._image_spans = image_spans
        count = len(prompt)
        self._logprobs = array("f", [NAN]) * count
        self._ranks = array("i", [0]) * count
        self._best_ids = array("i", [0]) * count
        self._best_logprobs = array("f", [NAN]) * count
        self.changed = False  # by `record`

    def record(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Take in logprobs of the tokens from `start` on, each with at least one of the likeliest tokens."""
        for at, logprob in enumerate(logprobs[: len(self._prompt) - start], start):
            self._logprobs[at], self._ranks[at] = logprob.logprob, logprob.rank
            self._best_ids[at], self._best_logprobs[at] = logprob.top[0]
        self.changed = True

    def read(self, start: int) -> list[TokenLogprob]:
        """The logprobs from `start` on, up to the first unknown one outside images."""
        unknown = (at for at, nan in enumerate(map(math.isnan, self._logprobs[start:]), start) if nan)
        outside = (at for at in unknown if not any(a <= at < b for a, b in self._image_spans))
        part = slice(start, next(outside, len(self._prompt)))
        tops = zip(zip(self._best_ids[part], self._best_logprobs[part], strict=True), strict=True)
        return list(map(_make_logprob, zip(self._logprobs[part], tops, self._ranks[part], strict=True)))

    def take(self, logprobs: EntryLogprobs, matched: int) -> None:
        """Take in the logprobs of an entry whose tokens equal the prompt's up to position `matched`."""
        first, end = logprobs.first + 1, logprobs.first + len(logprobs.best_ids)
        own = range(first, min(matched, end, len(self._prompt)))
        if logprobs.complete:
            self._copy(own, logprobs)
        else:
            for at in own:
                if not math.isnan(logprobs.logprobs[at - first]):
                    self._copy(range(at, at + 1), logprobs)
        found = logprobs.following.get(self._prompt[end]) if matched == end < len(self._prompt) else None
        if found is not None:
            self._logprobs[end], self._ranks[end] = found
            self._best_ids[end], self._best_logprobs[end] = logprobs.best_ids[-1], logprobs.best_logprobs[-1]

    def _copy(self, positions: range, logprobs: EntryLogprobs) -> None:
        if positions:
            own = slice(positions.start, positions.stop)
            items = slice(positions.start - logprobs.first - 1, positions.stop - logprobs.first - 1)
            self._logprobs[own], self._ranks[own] = logprobs.logprobs[items], logprobs.ranks[items]
            self._best_ids[own] = logprobs.best_ids[items]
            self._best_logprobs[own] = logprobs.best_logprobs[items]

    def make_logprobs(self, first: int, stop: int, matched: int) -> EntryLogprobs | None:
        """The logprobs of an entry of tokens [first, stop) that equal the prompt's up to position `matched`.
        None if nothing is known."""
        count, matched = stop - first, min(matched, stop, len(self._prompt))
        own, best = slice(first + 1, matched), slice(first + 1, matched + 1)
        best_logprobs = _pad(self._best_logprobs[best], count, NAN)
        if all(math.isnan(value) for value in best_logprobs):
            return None
        following = {}
        if matched == stop < len(self._prompt) and not math.isnan(self._logprobs[stop]):
            following = {self._prompt[stop]: (self._logprobs[stop], self._ranks[stop])}
        logprobs, ranks = _pad(self._logprobs[own], count, NAN), _pad(self._ranks[own], count, 0)
        best_ids = _pad(self._best_ids[best], count, 0)
        return EntryLogprobs(first, logprobs, ranks, best_ids, best_logprobs, following)


def _pad(values: array[Any], count: int, filler: float) -> array[Any]:
    return values + array(values.typecode, [filler]) * (count - len(values))


def _fill_unknown(
    own: array[float], own_numbers: array[int], other: array[float], other_numbers: array[int]
) -> tuple[array[float], array[int]]:
    """Where the logprobs `own` are unknown those of `other`, each with its number."""
    values, numbers = array("f", own), array("i", own_numbers)
    for at, value in enumerate(own):
        if math.isnan(value):
            values[at], numbers[at] = other[at], other_numbers[at]
    return values, numbers
