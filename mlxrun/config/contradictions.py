"""Rules against valid values that contradict each other, and against settings that would have no effect.

A rule is a function that returns what is wrong with a config, or None; `forbid` makes one of a condition. It
names the keys that it reads. It is skipped if one of them is invalid, and its error cites the first of them
that was given. `RULES` has the rules of this module and of rules.py (the server, sparse prefill, speculation,
keys without effect).
"""

from __future__ import annotations

import re
from pathlib import Path

from mlxrun.config.rules import NAME, RULES, check_value, forbid, reads
from mlxrun.config.setting_fields import list_fields
from mlxrun.config.settings import Config
from mlxrun.config.sources import MODEL_PATHS
from mlxrun.core.text_files import read_json

__all__ = ["HUB_ID", "RULES", "explain_missing_config"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find_path_problem(path: str) -> str | None:
    """What is wrong with a model's path, which is a folder, a GGUF file or a hub id; None if nothing is."""
    if path.endswith(".gguf"):
        return None if Path(path).is_file() else f"{path} is not a file"
    if path == "embedded" or (not Path(path).is_absolute() and HUB_ID.fullmatch(path)):
        return None
    if not Path(path).is_absolute():
        return f"{path!r} is neither 'embedded' nor a folder nor a hub id such as Qwen/Qwen3-0.6B"
    if not Path(path).is_dir():
        return f"{path} is neither a folder nor a .gguf file"
    config = Path(path, "config.json")
    if not config.exists():
        return explain_missing_config(Path(path))
    try:
        found = read_json(config)
    except OSError as error:
        return f"{config}: {error.strerror}"
    except RecursionError:
        return f"{config}: its values are nested too deeply"
    except ValueError as error:
        return f"{config}: not JSON: {error}"
    return None if isinstance(found, dict) else f"{config}: not a JSON object"


def explain_missing_config(folder: Path) -> str:
    """Why a folder without a config.json is not the folder of a model."""
    files = sorted(folder.glob("*.gguf"))
    hint = f"; give the path of its GGUF file, such as {files[0]}" if files else ""
    return f"{folder} has no config.json, so it is not the folder of a model{hint}"


for _path in MODEL_PATHS:
    check_value(_path, find_path_problem)


@reads("models", "model.path", "model.names", "model.adapters", "model.adapter", "model.revision")
def check_one_or_several(config: Config) -> str | None:
    """What names one model has no effect on several."""
    one, default = config.model, Config().model
    keys = ("path", "names", "adapters", "adapter", "revision")
    given = [key for key in keys if getattr(one, key) != getattr(default, key)]
    if not config.models or not given:
        return None
    return f"not together with model.{given[0]}: give each model its own"


forbid(
    ("model.adapter",),
    "{0} is not a folder",
    lambda path: path is not None and not Path(path).is_dir(),
)


@reads("model.adapters")
def check_adapters(config: Config) -> str | None:
    for name, path in config.model.adapters.items():
        if not NAME.fullmatch(name):
            return f"{name!r} is not a name of letters, digits, '.', '_' and '-', at most 64"
        if not Path(path).is_dir():
            return f"{name}: {path} is not a folder"
    return None


forbid(  # with both, a request that names no adapter would not get the plain model
    ("model.adapters", "model.adapter"),
    "not together with model.adapter: give each adapter a name",
    lambda adapters, adapter: bool(adapters) and adapter is not None,
)


@reads("model.adapters", "model.names", "model.path")
def check_adapter_names(config: Config) -> str | None:
    """A request names an adapter as MODEL:NAME or NAME, so neither may be a name of the model."""
    settings = config.model
    path = Path(settings.path)
    models = (*settings.names, settings.path, path.name, path.stem)
    for name in settings.adapters:
        clash = next(
            (each for each in (name, *(f"{m}:{name}" for m in models)) if each in settings.names), None
        )
        if clash is not None:
            return f"{clash!r} is one of model.names too"
    return None


forbid(
    ("model.chat_template",),
    "{0} is not a file",
    lambda path: path is not None and not Path(path).is_file(),
)
forbid(  # only a hub id has revisions
    ("model.revision", "model.path"),
    "has no effect: model.path {1!r} is not a hub id",
    lambda revision, path: revision is not None and (path == "embedded" or Path(path).is_absolute()),
)
forbid(
    ("model.trust_remote_code", "model.path"),
    "has no effect: the embedded model has no code of its own",
    lambda trusted, path: trusted and path == "embedded",
)
forbid(  # the budget beside decoding rows must be the smaller one
    ("scheduler.prefill_budget_busy", "scheduler.prefill_budget"),
    "prefill_budget_busy {0} is more than prefill_budget {1}",
    lambda busy, idle: busy is not None and busy > idle,
)
forbid(  # a step must be able to prefill a full chunk
    ("scheduler.chunk", "scheduler.prefill_budget"),
    "chunk {0} is more than prefill_budget {1}",
    lambda chunk, budget: chunk is not None and chunk > budget,
)
forbid(  # with `engine.reproducible`, prompts are always computed in the same full chunks
    ("scheduler.prefill_budget_busy", "scheduler.chunk", "engine.reproducible"),
    "engine.reproducible needs full chunks: {0} is less than scheduler.chunk {1}",
    lambda busy, chunk, exact: exact and busy is not None and chunk is not None and chunk > busy,
)
forbid(
    ("sampling.max_tokens", "model.context_length"),
    "sampling.max_tokens {0} leaves no room for a prompt in model.context_length {1}",
    lambda answer, context: answer is not None and context is not None and answer >= context,
)
for _path, _what in (  # each must leave memory for the model
    ("media.memory_bytes", "images"),
    ("cache.image_bytes", "image features"),
    ("cache.memory_bytes", "the prefix cache"),
):
    forbid(
        (_path, "scheduler.memory_limit"),
        f"{{0}} bytes for {_what} leave nothing of scheduler.memory_limit {{1}}",
        lambda size, limit: size is not None and limit is not None and size >= limit,
    )
forbid(  # as must images and features together
    ("media.memory_bytes", "cache.image_bytes", "scheduler.memory_limit"),
    "{0} bytes for images and {1} for their features leave nothing of scheduler.memory_limit {2}",
    lambda images, features, limit: (
        images is not None
        and features is not None
        and limit is not None
        and max(images, features) < limit <= images + features
    ),
)
forbid(
    ("cache.stored_bits", "engine.reproducible"),
    "quantized entries are not exact, but engine.reproducible needs exact ones; remove one of them",
    lambda bits, reproducible: bits is not None and reproducible,
)
forbid(
    ("cache.kv_bits", "engine.reproducible"),
    "quantized keys are not computed reproducibly, as engine.reproducible demands; remove one of them",
    lambda bits, reproducible: bits is not None and reproducible,
)


@reads("workers.resources")
def check_worker_resources(config: Config) -> str | None:
    """Amounts must be numbers above 0."""
    for name, amount in config.workers.resources.items():
        if isinstance(amount, bool | str) or amount <= 0:
            return f"{name}: {amount!r} is not a number above 0"
    return None


@reads("workers.overrides")
def check_worker_overrides(config: Config) -> str | None:
    """The values themselves are checked with those of the job, before its workers start."""
    for key in config.workers.overrides:
        number, _, rest = key.partition(".")
        if not number.isdecimal() or rest.count(".") != 1 or rest.startswith(("model.", "workers.")):
            return f"{key!r} is not a worker's number and a setting, such as 1.scheduler.max_running"
        if rest not in list_fields():
            return f"{key!r}: there is no setting {rest}"
        if rest.startswith(("sampling.", "parsers.", "structured.")) or rest == "engine.reproducible":
            return f"{key!r}: workers may not differ in {rest}, which changes answers"
    return None


@reads("workers.overrides", "workers.count")
def check_worker_numbers(config: Config) -> str | None:
    """If `workers.count` is null, the command checks the numbers once the cluster is known."""
    count = config.workers.count
    for key in config.workers.overrides if count is not None else ():
        number = key.partition(".")[0]
        if number.isdecimal() and int(number) >= (count or 0):
            return f"there is no worker {number}; the last one of workers.count is {(count or 0) - 1}"
    return None
