"""What followed the newest tokens where they came before."""

from __future__ import annotations

import random

import pytest

from mlxrun.engine.scheduler import row_drafter
from mlxrun.engine.scheduler.row_drafter import PromptLookup


def make_lookup(tokens: list[int], min_ngram: int = 2, max_ngram: int = 4) -> PromptLookup:
    lookup = PromptLookup(min_ngram, max_ngram)
    lookup.extend(tokens)
    return lookup


def find_slowly(tokens: list[int], min_ngram: int, max_ngram: int) -> int:
    """The newest place with the most tokens in common, by comparing all; 0: none."""
    best, found = min_ngram - 1, 0
    for place in range(len(tokens) - 1, 0, -1):
        size = 0
        while size < min(max_ngram, place) and tokens[place - 1 - size] == tokens[-1 - size]:
            size += 1
        if size > best:
            best, found = size, place
    return found


def test_what_followed_is_proposed() -> None:
    lookup = make_lookup([1, 2, 3, 4, 5, 9, 1, 2])
    assert lookup.run == 0 and lookup.propose(3) == (3, 4, 5)
    assert make_lookup([1, 2, 3, 4, 5]).propose(3) == ()


def test_the_place_with_the_longest_match_wins_and_then_the_newest() -> None:
    assert make_lookup([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2]).propose(1) == (5,)
    assert make_lookup([7, 1, 2, 5, 7, 1, 2, 6, 7, 1, 2]).propose(1) == (6,)


def test_what_repeats_itself_goes_on() -> None:
    assert make_lookup([1, 2, 3, 1, 2, 3, 1, 2]).propose(7) == (3, 1, 2, 3, 1, 2, 3)


def test_runs_are_followed_and_counted() -> None:
    lookup = make_lookup([1, 2, 3, 4, 5, 6, 9, 1, 2])
    assert [lookup.append(token) for token in (3, 4)] == [None, None]
    assert lookup.run == 2 and lookup.propose(2) == (5, 6)
    assert lookup.append(8) == 2 and lookup.run is None and lookup.propose(2) == ()
    assert [lookup.append(token) for token in (3, 4)] == [None, None]
    assert lookup.run == 0 and lookup.propose(1) == (8,)


@pytest.mark.parametrize("bits", [2, row_drafter.TABLE_BITS])
def test_it_finds_what_a_slow_search_finds(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Also where many n-grams share a chain."""
    monkeypatch.setattr(row_drafter, "TABLE_BITS", bits)
    monkeypatch.setattr(row_drafter, "MAX_CANDIDATES", 1000)
    rng = random.Random(1)
    for _ in range(30):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        lookup = make_lookup(tokens)
        for _ in range(20):
            place = find_slowly(tokens, 2, 4)
            if lookup.run in (0, None):
                assert lookup.propose(1) == ((tokens[place],) if place else ())
            token = rng.randrange(3)
            lookup.append(token)
            tokens.append(token)
