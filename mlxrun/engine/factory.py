"""Builds an engine from a config: loads the model, and joins the parts.

Must be called on the thread that will step the engine, because MLX's streams belong to threads.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace

from mlxrun.config.image_bytes import get_image_bytes
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from mlxrun.core.memory_budget import MemoryBudget, RequestLimits
from mlxrun.engine.cache_factory import build_prefix_cache
from mlxrun.engine.draft_factory import build_draft_planner, check_drafting, find_draft
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.pooling import PoolingSteps
from mlxrun.engine.workloads.token_selection import TokenSelection
from mlxrun.model.load.draft_loading import load_small_model
from mlxrun.model.load.footprint import make_encoder_budget, make_memory_budget, read_hidden_size
from mlxrun.model.load.memory_check import check_memory
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from mlxrun.model.machine.blas import hold_blas_threads
from mlxrun.model.machine.device import choose_step_costs, resolve_config
from mlxrun.model.machine.device_facts import choose_blas_threads
from mlxrun.model.model_loading import LoadedModel, load_model
from mlxrun.model.pooling.build import build_decoder_runner, build_encoder_runner
from mlxrun.model.pooling.encoder_types import is_encoder
from mlxrun.model.pooling.pooling_runner import IdleRunner, PoolingRunner
from mlxrun.model.probe.report import ProbeReport
from mlxrun.model.run.compute_methods import DecodeMethod
from mlxrun.model.run.runner import ModelRunner
from mlxrun.model.run.token_embeddings import count_token_embeddings
from mlxrun.model.sparse.build import LoadedDraft, make_draft
from mlxrun.model.speculation.draft_build import LoadedDraftModel
from mlxrun.model.speculation.mtp_build import LoadedHead

log = logging.getLogger(__name__)


def build_engine(
    config: Config, model_info: LoadedModelInfo | None = None, probe: ProbeReport | None = None
) -> Engine:
    """An idle engine. Raises ModelLoadError or ConfigError. `model_info`: if it is already loaded; `probe`:
    if this model was already compared."""
    with ExitStack() as held:
        held.enter_context(hold_blas_threads(choose_blas_threads(config.engine)))
        engine = _build_engine(config, model_info, probe)
        engine.held = held.pop_all()
    return engine


def _build_engine(config: Config, model_info: LoadedModelInfo | None, probe: ProbeReport | None) -> Engine:
    costs = choose_step_costs(config)
    config = resolve_config(config)
    check_drafting(config)
    model_info = model_info or load_model_info(config.model, weights=True)
    check_memory(config, model_info)
    if is_encoder(model_info.config):
        return _build_encoder_engine(config, model_info)
    draft = find_draft(config, model_info)
    if draft is not None:
        check_memory(config, model_info, draft)
    model = load_model(config, model_info, probe)
    config, methods = model.config, model.methods
    drafts, drafting = build_draft_planner(model, draft)
    choosing = None
    if config.prefill.sparse != "off":
        assert draft is not None
        shared = drafting.small if isinstance(drafting, LoadedDraftModel) else None
        small = shared or load_small_model(config, model_info, draft)
        choosing = make_draft(config, model_info, small, shared=shared is not None)
    memory = _make_memory(model, choosing, drafting)
    prefix_cache = build_prefix_cache(config, model_info, model.snapshots, memory)
    scheduler = Scheduler(
        config.scheduler,
        RequestLimits(model_info.context_length, memory),
        prefix_cache=prefix_cache,
        aligned_chunks=config.engine.reproducible or methods.library_chunks,
        regenerates=config.engine.reproducible,
        costs=costs,
        drafts=drafts,
    )
    _warn_of_short_rows(memory, model_info, scheduler.token_budget.min_chunk)
    pooling = None
    if model_info.pooled is not None:
        pooling = _make_pooling(config, build_decoder_runner(config, model_info, model.adapter), memory)
    selection = None
    if choosing is not None:
        selection = TokenSelection(choosing.draft, config.prefill, config.scheduler, prefix_cache)
    log.info("loaded %s; %s", model_info.name, _DECODE[methods.decode])
    head = drafting.source if isinstance(drafting, LoadedHead) else None
    runner = ModelRunner(model.adapter, model.vocab, methods, model.snapshots, head)
    count = count_token_embeddings(model.adapter.model, model.vocab)
    _warn_of_unknown_tokens(model_info, count)
    return Engine(
        model_info, scheduler, runner, config.engine, model.probe, prefix_cache, pooling, selection, count
    )


def _warn_of_short_rows(memory: MemoryBudget, info: LoadedModelInfo, min_chunk: int) -> None:
    """Where memory, not the context, limits a request: its answer then ends sooner than was asked."""
    if info.pooled is not None:
        return
    longest = memory.find_max_length(2, info.context_length, min_chunk)
    if longest < info.context_length:
        log.warning(
            "scheduler.memory_limit: a prompt and its answer fit in memory up to %d tokens, the context has "
            "%d; answers end there, with finish_reason length",
            *(longest, info.context_length),
        )


def _make_memory(
    model: LoadedModel, choosing: LoadedDraft | None, drafting: LoadedDraftModel | LoadedHead | None
) -> MemoryBudget:
    """The sum that admission checks, with images, what chooses tokens of prompts, and what drafts.
    ConfigError if no request fits in it."""
    config, small = model.config, [each for each in (choosing, drafting) if each is not None]
    images = 0
    if model.info.vision:
        images = get_image_bytes(config.media.memory_bytes, config.scheduler.memory_limit)
    memory = make_memory_budget(
        config.scheduler,
        model.adapter.model,
        read_hidden_size(model.info.config),
        model.cache,
        model.vocab,
        sum(each.nbytes for each in small),
        images,
        model.methods.quantization,
    )
    if drafting is not None:
        memory = replace(memory, footprint=memory.footprint.add(drafting.footprint))
    _check_memory(memory, model.info, "".join(f"; {each.describe()}" for each in small))
    return memory


def _check_memory(memory: MemoryBudget, info: LoadedModelInfo, note: str = "") -> None:
    """ConfigError, with a note, if not even the shortest request fits."""
    problem = memory.find_start_problem(pools=info.pooled is not None)
    if problem is not None:
        raise ConfigError(f"scheduler.memory_limit: {problem}: no request can ever run{note}")


def _build_encoder_engine(config: Config, model_info: LoadedModelInfo) -> Engine:
    """The engine of a model that only gives vectors."""
    runner = build_encoder_runner(config, model_info)
    memory = make_encoder_budget(config.scheduler, read_hidden_size(model_info.config), runner.nbytes)
    _check_memory(memory, model_info)
    scheduler = Scheduler(config.scheduler, RequestLimits(model_info.context_length, memory))
    log.info("loaded %s, an encoder; up to %d texts are computed together", model_info.name, runner.max_rows)
    pooling = _make_pooling(config, runner, memory)
    count = runner.num_embeddings
    _warn_of_unknown_tokens(model_info, count)
    return Engine(model_info, scheduler, IdleRunner(), config.engine, pooling=pooling, num_embeddings=count)


def _warn_of_unknown_tokens(model_info: LoadedModelInfo, count: int) -> None:
    size = 0 if model_info.tokenizer is None else len(model_info.tokenizer)
    if 0 < count < size:
        text = "%s: the tokenizer has %d tokens, the model embeddings of %d: prompts with others are refused"
        log.warning(text, model_info.name, size, count)


def _make_pooling(config: Config, runner: PoolingRunner, memory: MemoryBudget) -> PoolingSteps:
    return PoolingSteps(runner, config.scheduler, config.engine.max_errors, memory=memory)


_DECODE: dict[DecodeMethod, str] = {
    "compiled": "rows of any length decode together, compiled, with one attention kernel",
    "paged": "rows of any length decode together, with one attention kernel",
    "ragged": "rows of any length decode together",
    "grouped": "rows of similar length decode together",
    "row_by_row": "rows decode one by one",
}
