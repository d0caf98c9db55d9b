"""Shortens the import of transformers by some 0.4 s, which each start of a command with a model pays.

At its import the library reads the source of all its models for the names that they export. It does so twice,
as its cache of folders has fewer places than there are folders. In each file it walks over all lines to the
last one that begins with `__all__`. What it finds stays the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_MODULE = "transformers.utils.import_utils"


class _ScanFinder(MetaPathFinder):
    """Finds the module that scans, for `_ScanLoader`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _MODULE else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _ScanLoader(name, spec.loader.path)
        return spec


class _ScanLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        shorten_scan(module)


def install_short_scan() -> None:
    """Change how transformers scans, when it is imported. It stays as it is if it was imported before."""
    if _MODULE not in sys.modules and not any(type(each) is _ScanFinder for each in sys.meta_path):
        sys.meta_path.insert(0, _ScanFinder())  # never removed: another thread may walk over the list


def shorten_scan(module: Any) -> None:
    """Keep all folders that this module has scanned, and search a file from its end. A version without these
    functions stays as it is."""
    scan_folder = getattr(getattr(module, "create_import_structure_from_path", None), "__wrapped__", None)
    fetch_names = getattr(module, "fetch__all__", None)
    if scan_folder is None or fetch_names is None:
        return

    def fetch_last_names(content: str) -> Any:
        return fetch_names(content[content.rfind("\n__all__") + 1 :])

    module.create_import_structure_from_path = cache(scan_folder)
    module.fetch__all__ = fetch_last_names
