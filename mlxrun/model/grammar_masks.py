"""Which tokens the rows of a step may draw: the masks of their constraints, as one array.

What a row's constraint raises, or a mask that allows nothing, is that row's own failure. It comes out when
the row's next token is taken in, so that the tokens before it are delivered; until then the row draws as it
likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxrun.errors import RequestError
from mlxrun.scheduler.request import GrammarMatcher

ALLOW_ALL = b"\xff"  # allows its eight tokens


@dataclass(slots=True)
class RowGrammar:
    """A row's constraint, and what it failed by."""

    matcher: GrammarMatcher
    error: Exception | None = None

    def compute_mask(self, size: int) -> bytes:
        """The mask in so many bytes; tokens that only the model has are forbidden."""
        if self.error is None:
            try:
                return self.matcher.mask()[:size].ljust(size, b"\0")
            except Exception as error:  # the border: see above
                self.error = error
        return ALLOW_ALL * size

    def accept(self, token: int) -> None:
        """Take a token in, or raise what failed."""
        if self.error is not None:
            raise self.error
        self.matcher.accept(token)


def make_grammar_mask(guards: Sequence[RowGrammar | None], vocab: int) -> mx.array | None:
    """bool [rows, vocab]; None if no row has a constraint."""
    if not any(guards):
        return None
    size = (vocab + 7) // 8
    rows = [ALLOW_ALL * size if guard is None else guard.compute_mask(size) for guard in guards]
    packed = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), size)
    mask = np.unpackbits(packed, axis=1, count=vocab, bitorder="little").view(np.bool_)
    for index in np.flatnonzero(~mask.any(axis=1)).tolist():
        guard = guards[index]
        assert guard is not None
        guard.error = RequestError(_explain_empty_mask(guard.matcher), code="grammar_failed")
        mask[index] = True
    return mx.array(mask)


def _explain_empty_mask(constraint: GrammarMatcher) -> str:
    if constraint.done:
        return "the answer is complete by its grammar, and the request has no stop token to say so"
    return "the grammar allows no token that this model has"
