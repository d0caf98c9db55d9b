"""Builds an engine from a config: loads the model, and joins the parts.

It must run on the thread that will step the engine, because MLX's streams belong to threads.

The prefix cache's fingerprint covers everything that an entry depends on besides the tokens. So no entry of
another model, library, device or chunk size is ever found. build_drafts.py makes what drafts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import ExitStack
from dataclasses import asdict, replace

from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError
from mlxrun.core.memory_budget import MemoryBudget, RequestLimits
from mlxrun.engine.build_drafts import build_draft_planner, check_drafting, find_draft
from mlxrun.engine.engine import Engine
from mlxrun.engine.prefix_cache.cache_tier import TIERS
from mlxrun.engine.prefix_cache.entry import CacheCounters
from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache, PrefixCacheInterface
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.pooling import PoolingSteps
from mlxrun.engine.workloads.token_selection import TokenSelection
from mlxrun.engine.workloads.transcription import TranscriptionSteps
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load.footprint import (
    check_memory,
    count_token_embeddings,
    make_encoder_budget,
    make_memory_budget,
    read_hidden_size,
)
from mlxrun.model.load.loader import load_small_model
from mlxrun.model.load.model_digests import digest_large_files, list_model_files
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.machine.blas import follow_free_cores, hold_blas_threads
from mlxrun.model.machine.device import (
    choose_blas_threads,
    choose_step_costs,
    describe_rounding,
    get_backend,
    resolve_config,
    uses_cuda,
)
from mlxrun.model.machine.device_choice import hold_device
from mlxrun.model.machine.versions import find_version, list_library_versions
from mlxrun.model.model_loading import LoadedModel, load_model
from mlxrun.model.pooling.build import build_decoder_runner, build_encoder_runner
from mlxrun.model.pooling.pooled_model import is_encoder
from mlxrun.model.pooling.pooling_runner import IdleRunner
from mlxrun.model.run.attention_plans import prepare_attention
from mlxrun.model.run.compute_methods import DecodeMethod
from mlxrun.model.run.runner import ModelRunner
from mlxrun.model.sparse.build import LoadedSelector, make_selector
from mlxrun.model.speculation.build import LoadedSource
from mlxrun.model.speculation.mtp_source import MTPSource

log = logging.getLogger(__name__)
FORMAT_VERSION = 1  # of entries: another number turns all old ones into misses
MEMORY_SHARE = 4  # default size of the cache: one in so many bytes of the memory beside the weights
_PIXEL_LIBRARIES = ("transformers", "pillow", "numpy")  # that make pixels of images, beside MLX's
FALLBACK_BYTES = 2_000_000_000  # default size if the amount of memory is unknown


def build_engine(
    config: Config, model_info: LoadedModelInfo | None = None, load_check: LoadCheckReport | None = None
) -> Engine:
    """Build an idle engine. Raises ModelLoadError or ConfigError. `model_info`: the model, if it is already
    loaded; `load_check`: its report, if it was already compared."""
    with ExitStack() as held:
        held.enter_context(hold_device(config.engine))
        threads = choose_blas_threads(config.engine)
        held.enter_context(hold_blas_threads(threads))
        follow = None
        if threads is None and get_backend() == "cpu":
            follow = held.enter_context(follow_free_cores())
            follow()
        engine = _build_engine(config, model_info, load_check)
        engine.before_step = follow
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
    choosing = None if config.prefill.sparse == "off" else _load_selector(model, draft, drafting)
    memory = _make_memory(model, choosing, drafting)
    scheduler = Scheduler(
        config.scheduler,
        RequestLimits(model_info.context_length, memory),
        prefix_cache=build_prefix_cache(config, model_info, model.snapshots, memory),
        aligned_chunks=config.engine.reproducible or methods.library_chunks,
        regenerates=config.engine.reproducible,
        costs=costs,
        drafts=drafts,
    )
    _log_rows(memory, model_info, config.scheduler.max_running, scheduler.token_budget.min_chunk)
    pooling = selection = head = None
    if model_info.pooled is not None:
        vectors = build_decoder_runner(config, model_info, model.caller)
        pooling = PoolingSteps(vectors, scheduler, config.engine.max_errors)
    if choosing is not None:
        selection = TokenSelection(choosing.selector, config.prefill, scheduler)
    if drafting is not None and isinstance(drafting.source, MTPSource):
        head = drafting.source
    log.info("loaded %s; %s", model_info.name, _DECODE[methods.decode])
    runner = ModelRunner(model.caller, model.vocab, methods, model.snapshots, head)
    count = count_token_embeddings(model.caller.model, model.vocab)
    _warn_of_unknown_tokens(model_info, count)
    preparation = None
    if uses_cuda():
        context = model_info.context_length
        preparation = prepare_attention(model.caller, config.scheduler, methods.sharing, context)
    return Engine(
        model_info,
        scheduler,
        runner,
        config.engine,
        model.load_check,
        pooling,
        selection,
        num_embeddings=count,
        recheck=model.recheck,
        preparation=preparation,
    )


def _load_selector(
    model: LoadedModel, draft: LoadedModelInfo | None, drafting: LoadedSource | None
) -> LoadedSelector:
    """What chooses tokens of long prompts, by the model that drafts, or by `draft` if none does."""
    shared = None if drafting is None else drafting.small
    if shared is not None:
        return make_selector(model.config, model.info, shared, shared=True)
    assert draft is not None
    return make_selector(model.config, model.info, load_small_model(model.config, model.info, draft))


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
    is_kept = config.cache.backend == "disk"
    large = digest_large_files(list_model_files(config.model, model_info.folder)) if is_kept else ""
    if large:  # of these files, the digest of the model has blocks only
        parts["large"] = large
    if model_info.vision:  # images are found by what was sent, and not by the pixels that the model sees
        parts["pixels"] = {name: find_version(name) for name in _PIXEL_LIBRARIES}
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
