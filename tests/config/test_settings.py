"""Every setting has a description and is read by code."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import mlxrun
from mlxrun.api import sampling_params
from mlxrun.api.text.media.media_kinds import AUDIO, MEDIA
from mlxrun.config.setting_fields import describe_class, list_fields, list_sections
from mlxrun.server.app import list_surfaces

PACKAGE = Path(mlxrun.__file__).parent


def test_every_field_has_a_description() -> None:
    assert [path for path, info in list_fields().items() if not info.doc] == []
    assert [name for name, cls in list_sections().items() if not describe_class(cls)] == []


def options_read(tree: ast.AST) -> set[str]:
    """The `section.key`s that a module reads: `config.log.level`, or `settings.level` beside LogSettings."""
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    here = {
        name
        for name, cls in list_sections().items()
        if cls.__name__ in names or name in {read.attr for read in reads}
    }
    found = set()
    for read in reads:
        holder = ast.unparse(read.value).rpartition(".")[2].lstrip("_")
        found |= {f"{section}.{read.attr}" for section in (here if holder == "settings" else {holder})}
    return found


def options_read_by_name() -> set[str]:
    """Options that code reads in a loop: switches of surfaces, counts of media, and defaults of sampling."""
    switches = {f"apis.{surface.name}" for surface in list_surfaces()}
    switches |= {f"media.{name}" for kind in (*MEDIA, AUDIO) for name in (kind.max_bytes, kind.max_count)}
    return switches | {f"sampling.{name}" for name in sampling_params._DEFAULTS}


def test_every_declared_option_is_read() -> None:
    """An option that no code reads would have no effect. (The loader reads `version`.)"""
    found: set[str] = options_read_by_name()
    for path in PACKAGE.rglob("*.py"):
        declares = path.relative_to(PACKAGE).parts[0] in ("config", "embedded")
        if not declares or path.name == "media_settings.py":  # which also uses the settings of videos
            found |= options_read(ast.parse(path.read_text(encoding="utf-8")))
    declared = {path for path, info in list_fields().items() if info.section}
    assert declared - found == set()


def test_what_counts_as_reading_an_option() -> None:
    code = "def f(settings: MediaSettings, config): settings.timeout + config.log.level + other.max_bytes"
    assert options_read(ast.parse(code)) & set(list_fields()) == {"media.timeout", "log.level"}


def test_every_option_that_is_read_is_declared() -> None:
    """mypy checks this; the test only checks that settings are classes that mypy can check."""
    for cls in list_sections().values():
        assert dataclasses.is_dataclass(cls)
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
