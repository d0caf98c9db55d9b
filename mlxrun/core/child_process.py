"""Starts modules of this package as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def start_module(
    module: str, *arguments: Any, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """A process that runs a module with these arguments. `environment`: variables besides those of this
    process; `options`: of Popen."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: files of the folder that this process was started in are no modules of the child.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
        **options,
    )
