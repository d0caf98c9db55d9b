"""The numbers at the end of a run are those of what has run, also in processes of pytest-xdist."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.storm_counts import describe_counts, make_rng

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.helpers.storm_counts import (
    pytest_runtest_logreport, pytest_runtest_makereport, pytest_terminal_summary,
)
"""
TESTS = """
import pytest
from tests.helpers.storm_counts import count
@pytest.mark.parametrize("seed", range(4))
def test_one(seed):
    count("mutated bodies", 500)
    assert seed != 3
def test_other():
    for _ in range(7):
        count("kills")
def test_that_counts_nothing():
    pass
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_counts_are_summed(
    pytester: pytest.Pytester, processes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a test that fails too: its bodies were sent."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-n", processes, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["robustness: 2,000 mutated bodies, 7 kills"])


def test_the_largest_number_is_first() -> None:
    assert describe_counts(Counter({"kills": 3, "bodies": 4000})) == "robustness: 4,000 bodies, 3 kills"


def test_a_night_has_its_own_numbers() -> None:
    assert make_rng(5, 0).random() == make_rng(5, 0).random() != make_rng(5, 1).random()
