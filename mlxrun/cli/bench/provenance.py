"""Where a report comes from: the command, the date, the machine and the versions, for a report's JSON.

Nothing in it names a host, a user or a serial number. This module imports no mlx, so it also works beside
servers that run elsewhere.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
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
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": _find_cpu_name(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.platform(),
        "arch": platform.machine(),
    }


def _find_cpu_name() -> str:
    """The name that the system gives the processor, else its architecture."""
    if sys.platform == "darwin":
        sysctl = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(sysctl, capture_output=True, text=True).stdout.strip() or platform.processor()
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = (line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())
