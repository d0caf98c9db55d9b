"""docs/architecture.md names functions and modules: all of them exist, and it lists every package."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import mlxrun

ROOT = Path(mlxrun.__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`(mlxrun(?:\.\w+)+)`", PAGE)))
PATHS = sorted(set(re.findall(r"`((?:\w+/)+\w*\.py)`", PAGE)))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_page_can_be_imported(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_the_page_exists(path: str) -> None:
    assert any((folder / path).is_file() for folder in (ROOT, ROOT / "mlxrun"))


def test_both_paths_are_listed_step_by_step() -> None:
    for title, least in (("From an HTTP body to the forward", 9), ("From a job's line to its output", 7)):
        section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
        steps = re.findall(r"^(\d)\. .*`mlxrun\.", section, re.MULTILINE)
        assert len(steps) >= least - 1, title


def test_every_package_is_in_the_table() -> None:
    packages = {path.parent.name for path in (ROOT / "mlxrun").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE))


def test_the_check_sees_a_name_that_is_gone() -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        pkgutil.resolve_name("mlxrun.engine.scheduler.scheduler.Scheduler.turn")
    assert importlib.import_module("mlxrun.engine.scheduler.scheduler")
