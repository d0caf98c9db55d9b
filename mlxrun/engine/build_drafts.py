"""Makes the source of drafts that the config asks for: n-gram lookup, a draft model, the checkpoint's own
head, or none. It must run on the thread that will step the engine."""

from __future__ import annotations

import logging

from mlxrun.config.settings import Config
from mlxrun.core.draft_source import CheckedSource
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.engine.scheduler.draft_planner import DraftPlanner
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind
from mlxrun.model.load.loader import load_draft_info, load_small_model
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.model_loading import LoadedModel
from mlxrun.model.sparse.build import check_sparse_kind
from mlxrun.model.speculation.build import (
    LoadedSource,
    find_device_problem,
    find_draft_problem,
    load_mtp_source,
    make_draft_model,
    measure_row_cost,
    names_split_head,
)

log = logging.getLogger(__name__)


def check_drafting(config: Config) -> None:
    """ConfigError if the config asks for a method of drafting that this device cannot run."""
    method = config.speculation.method
    problem = None if method in ("off", "auto") else find_device_problem()
    if problem is not None:
        reason = f"{method} cannot be used: {problem}; set speculation.method to auto or off"
        raise ConfigError(f"speculation.method: {reason}")


def find_draft(config: Config, info: LoadedModelInfo) -> LoadedModelInfo | None:
    """The model of `model.draft`, or None if nothing uses it. ConfigError if its files show that it cannot be
    used, or if the target model (`info`) is of a kind that cannot use it."""
    settings, method = config.model, config.speculation.method
    drafts = method == "draft" or (method == "auto" and not names_split_head(settings))
    is_sparse = config.prefill.sparse != "off"
    if is_sparse:
        check_sparse_kind(info)
    is_used = is_sparse or (drafts and find_device_problem() is None)
    if not is_used or settings.draft is None:
        return None
    draft = load_draft_info(settings, info)
    if is_sparse:
        _check_sparse_prompts_fit(config.prefill.sparse_min_tokens, info, draft)
    return draft


def _check_sparse_prompts_fit(least: int, info: LoadedModelInfo, draft: LoadedModelInfo) -> None:
    """ConfigError if no prompt that both models take is long enough to be computed sparsely."""
    problem = f"prefill.sparse_min_tokens: {least} is longer than all prompts"
    if least >= info.context_length:
        raise ConfigError(f"{problem}: the context of {info.name} is {info.context_length}")
    if least > draft.context_length:
        raise ConfigError(f"{problem} that model.draft takes: its context is {draft.context_length}")


def build_draft_planner(
    model: LoadedModel, draft: LoadedModelInfo | None
) -> tuple[DraftPlanner, LoadedSource | None]:
    """The draft planner, and the model or head that drafts for it, if any. `draft`: the result of find_draft.
    ConfigError if the configured method cannot draft.

    A draft fills free rows of a forward of fixed width, else drafts are few. `auto` uses model.draft, or else
    the checkpoint's own head.
    """
    config, methods = model.config, model.methods
    settings = config.speculation
    if settings.method == "off":
        return DraftPlanner(settings), None
    problem = find_draft_problem(methods)
    if problem is not None and settings.method != "auto":
        raise ConfigError(f"speculation.method: {settings.method} cannot be used: {problem}")
    if problem is not None:
        log.warning("speculation is off: %s", problem)
        return DraftPlanner(settings, problem=problem), None
    loaded: LoadedSource | None = None
    if settings.method in ("auto", "draft") and draft is not None:
        small = load_small_model(config, model.info, draft)
        loaded = make_draft_model(config, small, model.caller, model.vocab, methods)
    elif settings.method in ("auto", "mtp"):
        loaded = _load_head(model)
    rows = methods.fixed_width or max(config.scheduler.max_running, 1 + settings.max_tokens)
    source = None if loaded is None else CheckedSource(loaded.source)
    looks_up = settings.method in ("auto", "ngram")
    is_measured = source is not None or LayerKind.STATE in map(get_kind, flatten_caches(model.cache))
    cost = measure_row_cost(model.caller, methods, settings.max_tokens) if is_measured else 0.0
    return DraftPlanner(settings, rows, source=source, looks_up=looks_up, row_cost=cost), loaded


def _load_head(model: LoadedModel) -> LoadedSource | None:
    """The checkpoint's own head; None if `auto` finds none that can be used."""
    try:
        loaded = load_mtp_source(model.config, model.info, model.caller, model.vocab, model.methods)
    except ModelLoadError as error:
        loaded = f"its head cannot be loaded: {error}"
        log.warning("speculation: %s", loaded)
    if not isinstance(loaded, str):
        return loaded
    if model.config.speculation.method == "mtp":
        raise ConfigError(f"speculation.method: mtp cannot be used: {loaded}")
    return None
