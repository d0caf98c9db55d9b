"""Loads and validates a config: defaults < file (and what it extends) < MLXRUN_SECTION__KEY < --set.

`load_config` returns a config, or raises one ConfigError with all problems. Each problem is a line
`path:line:col: section.key: what is wrong (did you mean ...?)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from mlxrun.config.contradictions import RULES, find_path_problem
from mlxrun.config.nodes import DEFAULT, ConfigNode, ConfigProblem, Origin
from mlxrun.config.rules import NAME
from mlxrun.config.server_settings import ServedModelSettings, read_served_model
from mlxrun.config.setting_fields import build_config, hash_config, list_fields
from mlxrun.config.settings import Config
from mlxrun.config.sources import ConfigSources
from mlxrun.config.validation import validate_layer
from mlxrun.core.byte_sizes import format_bytes
from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import ConfigError
from mlxrun.core.field_errors import suggest

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
    # What a command was given besides the file; see load_config.
    sets: Sequence[str] = field(default=(), compare=False)
    options: Sequence[tuple[str, str, str]] = field(default=(), compare=False)


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
    loaded = LoadedConfig(config, origins, hash_config(config), chosen, tree, sets, options)
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
        return expand_home(environ[CONFIG_VARIABLE]), f"{CONFIG_VARIABLE}: "
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


Place = tuple[str, ...]
_ENTRY_KEYS = {
    "model.path": "`path`",
    "model.names": "`names`",
    "model.adapters": "`adapters`",
    "scheduler.memory_limit": "`memory`",
}  # which an entry has itself
_OF_ONE_MODEL = tuple(
    f"{name}."
    for name in (
        *("model", "engine", "scheduler", "cache", "prefill"),
        *("speculation", "sampling", "parsers", "structured", "media"),
    )
)


def find_entry_problems(config: Config, tree: ConfigNode) -> list[ConfigProblem]:
    """Find what is wrong with the entries of `models`. `tree`: where the values of the config come from."""
    models = {name: read_served_model(value) for name, value in config.models.items()}
    if not models and tree.find(("models",)) is not None:
        what = "it names no model; name one, as in `chat: ORG/NAME`, or leave the key out"
        return [place_problem(tree, ("models",), what)]
    found = [*_check_names(models), *_check_memory(models, config.scheduler.memory_limit)]
    found += [problem for name, model in models.items() for problem in _check_entry(name, model)]
    return [place_problem(tree, ("models", *place), message) for place, message in found]


def place_problem(tree: ConfigNode, place: Place, message: str) -> ConfigProblem:
    """Make a problem with the value at a place, or with the nearest one around it that was given."""
    return ConfigProblem.at(_find_origin(tree, place), ".".join(place), message)


def _find_origin(tree: ConfigNode, place: Place) -> Origin:
    node = tree.find_nearest(place)
    is_about_key = isinstance(node.value, dict) or len(place) == len(("models", "name"))
    return (node.key_origin if is_about_key else None) or node.origin


def _check_names(models: dict[str, ServedModelSettings]) -> Iterator[tuple[Place, str]]:
    owners: dict[str, str] = {}
    for name, model in models.items():
        for each in (name, *model.names):
            if owners.setdefault(each, name) != name:
                yield (name, "names"), f"{each!r} is a name of {owners[each]} too"


def _check_entry(name: str, model: ServedModelSettings) -> Iterator[tuple[Place, str]]:
    if not NAME.fullmatch(name) or name.startswith("."):
        yield (name,), f"the name {name!r} is not 1 to 64 letters, digits, '.', '_' and '-'"
    for key in model.settings:
        if key not in list_fields() or not key.startswith(_OF_ONE_MODEL):
            near = suggest(key, [each for each in list_fields() if each.startswith(_OF_ONE_MODEL)])
            text = f"is not a setting of one model{near or ', such as sampling.temperature'}"
            yield (name, "settings", key), text
        elif key in _ENTRY_KEYS:
            yield (name, "settings", key), f"belongs in {_ENTRY_KEYS[key]}"
    problem = find_path_problem(model.path) if model.path else "it has no path"
    if problem is not None:
        yield (name, "path"), problem


def _check_memory(models: dict[str, ServedModelSettings], limit: int | None) -> Iterator[tuple[Place, str]]:
    """Each model fits beside the pinned ones, as far as the config says how large they are."""
    kept = sum(model.memory or 0 for model in models.values() if model.pinned)
    for name, model in models.items():
        needed = kept + (0 if model.pinned else model.memory or 0)
        if limit is not None and needed > limit:
            beside = " with that of pinned models" if needed > (model.memory or 0) else ""
            more = f"{format_bytes(needed)}, more than scheduler.memory_limit, {format_bytes(limit)}"
            yield (name, "memory"), f"its memory{beside} is {more}"
            return
