"""Replaces `${NAME}` in config strings by the environment variable; `$${NAME}` becomes `${NAME}`.

A secret must come from a variable. If the key is not a string, the result is read as YAML, so that
`max_running: ${ROWS}` works.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlxrun.config.nodes import ConfigNode, ConfigProblem
from mlxrun.config.setting_fields import SettingField, list_fields
from mlxrun.config.yaml_source import parse_scalar

_REFERENCE = re.compile(r"\$?\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def escape_references(text: str) -> str:
    """Return the text with its references escaped."""
    return _REFERENCE.sub(lambda match: "$" + match[0], text)


class Interpolator:
    """Replaces the references in a layer, and collects the problems."""

    def __init__(self, environ: Mapping[str, str], problems: list[ConfigProblem]) -> None:
        self._environ = environ
        self._problems = problems

    def interpolate(self, node: ConfigNode, path: str = "", info: SettingField | None = None) -> ConfigNode:
        """Return the node with all references replaced; `info` is the key it belongs to, if that is known."""
        info = info or list_fields().get(path)
        if isinstance(node.value, dict):
            below = {
                key: self.interpolate(child, f"{path}.{key}" if path else key, info)
                for key, child in node.value.items()
            }
            return ConfigNode(below, node.origin, node.key_origin)
        if isinstance(node.value, list):
            items = [self.interpolate(child, f"{path}.{at}", info) for at, child in enumerate(node.value)]
            return ConfigNode(items, node.origin, node.key_origin)
        if not isinstance(node.value, str):
            return node
        return self._replace(node, path, info)

    def _replace(self, node: ConfigNode, path: str, info: SettingField | None) -> ConfigNode:
        def replace(match: re.Match[str]) -> str:
            if match[0].startswith("$$"):
                return match[0][1:]
            if match[1] not in self._environ:
                message = f"the environment variable {match[1]} is not set"
                self._problems.append(ConfigProblem.at(node.origin, path, message))
            return self._environ.get(match[1], match[0])

        text = _REFERENCE.sub(replace, node.value)
        if text != node.value:
            as_yaml = info is not None and path == info.path and not info.is_text
            return ConfigNode(parse_scalar(text) if as_yaml else text, node.origin, node.key_origin)
        if info is not None and info.is_secret and not _REFERENCE.search(text):
            message = "this is a secret; write ${NAME} here and set the environment variable NAME"
            self._problems.append(ConfigProblem.at(node.origin, path, message))
        return node
