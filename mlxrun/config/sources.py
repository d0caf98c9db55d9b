"""The layers of a config: files (with what they extend), MLXRUN_SECTION__KEY variables, --set flags.

Each layer is a tree of nodes with references replaced and paths made absolute; nothing is validated yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlxrun.config.interpolate import Interpolator
from mlxrun.config.nodes import ConfigNode, ConfigProblem, Origin, problem
from mlxrun.config.schema import EXTENDS
from mlxrun.config.setting_fields import fields_of, sections_of
from mlxrun.config.yaml_source import YamlError, parse_value, parse_yaml

ENV_PREFIX = "MLXRUN_"
PATH_KEYS = ("model.adapter", "model.chat_template", "server.data_path")  # always files or folders
MODEL_PATH = "model.path"  # a folder, where it is one
EMBEDDED = "embedded"


class Sources:
    """Reads layers for one config class and collects the problems."""

    def __init__(self, root: type, environ: Mapping[str, str], problems: list[ConfigProblem]) -> None:
        self._infos = fields_of(root)
        self._sections = sections_of(root)
        self._environ = environ
        self._problems = problems
        self._interpolator = Interpolator(self._infos, environ, problems)

    def files(self, path: Path, asked_by: str = "", above: tuple[Path, ...] = ()) -> list[ConfigNode]:
        """The file's layers: first what it extends, in order, then itself."""
        tree = self._read(path, asked_by)
        if tree is None:
            return []
        own = self._finish(tree, path.parent, interpolate=True)
        chain = (*above, path.resolve())
        layers = []
        for node in _extended(own):
            target = path.parent / Path(str(node.value)).expanduser()
            asked = f"{node.origin}: {EXTENDS}: "
            if target.resolve() in chain:
                names = " -> ".join(_shown(step) for step in (*chain, target))
                self._problems.append(problem(node.origin, EXTENDS, f"a cycle: {names}"))
            else:
                layers += self.files(target, asked, chain)
        return [*layers, own]

    def environment(self) -> ConfigNode:
        """Every MLXRUN_SECTION__KEY variable. Others with the prefix belong to somebody else."""
        spelled = {ENV_PREFIX + path.replace(".", "_").upper(): path for path in self._infos if "." in path}
        layer: dict[str, ConfigNode] = {}
        for name in sorted(name for name in self._environ if name.startswith(ENV_PREFIX)):
            origin = Origin("env", name)
            if "__" in name:
                keys = name.removeprefix(ENV_PREFIX).lower().split("__")
                self._put(layer, keys, self._environ[name], origin)
            elif name in spelled:
                right = ENV_PREFIX + spelled[name].replace(".", "__").upper()
                self._problems.append(problem(origin, "", f"does nothing (did you mean {right}?)"))
        return self._finish(ConfigNode(layer, Origin("env")), Path.cwd(), interpolate=False)

    def flags(self, sets: Sequence[str]) -> list[ConfigNode]:
        """A layer for each --set section.key=value: a later one hides no mistake of an earlier one."""
        layers = []
        for flag in sets:
            layer: dict[str, ConfigNode] = {}
            key, equals, text = flag.partition("=")
            origin = Origin("set", key.strip())
            if not equals or not key.strip():
                self._problems.append(problem(Origin("set", flag), "", "not of the form section.key=value"))
            elif key.strip() == EXTENDS:
                self._problems.append(problem(origin, "", "only a file can extend another; use -c"))
            else:
                self._put(layer, key.strip().split("."), text, origin)
            layers.append(self._finish(ConfigNode(layer, Origin("set")), Path.cwd(), interpolate=True))
        return layers

    def _put(self, layer: dict[str, ConfigNode], keys: Sequence[str], text: str, origin: Origin) -> None:
        """Set one value of a layer; the mappings on the way are made."""
        path = ".".join(keys)
        node = self._value(text, path, origin)
        for key in keys[:-1]:
            inner = layer.get(key)
            if inner is None or not isinstance(inner.value, dict):
                inner = layer[key] = ConfigNode({}, origin, origin)
            layer = inner.value
        layer[keys[-1]] = node

    def _value(self, text: str, path: str, origin: Origin) -> ConfigNode:
        """The text as YAML; as it stands where the key takes text, so that 123 can be a revision."""
        info = self._infos.get(path)
        is_text = info is not None and info.is_text
        try:
            node = parse_value(text, path, origin, [] if is_text else self._problems)
        except YamlError as error:
            if not is_text:
                self._problems.append(problem(origin, path, f"not YAML: {error}"))
            return ConfigNode(text, origin, origin)
        cleared = info is not None and info.optional and node.value is None
        if is_text and not cleared and not isinstance(node.value, str):
            return ConfigNode(text, origin, origin)
        return node

    def _read(self, path: Path, asked_by: str) -> ConfigNode | None:
        name = _shown(path)
        try:
            raw = path.read_bytes()
        except OSError as error:
            self._problems.append(ConfigProblem((1, name, 0, 0), f"{asked_by}{name}: {error.strerror}"))
            return None
        try:
            return parse_yaml(raw.decode("utf-8-sig"), name, self._problems)
        except UnicodeDecodeError as error:
            line = raw[: error.start].count(b"\n") + 1
            column = error.start - raw.rfind(b"\n", 0, error.start)
            self._problems.append(problem(Origin("file", name, line, column), "", "not UTF-8"))
        except YamlError as error:
            at = Origin("file", name, error.line, error.column)
            self._problems.append(problem(at, "", f"not YAML: {error}"))
        return None

    def _finish(self, tree: ConfigNode, folder: Path, *, interpolate: bool) -> ConfigNode:
        """Drop empty sections, replace references, make paths absolute."""
        kept = {
            key: node
            for key, node in tree.value.items()
            if not (key in self._sections and node.value is None)
        }
        tree = ConfigNode(kept, tree.origin)
        if interpolate:
            tree = self._interpolator.apply(tree)
        for path in (*PATH_KEYS, MODEL_PATH):
            _make_absolute(tree, path, folder)
        return tree


def _extended(tree: ConfigNode) -> list[ConfigNode]:
    """The nodes of `extends:`; what is not a string there is left to the schema."""
    node = tree.value.get(EXTENDS)
    if node is None:
        return []
    nodes = node.value if isinstance(node.value, list) else [node]
    return [item for item in nodes if isinstance(item.value, str) and item.value]


def _make_absolute(tree: ConfigNode, path: str, folder: Path) -> None:
    section, key = path.split(".")
    inner = tree.value.get(section)
    if inner is None or not isinstance(inner.value, dict):
        return
    node = inner.value.get(key)
    if node is None or not isinstance(node.value, str) or not node.value:
        return
    target = Path(os.path.abspath(folder / Path(node.value).expanduser()))
    if path != MODEL_PATH or (node.value != EMBEDDED and (_is_path(node.value) or target.is_dir())):
        inner.value[key] = ConfigNode(str(target), node.origin, node.key_origin)


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~"))


def _shown(path: Path) -> str:
    """The path as errors name it: relative to here where it is below, else as it was given."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(path)
