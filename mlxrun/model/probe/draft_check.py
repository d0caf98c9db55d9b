"""The check of drafts: rows that take several tokens in a forward, of which some are rejected.

What they must give is what one token a step gives. The tokens that are rejected are wrong ones, so a state
that keeps any of them, or that loses an accepted one, changes the logits of the next step.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.probe.reference import STEPS, Reference
from mlxrun.model.probe.rounding import ProbeLogits
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch

# For each forward: by row, the tokens that it takes, and how many of them are kept. A row that is not named
# has left. Each row takes the probe's answer, wherever that is kept.
FORWARDS = ({0: (2, 2), 1: (3, 1), 2: (3, 3)}, {0: (1, 1), 1: (2, 1)}, {1: (1, 1)})


MOST_ROWS = max(sum(count for count, _ in blocks.values()) for blocks in FORWARDS)


class DraftCheck:
    """`methods`: how rows decode, by pages. A fixed width is at least MOST_ROWS here."""

    def __init__(self, reference: Reference, methods: ComputeMethods) -> None:
        width = methods.fixed_width and max(methods.fixed_width, MOST_ROWS)
        self._reference, self._methods = reference, replace(methods, fixed_width=width)
        self._inputs = reference.inputs

    def take_steps(self) -> ProbeLogits:
        """All rows in one batch, one token a step."""
        batch, logits = self._start_batch(), ProbeLogits()
        for step in range(STEPS + 1):
            tokens = [tokens[step] for tokens in self._inputs]
            output = self._forward(batch, tokens, [1] * len(tokens))
            logits |= {(row, step): output[row] for row in range(len(tokens))}
        return logits

    def take_drafts(self) -> ProbeLogits:
        """The same rows by FORWARDS."""
        batch, logits = self._start_batch(), ProbeLogits()
        done = [0] * len(self._inputs)  # tokens by row
        for blocks in FORWARDS:
            batch.update({str(row) for row in blocks}, ())
            given = []
            for row, (count, kept) in blocks.items():
                tokens = self._inputs[row][done[row] :]
                wrong = [tokens[0] ^ 1] * (count - kept)
                given += [*tokens[:kept], *wrong]
            lengths = dict(zip(batch.ids, batch.lengths, strict=True))
            output = self._forward(batch, given, [count for count, _ in blocks.values()])
            batch.accept({str(row): lengths[str(row)] + kept for row, (_, kept) in blocks.items()})
            first = 0
            for row, (count, kept) in blocks.items():
                logits |= {(row, done[row] + i): output[first + i] for i in range(kept)}
                done[row] += kept
                first += count
        return logits

    def _start_batch(self) -> PagedDecodeBatch:
        batch = make_decode_batch(self._reference.make_cache(), self._methods, compiled_at_once=True)
        assert isinstance(batch, PagedDecodeBatch), "drafts need pages"
        rows = list(map(self._reference.make_row, range(len(self._inputs))))
        batch.update({row.id for row in rows}, rows)
        return batch

    def _forward(self, batch: PagedDecodeBatch, tokens: list[int], counts: list[int]) -> mx.array:
        places = [n + i for n, count in zip(batch.lengths, counts, strict=True) for i in range(count)]
        return self._reference.forward(batch, tokens, places, counts)
