"""Config values that know where they came from. The sources produce them; the loader merges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxrun.core.visible_text import make_message


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from. Errors and `config show` print its `str()`."""

    kind: Literal["default", "file", "env", "set", "option"]
    name: str = ""  # the file, the variable, the key of --set, or another option or argument
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.name}:{self.line}:{self.column}"
        return f"--set {self.name}" if self.kind == "set" else self.name or self.kind


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class ConfigNode:
    """One value: a scalar, a list of nodes or a dict of nodes, with its origin and that of its key."""

    value: Any
    origin: Origin
    key_origin: Origin | None = None

    def merge(self, top: ConfigNode) -> ConfigNode:
        """Return `top` merged over this node. Mappings are merged key by key; everything else is replaced."""
        if not (isinstance(self.value, dict) and isinstance(top.value, dict)):
            return top
        merged = dict(self.value)
        for key, node in top.value.items():
            merged[key] = merged[key].merge(node) if key in merged else node
        return ConfigNode(merged, top.origin, top.key_origin)

    def strip_origins(self) -> Any:
        """Return the value as plain dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.strip_origins() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.strip_origins() for child in self.value]
        return self.value

    def find(self, path: Sequence[str | int]) -> ConfigNode | None:
        """Return the node at a path, or None."""
        node: ConfigNode | None = self
        for step in path:
            value = node.value if node is not None else None
            if isinstance(value, list) and isinstance(step, int):
                node = value[step]
            else:
                node = value.get(step) if isinstance(value, dict) else None
        return node

    def find_nearest(self, path: Sequence[str | int]) -> ConfigNode:
        """Return the node at a path, or the nearest node above it."""
        return next(node for end in range(len(path), -1, -1) if (node := self.find(path[:end])) is not None)


@dataclass(frozen=True, slots=True, order=True)
class ConfigProblem:
    """One error in a config; problems sort by source, then by position."""

    rank: tuple[int, str, int, int]
    text: str
    key: str = ""  # the `section.key` that has the error, if there is one

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", make_message(self.text))

    @classmethod
    def at(cls, origin: Origin, path: str, message: str) -> ConfigProblem:
        """A problem with a text such as `configs/prod.yaml:12:11: scheduler.policy: message`."""
        order = ("default", "file", "env", "set", "option").index(origin.kind)
        names_path = origin.kind == "set" and origin.name == path
        where = f"{origin}: {path}: " if path and not names_path else f"{origin}: "
        rank = (order, origin.name, origin.line, origin.column)
        return cls(rank, where + message, ".".join(path.split(".")[:2]))
