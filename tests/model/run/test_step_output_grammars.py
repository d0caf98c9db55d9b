"""The masks of a step's rows: one array, and an error of one row's matcher stays that row's."""

from __future__ import annotations

import numpy as np
import pytest

from mlxrun.model.run.step_output import RowGrammar, make_grammar_mask


class FixedMatcher:
    """A matcher whose mask never changes."""

    def __init__(self, *tokens: int, size: int = 3) -> None:
        bits = bytearray(size)
        for token in tokens:
            bits[token // 8] |= 1 << token % 8
        self._mask, self.done = bytes(bits), False

    def mask(self) -> bytes:
        return self._mask

    def accept(self, token: int) -> None:
        raise AssertionError(token)

    def fork(self) -> FixedMatcher:
        raise AssertionError("no draft")


def rows(guards: list[RowGrammar | None], vocab: int) -> list[list[int]]:
    mask = make_grammar_mask(guards, vocab)
    assert mask is not None and mask.shape == (len(guards), vocab)
    return [np.flatnonzero(np.array(row)).tolist() for row in mask]


@pytest.mark.parametrize("vocab", [20, 24, 37, 64])
def test_logits_may_be_wider_than_the_vocabulary(vocab: int) -> None:
    """Padding rows of the output layer are no tokens; rows without a grammar keep them all."""
    assert rows([RowGrammar(FixedMatcher(0, 9, 19)), None], vocab) == [[0, 9, 19], list(range(vocab))]


def test_logits_may_be_narrower_than_the_vocabulary() -> None:
    guards = [RowGrammar(FixedMatcher(3, 11, 12)), RowGrammar(FixedMatcher(12, 23))]
    assert rows(guards, 12) == [[3, 11], list(range(12))]
    assert guards[0].error is None and "allows no token" in str(guards[1].error)


def test_no_masks_without_grammars() -> None:
    assert make_grammar_mask([None, None], 300) is None


class BrokenMatcher(FixedMatcher):
    def mask(self) -> bytes:
        raise ValueError("broken")


def test_a_matcher_that_raises_fails_its_row_only() -> None:
    broken, whole = RowGrammar(BrokenMatcher()), RowGrammar(FixedMatcher(1))
    assert rows([broken, whole], 20) == [list(range(20)), [1]]
    with pytest.raises(ValueError, match="broken"):
        broken.accept(3)


def test_a_complete_answer_without_a_stop_token_says_so() -> None:
    matcher = FixedMatcher()
    matcher.done = True
    row = RowGrammar(matcher)
    make_grammar_mask([row], 20)
    assert "has no stop token" in str(row.error)
