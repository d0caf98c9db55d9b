"""Time in which nobody reads the clock is that of a suspension; all else counts."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.core import running_clock
from mlxrun.core.running_clock import GAP, RunningClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the system, which tests set."""
    times = [100.0]
    monkeypatch.setattr(running_clock.time, "monotonic", lambda: times[0])  # type: ignore[attr-defined]
    return times


def test_it_counts_what_is_read_often(now: list[float]) -> None:
    clock = RunningClock()
    first = clock.read()
    for _ in range(100):
        now[0] += GAP
        clock.read()
    assert clock.read() - first == pytest.approx(100 * GAP)


def test_it_stands_still_in_a_suspension(now: list[float]) -> None:
    """Also of one in a wait, of which it is not known how much was left."""
    clock: Any = RunningClock()
    first = clock.read()
    now[0] += 3600.0
    assert clock.read() == first
    now[0] += 5.0
    assert clock.read(waited=5.0) == first + 5.0
    now[0] += 5.0 + GAP + 0.1
    assert clock.read(waited=5.0) == first + 5.0
    now[0] += 0.5
    assert clock.read() == first + 5.5
