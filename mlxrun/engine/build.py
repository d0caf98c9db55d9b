"""Builds an engine from a config: loads the model, and joins the parts.

It must run on the thread that will step the engine, because MLX's streams belong to threads.

From top to bottom: the engine; the source of drafts (n-gram lookup, a draft model, the checkpoint's own head,
or none); the prefix cache. The cache's fingerprint covers everything that an entry depends on besides the
tokens. So no entry of another model, library, device or chunk size is ever found.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import ExitStack
from dataclasses import asdict, replace

from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.draft_source import CheckedSource
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.core.memory_budget import MemoryBudget, RequestLimits
from mlxrun.engine.engine import Engine
from mlxrun.engine.prefix_cache.cache_tier import TIERS
from mlxrun.engine.prefix_cache.entry import CacheCounters
from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache
from mlxrun.engine.scheduler.draft_planner import DraftPlanner
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache, PrefixCacheInterface
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.pooling import PoolingSteps
from mlxrun.engine.workloads.token_selection import TokenSelection
from mlxrun.engine.workloads.transcription import TranscriptionSteps
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load.footprint import (
    check_memory,
    count_token_embeddings,
    make_encoder_budget,
    make_memory_budget,
    read_hidden_size,
)
from mlxrun.model.load.loader import load_draft_info, load_small_model
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.machine.blas import hold_blas_threads
from mlxrun.model.machine.device import (
    choose_blas_threads,
    choose_step_costs,
    describe_rounding,
    get_backend,
    resolve_config,
)
from mlxrun.model.machine.device_choice import hold_device
from mlxrun.model.machine.versions import list_library_versions
from mlxrun.model.model_loading import LoadedModel, load_model
from mlxrun.model.pooling.build import build_decoder_runner, build_encoder_runner
from mlxrun.model.pooling.pooled_model import is_encoder
from mlxrun.model.pooling.pooling_runner import IdleRunner
from mlxrun.model.run.compute_methods import DecodeMethod
from mlxrun.model.run.runner import ModelRunner
from mlxrun.model.sparse.build import LoadedSelector, check_sparse_kind, make_selector
from mlxrun.model.speculation.build import (
    LoadedSource,
    find_device_problem,
    find_draft_problem,
    load_mtp_source,
    make_draft_model,
    measure_row_cost,
    names_split_head,
)
from mlxrun.model.speculation.mtp_source import MTPSource

log = logging.getLogger(__name__)
FORMAT_VERSION = 1  # of entries: another number turns all old ones into misses
MEMORY_SHARE = 4  # default size of the cache: one in so many bytes of the memory beside the weights
FALLBACK_BYTES = 2_000_000_000  # default size if the amount of memory is unknown


def build_engine(
    config: Config, model_info: LoadedModelInfo | None = None, load_check: LoadCheckReport | None = None
) -> Engine:
    """Build an idle engine. Raises ModelLoadError or ConfigError. `model_info`: the model, if it is already
    loaded; `load_check`: its report, if it was already compared."""
    with ExitStack() as held:
        held.enter_context(hold_device(config.engine))
        held.enter_context(hold_blas_threads(choose_blas_threads(config.engine)))
        engine = _build_engine(config, model_info, load_check)
        engine.held = held.pop_all()
    return engine


def _build_engine(
    config: Config, model_info: LoadedModelInfo | None, load_check: LoadCheckReport | None
) -> Engine:
    costs = choose_step_costs(config)
    config = resolve_config(config)
    check_drafting(config)
    model_info = model_info or load_model_info(config.model, weights=True)
    check_memory(config, model_info)
    if model_info.speech is not None:
        return _build_transcriber(config, model_info)
    if is_encoder(model_info.config):
        return _build_encoder_engine(config, model_info)
    draft = find_draft(config, model_info)
    if draft is not None:
        check_memory(config, model_info, draft)
    model = load_model(config, model_info, load_check)
    config, methods = model.config, model.methods
    drafts, drafting = build_draft_planner(model, draft)
    choosing = None
    if config.prefill.sparse != "off":
        assert draft is not None
        shared = None if drafting is None else drafting.small
        small = shared or load_small_model(config, model_info, draft)
        choosing = make_selector(config, model_info, small, shared=shared is not None)
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
    _log_rows(memory, model_info, config.scheduler.max_running, scheduler.token_budget.min_chunk)
    pooling = None
    if model_info.pooled is not None:
        vectors = build_decoder_runner(config, model_info, model.caller)
        pooling = PoolingSteps(vectors, scheduler, config.engine.max_errors)
    selection = None
    if choosing is not None:
        selection = TokenSelection(choosing.selector, config.prefill, scheduler, prefix_cache)
    log.info("loaded %s; %s", model_info.name, _DECODE[methods.decode])
    source = None if drafting is None else drafting.source
    head = source if isinstance(source, MTPSource) else None
    runner = ModelRunner(model.caller, model.vocab, methods, model.snapshots, head)
    count = count_token_embeddings(model.caller.model, model.vocab)
    _warn_of_unknown_tokens(model_info, count)
    return Engine(
        model_info,
        scheduler,
        runner,
        config.engine,
        model.load_check,
        prefix_cache,
        pooling,
        selection,
        num_embeddings=count,
        recheck=model.recheck,
    )


def _log_rows(memory: MemoryBudget, info: LoadedModelInfo, most: int, min_chunk: int) -> None:
    """Log how many of `most` rows fit in memory, and warn where memory, not the context, limits a request:
    its answer then ends sooner than was asked."""
    if info.pooled is not None:
        return
    if memory.limit:
        rows = memory.find_max_rows(info.context_length, most, min_chunk)
        text = "memory: %s of the %s that may be used without rows; %d of %d rows of %d tokens fit at a time"
        used, limit = format_rounded(memory.weights), format_rounded(memory.limit)
        log.info(text, used, limit, rows, most, info.context_length)
    longest = memory.find_max_length(2, info.context_length, min_chunk)
    if longest < info.context_length:
        log.warning(
            "scheduler.memory_limit: a prompt and its answer fit in memory up to %d tokens, the context has "
            "%d; answers end there, with finish_reason length",
            *(longest, info.context_length),
        )


def _make_memory(
    model: LoadedModel, choosing: LoadedSelector | None, drafting: LoadedSource | None
) -> MemoryBudget:
    """The sum that admission checks, with images, what chooses tokens of prompts, and what drafts.
    ConfigError if no request fits in it."""
    small = [each for each in (choosing, drafting) if each is not None]
    memory = make_memory_budget(
        model.config,
        model.info,
        model.caller.model,
        model.cache,
        model.vocab,
        sum(each.nbytes for each in small),
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
    pooling = PoolingSteps(runner, scheduler, config.engine.max_errors)
    count = runner.num_embeddings
    _warn_of_unknown_tokens(model_info, count)
    return Engine(model_info, scheduler, IdleRunner(), config.engine, pooling=pooling, num_embeddings=count)


def _build_transcriber(config: Config, model_info: LoadedModelInfo) -> Engine:
    """The engine of a model that only transcribes sound."""
    from mlxrun.model.transcription.whisper import load_whisper  # mlx-audio is an extra

    runner = load_whisper(config.model, model_info)
    memory = make_encoder_budget(config.scheduler, read_hidden_size(model_info.config), runner.nbytes)
    scheduler = Scheduler(config.scheduler, RequestLimits(model_info.context_length, memory))
    log.info("loaded %s, which transcribes sound", model_info.name)
    steps = TranscriptionSteps(runner, config.scheduler.max_queue, config.engine.max_errors)
    return Engine(model_info, scheduler, IdleRunner(), config.engine, transcription=steps)


def _warn_of_unknown_tokens(model_info: LoadedModelInfo, count: int) -> None:
    size = 0 if model_info.tokenizer is None else len(model_info.tokenizer)
    if 0 < count < size:
        text = "%s: the tokenizer has %d tokens, the model embeddings of %d: prompts with others are refused"
        log.warning(text, model_info.name, size, count)


_DECODE: dict[DecodeMethod, str] = {
    "fused": "rows of any length decode together, compiled, with few kernels a layer",
    "compiled": "rows of any length decode together, compiled, with one attention kernel",
    "paged": "rows of any length decode together, with one attention kernel",
    "ragged": "rows of any length decode together",
    "grouped": "rows of similar length decode together",
    "row_by_row": "rows decode one by one",
}


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


def build_prefix_cache(
    config: Config, model_info: LoadedModelInfo, snapshots: SnapshotCodec, memory: MemoryBudget
) -> PrefixCacheInterface:
    """The prefix cache of the config, in which values of the device are filled in. ConfigError if the memory
    holds no chunk, or if the folder cannot be written."""
    settings, chunk = config.cache, config.scheduler.chunk
    assert chunk is not None
    if settings.backend == "none" or snapshots.problem is not None:
        return NoPrefixCache()  # SnapshotCodec has logged the reason
    size = _resolve_memory_bytes(config, snapshots, memory)
    if size is None:
        log.warning(
            "the prefix cache is off because the free memory is too small for one chunk of %d tokens", chunk
        )
        return NoPrefixCache()
    root, counters = compute_fingerprint(config, model_info, snapshots), CacheCounters()
    open_tier = TIERS.get(settings.backend)
    return PrefixCache(
        root,
        chunk,
        deltas=snapshots.has_deltas,
        states=snapshots.has_states,
        codec=snapshots,
        settings=settings,
        memory_bytes=size,
        tier=open_tier(settings, root, counters) if open_tier is not None else None,
        grid_only=config.engine.reproducible,
        counters=counters,
    )


def compute_fingerprint(config: Config, model_info: LoadedModelInfo, snapshots: SnapshotCodec) -> bytes:
    """Return a 32-byte digest of all that decides what an entry holds for given tokens."""
    parts = {
        "format": FORMAT_VERSION,
        "model": model_info.digests["model"],
        "load": {key: asdict(config.model)[key] for key in ("kind", "dtype", "dequantize")},
        "layers": snapshots.describe(),
        "chunk": config.scheduler.chunk,
        "reproducible": config.engine.reproducible,
        "stored_bits": config.cache.stored_bits,
        "backend": get_backend(),
        "versions": {k: v for k, v in list_library_versions().items() if k.startswith("mlx")},
    }
    if config.engine.reproducible:  # a folder outlives processes, and may be copied to another machine
        parts["rounding"] = describe_rounding(config.engine)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _resolve_memory_bytes(config: Config, snapshots: SnapshotCodec, memory: MemoryBudget) -> int | None:
    """Bytes of the memory tier; None if the default size holds no chunk."""
    assert config.scheduler.chunk is not None
    least = snapshots.count_min_bytes(config.scheduler.chunk)
    given = config.cache.memory_bytes
    if given is not None:
        if given < least:
            raise ConfigError(
                f"cache.memory_bytes: {given} bytes hold less than one chunk of {config.scheduler.chunk} "
                f"tokens ({least} bytes): give more, or lower scheduler.chunk, or set cache.backend: none"
            )
        return given
    size = (memory.limit - memory.weights) // MEMORY_SHARE if memory.limit else FALLBACK_BYTES
    return size if size >= least else None
