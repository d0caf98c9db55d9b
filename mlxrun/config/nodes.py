"""Config values that know where they came from: what the sources give, the loader merges and errors cite."""

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
    """One value: a scalar, a list of nodes or a dict of nodes, with the origins of it and of its key."""

    value: Any
    origin: Origin
    key_origin: Origin | None = None


@dataclass(frozen=True, slots=True, order=True)
class ConfigProblem:
    """One thing that is wrong; problems sort by source, then by place."""

    rank: tuple[int, str, int, int]
    text: str
    key: str = ""  # the `section.key` that it is about, where it is about one


def problem(origin: Origin, path: str, message: str) -> ConfigProblem:
    """`configs/prod.yaml:12:11: scheduler.policy: message`."""
    order = ("default", "file", "env", "set").index(origin.kind)
    said_already = origin.kind == "set" and origin.name == path
    where = f"{origin}: {path}: " if path and not said_already else f"{origin}: "
    rank = (order, origin.name, origin.line, origin.column)
    return ConfigProblem(rank, where + message, ".".join(path.split(".")[:2]))


def merge(base: ConfigNode, top: ConfigNode) -> ConfigNode:
    """`top` over `base`: mappings are merged key by key, everything else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
        return top
    merged = dict(base.value)
    for key, node in top.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return ConfigNode(merged, top.origin, top.key_origin)


def plain(node: ConfigNode) -> Any:
    """The value as plain dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def find(node: ConfigNode, path: Sequence[str | int]) -> ConfigNode | None:
    """The node at a path, or None."""
    at: ConfigNode | None = node
    for step in path:
        if at is None:
            return None
        if isinstance(at.value, dict):
            at = at.value.get(step)
        else:
            at = at.value[step] if isinstance(at.value, list) and isinstance(step, int) else None
    return at
