"""`${NAME}` in config strings: replaced by the environment variable, `$${NAME}` stays as `${NAME}`.

A secret may come from nowhere else. Where the key takes no text, what comes out is read as YAML, so
that `max_running: ${ROWS}` works.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlxrun.config.nodes import ConfigNode, ConfigProblem, problem
from mlxrun.config.setting_fields import FieldInfo
from mlxrun.config.yaml_source import scalar_of

_REFERENCE = re.compile(r"\$?\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def escape(text: str) -> str:
    """The text with its references kept as they are."""
    return _REFERENCE.sub(lambda match: "$" + match[0], text)


class Interpolator:
    """Replaces references below a node, and collects what is missing."""

    def __init__(
        self, infos: Mapping[str, FieldInfo], environ: Mapping[str, str], problems: list[ConfigProblem]
    ) -> None:
        self._infos = infos
        self._environ = environ
        self._problems = problems

    def apply(self, node: ConfigNode, path: str = "", info: FieldInfo | None = None) -> ConfigNode:
        """The node with every string replaced; `info` is the key that it belongs to, once that is known."""
        info = info or self._infos.get(path)
        if isinstance(node.value, dict):
            below = {
                key: self.apply(child, f"{path}.{key}" if path else key, info)
                for key, child in node.value.items()
            }
            return ConfigNode(below, node.origin, node.key_origin)
        if isinstance(node.value, list):
            items = [self.apply(child, f"{path}.{at}", info) for at, child in enumerate(node.value)]
            return ConfigNode(items, node.origin, node.key_origin)
        if not isinstance(node.value, str):
            return node
        return self._string(node, path, info)

    def _string(self, node: ConfigNode, path: str, info: FieldInfo | None) -> ConfigNode:
        text = self._replace(node, path)
        if text == node.value:
            asked = any(not match[0].startswith("$$") for match in _REFERENCE.finditer(node.value))
            if info is not None and info.is_secret and not asked:
                self._problems.append(
                    problem(node.origin, path, "a secret; write ${NAME} and set that variable")
                )
            return node
        as_yaml = info is not None and path == info.path and not info.is_text
        return ConfigNode(scalar_of(text) if as_yaml else text, node.origin, node.key_origin)

    def _replace(self, node: ConfigNode, path: str) -> str:
        def one(match: re.Match[str]) -> str:
            if match[0].startswith("$$"):
                return match[0][1:]
            if match[1] not in self._environ:
                self._problems.append(problem(node.origin, path, f"the variable {match[1]} is not set"))
            return self._environ.get(match[1], match[0])

        return _REFERENCE.sub(one, node.value)
