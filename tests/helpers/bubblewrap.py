"""Whether programs run in bubblewrap here."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest


@functools.cache
def find_problem() -> str | None:
    """Why no program runs in bubblewrap here; None if one does. It may be installed where a container without
    privileges gives it no namespaces. What mlxrun asks of it is not tried: if that is wrong, tests fail."""
    if shutil.which("bwrap") is None:
        return "`make system-packages` installs bubblewrap"
    parts = ("--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")
    done = subprocess.run(["bwrap", *parts, "true"], capture_output=True, text=True, timeout=60)
    return f"bubblewrap runs no program here: {done.stderr.strip()}" if done.returncode else None


needs_bubblewrap = pytest.mark.skipif(find_problem() is not None, reason=find_problem() or "")
