"""Which tokens the rows of a step may sample: the masks of their grammars, as one array.

An exception of a row's matcher, or a mask that allows nothing, fails that row only. The row fails when its
next token is read, so that the tokens before it are delivered; until then it is sampled without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxrun.core.errors import RequestError
from mlxrun.core.request import GrammarMatcher
from mlxrun.core.step_plan import SampledToken

ALLOW_ALL = b"\xff"  # allows its eight tokens


@dataclass(slots=True)
class RowGrammar:
    """A row's matcher, and the error that it failed with."""

    matcher: GrammarMatcher
    error: Exception | None = None

    def compute_mask(self, size: int) -> bytes:
        """The mask in so many bytes; tokens that the tokenizer does not have are forbidden."""
        if self.error is None:
            try:
                return self.matcher.mask()[:size].ljust(size, b"\0")
            except Exception as error:  # see the module's docstring
                self.error = error
        return ALLOW_ALL * size

    def accept(self, token: int) -> None:
        """Advance by the sampled token. Raises what failed before."""
        if self.error is not None:
            raise self.error
        self.matcher.accept(token)

    def accept_all(
        self, sampled: tuple[SampledToken, ...], forks: Sequence[RowGrammar | None] = ()
    ) -> tuple[SampledToken, ...]:
        """Advance by the tokens of a step. `forks`: of `fork_along`, which masked each of them. Returns those
        before one that fails, or whose mask has failed; that fails the row in its next step. Raises if it is
        the first."""
        for index, each in enumerate(sampled):
            fork = forks[index] if forks else self
            try:
                if fork is not None and fork.error is not None:
                    raise fork.error
                self.accept(each.token)
            except Exception as error:
                if index == 0:
                    raise
                self.error = error
                return sampled[:index]
        return sampled

    def fork_along(self, draft: Sequence[int]) -> list[RowGrammar | None]:
        """This grammar, and what it is after each token of a draft; None from the token on that it does not
        allow: nothing is accepted there."""
        forks: list[RowGrammar | None] = [self]
        newest: RowGrammar = self
        for token in draft:
            try:
                newest = RowGrammar(newest.matcher.fork(), newest.error)
                newest.accept(token)
            except Exception:  # the draft does not match
                break
            forks.append(newest)
        return forks + [None] * (len(draft) + 1 - len(forks))


def make_grammar_mask(grammars: Sequence[RowGrammar | None], vocab: int) -> mx.array | None:
    """Bool [rows, vocab], True for allowed tokens; None if no row has a grammar."""
    if not any(grammars):
        return None
    size = (vocab + 7) // 8
    rows = [ALLOW_ALL * size if grammar is None else grammar.compute_mask(size) for grammar in grammars]
    packed = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), size)
    mask = np.unpackbits(packed, axis=1, count=vocab, bitorder="little").view(np.bool_)
    for index in np.flatnonzero(~mask.any(axis=1)).tolist():
        grammar = grammars[index]
        assert grammar is not None
        reason = "the grammar allows no token that this model has"
        if grammar.matcher.done:
            reason = "the answer is complete by its grammar, and the request has no stop token to say so"
        grammar.error = RequestError(reason, code="grammar_failed")
        mask[index] = True
    return mx.array(mask)
