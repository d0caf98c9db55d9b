"""The rows of a forward that verifies drafts, and which of the drafted tokens are accepted.

A row with a draft of k tokens takes k + 1 rows of the forward: for its newest token, and for each drafted
token. Each is sampled as if the tokens before it were the row's. A drafted token is accepted if it equals the
token that is sampled in its place. So answers are the same as without drafts, with any sampling, since noise
depends on seed and position only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxrun.model.run.sampler import RowSampling


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """`drafts`: a draft for each row, which may be empty. `forks`: for each row of the forward, its sampling
    state after the drafted tokens before it."""

    drafts: tuple[tuple[int, ...], ...]
    forks: tuple[tuple[RowSampling, ...], ...]

    @classmethod
    def start(cls, drafts: Sequence[tuple[int, ...]], rows: Sequence[RowSampling]) -> DraftedRows:
        forks = [
            tuple(row.fork(draft[:count]) for count in range(len(draft) + 1))
            for row, draft in zip(rows, drafts, strict=True)
        ]
        return cls(tuple(drafts), tuple(forks))

    @property
    def counts(self) -> list[int]:
        """The number of rows of the forward that each row takes."""
        return [len(draft) + 1 for draft in self.drafts]

    def expand_tokens(self, newest: mx.array) -> mx.array:
        """The tokens of the forward, row after row. `newest` [rows]: the last sampled token of each row."""
        flat = [token for draft in self.drafts for token in draft]
        places, drafted = [], len(self.drafts)
        for index, draft in enumerate(self.drafts):
            places += [index, *range(drafted, drafted + len(draft))]
            drafted += len(draft)
        return mx.concatenate([newest, mx.array(flat, newest.dtype)])[mx.array(places)]

    def expand_positions(self, first: Sequence[int]) -> list[int]:
        """Positions in the forward, if rows begin at `first`."""
        return [at + i for at, count in zip(first, self.counts, strict=True) for i in range(count)]

    def count_accepted(self, sampled: Sequence[int]) -> list[int]:
        """How many of the `sampled` tokens each row gets: those that equal its draft, and one more. None
        count after a token that ends the answer."""
        kept, first = [], 0
        for draft, forks in zip(self.drafts, self.forks, strict=True):
            size = 0
            while size < len(draft) and sampled[first + size] == draft[size]:
                if draft[size] in forks[0].params.stop_ids:
                    break
                size += 1
            kept.append(size + 1)
            first += len(draft) + 1
        return kept
