"""Decides for one row whether drafts pay, how long they are, and which tokens they have.

A prediction can be compared with the sampled tokens whether it was drafted or not. So a row whose predictions
fail costs nothing, and drafts again as soon as they hold. Only counts decide, never times: the same tokens
give the same drafts.

N-gram lookup predicts tokens: what followed when the newest tokens came before. The index holds every n-gram
of a row's prompt and answer as a chain of positions, as in Lempel-Ziv compressors. A token costs a bounded
number of comparisons, and 8 bytes besides a table of fixed size.

A model's predictions are known only once it has made them, so a row that does not draft learns nothing.
Therefore `Acceptance` fades: after some tokens a row is expected to draft as well as the others, and tries
again. The record of all rows fades towards its start. A head's later tokens are accepted less often than its
first ones, so each place of a draft has its own counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from mlxrun.config.settings import SpeculationSettings

START = 2.0  # predicted tokens that are expected to hold before anything is known
PAYS = 1.0  # tokens that a draft must be expected to gain
WEIGHT = 0.25  # of the newest run of predicted tokens in the mean
TABLE_BITS = 14  # heads of chains in a row's table
MAX_CANDIDATES = 16  # earlier places that are compared in one lookup
_MULTIPLIER = 0x9E3779B1  # 2^32 divided by the golden ratio, as in Fibonacci hashing


class RowDrafter:
    """Drafts for one row by n-gram lookup. Like the row's tokens, it outlives the row's preemption."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self._lookup = PromptLookup(settings.min_ngram, settings.max_ngram)
        self._max_tokens = settings.max_tokens
        self._mean = min(START, float(settings.max_tokens))  # length of runs; longer ones count as max_tokens

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the row that are known here."""
        return len(self._lookup)

    @property
    def predicts(self) -> bool:
        """Whether a next token is predicted."""
        return self._lookup.run is not None

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """Take in new tokens that were not sampled."""
        self._lookup.extend(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Take in newly sampled tokens."""
        for token in tokens:
            ended = self._lookup.append(token)
            if ended is not None:
                self._mean += WEIGHT * (min(ended, self._max_tokens) - self._mean)

    def expect(self) -> float:
        """The number of tokens that a draft is expected to gain. It is 0.0 if that does not pay, or nothing
        is predicted. A run is expected to go on for half of its length so far."""
        run = self._lookup.run
        if run is None:
            return 0.0
        expected = min(max(self._mean, run / 2), float(self._max_tokens))
        return expected if expected >= min(PAYS, self._max_tokens / 2) else 0.0

    def propose(self, limit: int) -> tuple[int, ...]:
        """A draft of at most `limit` tokens. It may be twice as long as expected, since its end costs
        little."""
        return self._lookup.propose(min(limit, self._max_tokens, round(2 * self.expect())))


class PromptLookup:
    """The tokens of one row, and the place that predicts the next ones. A place matches if the `min_ngram`
    tokens before it equal the newest ones. Of several places, the one with the longest match is taken,
    counted up to `max_ngram`, and then the newest.

    `run`: how many tokens in a row came as predicted since the place was found. None: nothing matches.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min, self._max = min_ngram, max_ngram
        self._tokens = array("q")
        self._heads = array("i", [0]) * (1 << TABLE_BITS)  # newest end of an n-gram with this hash; 0: none
        self._previous = array("i", [0])  # by end of an n-gram: the end before it in the chain
        self._place = 0  # of the token that is predicted next; 0: none
        self.run: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in the tokens of a prompt, whose predictions are not compared."""
        self._place, self.run = 0, None
        for token in tokens:
            self._tokens.append(token)
            self._add_ngram(self._hash_end())
        self._find_place(self._hash_end())

    def append(self, token: int) -> int | None:
        """Take in the next token. If it ends a run of predicted tokens, return the length of that run."""
        ended = None
        if self.run is not None:
            if self._tokens[self._place] == token:
                self.run, self._place = self.run + 1, self._place + 1
            else:
                ended, self.run, self._place = self.run, None, 0
        self._tokens.append(token)
        head = self._hash_end()
        if self.run is None:
            self._find_place(head)
        self._add_ngram(head)
        return ended

    def propose(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens as predicted; empty if nothing matches."""
        if self.run is None:
            return ()
        end = len(self._tokens)
        found: list[int] = []
        for at in range(self._place, self._place + count):  # what repeats itself goes on beyond the end
            found.append(self._tokens[at] if at < end else found[at - end])
        return tuple(found)

    def _hash_end(self) -> int:
        """The chain of the newest n-gram."""
        tokens, value = self._tokens, 0
        for back in range(-min(self._min, len(tokens)), 0):
            value = ((value ^ tokens[back]) * _MULTIPLIER) & 0xFFFFFFFF
        return value >> (32 - TABLE_BITS)

    def _add_ngram(self, head: int) -> None:
        """Put the newest n-gram into its chain."""
        end = len(self._tokens)
        if end < self._min:
            self._previous.append(0)
            return
        self._previous.append(self._heads[head])
        self._heads[head] = end

    def _find_place(self, head: int) -> None:
        """Look the newest tokens up in their chain, which may or may not have their own n-gram yet."""
        end, best = len(self._tokens), self._min - 1
        place = self._heads[head] if end > self._min else 0
        for _ in range(MAX_CANDIDATES):
            if place == 0:
                break
            if place < end and (size := self._count_common(place)) > best:
                best, self._place, self.run = size, place, 0
                if size == self._max:
                    break
            place = self._previous[place]

    def _count_common(self, place: int) -> int:
        """How many tokens before `place` are the newest ones, counted up to the longest n-gram."""
        tokens, size = self._tokens, 0
        limit = min(self._max, place)
        while size < limit and tokens[place - 1 - size] == tokens[-1 - size]:
            size += 1
        return size


START_RATE = 0.75  # of the first drafted token to be accepted, before anything is known
START_WEIGHT = 1.0  # compared tokens that START_RATE counts for, and for a later place the one before it
OTHERS_WEIGHT = 4.0  # compared tokens of a row that what is known of all rows counts for
FADING = 12  # compared tokens after which what is known of a place counts half
IDLE_FADING = 64  # the same in tokens of the row that were not compared there


class Acceptance:
    """How many drafted tokens are accepted: of one row, across its preemptions, or of all rows. `others`:
    that of all rows, which a row follows before more is known. `pending`: tokens that the step in flight
    compares."""

    def __init__(self, others: Acceptance | None = None) -> None:
        self._others = others
        self._counts: list[tuple[float, float]] = []  # by place in a draft: compared and accepted tokens
        self.pending = 0

    def expect(self, count: int) -> float:
        """How many tokens of a draft of `count` are expected to be accepted. Each needs those before it."""
        expected, likely = 0.0, 1.0
        for rate in self.estimate_rates(count):
            likely *= rate
            expected += likely
        return expected

    def estimate_rates(self, count: int) -> list[float]:
        """By place, the probability that a drafted token is accepted if those before it are."""
        others = None if self._others is None else self._others.estimate_rates(count)
        rates: list[float] = []
        for place in range(count):
            start, weight = rates[-1] if rates else START_RATE, START_WEIGHT
            if others is not None:
                start, weight = others[place], OTHERS_WEIGHT
            compared, accepted = self._counts[place] if place < len(self._counts) else (0.0, 0.0)
            rates.append((accepted + start * weight) / (compared + weight))
        return rates

    def record(self, tokens: int, accepted: int) -> None:
        """Take in a step of the row: it got `tokens` tokens, and `accepted` of them were drafted by the
        source."""
        compared, self.pending = min(accepted + 1, self.pending), 0
        for known in (self,) if self._others is None else (self, self._others):
            known._learn(tokens, compared, min(accepted, compared))

    def _learn(self, tokens: int, compared: int, accepted: int) -> None:
        self._counts += [(0.0, 0.0)] * (compared - len(self._counts))
        for place, (known, held) in enumerate(self._counts):
            share = 0.5 ** (1 / FADING if place < compared else tokens / IDLE_FADING)
            self._counts[place] = known * share + (place < compared), held * share + (place < accepted)
