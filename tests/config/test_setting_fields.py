"""Every option has a description and is read by code (config/settings.py, setting_fields.py)."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import mlxrun
from mlxrun.config.setting_fields import list_fields, list_sections

PACKAGE = Path(mlxrun.__file__).parent


def test_every_field_has_a_description() -> None:
    assert [path for path, info in list_fields().items() if not info.doc] == []
    assert [name for name, section in list_sections().items() if not section.doc] == []


def options_read(tree: ast.AST) -> set[str]:
    """The `section.key`s that a module reads: `config.log.level`, or `settings.level` beside LogSettings."""
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    here = {
        section.name
        for section in list_sections().values()
        if section.cls.__name__ in names or section.name in {read.attr for read in reads}
    }
    found = set()
    for read in reads:
        holder = ast.unparse(read.value).rpartition(".")[2].lstrip("_")
        found |= {f"{section}.{read.attr}" for section in (here if holder == "settings" else {holder})}
    return found


def sections_read_by_name(tree: ast.AST) -> set[str]:
    """Sections whose keys a module reads by name: `getattr(config.sampling, name)`, `asdict(config.apis)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    return {
        ast.unparse(call.args[0]).removeprefix("config.")
        for call in calls
        if ast.unparse(call.func) in ("getattr", "asdict")
    } & set(list_sections())


def test_every_declared_option_is_read() -> None:
    """An option that no code reads would have no effect. (The loader reads `version`.)"""
    found: set[str] = set()
    by_name: set[str] = set()
    strings: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in ("config", "embedded"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= options_read(tree)
            by_name |= sections_read_by_name(tree)
            strings |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    declared = {path: info for path, info in list_fields().items() if info.section}
    unread = {path for path, info in declared.items() if path not in found}
    assert {path for path in unread if declared[path].section not in by_name} == set()
    assert {path for path in unread if declared[path].key not in strings} == set()


def test_what_counts_as_reading_an_option() -> None:
    code = "def f(settings: MediaSettings, config): settings.timeout + config.log.level + other.max_bytes"
    assert options_read(ast.parse(code)) & set(list_fields()) == {"media.timeout", "log.level"}


def test_every_option_that_is_read_is_declared() -> None:
    """mypy checks this; the test only checks that settings are classes that mypy can check."""
    for section in list_sections().values():
        assert dataclasses.is_dataclass(section.cls)
        assert section.cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
