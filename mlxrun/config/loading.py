"""Loads and validates a config: defaults < file (and what it extends) < MLXRUN_SECTION__KEY < --set.

`load_config` returns a config, or raises one ConfigError with all problems. Each problem is a line
`path:line:col: section.key: what is wrong (did you mean ...?)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from mlxrun.config.contradictions import RULES
from mlxrun.config.model_entries import find_entry_problems
from mlxrun.config.nodes import DEFAULT, ConfigNode, ConfigProblem, Origin
from mlxrun.config.setting_fields import build_config, hash_config, list_fields
from mlxrun.config.settings import Config
from mlxrun.config.sources import ConfigSources
from mlxrun.config.validation import validate_layer
from mlxrun.core.errors import ConfigError

CONFIG_VARIABLE = "MLXRUN_CONFIG"
DEFAULT_FILE = "mlxrun.yaml"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config, the origin of each of its keys (`section.key`), and its sha256 (`hash_config`)."""

    config: Config
    origins: Mapping[str, Origin]
    digest: str
    path: Path | None  # the file that it was read from; None: built-in defaults
    tree: ConfigNode = field(default=ConfigNode({}, DEFAULT), compare=False)  # values with their origins


def load_config(
    path: Path | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    extra_checks: Sequence[Callable[[LoadedConfig], list[ConfigProblem]]] = (),
    options: Sequence[tuple[str, str, str]] = (),
    trees: Sequence[tuple[ConfigNode, Path]] = (),
    without: Collection[str] = (),
) -> LoadedConfig:
    """Load the config of `path`. Without a path, load $MLXRUN_CONFIG, else ./mlxrun.yaml, else the defaults.
    ConfigError with all problems.

    `extra_checks`: checks by packages that this one does not know. They run even if there are problems, so
    that one error reports all; a key with a problem has its default then. `options`: a command's own options
    as (name, key, text); they override `sets`. `trees`: sections in another file, such as a suite, with the
    folder that their paths are relative to; `sets` override them. `without`: keys of the top level that are
    left out, wherever they are given.
    """
    environ = environ or {}
    chosen, chosen_by = _choose_file(path, environ)
    problems: list[ConfigProblem] = []
    sources = ConfigSources(environ, problems)
    layers = sources.read_files(chosen, chosen_by) if chosen else []
    layers.append(sources.read_environment())
    layers += [sources.finish_layer(tree, folder, interpolate=True) for tree, folder in trees]
    layers += [*sources.read_flags(sets), sources.read_options(options)]
    # Each layer is validated by itself, so that no mistake hides below another layer. A value that could not
    # be read has been reported.
    reported = {item.rank for item in problems}
    problems += [item for layer in layers for item in validate_layer(layer) if item.rank not in reported]
    tree = reduce(ConfigNode.merge, layers, ConfigNode({}, DEFAULT))
    tree = ConfigNode({key: node for key, node in tree.value.items() if key not in without}, DEFAULT)
    nodes = {key: tree.find(key.split(".")) for key in list_fields()}
    origins = {key: node.origin if node else DEFAULT for key, node in nodes.items()}
    wrong = {item.key for item in problems}
    config = build_config(tree.strip_origins(), wrong)
    problems += _find_contradictions(config, origins, wrong)
    if not any(key.startswith("models") for key in wrong):
        problems += find_entry_problems(config, tree)
    loaded = LoadedConfig(config, origins, hash_config(config), chosen, tree)
    wrong = {item.key for item in problems}
    problems += [item for check in extra_checks for item in check(loaded) if item.key not in wrong]
    if problems:
        raise ConfigError.from_problems(item.text for item in sorted(problems))
    return loaded


def _choose_file(path: Path | None, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return the file to read, and a prefix for errors that says which variable named it."""
    if path is not None:
        return path, ""
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE]).expanduser(), f"{CONFIG_VARIABLE}: "
    return (Path(DEFAULT_FILE), "") if Path(DEFAULT_FILE).exists() else (None, "")


def _find_contradictions(
    config: Config, origins: Mapping[str, Origin], wrong: set[str]
) -> list[ConfigProblem]:
    problems = []
    for keys, rule in RULES:
        try:
            message = None if wrong.intersection(keys) else rule(config)
        except OSError as error:  # a path that is too long, or that may not be looked at
            message = f"{error.filename}: {error.strerror}"
        if message:
            key = next((key for key in keys if origins[key] != DEFAULT), keys[0])
            problems.append(ConfigProblem.at(origins[key], key, message))
    return problems
