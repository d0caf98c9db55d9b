"""The files that are generated from settings.py, and the shipped configs (tools/config_files.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mlxrun
from mlxrun.config.annotate import PRESETS
from mlxrun.config.loading import load_config
from mlxrun.config.schema import build_schema
from mlxrun.config.settings import Config
from tools.config_files import render_files, render_suite_reference

PACKAGE = Path(mlxrun.__file__).parent
CONFIGS = PACKAGE.parent / "configs"


@pytest.mark.parametrize("path", list(render_files()), ids=lambda path: path.name)
def test_generated_files_are_fresh(path: Path) -> None:
    """`make generate` writes these files."""
    assert path.read_text(encoding="utf-8") == render_files()[path]


def test_the_default_file_lists_every_key_with_its_default() -> None:
    loaded = load_config(CONFIGS / "default.yaml")
    assert loaded.config == Config()
    left_out = [key for key, origin in loaded.origins.items() if origin.kind == "default"]
    assert left_out == ["models"], "it may not be empty, and stands there as a comment"
    assert "\n# models: {}" in (CONFIGS / "default.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    """Each file in configs/ names the schema for editors."""
    loaded = load_config(path, environ={"MLXRUN_KEY_TEAM": "one", "MLXRUN_KEY_CI": "two"})
    first = path.read_text().splitlines()[0]
    schema = path.parent / first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(schema.read_text()) == build_schema()
    assert loaded.config.version == 1


def test_the_shipped_configs_are_the_presets_and_two_more() -> None:
    assert set(PRESETS) == {"laptop", "agents", "prod", "batch"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*PRESETS, "default", "vision"}


def test_the_page_of_suites_has_every_key_with_its_type_and_default() -> None:
    page = render_suite_reference()
    assert "| `count` | integer, 1 to 1000 | `5` | Number of examples. |" in page
    assert "| `endpoint` | chat \\| completion | `chat` |" in page
    assert "| `models` | mapping | required |" in page
    assert "| `limit` | integer or null, 1 or more | `null` |" in page
