"""The layers of a config: files (with what they extend), MLXRUN_SECTION__KEY variables, --set flags.

Each layer is a tree of nodes with references replaced and paths made absolute. Validation comes later.

`${NAME}` is the environment variable, `${file:/PATH}` the text of a file, `$${NAME}` is `${NAME}`. A secret
must come from one of them. If the key is not a string, the text is read as YAML, so that
`max_running: ${ROWS}` works. Forms of the shell, such as `${NAME:-text}`, are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mlxrun.config.nodes import ConfigNode, ConfigProblem, Origin
from mlxrun.config.schema import EXTENDS
from mlxrun.config.setting_fields import SettingField, find_field, list_fields, list_sections
from mlxrun.config.yaml_source import YamlError, parse_scalar, parse_value, parse_yaml
from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import ConfigError
from mlxrun.core.text_files import check_encoding, is_stream, read_regular

ENV_PREFIX = "MLXRUN_"
PATH_KEYS = (
    *("model.adapter", "model.chat_template"),
    *("cache.disk_path", "server.data_path", "server.runs_path"),
)
PATH_MAPPINGS = ("model.adapters", "server.tls")  # from names to paths
MODEL_PATHS = ("model.path", "model.draft", "batch.user_model")  # each a path, "embedded" or a hub id
EMBEDDED = "embedded"
MAX_FILES = 100  # that one file extends, each as often as it is named
_FILE = "file:"
_NAME, _SHELL_FORM = r"[A-Za-z_][A-Za-z0-9_]*", r":?[-=?+][^{}]*"
_REFERENCE = re.compile(rf"\$?\$\{{({_NAME}(?:{_SHELL_FORM})?|{_FILE}[^{{}}]+)\}}")


class ConfigSources:
    """Reads the layers and collects the problems."""

    def __init__(self, environ: Mapping[str, str], problems: list[ConfigProblem]) -> None:
        self._environ = environ
        self._problems = problems
        self._count = 0  # of files, each as often as it is read

    def _report(self, origin: Origin, path: str, message: str) -> None:
        self._problems.append(ConfigProblem.at(origin, path, message))

    def read_files(self, path: Path, named_by: str = "", above: tuple[Path, ...] = ()) -> list[ConfigNode]:
        """Return the layers of a file: first those of the files that it extends, in order, then its own."""
        self._count += 1
        if self._count > MAX_FILES:
            if self._count == MAX_FILES + 1:
                text = f"{named_by}{_shorten_path(path)}: the files extend more than {MAX_FILES} others"
                self._problems.append(ConfigProblem((1, _shorten_path(path), 0, 0), text))
            return []
        tree = self._read_file(path, named_by, is_given=not above)
        if tree is None:
            return []
        folder = Path.cwd() if is_stream(path) else path.parent
        own = self.finish_layer(tree, folder, interpolate=True)
        chain = (*above, path.resolve())
        layers = []
        for node in _list_extended(own):
            if "\0" in node.value:
                self._report(node.origin, EXTENDS, "a path cannot have a NUL character")
                continue
            with _name_origin(node):
                target = folder / expand_home(str(node.value))
            if target.resolve() in chain:
                names = " -> ".join(_shorten_path(step) for step in (*chain, target))
                self._report(node.origin, EXTENDS, f"the files extend each other: {names}")
            else:
                layers += self.read_files(target, f"{node.origin}: {EXTENDS}: ", chain)
        return [*layers, own]

    def read_environment(self) -> ConfigNode:
        """Return the layer of all MLXRUN_SECTION__KEY variables. A variable that only resembles this form is
        a problem; others with the prefix are ignored."""
        misspelled = {ENV_PREFIX + path.replace(".", "_").upper(): path for path in list_fields()}
        sections = {ENV_PREFIX + name.upper(): name for name in list_sections()}
        layer: dict[str, ConfigNode] = {}
        for name in sorted(name for name in self._environ if name.startswith(ENV_PREFIX)):
            origin = Origin("env", name)
            if "__" in name:
                keys = name.removeprefix(ENV_PREFIX).lower().split("__")
                self._set_value(layer, keys, self._environ[name], origin)
            elif "." in misspelled.get(name, ""):
                right = ENV_PREFIX + misspelled[name].replace(".", "__").upper()
                self._report(origin, "", f"has no effect (did you mean {right}?)")
            elif name in sections:
                text = f"has no effect: {sections[name]} is a section; the variable of a key is {name}__KEY"
                self._report(origin, "", text)
        return self.finish_layer(ConfigNode(layer, Origin("env")), Path.cwd(), interpolate=False)

    def read_flags(self, sets: Sequence[str]) -> list[ConfigNode]:
        """Return a layer for each --set section.key=value, so that no flag hides an error of another."""
        layers = []
        for flag in sets:
            layer: dict[str, ConfigNode] = {}
            key, equals, text = flag.partition("=")
            origin = Origin("set", key.strip())
            if not equals or not key.strip():
                self._report(Origin("set", flag), "", "it does not have the form section.key=value")
            elif key.strip() == EXTENDS:
                self._report(origin, "", "only a file can extend another; use -c")
            else:
                self._set_value(layer, key.strip().split("."), text, origin)
            layers.append(self.finish_layer(ConfigNode(layer, Origin("set")), Path.cwd(), interpolate=True))
        return layers

    def read_options(self, options: Sequence[tuple[str, str, str]]) -> ConfigNode:
        """Return the layer of a command's own options, each as (name, key, text)."""
        layer: dict[str, ConfigNode] = {}
        for name, key, text in options:
            self._set_value(layer, key.split("."), text, Origin("option", name))
        return self.finish_layer(ConfigNode(layer, Origin("option")), Path.cwd(), interpolate=False)

    def _set_value(
        self, layer: dict[str, ConfigNode], keys: Sequence[str], text: str, origin: Origin
    ) -> None:
        """Set one value of a layer, and create the mappings above it."""
        path = ".".join(keys)
        node = self._parse_text(text, path, origin)
        for key in keys[:-1]:
            inner = layer.get(key)
            if inner is None or not isinstance(inner.value, dict):
                inner = layer[key] = ConfigNode({}, origin, origin)
            layer = inner.value
        layer[keys[-1]] = node

    def _parse_text(self, text: str, path: str, origin: Origin) -> ConfigNode:
        """Return the text as YAML; as it is if the key is a string, so that 123 can be a revision."""
        info = list_fields().get(path)
        is_text = info is not None and info.is_text
        try:
            node = parse_value(text, path, origin, [] if is_text else self._problems)
        except YamlError as error:
            if not is_text:
                self._report(origin, path, str(error))
            return ConfigNode(text, origin, origin)
        is_null = info is not None and info.optional and node.value is None
        if is_text and not is_null and not isinstance(node.value, str):
            return ConfigNode(text, origin, origin)
        return node

    def _read_file(self, path: Path, named_by: str, *, is_given: bool) -> ConfigNode | None:
        """`is_given`: by the user, and not by another config, which cannot name a pipe."""
        name = _shorten_path(path)
        try:
            raw = read_regular(path, streams=is_given)
            check_encoding(raw[:4])
        except OSError as error:
            self._problems.append(ConfigProblem((1, name, 0, 0), f"{named_by}{name}: {error.strerror}"))
            return None
        try:
            return parse_yaml(raw.decode("utf-8-sig"), name, self._problems)
        except UnicodeDecodeError as error:
            line = raw[: error.start].count(b"\n") + 1
            column = error.start - raw.rfind(b"\n", 0, error.start)
            self._report(Origin("file", name, line, column), "", "the file is not UTF-8")
        except YamlError as error:
            origin = Origin("file", name, error.line, error.column)
            self._report(origin, "", str(error))
        return None

    def finish_layer(self, tree: ConfigNode, folder: Path, *, interpolate: bool) -> ConfigNode:
        """Drop empty sections, replace references, make paths absolute."""
        sections = list_sections()
        filled = {k: node for k, node in tree.value.items() if k not in sections or node.value is not None}
        tree = ConfigNode(filled, tree.origin)
        if interpolate:
            tree = self._interpolate(tree)
        for path in (*PATH_KEYS, *MODEL_PATHS):
            section, key = path.split(".")
            _make_absolute(tree.find((section,)), key, folder, can_be_id=path in MODEL_PATHS)
        for path in PATH_MAPPINGS:
            _resolve_mapping(tree.find(tuple(path.split("."))), folder)
        _resolve_models(tree.find(("models",)), folder)
        return tree

    def _interpolate(self, node: ConfigNode, steps: tuple[str | int, ...] = ()) -> ConfigNode:
        """Return the node with all references replaced. `steps`: its place in the config."""
        if isinstance(node.value, dict):
            below = {key: self._interpolate(child, (*steps, key)) for key, child in node.value.items()}
            return replace(node, value=below)
        if isinstance(node.value, list):
            items = [self._interpolate(child, (*steps, at)) for at, child in enumerate(node.value)]
            return replace(node, value=items)
        if not isinstance(node.value, str):
            return node
        return self._replace(node, ".".join(map(str, steps)), find_field(steps))

    def _replace(self, node: ConfigNode, path: str, info: SettingField | None) -> ConfigNode:
        def read(match: re.Match[str]) -> str:
            if match[0].startswith("$$"):
                return match[0][1:]
            try:
                return self._read_reference(match[1])
            except ValueError as error:
                self._report(node.origin, path, str(error))
                return match[0]

        text = _REFERENCE.sub(read, node.value)
        if text != node.value:
            return replace(node, value=parse_scalar(text) if _is_read_as_yaml(path, info) else text)
        if info is not None and info.is_secret and not _REFERENCE.search(text):
            message = (
                "this is a secret; write ${NAME} here and set the environment variable NAME, "
                "or write ${file:/PATH}"
            )
            self._report(node.origin, path, message)
        return node

    def _read_reference(self, name: str) -> str:
        """The value of a variable, or the text of a file without the white space around it. ValueError if
        there is none."""
        if not name.startswith(_FILE):
            if not re.fullmatch(_NAME, name):
                text = "only ${NAME} and ${file:/PATH} are replaced; write $${...} for this text"
                raise ValueError(f"${{{name}}}: {text}")
            if name not in self._environ:
                raise ValueError(f"the environment variable {name} is not set")
            return self._environ[name]
        path = Path(name.removeprefix(_FILE))
        if not path.is_absolute():
            raise ValueError(f"{path} is not an absolute path, which ${{file:...}} needs")
        try:
            return read_regular(path).decode().strip()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8") from None
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error


def _is_read_as_yaml(path: str, info: SettingField | None) -> bool:
    """Whether a value at `path` of the config may be no string, so that the text of a reference is read as
    YAML. `info`: the key that it belongs to."""
    if info is None:
        return False
    if path == info.path:
        return not info.is_text
    *_, setting = path.split(".settings.")  # `models.NAME.settings` has keys of the config
    inner = list_fields().get(setting) if info.path == "models" else None
    return not inner.is_text if inner is not None else bool in info.item_kinds


def _list_extended(tree: ConfigNode) -> list[ConfigNode]:
    """Return the nodes of `extends:`; the schema finds those that are not strings."""
    node = tree.value.get(EXTENDS)
    if node is None:
        return []
    nodes = node.value if isinstance(node.value, list) else [node]
    return [item for item in nodes if isinstance(item.value, str) and item.value]


def _resolve_models(node: ConfigNode | None, folder: Path) -> None:
    """Make the paths of several models absolute. Each is a text, or a mapping with more keys."""
    if node is None or not isinstance(node.value, dict):
        return
    for name, entry in node.value.items():
        if isinstance(entry.value, dict):
            _make_absolute(entry, "path", folder, can_be_id=True)
            _resolve_mapping(entry.find(("adapters",)), folder)
            for path in (*PATH_KEYS, *MODEL_PATHS):
                _make_absolute(entry.find(("settings",)), path, folder, can_be_id=path in MODEL_PATHS)
        else:
            _make_absolute(node, name, folder, can_be_id=True)


def _resolve_mapping(node: ConfigNode | None, folder: Path) -> None:
    """Make the paths of a mapping from names to paths absolute."""
    if node is not None and isinstance(node.value, dict):
        texts = {k: n for k, n in node.value.items() if isinstance(n.value, str) and n.value}
        node.value.update({k: _resolve_path(n, folder) for k, n in texts.items()})


def _make_absolute(parent: ConfigNode | None, key: str, folder: Path, *, can_be_id: bool) -> None:
    """Make the path at a key absolute, unless it `can_be_id` and looks like one, or like EMBEDDED."""
    node = parent.value.get(key) if parent is not None and isinstance(parent.value, dict) else None
    if node is None or not isinstance(node.value, str) or not node.value:
        return
    found = _resolve_path(node, folder)
    is_path = not can_be_id or node.value.startswith((".", "/", "~"))
    is_path |= node.value.endswith(".gguf")
    if is_path or (node.value != EMBEDDED and os.path.isdir(found.value)):
        assert parent is not None
        parent.value[key] = found


def _resolve_path(node: ConfigNode, folder: Path) -> ConfigNode:
    with _name_origin(node):
        return replace(node, value=os.path.abspath(folder / expand_home(node.value)))


@contextmanager
def _name_origin(node: ConfigNode) -> Iterator[None]:
    """A ConfigError of the block has the place of the node."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError.from_problems([f"{node.origin}: {error}"]) from error


def _shorten_path(path: Path) -> str:
    """Return the path as errors name it: relative if it is below the working directory, else as given."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(path)


def escape_references(text: str) -> str:
    """Return the text with its references escaped."""
    return _REFERENCE.sub(lambda match: "$" + match[0], text)
