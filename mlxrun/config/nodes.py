"""Config values that know where they came from: the sources produce them, the loader merges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from; `str()` is what errors and `config show` print."""

    kind: Literal["default", "file", "env", "set"]
    name: str = ""  # the file, the variable, or the key of --set
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        match self.kind:
            case "default":
                return "default"
            case "set":
                return f"--set {self.name}"
            case "env":
                return self.name
            case "file":
                return f"{self.name}:{self.line}:{self.column}"


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class ConfigNode:
    """One value: a scalar, a list of nodes or a dict of nodes, with its origin and that of its key."""

    value: Any
    origin: Origin
    key_origin: Origin | None = None


@dataclass(frozen=True, slots=True, order=True)
class ConfigProblem:
    """One error in a config; problems sort by source, then by position."""

    rank: tuple[int, str, int, int]
    text: str
    key: str = ""  # the `section.key` that has the error, if there is one


def make_problem(origin: Origin, path: str, message: str) -> ConfigProblem:
    """Return a problem whose text is like `configs/prod.yaml:12:11: scheduler.policy: message`."""
    order = ("default", "file", "env", "set").index(origin.kind)
    names_path = origin.kind == "set" and origin.name == path
    where = f"{origin}: {path}: " if path and not names_path else f"{origin}: "
    rank = (order, origin.name, origin.line, origin.column)
    return ConfigProblem(rank, where + message, ".".join(path.split(".")[:2]))


def merge_nodes(base: ConfigNode, top: ConfigNode) -> ConfigNode:
    """Return `top` over `base`: mappings are merged key by key, everything else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
        return top
    merged = dict(base.value)
    for key, node in top.value.items():
        merged[key] = merge_nodes(merged[key], node) if key in merged else node
    return ConfigNode(merged, top.origin, top.key_origin)


def strip_origins(node: ConfigNode) -> Any:
    """Return the value as plain dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: strip_origins(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [strip_origins(child) for child in node.value]
    return node.value


def find_node(node: ConfigNode, path: Sequence[str | int]) -> ConfigNode | None:
    """Return the node at a path, or None."""
    found: ConfigNode | None = node
    for step in path:
        if found is None:
            return None
        if isinstance(found.value, dict):
            found = found.value.get(step)
        else:
            found = found.value[step] if isinstance(found.value, list) and isinstance(step, int) else None
    return found
