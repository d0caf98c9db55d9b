"""How many cores other processes leave free."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxrun.model.machine import free_cores
from mlxrun.model.machine.free_cores import FreeCores, read_busy_seconds

TICK = os.sysconf("SC_CLK_TCK")
STAT = """cpu  40 8 12 2000 20 4 8 4 0 0
cpu0 10 1 2 900 9 3 4 5 6 7
cpu1 {user} 0 0 0 0 0 0 0 0 0
cpu10 70 0 0 0 0 0 0 0 0 0
intr 1 2 3
"""


def test_busy_seconds_are_those_of_the_cores_that_are_given() -> None:
    """Without idle time and time spent waiting for disks; a guest's time is in that of its user."""
    stat = STAT.format(user=30)
    assert read_busy_seconds(stat, [0]) == pytest.approx((10 + 1 + 2 + 3 + 4 + 5) / TICK)
    assert read_busy_seconds(stat, [1, 10]) == pytest.approx(100 / TICK)
    assert read_busy_seconds(stat, []) == 0


class Clocks:
    """Time, this process's seconds, and those of all processes on two cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.now = self.own = self.busy = 0.0
        self._stat = tmp_path / "stat"
        monkeypatch.setattr(free_cores, "STAT", self._stat)
        monkeypatch.setattr(free_cores.os, "sched_getaffinity", lambda pid: {0, 1})
        monkeypatch.setattr(free_cores.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(free_cores.time, "process_time", lambda: self.own)
        self.advance(0, 0, 0)

    def advance(self, seconds: float, own: float, others: float) -> None:
        self.now += seconds
        self.own += own
        self.busy += own + others
        self._stat.write_text(STAT.format(user=round(self.busy * TICK)))


@pytest.mark.parametrize(
    ("own", "others", "free"),
    [(0, 0, 2), (2, 0, 2), (1, 0.4, 2), (1.4, 0.6, 1), (1, 1, 1), (0.1, 1.9, 1), (0, 2, 1)],
)
def test_what_others_use_is_not_free(
    own: float, others: float, free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clocks = Clocks(monkeypatch, tmp_path)
    cores = FreeCores()
    clocks.advance(1, own, others)
    assert cores.count() == free
    clocks.advance(0.1, 0, 0)
    assert cores.count() is None  # too soon
    clocks.advance(0.9, 0, 0)
    assert cores.count() == 2  # since the last count


@pytest.mark.parametrize("text", [None, "cpu0 1 2", "cpu0 a b c d e f g h i"])
def test_a_system_that_no_longer_says_it_ends_no_step(
    text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with too many open files: the file cannot be read, or has less than it should."""
    clocks = Clocks(monkeypatch, tmp_path)
    cores, stat = FreeCores(), tmp_path / "stat"
    clocks.advance(1, 0, 0)
    if text is None:
        stat.unlink()
    else:
        stat.write_text(text)
    assert cores.count() is None
    clocks.advance(1, 0, 2)
    assert cores.count() == 1


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux only")
def test_a_program_beside_this_process_is_counted() -> None:
    """This machine's own numbers: what another process computes, and not what this one does."""
    cores = FreeCores()
    program = "import time\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass"
    before = cores._read_others()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with_program = cores._read_others() - before
    assert with_program > 0.2
    end = time.process_time() + 0.3
    before, own = cores._read_others(), time.process_time()
    while time.process_time() < end:
        pass
    assert time.process_time() - own >= 0.3 - 1e-3
    assert cores._read_others() - before > -0.1  # its own seconds are taken away once
