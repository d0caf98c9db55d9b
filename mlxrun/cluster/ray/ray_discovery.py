"""Finds the Ray of this machine for `--ray auto`: that of `ray start`, and never one that an mlxrun command
has started for itself, which ends with that command.

Ray's own search would take any. Both know a Ray by the command line of its raylet, the process of a node.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from mlxrun.core.errors import ConfigError

PRIVATE = "mlxrun_private"  # a resource that marks the Ray of one command
_RAYLET = re.compile(r"^\S*/raylet(\.exe)? -")
_ADDRESS = re.compile(r"--gcs-address=(\S+)")


def find_own_address(ray: Any) -> str:
    """The HOST:PORT of the Ray to which `auto` leads. ConfigError if there is none, or no way to choose."""
    given = os.environ.get("RAY_ADDRESS", "")
    if given not in ("", "auto", "local"):
        return given
    public, private = sort_raylets(_list_commands())
    noted = _read_noted_address(ray)
    if noted in public or (noted and not public):
        return noted
    if len(public) > 1:
        raise ConfigError(
            f"--ray auto: several Rays run on this machine ({', '.join(sorted(public))}); give the address "
            "of one"
        )
    if not public:
        passed = " (those that other mlxrun commands started for themselves are not used)" if private else ""
        raise ConfigError(
            f"--ray auto: no Ray runs on this machine{passed}: `ray start --head` starts one; --ray without "
            "an address starts one for this command"
        )
    return public.pop()


def sort_raylets(commands: Iterable[str]) -> tuple[set[str], set[str]]:
    """The addresses of the clusters to which the raylets among the command lines belong: those of anybody,
    and those that other mlxrun commands started for themselves."""
    public: set[str] = set()
    private: set[str] = set()
    for command in commands:
        if _RAYLET.match(command) and (found := _ADDRESS.search(command)):
            (private if PRIVATE in command else public).add(found[1])
    return public, private


def _list_commands() -> list[str]:
    """The command lines of all processes that can be seen."""
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(("ps", "-axww", "-o", "args="), capture_output=True, text=True, check=True)
        return listed.stdout.splitlines()
    return []


def _read_noted_address(ray: Any) -> str:
    """What `ray start` has noted as the address of its last cluster; it may have ended since."""
    with suppress(Exception):
        found: str | None = importlib.import_module(f"{ray.__name__}._private.utils").read_ray_address()
        return found or ""
    return ""
