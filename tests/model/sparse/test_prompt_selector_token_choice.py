"""Which tokens are kept."""

from __future__ import annotations

import numpy as np
import pytest

from mlxrun.model.sparse.prompt_selector import BLOCK, FIRST, LAST, choose_tokens


def make_logprobs(size: int, peaks: dict[int, float]) -> np.ndarray:
    scores = np.zeros(size, np.float32)
    for at, height in peaks.items():
        scores[at] = height
    return scores


def test_the_beginning_the_end_and_the_highest_blocks() -> None:
    size = 4000
    kept = choose_tokens(make_logprobs(size, {1000: 1.0, 2000: 0.5, 3000: 0.1}), 0.05)
    assert list(kept) == sorted(set(kept)) and len(kept) <= 0.05 * size + 2 * BLOCK
    assert set(range(FIRST)) | set(range(size - LAST, size)) <= set(kept)
    assert {1000, 2000} <= set(kept) and 3000 not in kept


def test_a_share_is_kept() -> None:
    scores = np.random.default_rng(0).random(10_000, np.float32)
    for keep in (0.1, 0.2, 0.5):
        assert len(choose_tokens(scores, keep)) == pytest.approx(keep * 10_000, abs=2 * BLOCK)
    assert choose_tokens(scores, 1.0) == tuple(range(10_000))


def test_what_is_important_has_its_neighbours() -> None:
    """A peak next to the border of its block lifts the other block too."""
    at = 50 * BLOCK
    kept = choose_tokens(make_logprobs(4000, {at: 1.0}), 0.06)
    assert {at - 1, at} <= set(kept)


@pytest.mark.parametrize("size", [2, BLOCK, BLOCK + 1, FIRST + LAST, 300])
def test_short_prompts(size: int) -> None:
    kept = choose_tokens(np.ones(size, np.float32), 0.01)
    assert kept[-1] == size - 1 and kept[0] == 0


def test_known_tokens_are_kept_beside_a_share_of_the_others() -> None:
    scores = np.random.default_rng(0).random(10_000, np.float32)
    for known in (0, 1000, 6000):
        kept = choose_tokens(scores, 0.2, known)
        assert kept[:known] == tuple(range(known))
        assert len(kept) - known == pytest.approx(0.2 * (10_000 - known), abs=3 * BLOCK)


def test_scores_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="NaN"):
        choose_tokens(make_logprobs(300, {7: float("nan")}), 0.2)
