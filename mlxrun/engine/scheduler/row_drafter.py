"""Decides for one row whether drafts pay, how long they are, and what is in them.

A prediction can be compared with the tokens that come whether it was drafted or not. So a row whose
predictions fail costs nothing, and drafts again as soon as they hold. Only counts decide, never times: the
same tokens give the same drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxrun.config.settings import SpeculationSettings
from mlxrun.engine.scheduler.prompt_lookup import PromptLookup

START = 2.0  # predicted tokens that are expected to hold before anything is known
PAYS = 1.0  # tokens that a draft must be expected to gain
WEIGHT = 0.25  # of the newest run of predicted tokens in the mean


class RowDrafter:
    """It outlives the row's preemption, as the row's tokens do."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self._lookup = PromptLookup(settings.min_ngram, settings.max_ngram)
        self._max_tokens = settings.max_tokens
        self._mean = min(START, float(settings.max_tokens))  # length of runs; longer ones count as max_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the row that are known here."""
        return len(self._lookup)

    @property
    def predicts(self) -> bool:
        """Whether a next token is predicted."""
        return self._lookup.run is not None

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """Take in tokens that were not sampled since the last call."""
        self._lookup.extend(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Take in newly sampled tokens."""
        for token in tokens:
            ended = self._lookup.append(token)
            if ended is not None:
                self._mean += WEIGHT * (min(ended, self._max_tokens) - self._mean)

    def expect(self) -> float:
        """Tokens that a draft is expected to gain; 0.0 if that does not pay, or nothing is predicted. A run
        is expected to go on for half of what it has held."""
        run = self._lookup.run
        if run is None:
            return 0.0
        expected = min(max(self._mean, run / 2), float(self._max_tokens))
        return expected if expected >= min(PAYS, self._max_tokens / 2) else 0.0

    def propose(self, limit: int) -> tuple[int, ...]:
        """A draft of at most `limit` tokens, and of twice what is expected: its end costs little."""
        return self._lookup.propose(min(limit, self._max_tokens, round(2 * self.expect())))
