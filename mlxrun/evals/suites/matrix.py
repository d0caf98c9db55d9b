"""The cells of a suite: every combination of a model, a task, a seed and the settings in `vary`.

Cells whose settings differ only for requests, such as sampling, share an engine.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from mlxrun.config.loading import LoadedConfig
from mlxrun.config.nodes import DEFAULT, ConfigNode
from mlxrun.config.setting_fields import hash_config, to_plain
from mlxrun.config.settings import Config
from mlxrun.config.yaml_source import render_yaml
from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import ConfigError
from mlxrun.core.text_files import explain_missing_file
from mlxrun.evals.suites.suite_checks import GENERATION, SAMPLING, TASK_KEYS
from mlxrun.evals.suites.suite_file import SuiteFile
from mlxrun.evals.suites.suite_settings import SuiteTask
from mlxrun.jobs.lines.line_keys import dump_canonical

# Loads the config of a model: its file (None: the command's), and sections with the folder of their paths.
LoadModelConfig = Callable[[Path | None, Sequence[tuple[ConfigNode, Path]]], LoadedConfig]
Settings = dict[str, Any]
_ENGINE_SECTIONS = ("model", "engine", "scheduler", "cache", "media")
_BUILT_IN = LoadedConfig(Config(), {}, hash_config(Config()), None)
_USER = "batch.user_model"
_LONGEST = 40  # characters of a value in the name of a folder


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination. `settings`: the seed and the values of `vary`. `config` and `task` already contain
    those that concern them."""

    model: str
    task_name: str
    variant: str
    settings: Mapping[str, Any]
    config: Config
    config_hash: str
    task: SuiteTask

    @property
    def name(self) -> str:
        """`model/task/variant`, which is the cell's folder too."""
        return f"{self.model}/{self.task_name}/{self.variant}"

    @property
    def engine_key(self) -> str:
        """A key that is equal for cells that can use one engine."""
        return compute_engine_key(to_plain(self.config))

    @property
    def lines_key(self) -> str:
        """A key that is equal for cells with the same lines."""
        varied = {key: value for key, value in self.settings.items() if _is_of_task(key)}
        return dump_canonical([self.task_name, varied]).decode()


def compute_engine_key(config: Mapping[str, Any]) -> str:
    """Digest the parts of a config (as plain values) on which an engine depends, and the one beside it of a
    simulated user."""
    plain = {**config, "media": {**config["media"], "roots": []}}
    parts = [*(plain[name] for name in _ENGINE_SECTIONS), config["batch"].get("user_model")]
    return hashlib.sha256(dump_canonical(parts)).hexdigest()


def build_cells(file: SuiteFile, load: LoadModelConfig) -> list[Cell]:
    """Build the cells of a checked suite. Problems of a model's config are added to those of the suite, also
    if no task is left. Such cells have the built-in config, so that their data can be checked too."""
    names = {key: _name_values(key, values, file.suite.vary) for key, values in file.suite.vary.items()}
    cells: list[Cell] = []
    for model in file.suite.models or [""]:
        configs: dict[str, LoadedConfig] = {}
        if model and not file.suite.tasks:
            _load_config(file, model, {}, load)
        for task, chosen in _list_combinations(file):
            of_config = {key: at for key, at in chosen.items() if not _is_of_task(key)}
            user = file.tree.find(("tasks", task, "agent", "user", "model"))
            key = repr((of_config, user and user.value))
            if key not in configs:
                configs[key] = _load_config(file, model, of_config, load, user) if model else _BUILT_IN
            cells += _build_seeds(file, model, task, chosen, configs[key], names)
    return cells


def _is_of_task(key: str) -> bool:
    return key in TASK_KEYS or key.startswith(GENERATION)


def _list_combinations(file: SuiteFile) -> Iterator[tuple[str, dict[str, int]]]:
    """Each task with each choice of values in `vary` that concern it, by their positions."""
    for name, task in file.suite.tasks.items():
        keys = [key for key in file.suite.vary if _concerns(key, task)]
        for positions in itertools.product(*(range(len(file.suite.vary[key])) for key in keys)):
            yield name, dict(zip(keys, positions, strict=True))


def _concerns(key: str, task: SuiteTask) -> bool:
    """Whether a key of `vary` changes anything in a task."""
    if key == "prompt":
        return bool(task.prompts)
    if key == _USER:
        return task.has_user
    if key in TASK_KEYS:
        return task.few_shot is not None
    if task.is_perplexity:
        return not key.startswith(SAMPLING)
    return not (task.choices and key.startswith((GENERATION, SAMPLING)))


def _load_config(
    file: SuiteFile,
    model: str,
    chosen: Mapping[str, int],
    load: LoadModelConfig,
    user: ConfigNode | None = None,
) -> LoadedConfig:
    """The config of a model with values of `vary`; the built-in one if it has problems, which are added.
    `user`: the model that plays the user of a task."""
    given = file.suite.models[model]
    own = file.tree.find(("models", model, "set"))
    varied = {}
    for key, position in chosen.items():
        keys = file.tree.find_nearest(("vary", key))
        value = keys.value[position]
        varied[key] = ConfigNode(value.value, value.origin, keys.key_origin)
    of_user = {} if user is None or user.value is None else {_USER: user}
    layers = [_build_layer(each) for each in ((own and own.value) or {}, of_user, varied)]
    path = None if given.config is None else file.folder / expand_home(given.config)
    if path is not None and (reason := explain_missing_file(path)) is not None:
        file.report(("models", model, "config"), f"{path}: {reason}")
        path = None  # `set` is checked all the same
    try:
        loaded = load(path, [(layer, file.folder) for layer in layers])
    except ConfigError as error:
        file.lines += str(error).splitlines()
        return _BUILT_IN
    return _order_records(loaded) if path is not None or given.config is None else _BUILT_IN


def _order_records(loaded: LoadedConfig) -> LoadedConfig:
    """The config with records in the order of the job, unless it says otherwise."""
    if loaded.origins["batch.order"] != DEFAULT:
        return loaded
    config = replace(loaded.config, batch=replace(loaded.config.batch, order="input"))
    return replace(loaded, config=config, digest=hash_config(config))


def _build_layer(settings: Mapping[str, ConfigNode]) -> ConfigNode:
    """A tree of sections of keys such as `model.path`."""
    trees = []
    for path, node in settings.items():
        *sections, key = path.split(".")
        tree = {key: node}
        for section in reversed(sections):
            tree = {section: ConfigNode(tree, node.key_origin or node.origin, node.key_origin)}
        trees.append(ConfigNode(tree, node.origin))
    return reduce(ConfigNode.merge, trees, ConfigNode({}, DEFAULT))


def _build_seeds(
    file: SuiteFile,
    model: str,
    task_name: str,
    chosen: Mapping[str, int],
    loaded: LoadedConfig,
    names: Mapping[str, Sequence[str]],
) -> Iterator[Cell]:
    """The cells of one combination, one for each seed; one only where nothing is sampled."""
    suite = file.suite
    values = {key: suite.vary[key][at] for key, at in chosen.items()}
    task = _change_task(suite.tasks[task_name], values)
    own = (loaded.config.sampling.seed or 0,)
    seeds: Sequence[int] = suite.seeds or own
    for seed in seeds[:1] if task.choices or task.is_perplexity else seeds:
        config = loaded.config
        if not task.has_user:
            config = replace(config, batch=replace(config.batch, user_model=None))
        if suite.seeds:
            config = replace(config, sampling=replace(config.sampling, seed=seed))
        digest = loaded.digest if config == loaded.config else hash_config(config)
        variant = ",".join([f"seed-{seed}", *(names[key][at] for key, at in chosen.items())])
        yield Cell(model, task_name, variant, {"seed": seed, **values}, config, digest, task)


def _change_task(task: SuiteTask, values: Mapping[str, Any]) -> SuiteTask:
    for key, value in values.items():
        if key == "prompt":
            task = replace(task, prompt=task.prompts[value], prompts={})
        elif key in TASK_KEYS and task.few_shot is not None:
            few_shot = replace(task.few_shot, **{key.partition(".")[2]: value})
            task = replace(task, few_shot=few_shot)
        elif key.startswith(GENERATION):
            task = replace(task, generation={**task.generation, key.removeprefix(GENERATION): value})
    return task


def _name_values(key: str, values: Sequence[Any], keys: Mapping[str, Any]) -> list[str]:
    """A name of each value of a key for folders, such as `temperature-0.5`."""
    last = key.rpartition(".")[2]
    if sum(each.rpartition(".")[2] == last for each in keys) > 1:
        last = key
    texts = [value if isinstance(value, str) else render_yaml(value) for value in values]
    short = [re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("._-")[:_LONGEST] for text in texts]
    folded = [each.casefold() for each in short]
    return [
        f"{last}-{name}" if name and folded.count(name.casefold()) == 1 else f"{last}-{_digest(text)}"
        for name, text in zip(short, texts, strict=True)
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
