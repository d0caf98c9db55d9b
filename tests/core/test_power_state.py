"""The outputs of macOS' programs, as people have published them, and what is read from them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.power_state import parse_power_state, read_power_state

LAPTOP = """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by powerd)
 hibernatemode        3
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 lowpowermode         {mode}
 womp                 0
"""
MODES = " standby              0\n powermode            {mode}\n sleep                0\n"
QUIET = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
HOT = """Note: No thermal warning level has been recorded
2026-08-31 20:01:34 +0200 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 46
"""
PRESSURE = "com.apple.system.thermalpressurelevel {level}\n"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LAPTOP.format(mode=0), False),
        (LAPTOP.format(mode=1), True),
        (MODES.format(mode=0), False),
        (MODES.format(mode=1), True),
        (MODES.format(mode=2), False),  # high power
        (" sleep                1\n", None),
        ("", None),
    ],
)
def test_low_power_mode(settings: str, expected: bool | None) -> None:
    assert parse_power_state(settings, "", "")["low_power_mode"] is expected


@pytest.mark.parametrize(("heat", "expected"), [(QUIET, None), (HOT, 46), ("", None)])
def test_the_speed_of_the_processor(heat: str, expected: int | None) -> None:
    assert parse_power_state("", heat, "")["cpu_speed_limit"] == expected


@pytest.mark.parametrize(
    ("pressure", "expected"),
    [
        (PRESSURE.format(level=0), "nominal"),
        (PRESSURE.format(level=1), "moderate"),
        (PRESSURE.format(level=2), "heavy"),
        (PRESSURE.format(level=99), None),
        ("com.apple.system.thermalpressurelevel: Failed with code 1000000\n", None),
        ("", None),
    ],
)
def test_thermal_pressure(pressure: str, expected: str | None) -> None:
    assert parse_power_state("", "", pressure)["thermal_pressure"] == expected


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing was read before, and nothing stays for other tests."""
    cache: Any = read_power_state.cache
    cache.clear()
    yield
    cache.clear()


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_programs_are_asked_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    install(tmp_path, "pmset", f"echo asked >> {tmp_path}/log; echo ' lowpowermode 1'")
    install(tmp_path, "notifyutil", "echo $2 2")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    expected = {"low_power_mode": True, "thermal_pressure": "heavy", "cpu_speed_limit": None}
    assert read_power_state() == read_power_state() == expected
    assert (tmp_path / "log").read_text() == "asked\n" * 2


def test_a_mac_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    state = read_power_state()
    assert state is not None and set(state.values()) == {None}


def test_other_systems(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert read_power_state() is None
