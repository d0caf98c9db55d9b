"""The tasks that come with mlxrun, each in a YAML file beside this one: a task of a suite, and `about` it.

A suite takes one by `use: NAME`. The keys that it gives itself replace those of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlxrun.config.nodes import ConfigNode, ConfigProblem
from mlxrun.config.yaml_source import parse_yaml
from mlxrun.core.field_errors import suggest

FOLDER = Path(__file__).parent
SOURCES = ("data", "hub", "rows")  # of rows, of which a task or its examples have one


@dataclass(frozen=True, slots=True)
class BoxTask:
    """A task of the box. `about`: its title, paper, licence, metric, lm-eval's name and published scores;
    `node`: the keys of a suite's task, with their positions in the file."""

    name: str
    about: Mapping[str, Any]
    node: ConfigNode

    @property
    def path(self) -> Path:
        """The task's file."""
        return FOLDER / f"{self.name}.yaml"


@cache
def list_task_names() -> tuple[str, ...]:
    """List the names of all tasks of the box."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def read_task(name: str) -> BoxTask:
    """Read a task by its name, which `list_task_names` has."""
    path = FOLDER / f"{name}.yaml"
    problems: list[ConfigProblem] = []
    tree = parse_yaml(path.read_text(encoding="utf-8"), str(path), problems)
    assert not problems, problems
    keys = dict(tree.value)
    about: Mapping[str, Any] = keys.pop("about").strip_origins()
    return BoxTask(name, about, ConfigNode(keys, tree.origin))


def describe_unknown_task(name: object) -> str:
    """Say that the box has no task of this name, and which ones it has."""
    names = list_task_names()
    return f"there is no task {name!r}{suggest(str(name), names)}; mlxrun has {', '.join(names)}"


def fill_used_tasks(tree: ConfigNode, problems: list[ConfigProblem]) -> ConfigNode:
    """Put the keys of the box below those of each task of a suite that has `use`. Unknown names are added to
    the problems."""
    tasks = tree.value.get("tasks") if isinstance(tree.value, dict) else None
    if tasks is None or not isinstance(tasks.value, dict):
        return tree
    filled = {name: _fill_task(name, task, problems) for name, task in tasks.value.items()}
    section = ConfigNode(filled, tasks.origin, tasks.key_origin)
    return ConfigNode({**tree.value, "tasks": section}, tree.origin, tree.key_origin)


def _fill_task(name: str, task: ConfigNode, problems: list[ConfigProblem]) -> ConfigNode:
    used = task.find(("use",))
    if used is None or not isinstance(used.value, str):
        return task
    if used.value not in list_task_names():
        path = f"tasks.{name}.use"
        problems.append(ConfigProblem.at(used.origin, path, describe_unknown_task(used.value)))
        return task
    return _leave_sources(read_task(used.value).node, task).merge(task)


def _leave_sources(below: ConfigNode, top: ConfigNode) -> ConfigNode:
    """A mapping without the source of rows that one above it replaces, at each level."""
    if not (isinstance(below.value, dict) and isinstance(top.value, dict)):
        return below
    kept = below.value
    if top.value.keys() & set(SOURCES):
        kept = {name: each for name, each in kept.items() if name not in SOURCES or name in top.value}
    kept = {
        name: _leave_sources(each, top.value[name]) if name in top.value else each
        for name, each in kept.items()
    }
    return ConfigNode(kept, below.origin, below.key_origin)


def build_suite(
    model: str,
    model_path: str | None,
    names: Sequence[str],
    data: Mapping[str, str],
    examples: Mapping[str, str],
) -> dict[str, Any]:
    """Build a suite of tasks of the box on one model. `model`: its name in the suite; `model_path`: as in the
    config, None for that of the config; `data`, `examples`: files with the rows or the examples of a task."""
    tasks: dict[str, Any] = {}
    for name in names:
        tasks[name] = {"use": name}
        if name in data:
            tasks[name]["data"] = data[name]
        if name in examples:
            tasks[name]["few_shot"] = {"data": examples[name]}
    settings = {} if model_path is None else {"set": {"model.path": model_path}}
    return {"models": {model: settings}, "tasks": tasks}
