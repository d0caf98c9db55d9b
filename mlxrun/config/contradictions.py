"""Rules against valid values that contradict each other, and against settings that would have no effect.

A rule is a function that returns what is wrong with a config, or None. It names the keys that it reads. It is
skipped if one of them is invalid, and its error cites the first of them that was given. `RULES` has the rules
of this module and of rules.py (the server, sparse prefill, speculation, keys without effect).
"""

from __future__ import annotations

import re
from pathlib import Path

from mlxrun.config.rules import NAME, RULES, reads
from mlxrun.config.setting_fields import list_fields
from mlxrun.config.settings import Config

__all__ = ["HUB_ID", "RULES", "explain_missing_config"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@reads("model.path")
def check_model_path(config: Config) -> str | None:
    """A path must be a folder or a GGUF file; anything else must look like a hub id."""
    return find_path_problem(config.model.path)


@reads("model.draft")
def check_draft_path(config: Config) -> str | None:
    return None if config.model.draft is None else find_path_problem(config.model.draft)


@reads("batch.user_model")
def check_user_path(config: Config) -> str | None:
    return None if config.batch.user_model is None else find_path_problem(config.batch.user_model)


def find_path_problem(path: str) -> str | None:
    """What is wrong with a model's path; None if nothing is."""
    if path.endswith(".gguf"):
        return None if Path(path).is_file() else f"{path} is not a file"
    if path == "embedded" or (not Path(path).is_absolute() and HUB_ID.fullmatch(path)):
        return None
    if not Path(path).is_absolute():
        return f"{path!r} is neither 'embedded' nor a folder nor a hub id such as Qwen/Qwen3-0.6B"
    if not Path(path).is_dir():
        return f"{path} is neither a folder nor a .gguf file"
    if not Path(path, "config.json").exists():
        return explain_missing_config(Path(path))
    return None


def explain_missing_config(folder: Path) -> str:
    """Why a folder without a config.json is not the folder of a model."""
    files = sorted(folder.glob("*.gguf"))
    hint = f"; give the path of its GGUF file, such as {files[0]}" if files else ""
    return f"{folder} has no config.json, so it is not the folder of a model{hint}"


@reads("models", "model.path", "model.names", "model.adapters", "model.adapter", "model.revision")
def check_one_or_several(config: Config) -> str | None:
    """What names one model has no effect on several."""
    one, default = config.model, Config().model
    keys = ("path", "names", "adapters", "adapter", "revision")
    given = [key for key in keys if getattr(one, key) != getattr(default, key)]
    if not config.models or not given:
        return None
    return f"not together with model.{given[0]}: give each model its own"


@reads("model.adapter")
def check_adapter(config: Config) -> str | None:
    path = config.model.adapter
    return None if path is None or Path(path).is_dir() else f"{path} is not a folder"


@reads("model.adapters")
def check_adapters(config: Config) -> str | None:
    for name, path in config.model.adapters.items():
        if not NAME.fullmatch(name):
            return f"{name!r} is not a name of letters, digits, '.', '_' and '-', at most 64"
        if not Path(path).is_dir():
            return f"{name}: {path} is not a folder"
    return None


@reads("model.adapters", "model.adapter")
def check_single_adapter(config: Config) -> str | None:
    """With an adapter for all answers, a request that names no adapter would not get the plain model."""
    both = config.model.adapters and config.model.adapter is not None
    return "not together with model.adapter: give each adapter a name" if both else None


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


@reads("model.chat_template")
def check_chat_template_file(config: Config) -> str | None:
    path = config.model.chat_template
    return None if path is None or Path(path).is_file() else f"{path} is not a file"


@reads("model.revision", "model.path")
def check_revision(config: Config) -> str | None:
    """Only a hub id has revisions."""
    path = config.model.path
    if config.model.revision is None or not (path == "embedded" or Path(path).is_absolute()):
        return None
    return f"has no effect: model.path {path!r} is not a hub id"


@reads("model.trust_remote_code", "model.path")
def check_remote_code(config: Config) -> str | None:
    if config.model.trust_remote_code and config.model.path == "embedded":
        return "has no effect: the embedded model has no code of its own"
    return None


@reads("scheduler.prefill_budget_busy", "scheduler.prefill_budget")
def check_busy_budget(config: Config) -> str | None:
    """The budget beside decoding rows must be the smaller one."""
    busy, idle = config.scheduler.prefill_budget_busy, config.scheduler.prefill_budget
    if busy is None or busy <= idle:
        return None
    return f"prefill_budget_busy {busy} is more than prefill_budget {idle}"


@reads("scheduler.chunk", "scheduler.prefill_budget")
def check_chunk(config: Config) -> str | None:
    """A step must be able to prefill a full chunk."""
    chunk, budget = config.scheduler.chunk, config.scheduler.prefill_budget
    if chunk is None or chunk <= budget:
        return None
    return f"chunk {chunk} is more than prefill_budget {budget}"


@reads("scheduler.prefill_budget_busy", "scheduler.chunk", "engine.reproducible")
def check_reproducible_chunk(config: Config) -> str | None:
    """With `engine.reproducible`, prompts are always computed in the same full chunks."""
    chunk, busy = config.scheduler.chunk, config.scheduler.prefill_budget_busy
    if not config.engine.reproducible or busy is None or chunk is None or chunk <= busy:
        return None
    return f"engine.reproducible needs full chunks: {busy} is less than scheduler.chunk {chunk}"


@reads("sampling.max_tokens", "model.context_length")
def check_max_tokens(config: Config) -> str | None:
    answer, context = config.sampling.max_tokens, config.model.context_length
    if answer is None or context is None or answer < context:
        return None
    return f"sampling.max_tokens {answer} leaves no room for a prompt in model.context_length {context}"


@reads("media.memory_bytes", "scheduler.memory_limit")
def check_image_memory(config: Config) -> str | None:
    """Decoded images must leave memory for the model."""
    images, limit = config.media.memory_bytes, config.scheduler.memory_limit
    if images is None or limit is None or images < limit:
        return None
    return f"{images} bytes for images leave nothing of scheduler.memory_limit {limit}"


@reads("cache.stored_bits", "engine.reproducible")
def check_reproducible_cache(config: Config) -> str | None:
    if config.cache.stored_bits is None or not config.engine.reproducible:
        return None
    return "quantized entries are not exact, but engine.reproducible needs exact ones; remove one of them"


@reads("cache.kv_bits", "engine.reproducible")
def check_reproducible_keys(config: Config) -> str | None:
    if config.cache.kv_bits is None or not config.engine.reproducible:
        return None
    return "quantized keys are not computed reproducibly, as engine.reproducible demands; remove one of them"


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
