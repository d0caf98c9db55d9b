"""Where a report comes from: the command, the date, the machine and the versions, for a report's JSON.

Nothing in it names a host, a user or a serial number. This module imports no mlx, so it also works beside
servers that run elsewhere.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxrun import __version__
from mlxrun.model.machine.versions import list_library_versions


def add_provenance(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with `date` (UTC), `command`, `machine` and `versions`; what the report says itself wins.

    The versions of the report are completed, not replaced: a benchmark may know more than this module.
    """
    versions = {"mlxrun": __version__} | list_library_versions() | dict(report.get("versions", {}))
    origin = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["mlxrun", *sys.argv[1:]]),
        "machine": read_machine_facts(),
    }
    return origin | dict(report) | {"versions": versions}


def read_machine_facts() -> dict[str, Any]:
    """The processor, its cores (those that this process may use), the memory in bytes and the system."""
    return {
        "cpu": _find_cpu_name(),
        "cores": _count_cores(),
        "memory_bytes": _count_memory(),
        "os": _find_os_name(),
        "arch": platform.machine(),
    }


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _find_cpu_name() -> str:
    if sys.platform == "darwin":
        return _read_sysctl("machdep.cpu.brand_string") or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _count_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _find_os_name() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _read_sysctl(key: str) -> str:
    import subprocess

    try:
        found = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
