"""How many drafted tokens of a row are expected to be accepted, from those that were compared before.

A model's predictions are known only once it has made them, so that a row which does not draft learns nothing.
What is known of it therefore fades: after some tokens it is expected again to draft as well as the others,
and these as well as at the start, and it tries. A head's later tokens are accepted less often than its first
ones, so that each place of a draft has counts of its own. Only counts decide, never times.
"""

from __future__ import annotations

START = 0.75  # of the first drafted token to be accepted, before anything is known
START_WEIGHT = 1.0  # compared tokens that START counts for, and for a later place the one before it
OTHERS_WEIGHT = 4.0  # compared tokens of a row that what is known of all rows counts for
FADING = 12  # compared tokens after which what is known of a place counts half
IDLE_FADING = 64  # the same in tokens of the row that were not compared there


class Acceptance:
    """That of one row, which outlives the row's preemption, or of all rows. `others`: of all rows, which a
    row is expected to be like before more is known. `pending`: tokens that the step in flight compares."""

    def __init__(self, others: Acceptance | None = None) -> None:
        self._others = others
        self._counts: list[tuple[float, float]] = []  # by place in a draft: compared and accepted tokens
        self.pending = 0

    def expect(self, count: int) -> float:
        """Tokens of a draft of `count` that are expected to be accepted: each needs those before it."""
        expected, likely = 0.0, 1.0
        for rate in self._estimate_rates(count):
            likely *= rate
            expected += likely
        return expected

    def _estimate_rates(self, count: int) -> list[float]:
        """By place, the probability that a drafted token is accepted if those before it are."""
        others = None if self._others is None else self._others._estimate_rates(count)
        rates: list[float] = []
        for place in range(count):
            start, weight = rates[-1] if rates else START, START_WEIGHT
            if others is not None:
                start, weight = others[place], OTHERS_WEIGHT
            compared, accepted = self._counts[place] if place < len(self._counts) else (0.0, 0.0)
            rates.append((accepted + start * weight) / (compared + weight))
        return rates

    def record(self, tokens: int, accepted: int) -> None:
        """The row got `tokens` tokens, of which so many were drafted by the source."""
        compared, self.pending = min(accepted + 1, self.pending), 0
        for known in (self,) if self._others is None else (self, self._others):
            known._learn(tokens, compared, min(accepted, compared))

    def _learn(self, tokens: int, compared: int, accepted: int) -> None:
        self._counts += [(0.0, 0.0)] * (compared - len(self._counts))
        for place, (known, held) in enumerate(self._counts):
            share = 0.5 ** (1 / FADING if place < compared else tokens / IDLE_FADING)
            self._counts[place] = known * share + (place < compared), held * share + (place < accepted)
