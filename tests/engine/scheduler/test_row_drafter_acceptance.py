"""What is expected of a row's drafts after some held and some failed."""

from __future__ import annotations

import pytest

from mlxrun.engine.scheduler.row_drafter import START_RATE, Acceptance


def record(known: Acceptance, drafted: int, accepted: int) -> None:
    known.pending = drafted
    known.record(accepted + 1, accepted)


def test_a_new_row_is_expected_to_draft_well() -> None:
    known = Acceptance()
    assert known.expect(1) == START_RATE
    assert known.expect(0) == 0.0 and known.expect(1) == START_RATE
    assert known.expect(3) == pytest.approx(START_RATE + START_RATE**2 + START_RATE**3)


def test_the_rate_follows_the_newest_drafts() -> None:
    known = Acceptance()
    for _ in range(20):
        record(known, 4, 4)
    assert known.expect(1) > 0.95
    for _ in range(40):
        record(known, 4, 0)
    assert known.expect(1) < 0.2
    for _ in range(40):
        record(known, 4, 2)
    assert 1.7 < known.expect(2) < known.expect(4) < 2.1, "the first two are right, and the third is wrong"


def test_a_row_that_does_not_draft_is_tried_again() -> None:
    known = Acceptance()
    for _ in range(20):
        record(known, 1, 0)
    for _ in range(100):
        record(known, 0, 0)
    assert known.expect(1) < 0.5
    for _ in range(400):
        record(known, 0, 0)
    assert known.expect(1) > 0.6


def test_a_new_row_is_expected_to_be_like_the_others() -> None:
    for accepted in (0, 4):
        others = Acceptance()
        old = Acceptance(others)
        for _ in range(20):
            record(old, 4, accepted)
        assert abs(Acceptance(others).expect(1) - old.expect(1)) < 0.1
        new = Acceptance(others)
        for _ in range(10):
            record(new, 4, 2)
        assert abs(new.expect(4) - 2) < 0.5 < abs(old.expect(4) - 2), "own tokens count more"


def test_rows_that_all_failed_are_tried_again() -> None:
    others = Acceptance()
    rows = [Acceptance(others) for _ in range(8)]
    for row in rows * 3:
        record(row, 4, 0)
    assert all(row.expect(1) < 0.3 for row in rows)
    for row in rows * 400:
        record(row, 0, 0)
    assert all(row.expect(1) > 0.6 for row in rows)


def test_a_later_place_is_expected_to_be_like_the_one_before_it() -> None:
    known = Acceptance()
    for _ in range(20):
        record(known, 1, 1)
    assert known.expect(3) > 2.8


def test_one_wrong_draft_says_less_than_those_of_the_others() -> None:
    others = Acceptance()
    for _ in range(20):
        record(Acceptance(others), 4, 4)
    new = Acceptance(others)
    record(new, 4, 0)
    assert 0.7 < new.expect(1) < 0.9


def test_copied_tokens_are_tokens_without_a_draft() -> None:
    """A step may give a row several that were looked up: none of the source's."""
    copying, plain = Acceptance(), Acceptance()
    for known in (copying, plain):
        record(known, 4, 3)
    copying.record(5, 4)
    for _ in range(5):
        plain.record(1, 0)
    assert copying.expect(4) == pytest.approx(plain.expect(4))
