"""Reads the power and thermal state of a Mac, both of which slow a model down.

`pmset` and `notifyutil` are asked, which need no rights. On other systems there is nothing to read.
"""

from __future__ import annotations

import platform
import re
import subprocess
import threading
from contextlib import suppress
from typing import Any

from cachetools import TTLCache, cached

READ_EVERY = 10.0  # seconds
_SECONDS = 5.0  # that a program may take
_PRESSURE = "com.apple.system.thermalpressurelevel"
# The levels of this notification, in the words of macOS' `powermetrics`.
_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")


@cached(TTLCache(1, READ_EVERY), lock=threading.Lock())
def read_power_state() -> dict[str, Any] | None:
    """`low_power_mode`, `thermal_pressure` and `cpu_speed_limit` (percent), each None where the system does
    not say it; None as a whole elsewhere than on macOS. Blocks for some milliseconds."""
    if platform.system() != "Darwin":
        return None
    settings, heat = _run("pmset", "-g"), _run("pmset", "-g", "therm")
    return parse_power_state(settings, heat, _run("notifyutil", "-g", _PRESSURE))


def parse_power_state(settings: str, heat: str, pressure: str) -> dict[str, Any]:
    """The state from the outputs of `pmset -g`, `pmset -g therm`, and `notifyutil -g` of the thermal
    pressure."""
    # One of the two, by the model of Mac; 2 is the mode of high power.
    mode = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d+)", settings, re.MULTILINE)
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", heat)
    level = re.search(rf"{re.escape(_PRESSURE)}\s+(\d+)", pressure)
    number = int(level[1]) if level else len(_LEVELS)
    return {
        "low_power_mode": mode[1] == "1" if mode else None,
        "thermal_pressure": _LEVELS[number] if number < len(_LEVELS) else None,
        "cpu_speed_limit": int(limit[1]) if limit else None,
    }


def _run(*command: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        # Without close_fds, macOS starts the program by posix_spawn.
        options: dict[str, Any] = {"close_fds": False, "stdin": subprocess.DEVNULL, "timeout": _SECONDS}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, capture_output=True, text=True, **options
        )
        return done.stdout
    return ""
