"""Checks the entries of `models`, each at its own place in a config."""

from __future__ import annotations

from collections.abc import Iterator

from mlxrun.config.contradictions import find_path_problem
from mlxrun.config.nodes import ConfigNode, ConfigProblem, Origin
from mlxrun.config.rules import NAME
from mlxrun.config.server_settings import ServedModelSettings, read_served_model
from mlxrun.config.setting_fields import list_fields
from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_bytes
from mlxrun.core.field_errors import suggest

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
    found = [*_check_names(models), *_check_memory(models, config.scheduler.memory_limit)]
    found += [problem for name, model in models.items() for problem in _check_entry(name, model)]
    return [place_problem(tree, ("models", *place), message) for place, message in found]


def place_problem(tree: ConfigNode, place: Place, message: str) -> ConfigProblem:
    """Make a problem with the value at a place, or with the nearest one around it that was given."""
    return ConfigProblem.at(_find_origin(tree, place), ".".join(place), message)


def _find_origin(tree: ConfigNode, place: Place) -> Origin:
    node = next(found for end in range(len(place), -1, -1) if (found := tree.find(place[:end])) is not None)
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
