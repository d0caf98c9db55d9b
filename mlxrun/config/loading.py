"""Reads a config: defaults < file (and what it extends) < MLXRUN_SECTION__KEY < --set, then validates.

`load_config` returns everything or raises one ConfigError with all problems, one a line, each as
`path:line:col: section.key: what is wrong (did you mean ...?)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Generic, TypeVar

from mlxrun.config.contradictions import CHECKS
from mlxrun.config.conversion import build, config_hash
from mlxrun.config.nodes import DEFAULT, ConfigNode, ConfigProblem, Origin, find, merge, plain, problem
from mlxrun.config.setting_fields import fields_of
from mlxrun.config.settings import Config
from mlxrun.config.sources import Sources
from mlxrun.config.validation import validate
from mlxrun.errors import ConfigError

CONFIG_VARIABLE = "MLXRUN_CONFIG"
DEFAULT_FILE = "mlxrun.yaml"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A resolved config, where each of its keys (`section.key`) came from, and its digest."""

    config: Config
    origins: Mapping[str, Origin]
    digest: str
    path: Path | None  # the file it was read from; None: built-in defaults


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """What the layers of any config class come to; problems are for the caller to raise."""

    config: T
    origins: Mapping[str, Origin]
    bad: frozenset[str]  # keys with a problem; they have their default in `config`


def load_config(
    path: Path | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    more: Sequence[Callable[[Loaded], list[ConfigProblem]]] = (),
) -> Loaded:
    """The config of `path`; without one $MLXRUN_CONFIG, then ./mlxrun.yaml, then built-in defaults.

    `more`: checks by packages that this one does not know. They run whatever else is wrong, so that all is
    said at once; a key that is wrong already has its default there.
    """
    environ = environ or {}
    chosen, asked_by = _choose(path, environ)
    problems: list[ConfigProblem] = []
    resolved = resolve(Config, chosen, sets, environ, problems, asked_by)
    problems += _contradictions(resolved)
    loaded = Loaded(resolved.config, resolved.origins, config_hash(resolved.config), chosen)
    known = {item.key for item in problems}
    problems += [item for check in more for item in check(loaded) if item.key not in known]
    raise_all(problems)
    return loaded


def resolve(
    root: type[T],
    path: Path | None,
    sets: Sequence[str],
    environ: Mapping[str, str],
    problems: list[ConfigProblem],
    asked_by: str = "",
) -> Resolved[T]:
    """Read, merge and validate the layers of a config class."""
    sources = Sources(root, environ, problems)
    layers = sources.files(path, asked_by) if path else []
    layers += [sources.environment(), *sources.flags(sets)]
    # Each layer by itself, so that no mistake hides below another layer; what could not even be read
    # is not blamed again for its value.
    places = {item.rank for item in problems}
    problems += [item for layer in layers for item in validate(layer, root) if item.rank not in places]
    tree = reduce(merge, layers, ConfigNode({}, DEFAULT))
    bad = frozenset(item.key for item in problems)
    config = build(root, plain(tree), bad)
    origins = {}
    for key in fields_of(root):
        node = find(tree, key.split("."))
        origins[key] = node.origin if node else DEFAULT
    return Resolved(config, origins, bad)


def raise_all(problems: Sequence[ConfigProblem]) -> None:
    """One ConfigError with every problem, in order of place; nothing if there is none."""
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(item.text for item in sorted(problems))))


def _choose(path: Path | None, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The file to read, and who asked for it where that is not plain from the command line."""
    if path is not None:
        return path, ""
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE]).expanduser(), f"{CONFIG_VARIABLE}: "
    return (Path(DEFAULT_FILE), "") if Path(DEFAULT_FILE).exists() else (None, "")


def _contradictions(resolved: Resolved[Config]) -> list[ConfigProblem]:
    found = []
    for check in CHECKS:
        message = None if resolved.bad.intersection(check.keys) else check.run(resolved.config)
        if message:
            key = next((key for key in check.keys if resolved.origins[key] != DEFAULT), check.keys[0])
            found.append(problem(resolved.origins[key], key, message))
    return found
