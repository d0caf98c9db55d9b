"""The sources of scorers and tools: compiled as they are now, and their digest with what they import.

Python takes its cached code of a module for that of a source with the same size and second. So a source that
was just edited, or that an archive gave the time of all its files, would be called as it was before.

Modules of users are those that belong neither to Python, nor to an installed package, nor to mlxrun.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import mlxrun

_FOLDERS = [
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(site.getusersitepackages(), str(Path(mlxrun.__file__).parent)),
]
_INSTALLED = {Path(folder).resolve() for folder in _FOLDERS}


class SourceLoader(SourceFileLoader):
    """Compiles the source each time."""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.get_data(self.path), self.path, "exec")


class _SourceFinder(importlib.abc.MetaPathFinder):
    """Finds modules of users for that loader, and leaves others to the other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path, target)
        source = _find_source(found)
        if found is None or source is None:
            return None
        found.loader = SourceLoader(fullname, str(source))
        return found


@contextmanager
def compile_sources() -> Iterator[None]:
    """Within the block, modules of users are compiled from their sources."""
    finder = _SourceFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def digest_sources(module: ModuleType) -> str:
    """The sha256 (hex) of the module's file, with those of the modules of users that it imports, if there are
    any. Empty for a module without a file."""
    path = getattr(module, "__file__", None)
    if not path:
        return ""
    own = _digest_file(Path(path))
    found = list_imported(Path(path), module.__package__ or "")
    if not found:
        return own
    parts = [own, *(f"{name} {_digest_file(source)}" for name, source in sorted(found.items()))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _digest_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def list_imported(path: Path, package: str) -> dict[str, Path]:
    """The modules of users that a source imports, also those that these import, with their files. `package`:
    that of the source."""
    found: dict[str, Path] = {}
    specs: dict[str, ModuleSpec | None] = {}
    pending = [(path, package)]
    while pending:
        for name in _list_names(*pending.pop()):
            spec = _find_spec(name, specs)
            source = _find_source(spec)
            if spec is not None and source is not None and name not in found and source != path:
                found[name] = source
                pending.append((source, spec.parent or ""))
    return found


def _list_names(path: Path, package: str) -> Iterator[str]:
    """The names of modules that a source imports, and of the packages above them. Some may be names of
    functions in a module."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # it cannot be imported either
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            names = [f"{base}.{each.name}" if base else each.name for each in node.names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _find_spec(name: str, known: dict[str, ModuleSpec | None]) -> ModuleSpec | None:
    """Where a module is, without importing it or the packages above it. `known`: filled."""
    if name not in known:
        above, _, _ = name.rpartition(".")
        try:
            known[name] = None
            package = _find_spec(above, known) if above else None
            places = None if package is None else package.submodule_search_locations
            if not above or places is not None:
                known[name] = PathFinder.find_spec(name, None if places is None else list(places))
        except (ImportError, KeyError, ValueError):  # of odd finders and namespaces
            pass
    return known[name]


def _find_source(spec: ModuleSpec | None) -> Path | None:
    """The file of a module of users; None for others."""
    if spec is None or type(spec.loader) is not SourceFileLoader:
        return None
    path = Path(spec.loader.path)
    return None if any(path.resolve().is_relative_to(folder) for folder in _INSTALLED) else path
