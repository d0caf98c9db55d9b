"""How many drafted tokens of a row are expected to be accepted, from those that were compared before.

A model's predictions are known only once it has made them, so that a row which does not draft learns nothing.
What is known of it therefore fades: after some tokens it is expected again to draft as well as the others,
and these as well as at the start, and it tries. Only counts decide, never times.
"""

from __future__ import annotations

START = 0.75  # of the next drafted token to be accepted, before anything is known
START_WEIGHT = 1.0  # compared tokens that START counts for
FADING = 12  # compared tokens after which what is known counts half
IDLE_FADING = 64  # the same in tokens that were not drafted


class Acceptance:
    """That of one row, which outlives the row's preemption, or of all rows. `others`: of all rows, which a
    row is expected to be like before more is known. `pending`: tokens that the step in flight compares."""

    def __init__(self, others: Acceptance | None = None) -> None:
        self._others = others
        self._compared = self._accepted = 0.0
        self.pending = 0

    @property
    def rate(self) -> float:
        """The probability of the next drafted token."""
        start = START if self._others is None else self._others.rate
        return (self._accepted + start * START_WEIGHT) / (self._compared + START_WEIGHT)

    def expect(self, count: int) -> float:
        """Tokens of a draft of `count` that are expected to be accepted: each needs those before it."""
        rate, expected, likely = self.rate, 0.0, 1.0
        for _ in range(count):
            likely *= rate
            expected += likely
        return expected

    def record(self, tokens: int, accepted: int) -> None:
        """The row got `tokens` tokens, of which so many were drafted by the source."""
        compared, self.pending = min(accepted + 1, self.pending), 0
        for known in (self,) if self._others is None else (self, self._others):
            known._learn(tokens, compared, min(accepted, compared))

    def _learn(self, tokens: int, compared: int, accepted: int) -> None:
        share = 0.5 ** (compared / FADING if compared else tokens / IDLE_FADING)
        self._compared = self._compared * share + compared
        self._accepted = self._accepted * share + accepted
