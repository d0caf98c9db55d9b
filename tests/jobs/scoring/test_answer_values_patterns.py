"""Patterns of users, within limits of size and time."""

from __future__ import annotations

import pytest

from mlxrun.jobs.scoring import answer_values
from mlxrun.jobs.scoring.answer_values import SearchTimer, check_pattern


@pytest.mark.parametrize("pattern", ["(", "((a{1000}){1000}){1000}", "a{9999999999999999999999}"])
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a regular expression: "):
        check_pattern(pattern)


def test_a_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_values, "SEARCH_SECONDS", 0.1)
    timer = SearchTimer()
    assert timer.search("b+", "abba").group() == "bb"
    with pytest.raises(TimeoutError):
        timer.search("^(a|aa)+$", "a" * 200 + "!")
    with pytest.raises(TimeoutError):  # the second is that of all patterns together
        timer.search("^(a|aa)+$", "a" * 200 + "!")
