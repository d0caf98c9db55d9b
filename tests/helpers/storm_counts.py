"""What the storms of a run did: how many bodies, kills and connections there really were.

A storm calls `count` where it happens. The numbers travel with the report of their test, also out of the
processes of pytest-xdist, and a line at the end of the run has their sums. conftest.py takes the hooks.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

_OF_THIS_TEST: Counter[str] = Counter()
_OF_ALL: Counter[str] = Counter()
_NAME = "storm_counts"
_APART = 1_000_003  # between the seeds of two nights


def count(what: str, number: int = 1) -> None:
    """Add to what the test that runs has done."""
    _OF_THIS_TEST[what] += number


def make_rng(seed: int, night: int) -> random.Random:
    """The random numbers of a slice; each night has its own, and night 0 those of the seed."""
    return random.Random(seed + _APART * night)


def describe_counts(counts: Counter[str]) -> str:
    """One line, the largest number first."""
    return "robustness: " + ", ".join(f"{number:,} {what}" for what, number in counts.most_common())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """The last report of a test takes its numbers along, and not those of an earlier try."""
    if call.when == "teardown":
        item.user_properties[:] = [each for each in item.user_properties if each[0] != _NAME]
        if _OF_THIS_TEST:
            item.user_properties.append((_NAME, dict(_OF_THIS_TEST)))
        _OF_THIS_TEST.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that prints, whichever process has run the test."""
    if report.when == "teardown":
        for name, value in report.user_properties:
            if name == _NAME and isinstance(value, dict):
                _OF_ALL.update(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _OF_ALL:
        terminalreporter.write_line(describe_counts(_OF_ALL))
