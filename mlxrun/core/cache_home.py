"""Finds the folder for what can be made again: entries of the prefix cache, verdicts of the load check. And
home folders in the paths that a user gives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mlxrun.core.errors import ConfigError

KEPT_DAYS = 7.0  # of a verdict after it was compared; 0: none is kept


def find_cache_home(environ: Mapping[str, str] = os.environ) -> Path:
    """mlxrun's folder in XDG_CACHE_HOME, else where the system has caches. RuntimeError if the home folder is
    unknown."""
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore a relative path
        return Path(base, "mlxrun")
    caches = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(caches, "mlxrun").expanduser()


def expand_home(path: str, key: str = "") -> Path:
    """Return a path with a home folder in place of `~`, or of `~NAME`. ConfigError if it is unknown, with the
    `key` of the config that has the path."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        place = f"{key}: {path}" if key else path
        raise ConfigError(f"{place}: the home folder is unknown; give a full path") from error


def find_home() -> Path:
    """Return the user's home folder. ConfigError if it is unknown, as in a container for any user."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError("the home folder is unknown; set HOME") from error
