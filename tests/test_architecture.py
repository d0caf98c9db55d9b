"""docs/architecture.md and the pages of the packages: the functions, modules and hooks that they name exist,
and every package has its page."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import mlxrun
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.model.hooks.install import needs_quick_gates
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.model_fixtures import Zoo

ROOT = Path(mlxrun.__file__).parents[1]
OVERVIEW = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/architecture").glob("*.md")}
ALL = "\n".join([OVERVIEW, *PAGES.values()])
NAMES = sorted(set(re.findall(r"`(mlxrun(?:\.\w+)+)`", ALL)))
PATHS = sorted(set(re.findall(r"`((?:\w+/)+\w*\.py)`", ALL)))
HOOKS = re.findall(
    r"^\| ([a-z ]+) \| [^|]*\| [^|]*\| [^|]*\|$", PAGES["model"].split("## Hooks")[1], re.MULTILINE
)
FAMILIES = re.findall(r"^\| [^|]+ \| `(\w+)` \| ([a-z, ]+) \|$", PAGES["model"], re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_page_can_be_imported(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_the_page_exists(path: str) -> None:
    assert any((folder / path).is_file() for folder in (ROOT, ROOT / "mlxrun"))


def test_both_paths_are_listed_step_by_step() -> None:
    paths = (
        (OVERVIEW, "From an HTTP body to the forward", 9),
        (PAGES["jobs"], "From a job's line to its output", 7),
    )
    for page, title, least in paths:
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        steps = re.findall(r"^(\d)\. .*`mlxrun\.", section, re.MULTILINE)
        assert len(steps) >= least - 1, title


def test_every_package_is_in_the_table() -> None:
    packages = {path.parent.name for path in (ROOT / "mlxrun").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(\w+)/` \|", OVERVIEW, re.MULTILINE))


def test_every_package_has_a_page_and_the_overview_links_to_all() -> None:
    assert {path.parent.name for path in (ROOT / "mlxrun").glob("*/__init__.py")} <= PAGES.keys()
    assert all(f"(architecture/{name}.md)" in OVERVIEW for name in PAGES)


def test_the_overview_stays_short() -> None:
    assert len(OVERVIEW.splitlines()) <= 150, "details go to the page of the package"


def test_every_hook_is_in_the_table_in_its_order() -> None:
    source = (ROOT / "mlxrun/model/hooks/install.py").read_text(encoding="utf-8")
    assert re.findall(r"""InstalledHook\(\s*"([a-z ]+)",""", source) == HOOKS[1:]  # without the head
    assert len(FAMILIES) >= 6


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "names"), FAMILIES)
def test_the_hooks_of_a_family_are_those_of_the_table(zoo: Zoo, family: str, names: str) -> None:
    config = Config(model=ModelSettings(path=str(zoo.text(family))))
    hooks = load_caller(config, load_model_info(config.model, weights=True)).hooks
    assert ", ".join(hook.name for hook in hooks if hook.name != "gates") == names.removesuffix(", gates")
    if needs_quick_gates():
        assert ("gates" in [hook.name for hook in hooks]) is names.endswith(", gates")


def test_the_check_sees_a_name_that_is_gone() -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        pkgutil.resolve_name("mlxrun.engine.scheduler.scheduler.Scheduler.turn")
    assert importlib.import_module("mlxrun.engine.scheduler.scheduler")
