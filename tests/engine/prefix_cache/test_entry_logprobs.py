"""The logprobs of an entry: what a prompt's book gives to it, and takes from it."""

from __future__ import annotations

import math
import random

import pytest

from mlxrun.core.request import TokenLogprob
from mlxrun.engine.prefix_cache.entry_logprobs import MAX_FOLLOWING, EntryLogprobs, LogprobBook

PROMPT = tuple(range(100, 120))


def make_score(at: int) -> TokenLogprob:
    return TokenLogprob(-float(at), ((at, -at / 2),), at + 3)


def make_book(first: int = 1, stop: int = len(PROMPT), prompt: tuple[int, ...] = PROMPT) -> LogprobBook:
    book = LogprobBook(prompt, ())
    book.record(first, [make_score(at) for at in range(first, stop)])
    return book


def make_logprobs(book: LogprobBook, first: int, stop: int, matched: int | None = None) -> EntryLogprobs:
    scores = book.make_logprobs(first, stop, stop if matched is None else matched)
    assert scores is not None
    return scores


def list_known(book: LogprobBook) -> list[int]:
    return [at for at in range(1, len(PROMPT)) if book.read(at)]


@pytest.mark.parametrize(("first", "stop"), [(0, 8), (8, 16), (8, 19), (8, 20), (0, 20), (0, 1)])
def test_a_prompt_finds_again_what_it_stored(first: int, stop: int) -> None:
    """Of the entry's tokens after its first one, and of the token that follows the entry."""
    scores = make_logprobs(make_book(), first, stop)
    assert scores.complete
    book = LogprobBook(PROMPT, ())
    book.take(scores, stop)
    assert list_known(book) == list(range(first + 1, min(stop + 1, 20)))
    assert book.read(first + 1) == [make_score(at) for at in range(first + 1, min(stop + 1, 20))]


def test_nothing_is_known_after_the_last_token() -> None:
    assert make_book().make_logprobs(19, 20, 20) is None


def test_another_token_after_an_entry_is_unknown() -> None:
    scores = make_logprobs(make_book(), 0, 8)
    other = LogprobBook((*PROMPT[:8], 7, 7), ())
    other.take(scores, 8)
    assert len(other.read(1)) == 7 and scores.complete


@pytest.mark.parametrize("matched", [1, 4, 7])
def test_a_prompt_that_parts_from_an_entry_takes_what_they_share(matched: int) -> None:
    other = LogprobBook((*PROMPT[:matched], *range(9)), ())
    other.take(make_logprobs(make_book(), 0, 8), matched)
    assert other.read(1) == [make_score(at) for at in range(1, matched)]


def test_a_prompt_gives_to_a_longer_entry_what_they_share() -> None:
    scores = make_logprobs(make_book(stop=6, prompt=PROMPT[:6]), 0, 8, matched=6)
    assert not scores.complete and [not math.isnan(x) for x in scores.logprobs] == [True] * 5 + [False] * 3
    merged = scores.merge(make_logprobs(make_book(), 0, 8))
    assert merged.complete and merged.following == {PROMPT[8]: (-8.0, 11)}


def test_merging_keeps_what_is_known_and_collects_what_follows() -> None:
    early, late = make_logprobs(make_book(1, 5), 0, 8), make_logprobs(make_book(5), 0, 8)
    merged = late.merge(early)
    assert merged.complete and not early.complete and not late.complete
    book = LogprobBook(PROMPT, ())
    book.take(merged, 8)
    assert book.read(1) == [make_score(at) for at in range(1, 9)]
    assert merged.merge(early) is merged and merged.merge(merged) is merged
    for token in range(2 * MAX_FOLLOWING):
        more = EntryLogprobs(
            0, late.logprobs, late.ranks, late.best_ids, late.best_logprobs, {token: (-1.0, 2)}
        )
        merged = merged.merge(more)
    assert len(merged.following) == MAX_FOLLOWING


def test_bytes_come_back_as_they_were() -> None:
    rng = random.Random(2)
    for _ in range(20):
        first = rng.randrange(0, 15)
        scores = make_logprobs(
            make_book(first + 1, rng.randrange(first + 2, 21)), first, rng.randrange(first + 1, 20)
        )
        again = EntryLogprobs.decode(scores.encode())
        assert again.encode() == scores.encode()
        assert (again.first, again.following, again.complete) == (first, scores.following, scores.complete)


@pytest.mark.parametrize("damage", [b"", b"1234567", b"12345678", bytes(8), bytes(8) + b"123"])
def test_other_bytes_are_no_logprobs(damage: bytes) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        EntryLogprobs.decode(damage)


def test_tokens_inside_images_need_no_logprob() -> None:
    book = LogprobBook(PROMPT, ((3, 6),))
    book.record(1, [make_score(1), make_score(2)])
    book.record(6, [make_score(at) for at in range(6, 20)])
    found = book.read(1)
    assert len(found) == 19 and found[5] == make_score(6)


def test_scores_beyond_the_prompt_are_left_out() -> None:
    book = LogprobBook(PROMPT, ())
    book.record(18, [make_score(at) for at in range(18, 30)])
    assert book.read(18) == [make_score(18), make_score(19)]
