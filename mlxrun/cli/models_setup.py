"""`mlxrun serve` with several models: the config of each, and what it gets of the memory."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mlxrun.cli.options import read_config_again, say
from mlxrun.config.loading import LoadedConfig, load_config, place_problem
from mlxrun.config.nodes import ConfigNode, Origin
from mlxrun.config.server_settings import ServedModelSettings, has_response_file, read_served_model
from mlxrun.config.settings import Config
from mlxrun.config.sources import escape_references
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError, MlxrunError, ModelLoadError
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from mlxrun.cluster.models.messages import ModelFacts, ModelsFacts
    from mlxrun.cluster.models.model_slot import ModelSlot
    from mlxrun.server.engine_state import LoadedEngine


def load_model_configs(loaded: LoadedConfig) -> dict[str, Config]:
    """Load the config of each of several models, by its name. ConfigError with all problems, each at its
    place."""
    found, problems = {}, list[str]()
    for name in loaded.config.models:
        try:
            trees = [(make_tree(loaded, name), Path())]
            sources, options = (loaded.path, loaded.sets, os.environ), loaded.options
            config = load_config(*sources, options=options, trees=trees, without=("models",)).config
        except ConfigError as error:
            problems += [f"{each} (models.{name})" for each in error.problems or (str(error),)]
            continue
        # The front checks keys and hosts.
        server = replace(config.server, api_keys={}, allowed_hosts=("*",))
        found[name] = replace(config, server=server, apis=replace(config.apis, batches=False, ui=False))
    if problems:
        raise ConfigError.from_problems(problems)
    return found


def make_tree(loaded: LoadedConfig, name: str) -> ConfigNode:
    """Make the tree of the sections of one model, whose values know their places in the config."""
    model, place = read_served_model(loaded.config.models[name]), ("models", name)
    entry = loaded.tree.find(place)
    assert entry is not None
    own = {
        "model.path": (model.path, ("path",)),
        "model.names": ([name, *model.names], ("names",)),
        "model.adapters": (model.adapters, ("adapters",)),
        **{key: (value, ("settings", key)) for key, value in model.settings.items()},
    }

    def make_node(value: Any, origin: Origin) -> ConfigNode:
        if isinstance(value, dict):
            return ConfigNode({key: make_node(each, origin) for key, each in value.items()}, origin, origin)
        if isinstance(value, list):
            return ConfigNode([make_node(each, origin) for each in value], origin)
        return ConfigNode(escape_references(value) if isinstance(value, str) else value, origin, origin)

    sections: dict[str, dict[str, ConfigNode]] = {}
    for key, (value, at) in own.items():
        section, _, field = key.partition(".")
        origin = (loaded.tree.find((*place, *at)) or entry).origin
        sections.setdefault(section, {})[field] = make_node(value, origin)
    nodes = {section: ConfigNode(fields, entry.origin, entry.origin) for section, fields in sections.items()}
    return ConfigNode(nodes, entry.origin)


async def check_memory(loaded: LoadedConfig, configs: dict[str, Config]) -> None:
    """ConfigError for models of this machine whose `memory` is less than their weights, or which need more
    than `scheduler.memory_limit`."""
    from mlxrun.cluster.models.messages import DescribeModels
    from mlxrun.cluster.models.model_process import inspect_models

    entries, limit = read_entries(loaded), loaded.config.scheduler.memory_limit
    own = [
        name
        for name, each in entries.items()
        if (limit is not None or each.memory is not None) and is_local(each.path)
    ]
    message = DescribeModels([configs[name] for name in own])
    facts: ModelsFacts | None = await inspect_models(message) if own else None
    found = zip(own, facts.models if facts else (), strict=True)
    known = {name: each for name, each in found if not isinstance(each, Exception)}
    shares = {name: entries[name].memory or each.needed for name, each in known.items()}
    weights = {name: each.weights for name, each in known.items()}
    problems = list_memory_problems(loaded, shares, weights, limit or 0)
    if problems:
        raise ConfigError.from_problems(problems)


async def check_memory_limit(loaded: LoadedConfig) -> None:
    """ConfigError if the one model is on this machine, and `scheduler.memory_limit` has no room for a
    request beside its weights and images."""
    config = loaded.config
    limit = config.scheduler.memory_limit
    if limit is None or not is_local(config.model.path):
        return
    from mlxrun.cluster.models.messages import DescribeModels
    from mlxrun.cluster.models.model_process import inspect_models

    facts: ModelsFacts = await inspect_models(DescribeModels([config]))
    (model,) = facts.models
    if isinstance(model, Exception):
        return
    shortage = model.shortage
    if model.weights > limit:
        shortage = f"weights {format_rounded(model.weights)} > limit {format_rounded(limit)}"
    if shortage is None:
        return
    text = f"{shortage}: no request can ever run"
    raise ConfigError.from_problems([place_problem(loaded.tree, ("scheduler", "memory_limit"), text).text])


def read_entries(loaded: LoadedConfig) -> dict[str, ServedModelSettings]:
    """Read the entries of `models`, by name."""
    return {name: read_served_model(value) for name, value in loaded.config.models.items()}


def is_local(path: str) -> bool:
    """Whether the files of a model are on this machine without a hub."""
    return path == "embedded" or Path(path).exists()


def list_memory_problems(
    loaded: LoadedConfig, shares: Mapping[str, int], weights: Mapping[str, int], limit: int
) -> list[str]:
    """What is wrong with what models get: less than their weights, or more than the limit beside the pinned
    ones. `shares`, `weights`: bytes of each model; `limit`: of all together, 0 if unknown."""
    entries, small = read_entries(loaded), [name for name in shares if shares[name] < weights[name]]
    found: list[tuple[tuple[str, ...], str]] = [
        (
            ("models", name, "memory"),
            f"{format_rounded(shares[name])} are less than its weights, {format_rounded(weights[name])}",
        )
        for name in small
    ]
    kept = sum(share for name, share in shares.items() if entries[name].pinned)
    for name, share in shares.items():
        needed = kept + (0 if entries[name].pinned else share)
        if found or not limit or needed <= limit:
            continue
        beside = f", {format_rounded(needed)} with the pinned models" if needed > share else ""
        text = f"needs {format_rounded(share)}{beside}, and {format_rounded(limit)} may be used"
        if weights[name] > limit:
            hint = f"its weights alone are {format_rounded(weights[name])}"
        else:
            hint = "fewer bytes in its `memory` leave less for prompts and answers"
        if entries[name].memory is None and loaded.config.scheduler.memory_limit is not None:
            found.append((("scheduler", "memory_limit"), f"model {name} {text}; {hint}"))
        else:
            place = ("models", name) if entries[name].memory is None else ("models", name, "memory")
            found.append((place, f"it {text}; {hint}"))
    return [place_problem(loaded.tree, place, text).text for place, text in found]


def share_memory(
    needs: Sequence[int], given: Sequence[int | None], pinned: Sequence[bool], limit: int
) -> list[int]:
    """The bytes that each model gets while it is loaded. `needs`: what each needs; `given`: by the config;
    `limit`: of all together.

    If all fit together, they share what is left. If a model never fits beside another one, it gets all that
    pinned ones leave.
    """
    shares = [need if fixed is None else fixed for need, fixed in zip(needs, given, strict=True)]
    free = [index for index, fixed in enumerate(given) if fixed is None]
    left = limit - sum(shares)
    if left >= 0:
        return [share + (left // len(free) if index in free else 0) for index, share in enumerate(shares)]
    for index in free:
        kept = sum(s for other, s in enumerate(shares) if pinned[other] and other != index)
        others = [s for other, s in enumerate(shares) if other != index and not pinned[other]]
        if shares[index] + kept + min(others, default=0) > limit:
            shares[index] = max(shares[index], limit - kept)
    return shares


def number_models(names: Iterable[str]) -> list[int]:
    """Numbers below 4096 for the ids of stored responses. A model keeps its number when others come and go,
    unless two names have the same one."""
    found: list[int] = []
    for name in names:
        number = zlib.crc32(name.encode())
        found.append(next(n % 4096 for n in range(number, number + 4096) if n % 4096 not in found))
    return found


def claim_responses_folder(config: Config) -> Path | None:
    """The folder that has one for the stored responses of each model; None: they stay in memory."""
    from mlxrun.server.data_folder import claim_data_folder

    if not has_response_file(config.apis, config.server):
        return None
    return claim_data_folder(config.server, os.environ) / "models"


def make_responses_path(folder: Path | None, name: str) -> Path | None:
    """Where the responses of a model are stored, in a folder that exists then; None: in memory only."""
    from mlxrun.server.responses.response_file import FILE_NAME

    if folder is None:
        return None
    with suppress(OSError):  # who uses the folder says why it cannot be used
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / name / FILE_NAME


def make_slots(
    configs: dict[str, Config], models: dict[str, ServedModelSettings], facts: ModelsFacts, secret: str
) -> list[ModelSlot]:
    """Make the places of the models. ModelLoadError if none can be described."""
    from mlxrun.cluster.models.messages import ServeModel
    from mlxrun.cluster.models.model_process import ModelProcess
    from mlxrun.cluster.models.model_slot import ModelSlot

    known: list[ModelFacts | None] = [None if isinstance(f, Exception) else f for f in facts.models]
    entries = list(models.values())
    needs = [0 if fact is None else fact.needed for fact in known]
    pinned = [entry.pinned for entry in entries]
    shares = share_memory(needs, [entry.memory for entry in entries], pinned, facts.limit)
    slots, folder = [], claim_responses_folder(next(iter(configs.values())))
    for index, (number, (name, config)) in enumerate(
        zip(number_models(configs), configs.items(), strict=True)
    ):
        if facts.limit:
            scheduler = replace(config.scheduler, memory_limit=max(shares[index], 1))
            config = replace(config, scheduler=scheduler)
        spec = ServeModel(config, number, secret, make_responses_path(folder, name))
        make = partial(ModelProcess, spec, config.server.drain_timeout)
        entry, problem = entries[index], facts.models[index]
        slot = ModelSlot(number, name, known[index], make, shares[index], entry.pinned, entry.keep_alive)
        slot.error = problem if isinstance(problem, MlxrunError) else None
        slots.append(slot)
    if not any(known):
        raise ModelLoadError("; ".join(f"{slot.name}: {slot.error}" for slot in slots))
    return slots


def check_shares(loaded: LoadedConfig, slots: Sequence[ModelSlot], limit: int) -> None:
    """ConfigError if a model gets less than its weights, if pinned models do not fit together, or if another
    model does not fit beside them."""
    shares = {slot.name: slot.memory for slot in slots}
    weights = {slot.name: slot.facts.weights if slot.facts else 0 for slot in slots}
    problems = list_memory_problems(loaded, shares, weights, limit) if limit else []
    if problems:
        raise ConfigError.from_problems(problems)


async def serve_models(loaded: LoadedConfig) -> int:
    """Serve several models until a signal ends it; the exit code."""
    from mlxrun.cli.run_pages import show_runs
    from mlxrun.cluster.models.messages import DescribeModels, DigestModels
    from mlxrun.cluster.models.model_lines import ModelsJobService
    from mlxrun.cluster.models.model_pool import ModelPool
    from mlxrun.cluster.models.model_process import inspect_models
    from mlxrun.cluster.models.model_relay import ModelRelay, make_models_front
    from mlxrun.engine.client import EngineClient
    from mlxrun.server.batches.batch_queue import make_batch_queue
    from mlxrun.server.engine_state import LoadedEngine
    from mlxrun.server.lifecycle import run
    from mlxrun.server.running_servers import make_note
    from mlxrun.server.welcome import format_models_welcome

    config, secret = loaded.config, secrets.token_urlsafe(32)
    configs = load_model_configs(loaded)
    models = read_entries(loaded)
    facts: ModelsFacts = await inspect_models(DescribeModels(list(configs.values())))
    slots = make_slots(configs, models, facts, secret)
    check_shares(loaded, slots, facts.limit)
    for slot in slots:
        say(f"{slot.name}: {slot.error or f'may use up to {format_rounded(slot.memory)}'}")
    pool = ModelPool(slots, facts.limit, config.scheduler.max_queue, config.server.request_timeout)

    relay, queue = ModelRelay(pool, secret), make_batch_queue(config, os.environ)
    front, note = show_runs(make_models_front(relay, config, queue), config), make_note(config, os.environ)

    async def digest() -> str:
        return str(await inspect_models(DigestModels(list(configs.values()))))

    async def load() -> LoadedEngine:
        try:
            await pool.start()
            if queue is not None:
                await queue.start(ModelsJobService(config, loaded.digest, pool, relay.send_line, digest))
        except BaseException:
            await pool.close()
            raise
        return LoadedEngine(cast(EngineClient, pool), cast(Any, None), {})

    return await run(
        front,
        load,
        print_line,
        note=note,
        read_config=partial(read_config_again, loaded),
        welcome=format_models_welcome,
    )
