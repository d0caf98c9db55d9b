"""Builds an engine from a config: loads the model, probes it, and joins the parts.

Must be called on the thread that will step the engine, because MLX's streams belong to threads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from mlxrun.config.image_bytes import get_image_bytes
from mlxrun.config.settings import Config
from mlxrun.engine.cache_factory import build_prefix_cache
from mlxrun.engine.engine import Engine
from mlxrun.engine.pooling import PoolingSteps
from mlxrun.engine.token_selection import TokenSelection
from mlxrun.errors import ConfigError, ModelLoadError
from mlxrun.model.adapter import Adapter, VisionAdapter, run_trial_forward
from mlxrun.model.compute_methods import LIBRARY_CHUNK, ComputeMethods, DecodeMethod
from mlxrun.model.footprint import (
    choose_quantization,
    make_encoder_budget,
    make_memory_budget,
    read_hidden_size,
)
from mlxrun.model.loader import load_adapter
from mlxrun.model.lora.mix_check import separate_adapters
from mlxrun.model.machine.device import choose_step_costs, resolve_config
from mlxrun.model.model_info import LoadedModelInfo, load_model_info
from mlxrun.model.pooling.build import build_decoder_runner, build_encoder_runner
from mlxrun.model.pooling.encoder_types import is_encoder
from mlxrun.model.pooling.pooling_runner import IdleRunner, PoolingRunner
from mlxrun.model.probe.choose import choose_methods
from mlxrun.model.probe.report import ProbeReport
from mlxrun.model.runner import ModelRunner
from mlxrun.model.snapshot.snapshots import SnapshotCodec
from mlxrun.model.sparse.build import add_position_check, load_draft, make_positioned
from mlxrun.model.sparse.explicit_positions import PositionedAdapter
from mlxrun.model.speculation.draft_build import (
    LoadedDraftModel,
    load_draft_model,
    measure_row_cost,
)
from mlxrun.model.speculation.mtp_build import LoadedHead, load_mtp_source, names_split_head
from mlxrun.model.speculation.support import computes_token_by_token, find_draft_problem
from mlxrun.model.token_embeddings import count_token_embeddings
from mlxrun.scheduler.draft_planner import DraftPlanner
from mlxrun.scheduler.memory_budget import MemoryBudget, RequestLimits
from mlxrun.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


def build_engine(
    config: Config, model_info: LoadedModelInfo | None = None, probe: ProbeReport | None = None
) -> Engine:
    """An idle engine. Raises ModelLoadError or ConfigError. `model_info`: if it is already loaded; `probe`:
    if this model was already compared."""
    costs = choose_step_costs(config)
    config = resolve_config(config)
    model_info = model_info or load_model_info(config.model, weights=True)
    if is_encoder(model_info.config):
        return _build_encoder_engine(config, model_info)
    reproducible = config.engine.reproducible
    adapter = load_adapter(config, model_info)
    if config.prefill.sparse != "off":
        adapter = make_positioned(adapter)
    # The fingerprint of the prefix cache has what was chosen, not that it was left open.
    form: Literal["always", "never"] = "always" if adapter.weights.held else "never"
    config = replace(config, model=replace(config.model, dequantize=form))
    cache, vocab = run_trial_forward(adapter)
    snapshots = SnapshotCodec(cache, config.cache.stored_bits)
    if snapshots.problem is not None:
        config = replace(config, cache=replace(config.cache, backend="none"))
    quantization = choose_quantization(config.cache, cache)
    if probe is not None and isinstance(adapter, VisionAdapter):
        adapter.follow(probe.refused, probe.features_cached)
    probe = probe or choose_methods(adapter, vocab, config, model_info, quantization)
    model_info.refused_media.update({kind: why for kind, why in probe.refused.items() if why})
    probe = replace(probe, methods=separate_adapters(adapter, probe.methods))
    config = _follow_probe(config, probe.methods)
    beside = 0  # bytes
    if model_info.vision:
        beside = get_image_bytes(config.media.memory_bytes, config.scheduler.memory_limit)
    drafts, drafting = _make_draft_planner(config, model_info, adapter, cache, vocab, probe.methods)
    beside += 0 if drafting is None else drafting.nbytes
    loaded = None
    if isinstance(adapter, PositionedAdapter):
        probe = add_position_check(probe, adapter, vocab)
        shared = drafting.small if isinstance(drafting, LoadedDraftModel) else None
        loaded = load_draft(config, model_info, shared)
        beside += loaded.nbytes
    hidden = read_hidden_size(model_info.config)
    memory = make_memory_budget(
        config.scheduler, adapter.model, hidden, cache, vocab, beside, probe.methods.quantization
    )
    if drafting is not None:
        memory = replace(memory, footprint=memory.footprint.add(drafting.footprint))
    if 0 < memory.limit < memory.weights:
        own = "".join(f"; {each.describe()}" for each in (loaded, drafting) if each is not None)
        problem = f"{memory.explain_shortage(1, 1)}: no request can ever run{own}"
        raise ConfigError(f"scheduler.memory_limit: {problem}")
    prefix_cache = build_prefix_cache(config, model_info, snapshots, memory)
    scheduler = Scheduler(
        config.scheduler,
        RequestLimits(model_info.context_length, memory),
        prefix_cache=prefix_cache,
        aligned_chunks=reproducible or probe.methods.library_chunks,
        costs=costs,
        drafts=drafts,
    )
    pooling = None
    if model_info.pooled is not None:
        pooling = _make_pooling(config, build_decoder_runner(config, model_info, adapter), memory)
    selection = None
    if loaded is not None:
        selection = TokenSelection(loaded.draft, config.prefill, config.scheduler, prefix_cache)
    log.info("loaded %s; %s", model_info.name, _DECODE[probe.methods.decode])
    head = drafting.source if isinstance(drafting, LoadedHead) else None
    runner = ModelRunner(adapter, vocab, probe.methods, snapshots, head)
    count = count_token_embeddings(adapter.model, vocab)
    _warn_of_unknown_tokens(model_info, count)
    return Engine(
        model_info, scheduler, runner, config.engine, probe, prefix_cache, pooling, selection, count
    )


def _build_encoder_engine(config: Config, model_info: LoadedModelInfo) -> Engine:
    """The engine of a model that only gives vectors."""
    runner = build_encoder_runner(config, model_info)
    memory = make_encoder_budget(config.scheduler, read_hidden_size(model_info.config), runner.nbytes)
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


def _make_draft_planner(
    config: Config,
    model_info: LoadedModelInfo,
    adapter: Adapter,
    cache: Sequence[Any],
    vocab: int,
    methods: ComputeMethods,
) -> tuple[DraftPlanner, LoadedDraftModel | LoadedHead | None]:
    """Drafts fill a forward of fixed width, and are few beside rows otherwise. `auto` uses model.draft, or
    else the checkpoint's own head."""
    settings = config.speculation
    if settings.method == "off":
        return DraftPlanner(settings), None
    problem = find_draft_problem(methods)
    if problem is not None and settings.method != "auto":
        raise ConfigError(f"speculation.method: {settings.method} cannot be used: {problem}")
    if problem is not None:
        log.warning("speculation is off: %s", problem)
        return DraftPlanner(settings, problem=problem), None
    loaded: LoadedDraftModel | LoadedHead | None = None
    has_model = config.model.draft is not None and not names_split_head(config.model)
    if settings.method == "draft" or (settings.method == "auto" and has_model):
        loaded = load_draft_model(config, model_info, adapter, vocab, methods)
    elif settings.method in ("auto", "mtp"):
        loaded = _load_head(config, model_info, adapter, vocab, methods)
    rows = methods.fixed_width or max(config.scheduler.max_running, 1 + settings.max_tokens)
    source = None if loaded is None else loaded.source
    looks_up = settings.method in ("auto", "ngram")
    is_measured = source is not None or computes_token_by_token(cache)
    cost = measure_row_cost(adapter, methods, settings.max_tokens) if is_measured else 0.0
    return DraftPlanner(settings, rows, source=source, looks_up=looks_up, row_cost=cost), loaded


def _load_head(
    config: Config, model_info: LoadedModelInfo, adapter: Adapter, vocab: int, methods: ComputeMethods
) -> LoadedHead | None:
    """The checkpoint's own head; None if `auto` finds none that can be used."""
    try:
        loaded = load_mtp_source(config, model_info, adapter, vocab, methods)
    except ModelLoadError as error:
        loaded = f"its head cannot be loaded: {error}"
        log.warning("speculation: %s", loaded)
    if not isinstance(loaded, str):
        return loaded
    if config.speculation.method == "mtp":
        raise ConfigError(f"speculation.method: mtp cannot be used: {loaded}")
    return None


def _make_pooling(config: Config, runner: PoolingRunner, memory: MemoryBudget) -> PoolingSteps:
    return PoolingSteps(runner, config.scheduler, config.engine.max_errors, memory=memory)


def _follow_probe(config: Config, methods: ComputeMethods) -> Config:
    """The config without what this model cannot do exactly. ConfigError if rows cannot be quantised."""
    if methods.quantization is not None and methods.decode != "ragged":
        raise ConfigError("cache.kv_bits: rows with different adapters decode one by one for this model")
    if not methods.snapshots:
        config = replace(config, cache=replace(config.cache, backend="none"))
    if methods.library_chunks:
        budget = max(config.scheduler.prefill_budget, LIBRARY_CHUNK)
        scheduler = replace(config.scheduler, chunk=LIBRARY_CHUNK, prefill_budget=budget)
        config = replace(config, scheduler=replace(scheduler, prefill_budget_busy=LIBRARY_CHUNK))
    return config


_DECODE: dict[DecodeMethod, str] = {
    "compiled": "rows of any length decode together, compiled, with one attention kernel",
    "paged": "rows of any length decode together, with one attention kernel",
    "ragged": "rows of any length decode together",
    "grouped": "rows of similar length decode together",
    "row_by_row": "rows decode one by one",
}
