"""Compares installed libraries with the ranges that mlxrun was tested with. Imports no mlx.

The ranges are the package's own dependencies: those of the installed distribution, or of the pyproject.toml
beside the package.
"""

from __future__ import annotations

import functools
import platform
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import mlxrun

SHOWN = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "tokenizers", "numpy")
BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `mlxrun doctor`. Level `note`: works, but could be better; `off`: must be fixed."""

    area: str
    name: str
    level: Literal["ok", "note", "off"]
    value: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def list_library_versions() -> dict[str, str]:
    """The versions of Python and of the libraries that determine results and speed."""
    found = {name: find_version(name) for name in (*SHOWN, *BACKENDS)}
    return {"python": platform.python_version()} | {n: v for n, v in found.items() if v is not None}


@functools.cache  # all metadata of a package is parsed for it, 5 ms each, and each engine needs ten
def find_version(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_requirements() -> list[str]:
    """The package's dependencies; empty if they are not known."""
    try:
        return metadata.requires("mlxrun") or []
    except metadata.PackageNotFoundError:
        pyproject = Path(mlxrun.__file__).parent.parent / "pyproject.toml"
    if not pyproject.is_file():
        return []
    project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    return [str(line) for line in project.get("dependencies", [])]


def check_versions(lines: Iterable[str]) -> list[Finding]:
    """A finding for each requirement that applies to this platform, and for what is installed of the extra
    for images."""
    from packaging.requirements import Requirement

    parsed = [Requirement(line) for line in lines]
    wanted = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    extra = [r for r in parsed if r.marker is not None and r.marker.evaluate({"extra": "vision"})]
    wanted += [r for r in extra if r not in wanted and find_version(r.name) is not None]
    return [_check_version(r.name, str(r.specifier), r.specifier.contains) for r in wanted]


def _check_version(name: str, wanted: str, fits: Any) -> Finding:
    version = find_version(name)
    facts = {"installed": version, "tested": wanted}
    if version is None:
        return Finding("versions", name, "off", "not installed", f"pip install '{name}{wanted}'", facts)
    if not fits(version, prereleases=True):
        advice = f"tested with {wanted}: pip install '{name}{wanted}'"
        return Finding("versions", name, "off", version, advice, facts)
    return Finding("versions", name, "ok", f"{version} ({wanted or 'any'})", facts=facts)
